"""Supervised fine-tuning and DPO beside TRL's SFTTrainer and DPOTrainer: tokens per CPU second, in one run.

    python tests/benchmarks/supervised.py [--steps 3] [--only sft] [--check]

A random Qwen2 of 10 M parameters in float32; rows of random tokens whose prompts (median 40, at most 256) and answers
(median 80, at most 512) have log-normal lengths, as chats do; 32 rows a step, or 16 pairs; one AdamW update a step.
Every side has one compute thread and a process tree of its own. Counted are the steps after a first one: from the rows
to the updated weights, Ray's processes and TRL's collator included; model, tokenisation and start are not. The losses
of all steps have to agree, so every side does the same work.

TRL pads: eight rows at a time in the order they come (its default batch size); the same sorted by length within a
step; one by one, which pads nothing; and, of the SFTTrainer, ``padding_free``, which it recommends with FlashAttention
only. There is none on a CPU, so SDPA attends over the whole packed row with a mask. The DPOTrainer of TRL 1.16 has
``padding_free`` switched off. With ``--check`` the status is 1 where ours is less than 1.5 times the best of TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from step import LEARNING_RATE, WORK, Meter, _random_model

VOCABULARY = WORK["10m"].vocabulary
END = VOCABULARY - 1
PROMPTS = (40, 0.8, 8, 256)
ANSWERS = (80, 1.0, 4, 512)
"""Median, sigma, least and most tokens of a log-normal distribution."""
LONGEST = PROMPTS[3] + ANSWERS[3]
ROWS = {"sft": 32, "dpo": 16}
MICRO_BATCH_TOKENS = 2048
GOAL = 1.5
AGREE = 2e-4
SIDES = {
    "sft": ("ours", "trl 8", "trl 8 sorted", "trl 1", "trl 8 padding-free"),
    "dpo": ("ours", "trl 8", "trl 8 sorted", "trl 1"),
}


@dataclass
class Spent:
    """What the counted steps of one side came to, and the losses of all."""

    tokens: int
    wall_s: float
    cpu_s: float
    losses: list[float]


# -- the work, alike for all ----------------------------------------------------------------------------------------


def make_rows(objective: str, count: int) -> list[list[np.ndarray]]:
    """Of every row the prompt and its answers, one or (dpo) two, as int32 [tokens]; an answer ends with ``END``."""
    draw = np.random.default_rng(0)

    def tokens(median: float, sigma: float, least: int, most: int) -> np.ndarray:
        length = int(np.clip(draw.lognormal(np.log(median), sigma), least, most))
        return draw.integers(0, END, length).astype(np.int32)

    def answer() -> np.ndarray:
        found = tokens(*ANSWERS)
        found[-1] = END
        return found

    return [[tokens(*PROMPTS), *(answer() for _ in range(1 + (objective == "dpo")))] for _ in range(count)]


def tokens_of(rows: list[list[np.ndarray]]) -> int:
    """Tokens of all sequences: the prompt of a pair counts twice, as it is computed without sharing."""
    return sum((len(row) - 1) * len(row[0]) + sum(map(len, row[1:])) for row in rows)


# -- ours -----------------------------------------------------------------------------------------------------------


def run_ours(objective: str, folder: Path, steps: int) -> Spent:
    """The steps of the algorithm on a Megatron rank in a Ray actor, as a run takes them."""
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.session import session
    from gdpo_nemo.data.examples import Answer
    from gdpo_nemo.data.records import Prompt
    from gdpo_nemo.training.supervised import PreferenceTuning, SupervisedFineTuning

    size = ROWS[objective]
    rows = make_rows(objective, size * (steps + 1))
    config = _config(objective, folder)
    kind = SupervisedFineTuning if objective == "sft" else PreferenceTuning
    prompts = []
    for number, (asked, *answers) in enumerate(rows):
        fields = {"answers": [Answer(ids, None, sign) for ids, sign in zip(answers, (1, -1))]}
        prompts.append(Prompt(str(number), asked, "", "", fields))
    meter = Meter()
    losses = []
    with session(config.cluster):
        policy = PolicyGroup(config, str(folder), steps + 1, reference=kind.needs_reference(config))
        policy.ready()
        algorithm: Any = kind(config, policy, None, None)
        begun = 0.0, 0.0
        for step in range(steps + 1):
            if step == 1:
                begun = time.perf_counter(), meter.cpu()
            batch: Any = SimpleNamespace(prompts=prompts[step * size : (step + 1) * size])
            prepared = algorithm.prepare(batch)
            for update in algorithm.updates(prepared):
                losses.append(float(policy.train(update, algorithm.loss).loss))
        spent = time.perf_counter() - begun[0], meter.cpu() - begun[1]
        policy.close()
    return Spent(tokens_of(rows[size:]), *spent, losses)


def _config(objective: str, folder: Path) -> Any:
    from gdpo_nemo.config.schema import Config, MegatronConfig, OptimizerConfig, PolicyConfig

    config = Config()
    config.algorithm.type = objective
    config.cluster.cpus_per_node = 1
    config.policy = PolicyConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=LONGEST,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        megatron_cfg=MegatronConfig(
            data_parallel_size=1,
            optimizer=OptimizerConfig(lr=LEARNING_RATE, adam_beta2=0.999, weight_decay=0.0, clip_grad=1.0),
        ),
    )
    return config


# -- TRL ------------------------------------------------------------------------------------------------------------


def run_trl(objective: str, folder: Path, steps: int, how: list[str]) -> Spent:
    """The same on TRL's trainer of the objective, which is given the rows as text."""
    import datasets
    from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    rows_a_step = ROWS[objective]
    rows = make_rows(objective, rows_a_step * (steps + 1))
    if "sorted" in how:
        for start in range(0, len(rows), rows_a_step):
            rows[start : start + rows_a_step] = sorted(
                rows[start : start + rows_a_step], key=lambda row: len(row[0]) + max(map(len, row[1:]))
            )
    meter = Meter()
    found = Spent(tokens_of(rows[rows_a_step:]), 0.0, 0.0, [])

    class Clock(TrainerCallback):
        """Counts from the end of the first step to the end of the last."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                found.wall_s = -time.perf_counter()
                found.cpu_s = -meter.cpu()
            elif state.global_step == steps + 1:
                found.wall_s += time.perf_counter()
                found.cpu_s += meter.cpu()

    with tempfile.TemporaryDirectory() as output:
        options = dict(
            output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False,
            per_device_train_batch_size=int(how[0]), gradient_accumulation_steps=rows_a_step // int(how[0]),
            max_steps=steps + 1, max_length=None, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            max_grad_norm=1.0, adam_beta2=0.999, train_sampling_strategy="sequential", save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        if "padding-free" in how:
            options |= dict(padding_free=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="sdpa")
        trainer = _trainer(objective, model, options, rows, Clock())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        found.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return found


def _trainer(objective: str, model: Any, options: dict[str, Any], rows: list[list[np.ndarray]], clock: Any) -> Any:
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    kind, settings = (SFTTrainer, SFTConfig) if objective == "sft" else (DPOTrainer, DPOConfig)
    names = ("prompt", "completion") if objective == "sft" else ("prompt", "chosen", "rejected")
    texts = [{name: ("" if name == "prompt" else " ") + _text(ids) for name, ids in zip(names, row)} for row in rows]
    return kind(
        model=model,
        args=settings(**options),
        processing_class=_word_tokenizer(),
        train_dataset=Dataset.from_list(texts),
        callbacks=[clock],
    )


def _text(ids: np.ndarray) -> str:
    return " ".join("<end>" if i == END else f"w{i}" for i in ids.tolist())


def _word_tokenizer() -> Any:
    """Token i is the word ``w<i>``, the last one the end of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(END)} | {"<end>": END}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="<end>")


