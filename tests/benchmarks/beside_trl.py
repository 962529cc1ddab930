"""Long-tailed lengths: our whole steps beside those of TRL's GRPOTrainer, the same lengths, in processes of their own.

A random Qwen2 of a million parameters in float32, 16 prompts x 8 samples, log-normal lengths that both sides take from
the sample's seed, two rewards, GDPO, one AdamW update a step. Nothing is paced. Every process has one compute thread:
ours are an engine, a Megatron rank and the driver, so that wall time may use two cores; TRL, which generates with
transformers, is one process. CPU seconds are those of the process tree, Ray's own processes included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paced_run import Lengths, Pace, RandomPrompts, Rig, Work, engines_of
from step import Meter

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment

LENGTHS = Lengths(median=32, sigma=1.0, cap=256)
WORK = Work(pace=Pace(LENGTHS), engines=1, slots=128, groups=16, samples=8)
PROMPT_TOKENS = 8
VOCABULARY = 512
END = VOCABULARY - 1
LEARNING_RATE = 1e-5
MICRO_BATCH = 16
"""Sequences of a forward pass of TRL's."""
MICRO_BATCH_TOKENS = 4096
"""Tokens of one of ours: what 16 sequences have at most."""
RATIO = 2.0
OURS = {"gdpo_nemo, S=2": (2, 10), "gdpo_nemo, S=0": (0, 5)}
"""max_staleness, and counted steps."""
OURS_WARM_UP = 4
TRL_STEPS = 3
TRL_WARM_UP = 1


@dataclass
class Spent:
    """What the counted steps of one side came to."""

    steps: int
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def rates(self) -> tuple[float, float]:
        """Trained tokens per second, and per CPU second."""
        return self.tokens / self.wall_s, self.tokens / self.cpu_s


def make_model(folder: Path) -> int:
    """Write the random model and its tokenizer, in which token i is the word ``w<i>``; returns its parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=512, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    Qwen2Tokenizer(_words(), merges=[], unk_token="w0", pad_token="w0", eos_token="<end>").save_pretrained(folder)
    return int(model.num_parameters())


def _words() -> dict[str, int]:
    return {f"w{i}": i for i in range(END)} | {"<end>": END}


def starts_even(completion_ids: Any) -> list[float]:
    """1 where the first token is even."""
    return [float(int(ids[0]) % 2 == 0) for ids in completion_ids]


def lower_half(completion_ids: Any) -> list[float]:
    """Share of tokens from the lower half of the vocabulary."""
    return [sum(int(i) < VOCABULARY // 2 for i in ids) / len(ids) for ids in completion_ids]


class TwoRewards(Environment):
    """Both rewards, without a worker process."""

    reward_names = ("even", "lower")
    remote = True

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """See the functions."""
        ids = [t.completion_ids for t in trajectories]
        return [Verdict({"even": even, "lower": lower}) for even, lower in zip(starts_even(ids), lower_half(ids))]


# -- ours -----------------------------------------------------------------------------------------------------------


def run_ours(model: Path) -> dict[str, Spent]:
    """Steps of the trainer's own parts, in the middle of two runs that share engines and policy."""
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.session import session
    from gdpo_nemo.cluster.weight_sync import WeightSync

    found = {}
    config = _config(model, 0)
    with engines_of(WORK.pace), session(config.cluster):
        policy = PolicyGroup(config, str(model), 1000)
        fleet = EngineFleet(config, str(model))
        policy.ready()
        fleet.ready()
        for name, (max_staleness, steps) in OURS.items():
            config = _config(model, max_staleness)
            sync = WeightSync(policy, fleet, None, kv="recompute" if max_staleness else "drain")
            sync.publish(0)
            with Rig(WORK, model, fleet).stream(config) as stream:
                stream.schedule(0)
                found[name] = _ours_steps(config, stream, policy, sync, steps)
        policy.close()
        fleet.close()
    return found


def _ours_steps(config: Any, stream: Any, policy: Any, sync: Any, steps: int) -> Spent:
    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.rollouts.credit import advantages_of, updates_of

    meter = Meter()
    settings = LossSettings()
    spent = Spent(steps, 0, 0.0, 0.0)
    for step in range(OURS_WARM_UP + steps):
        if step == OURS_WARM_UP:
            spent = Spent(steps, 0, -time.monotonic(), -meter.cpu())
        rollout = stream.get_batch(step)
        advantages = advantages_of(rollout.groups, config).values.numpy()
        for update in updates_of(rollout.trajectories, advantages, config, step):
            policy.train(update, settings)
        sync.publish(step + 1)
        stream.schedule(step + 1)
        spent.tokens += sum(len(t.completion_ids) for t in rollout.trajectories)
    spent.wall_s += time.monotonic()
    spent.cpu_s += meter.cpu()
    return spent


def _config(model: Path, max_staleness: int) -> Any:
    config = WORK.config(model, max_staleness)
    config.gdpo.rewards = {"even": 1.0, "lower": 1.0}
    config.policy.micro_batch_tokens = MICRO_BATCH_TOKENS
    config.policy.megatron_cfg.optimizer.lr = LEARNING_RATE
    config.cluster.cpus_per_node = 1
    config.env = {"answers": {"plugin": f"{Path(__file__).resolve()}:TwoRewards"}}
    return config


# -- TRL ------------------------------------------------------------------------------------------------------------


