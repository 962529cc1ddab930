"""Time and CPU of one training step on a CPU, phase by phase; with ``--trl`` beside TRL's GRPOTrainer in the same
minute.

    python tests/benchmarks/step.py [--trl] [--prompt-tokens 32] [--steps 5] [--threads 2] [--micro-batch 32]
        [--precision bfloat16] [--share-prompts false]
    python tests/benchmarks/step.py --model smollm2 --trl

The work: a random Qwen2 of 10 M parameters in float32, 16 prompts of 32 tokens x 8 samples x 64 new tokens (nothing
ends early), two rewards, GDPO, one AdamW update of all 128 sequences in micro-batches of 32, which suit a CPU's caches.
``--model smollm2``: the weights of SmolLM2-135M-Instruct, fetched by examples/fetch_smollm2.py, and the numbers of
configs/gdpo_smollm2_cpu.yaml: 8 prompts of 48 tokens x 8 samples x 24 new tokens; the tokens of the prompts are random.
Ours runs on the trainer's own parts: a Megatron rank and a vLLM engine in Ray actors, driven from here. TRL generates
with transformers, in one process; bfloat16 is its autocast, with weights in float32, as ours keeps main weights.

Medians over the steps after a first one that is not counted. CPU seconds are those of the whole process tree: of Ray's
own processes, too. On a machine with other work compare CPU seconds, not wall seconds. ``parity`` is the largest
difference between the sampler's and the trainer's log-prob of a sampled token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LEARNING_RATE = 1e-5
PHASES = ("generation", "advantages", "training", "weight sync")


# -- the work, alike for both ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a step samples and trains."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.new_tokens

    def prompt_ids(self, step: int):
        """int32 [prompts, prompt tokens] of one step."""
        import numpy as np

        shape = self.prompts, self.prompt_tokens
        return np.random.default_rng(step).integers(0, self.vocabulary, shape).astype(np.int32)


WORK = {"10m": Work(16, 8, 32, 64, 8192), "smollm2": Work(8, 8, 48, 24, 49152)}


def make_model(name: str, work: Work, folder: Path) -> int:
    """Write the model to ``folder``; returns its parameters. It cannot sample the token that ends a text."""
    parameters = _random_model(work, folder) if name == "10m" else _real_model(folder)
    # Engines ask the tokenizer, too, what ends a text; the rest of it stays unused.
    _word_tokenizer(work.vocabulary).save_pretrained(folder)
    return parameters


def _real_model(folder: Path) -> int:
    """SmolLM2's weights."""
    from transformers import AutoModelForCausalLM, logging

    fetched = folder.parent / "fetched"
    subprocess.run([sys.executable, REPOSITORY / "examples" / "fetch_smollm2.py", fetched], check=True)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(fetched, dtype="float32")
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = settings.eos_token_id = settings.pad_token_id = None
    model.save_pretrained(folder)
    return model.num_parameters()