# -- all sides ------------------------------------------------------------------------------------------------------


def compare(objective: str, folder: Path, steps: int) -> float:
    """Print the table of one objective; returns ours over the best of TRL's, by CPU seconds. Raises SystemExit where
    losses differ."""
    rates: dict[str, float] = {}
    print(f"\n{objective:20s}   tokens/s  tokens/CPU s  losses", flush=True)
    losses: list[float] = []
    for side in SIDES[objective]:
        spent = _in_fresh_process(side, objective, folder, steps)
        rates[side] = spent.tokens / spent.cpu_s
        shown = " ".join(f"{loss:.4f}" for loss in spent.losses)
        print(f"{side:20s} {spent.tokens / spent.wall_s:10.0f} {rates[side]:13.0f}  {shown}", flush=True)
        losses = losses or spent.losses
        if len(losses) != len(spent.losses) or not np.allclose(losses, spent.losses, atol=AGREE):
            raise SystemExit(f"{side}: these are not the losses of the first side, so the work differs")
    ratio = rates["ours"] / max(rate for side, rate in rates.items() if side != "ours")
    print(f"ours over TRL's default {rates['ours'] / rates['trl 8']:.2f}, over the best of TRL's {ratio:.2f}")
    return ratio


def _in_fresh_process(side: str, objective: str, folder: Path, steps: int) -> Spent:
    """Run one side alone, so that none pays for another's threads and imports."""
    result = folder.parent / "spent.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--only", objective]
    command += ["--folder", str(folder), "--steps", str(steps)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return Spent(**json.loads(result.read_text()))


def main() -> int:
    """Compare, or run one side; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="counted steps, after a first one")
    parser.add_argument("--only", choices=tuple(SIDES))
    parser.add_argument("--check", action="store_true", help=f"exit with 1 below {GOAL} times")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        who, *how = arguments.side.split()
        run = (arguments.only, arguments.folder, arguments.steps)
        spent = run_ours(*run) if who == "ours" else run_trl(*run, how)
        (arguments.folder.parent / "spent.json").write_text(json.dumps(asdict(spent)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        work = SimpleNamespace(vocabulary=VOCABULARY, longest=LONGEST)
        print(f"{_random_model(work, folder):,} parameters, one thread a process")
        _word_tokenizer().save_pretrained(folder)
        objectives = [arguments.only] if arguments.only else list(SIDES)
        ratios = [compare(objective, folder, arguments.steps) for objective in objectives]
    return int(arguments.check and min(ratios) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