def run_trl(model: Path) -> dict[str, Spent]:
    """The same steps on TRL's GRPOTrainer."""
    from transformers import AutoModelForCausalLM, TrainerCallback

    meter = Meter()
    spent = Spent(TRL_STEPS, 0, 0.0, 0.0)

    class Clock(TrainerCallback):
        """Counts from the end of the warm-up to the end of the last step."""

        begun = 0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.begun == TRL_WARM_UP:
                spent.tokens = 0
                spent.wall_s = -time.monotonic()
                spent.cpu_s = -meter.cpu()
            self.begun += 1

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            spent.wall_s += time.monotonic()
            spent.cpu_s += meter.cpu()

    def starting_even(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        spent.tokens += sum(map(len, completion_ids))
        return starts_even(completion_ids)

    def from_lower_half(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        return lower_half(completion_ids)

    policy = AutoModelForCausalLM.from_pretrained(model)
    _force_lengths(policy)
    with tempfile.TemporaryDirectory() as output:
        trainer = _trl_trainer(policy, [starting_even, from_lower_half], TRL_WARM_UP + TRL_STEPS, output, Clock())
        trainer.train()
    return {"TRL": spent}


def _force_lengths(model: Any) -> None:
    """Let ``generate`` end every sample at its length, and not before; calls are the steps of the run, in order."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forced(LogitsProcessor):
        """The end token at its place, and nowhere else."""

        def __init__(self, lengths: torch.Tensor):
            self._lengths = lengths

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ends = self._lengths == input_ids.shape[1] - PROMPT_TOKENS + 1
            scores[:, END] = -torch.inf
            scores[ends] = -torch.inf
            scores[ends, END] = 0.0
            return scores

    generate = model.generate
    calls = iter(range(2**20))

    def forced(*args: Any, **kwargs: Any) -> Any:
        first = next(calls) * WORK.groups
        groups = [LENGTHS.sample_group(0, first + p, WORK.samples) for p in range(WORK.groups)]
        lengths = torch.tensor([int(length) for group in groups for length in group])
        assert kwargs["input_ids"].shape == (len(lengths), PROMPT_TOKENS)
        return generate(*args, **kwargs, logits_processor=LogitsProcessorList([Forced(lengths)]))

    model.generate = forced


def _trl_trainer(model: Any, rewards: list[Any], steps: int, output: str, clock: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, logging
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    prompts = RandomPrompts().batch(0, steps * WORK.groups)
    options = GRPOConfig(
        output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=WORK.groups * WORK.samples // MICRO_BATCH,
        num_generations=WORK.samples, max_completion_length=LENGTHS.cap, max_steps=steps,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.99,
        multi_objective_aggregation="normalize_then_sum", beta=0.0, temperature=1.0, shuffle_dataset=False,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        processing_class=_word_tokenizer(),
        reward_funcs=rewards,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in p.token_ids) for p in prompts]}),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(_words(), unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="<end>")


# -- both -----------------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[Path], dict[str, Spent]]] = {"ours": run_ours, "trl": run_trl}


def compare() -> list[str]:
    """Run the sides one after the other; returns what missed the bound."""
    found: dict[str, Spent] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        print(
            f"{make_model(model):,} parameters, {WORK.groups} x {WORK.samples} samples a step, {LENGTHS.mean:.0f} "
            f"tokens in the mean, {LENGTHS.cap} at most; nothing paced, one thread a process\n"
        )
        print("                 s a step  CPU s a step  tokens/s  tokens/CPU s", flush=True)
        for side in SIDES:
            for name, spent in _in_fresh_process(side, model).items():
                found[name] = spent
                _check_lengths(name, spent)
                print(
                    f"{name:16s} {spent.wall_s / spent.steps:8.2f} {spent.cpu_s / spent.steps:13.2f} "
                    f"{spent.rates[0]:9.0f} {spent.rates[1]:13.0f}",
                    flush=True,
                )
    return [line for name, (max_staleness, _) in OURS.items() if (line := _ratio(found, name)) and max_staleness]


def _check_lengths(name: str, spent: Spent) -> None:
    mean = spent.tokens / (spent.steps * WORK.groups * WORK.samples)
    if abs(mean / LENGTHS.mean - 1) > 0.25:
        raise SystemExit(
            f"{name}: {mean:.0f} tokens a sample in the mean, not {LENGTHS.mean:.0f}: not the lengths given"
        )


def _ratio(found: Mapping[str, Spent], name: str) -> str | None:
    """Print one of ours over TRL; returns a line where it misses the bound."""
    wall, cpu = (ours / theirs for ours, theirs in zip(found[name].rates, found["TRL"].rates))
    line = f"{name} over TRL: {wall:.2f} tokens/s, {cpu:.2f} tokens/CPU s"
    print(line)
    return line if min(wall, cpu) < RATIO else None


def _in_fresh_process(side: str, model: Path) -> dict[str, Spent]:
    """Run one side alone, so that neither pays for the other's threads and imports."""
    result = model.parent / f"{side}.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", __file__, side, str(model), str(result)]
    subprocess.run(command, env=environment, check=True)
    return {name: Spent(**spent) for name, spent in json.loads(result.read_text()).items()}


def main() -> None:
    """One side: its name, the model's folder, the file for what was spent."""
    side, model, result = sys.argv[1:]
    spent = SIDES[side](Path(model))
    Path(result).write_text(json.dumps({name: asdict(one) for name, one in spent.items()}))


if __name__ == "__main__":
    main()