def _random_model(work: Work, folder: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=work.vocabulary,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        max_position_embeddings=work.longest,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def starts_even(completion_ids) -> list[float]:
    """1 where the first token is even."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def below_4096(completion_ids) -> list[float]:
    """Share of tokens from the begin of the vocabulary."""
    return [sum(int(i) < 4096 for i in ids) / len(ids) for ids in completion_ids]


class Meter:
    """Wall and process-tree CPU seconds per phase."""

    def __init__(self) -> None:
        import psutil

        self._root = psutil.Process()
        self._gone = psutil.NoSuchProcess
        self.steps: list[dict[str, tuple[float, float]]] = []

    def cpu(self) -> float:
        """CPU seconds that this process and its descendants have used, those of children that ended included."""
        total = 0.0
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(self._gone):
                total += sum(process.cpu_times()[:4])
        return total

    @contextlib.contextmanager
    def phase(self, name: str):
        """Adds the block to phase ``name`` of the last step."""
        wall = time.perf_counter()
        cpu = self.cpu()
        yield
        spent = self.steps[-1].get(name, (0.0, 0.0))
        self.steps[-1][name] = (spent[0] + time.perf_counter() - wall, spent[1] + self.cpu() - cpu)

    def medians(self) -> dict[str, tuple[float, float]]:
        """Per phase and for the whole step, without the first step."""
        import statistics

        rows = [{**step, "step": tuple(map(sum, zip(*step.values())))} for step in self.steps[1:]]
        return {name: tuple(statistics.median(row[name][i] for row in rows) for i in (0, 1)) for name in rows[0]}


# -- ours -----------------------------------------------------------------------------------------------------------


def run_ours(work: Work, folder: Path, arguments) -> dict:
    """The steps on the trainer's parts."""
    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.session import session
    from gdpo_nemo.cluster.weight_sync import SyncCheck, WeightSync

    config = _config(work, folder, arguments)
    meter = Meter()
    settings = LossSettings()
    parity = 0.0
    with session(config.cluster):
        policy = PolicyGroup(config, str(folder), arguments.steps + 1)
        fleet = EngineFleet(config, str(folder))
        policy.ready()
        fleet.ready()
        sync_check = SyncCheck.sampled(
            fleet, work.prompt_ids(0)[:4], work.vocabulary, config.policy.max_total_sequence_length
        )
        sync_check.calibrate(policy, config)
        sync = WeightSync(policy, fleet, sync_check)
        sync.publish(0)
        for step in range(arguments.steps + 1):
            meter.steps.append({})
            with meter.phase("generation"):
                requests, completions = _sample(work, fleet, step)
            with meter.phase("advantages"):
                sequences = _sequences(work, requests, completions)
            with meter.phase("training"):
                result = policy.train(sequences, settings)
            with meter.phase("weight sync"):
                sync.publish(step + 1)
            parity = max(parity, result.maxima["parity_abs"])
        policy.close()
        fleet.close()
    return {"phases": meter.medians(), "parity": parity}


def _config(work: Work, folder: Path, arguments):
    from gdpo_nemo.config.schema import (
        ClusterConfig,
        Config,
        GenerationConfig,
        MegatronConfig,
        OptimizerConfig,
        PolicyConfig,
    )

    policy = PolicyConfig(
        model_name=str(folder),
        precision=arguments.precision,
        share_prompts="auto" if arguments.share_prompts == "auto" else False,
        max_total_sequence_length=work.longest,
        micro_batch_tokens=arguments.micro_batch * work.longest,
        megatron_cfg=MegatronConfig(data_parallel_size=1, optimizer=OptimizerConfig(lr=LEARNING_RATE)),
        generation=GenerationConfig(max_new_tokens=work.new_tokens),
    )
    return Config(policy=policy, cluster=ClusterConfig(cpus_per_node=arguments.threads))


def _sample(work: Work, fleet, step: int):
    from gdpo_nemo.generation.requests import SampleRequest, Sampling

    prompts = work.prompt_ids(step).repeat(work.samples, 0)
    requests = [SampleRequest(ids, seed=1000 * step + i) for i, ids in enumerate(prompts)]
    completions = fleet.generate(requests, Sampling(1.0, 1.0, -1, work.new_tokens)).completions
    assert all(len(completion.token_ids) == work.new_tokens for completion in completions)
    return requests, completions


def _sequences(work: Work, requests, completions):
    import numpy as np

    from gdpo_nemo.algorithms import compute_advantages, token_weights
    from gdpo_nemo.data.packing import TrainSequence

    ids = [completion.token_ids for completion in completions]
    rewards = {"starts_even": starts_even(ids), "below_4096": below_4096(ids)}
    advantages = compute_advantages(rewards, np.arange(work.prompts).repeat(work.samples)).values.tolist()
    weights = token_weights([len(i) for i in ids], "token_mean").tolist()
    return [
        TrainSequence(request.prompt_ids, completion.token_ids, completion.logprobs, advantage, weight)
        for request, completion, advantage, weight in zip(requests, completions, advantages, weights)
    ]


# -- TRL ------------------------------------------------------------------------------------------------------------


def run_trl(work: Work, folder: Path, arguments) -> dict:
    """The same steps on TRL's GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback, logging
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.disable_progress_bar()
    meter = Meter()

    class Phases(GRPOTrainer):
        """Notes what each part of a step takes. Weights need no publishing: sampling and training share the model."""

        def _generate(self, *args, **kwargs):
            with meter.phase("generation"):
                return super()._generate(*args, **kwargs)

        def _calculate_rewards(self, *args, **kwargs):
            with meter.phase("advantages"):
                return super()._calculate_rewards(*args, **kwargs)

    class Steps(TrainerCallback):
        """Books what is left of a step, the update itself, as training."""

        def on_step_begin(self, *args, **kwargs):
            meter.steps.append({})
            self.start = time.perf_counter(), meter.cpu()

        def on_step_end(self, *args, **kwargs):
            spent = time.perf_counter() - self.start[0], meter.cpu() - self.start[1]
            others = list(meter.steps[-1].values())
            meter.steps[-1]["training"] = tuple(all_ - sum(part) for all_, part in zip(spent, zip(*others)))

    lengths = []

    def rewarded(function):
        def reward(completions, completion_ids, **_):
            lengths.extend(map(len, completion_ids))
            return function(completion_ids)

        reward.__name__ = function.__name__
        return reward

    texts = [" ".join(f"w{i}" for i in ids) for step in range(arguments.steps + 1) for ids in work.prompt_ids(step)]
    with tempfile.TemporaryDirectory() as output:
        options = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=arguments.precision == "bfloat16",
            gradient_checkpointing=False,
            per_device_train_batch_size=arguments.micro_batch,
            gradient_accumulation_steps=work.prompts * work.samples // arguments.micro_batch,
            num_generations=work.samples,
            max_completion_length=work.new_tokens,
            max_steps=arguments.steps + 1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            multi_objective_aggregation="normalize_then_sum",
            beta=0.0,
            temperature=1.0,
            shuffle_dataset=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        )
        trainer = Phases(
            model=AutoModelForCausalLM.from_pretrained(folder),
            processing_class=_word_tokenizer(work.vocabulary),
            reward_funcs=[rewarded(starts_even), rewarded(below_4096)],
            args=options,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert set(lengths) == {work.new_tokens}
    return {"phases": meter.medians()}


def _word_tokenizer(vocabulary: int):
    """Token i is the word ``w<i>``; the end of a text is a token that the model does not have."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {f"w{i}": i for i in range(vocabulary)} | {"<end>": vocabulary}
    words = Tokenizer(models.WordLevel(known, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="<end>")


# -- command line ---------------------------------------------------------------------------------------------------


def show(name: str, result: dict) -> None:
    """One line per phase."""
    print(f"\n{name:14s}{'wall s':>9s}{'CPU s':>9s}")
    for phase in (*PHASES, "step"):
        if phase in result["phases"]:
            wall, cpu = result["phases"][phase]
            print(f"{phase:14s}{wall:9.2f}{cpu:9.2f}")
    if "parity" in result:
        print(f"{'parity':14s}{result['parity']:9.1e}")


def in_fresh_process(which: str, folder: str, arguments) -> dict:
    """Runs one side alone, so that neither pays for the other's threads and imports."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    result = Path(folder) / f"{which}.json"
    command = [sys.executable, "-W", "ignore", __file__, "--side", which, "--folder", folder]
    for option in ("model", "steps", "threads", "micro_batch", "precision", "share_prompts"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    if arguments.prompt_tokens:
        command += ["--prompt-tokens", str(arguments.prompt_tokens)]
    subprocess.run(command, env=environment, check=True)
    return json.loads(result.read_text())


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", action="store_true", help="run TRL on the same work, too")
    parser.add_argument("--model", choices=sorted(WORK), default="10m")
    parser.add_argument("--prompt-tokens", type=int, help="tokens of a prompt (32; 48 of smollm2)")
    parser.add_argument("--steps", type=int, default=5, help="steps that are counted (5)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each process (2)")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences per forward pass (32)")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--share-prompts", choices=("auto", "false"), default="auto", help="policy.share_prompts (auto)"
    )
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = WORK[arguments.model]
    work = replace(work, prompt_tokens=arguments.prompt_tokens or work.prompt_tokens)
    if arguments.side:
        run = run_trl if arguments.side == "trl" else run_ours
        found = run(work, Path(arguments.folder) / "model", arguments)
        (Path(arguments.folder) / f"{arguments.side}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(arguments.model, work, Path(folder) / "model")
        size = f"{work.prompts} x {work.samples} x ({work.prompt_tokens} + {work.new_tokens}) tokens"
        print(f"{parameters:,} parameters, {arguments.precision}, {size}, {arguments.threads} threads")
        ours = in_fresh_process("ours", folder, arguments)
        show("gdpo_nemo", ours)
        if arguments.trl:
            theirs = in_fresh_process("trl", folder, arguments)
            show("TRL", theirs)
            wall, cpu = (ours["phases"]["step"][i] / theirs["phases"]["step"][i] for i in (0, 1))
            print(f"\ngdpo_nemo / TRL: wall {wall:.2f}, CPU {cpu:.2f}")


if __name__ == "__main__":
    main()
