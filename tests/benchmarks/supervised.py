"""Supervised training and DPO beside TRL's SFTTrainer and DPOTrainer: the same model, rows and batches, one thread.

    python tests/benchmarks/supervised.py [--objective dpo] [--steps 8]

A random Llama of 10 M parameters in float32, 32 rows a step; prompts of 16 to 128 tokens, answers of log-normal length
(median 64, at most 383). Ours is ``gdpo-nemo train`` as users start it, micro-batches of 2,048 tokens; TRL pads
micro-batches of 8 rows, because its padding-free batches need flash-attention. CPU seconds are those of the whole
process tree, Ray's servers included, from the end of the warm-up to the end of the last step. A trained token is one of
an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from step import Meter

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 8192
END = VOCABULARY - 1
ROWS = 32
"""Of a step."""
MICRO_BATCH = 8
"""Rows of a forward pass of TRL's."""
MICRO_BATCH_TOKENS = 2048
LONGEST = 512
WARM_UP = 2
LEARNING_RATE = 1e-5
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
OBJECTIVES = ("sft", "dpo")


def make_model(folder: Path) -> int:
    """Write the random model and its tokenizer, in which token i is the word ``w<i>``; returns its parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=1024, max_position_embeddings=LONGEST, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(END)} | {"<end>": END}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def make_rows(objective: str, count: int) -> list[dict[str, str]]:
    """Rows in the columns that both sides read."""
    random = np.random.default_rng(0)

    def words(length: int) -> str:
        return " ".join(f"w{i}" for i in random.integers(1, END, length))

    def answer() -> str:
        return words(int(np.clip(random.lognormal(np.log(64), 0.8), 1, LONGEST - 128 - 1)))

    columns = ("completion",) if objective == "sft" else ("chosen", "rejected")
    return [
        {"prompt": words(int(random.integers(16, 129)))} | {name: answer() for name in columns} for _ in range(count)
    ]


def run_ours(objective: str, folder: Path, steps: int) -> dict[str, float]:
    """CPU and wall seconds of the counted steps, and their tokens, of a run of the program."""
    run_dir = folder / "run"
    config = REPOSITORY / "configs" / "dpo_tiny_cpu.yaml"
    command = [
        sys.executable, "-m", "gdpo_nemo", "train", "--config", str(config), f"algorithm.type={objective}",
        f"run.dir={run_dir}", "run.max_restarts=0", f"policy.model_name={folder / 'model'}",
        "policy.model_factory=null", f"policy.max_total_sequence_length={LONGEST}",
        f"policy.micro_batch_tokens={MICRO_BATCH_TOKENS}", f"policy.megatron_cfg.optimizer.lr={LEARNING_RATE}",
        f"gdpo.num_prompts_per_step={ROWS}", f"gdpo.max_num_steps={WARM_UP + steps}", "gdpo.val_period=0",
        "gdpo.val_at_start=false", "data.validation=null", f"data.train.path={folder / 'rows.jsonl'}",
        "cluster.cpus_per_node=1", "checkpointing.enabled=false", "health.checks=[]", "logger.console=quiet",
        "logger.tensorboard.enabled=false",
    ]  # fmt: skip
    run = psutil.Popen(command, env={**os.environ, **THREADS})
    meter = Meter(run)
    seen: dict[int, tuple[float, float]] = {}
    while run.poll() is None:
        done = len(_rows(run_dir))
        if done not in seen:
            seen[done] = time.monotonic(), meter.cpu()
        time.sleep(0.01)
    assert run.returncode == 0, "the run failed"
    begin, end = seen[WARM_UP], seen[WARM_UP + steps]
    counted = _rows(run_dir)[WARM_UP:]
    return {
        "wall": end[0] - begin[0],
        "cpu": end[1] - begin[1],
        "tokens": sum(row["train/tokens"] for row in counted),
        "rows": steps * ROWS,
    }


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def run_trl(objective: str, folder: Path, steps: int) -> dict[str, float]:
    """The same of TRL's trainer, in this process."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, logging
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    meter = Meter()
    spent = {"tokens": 0.0, "rows": 0.0}
    options, trainer = (SFTConfig, SFTTrainer) if objective == "sft" else (DPOConfig, DPOTrainer)

    class Counted(trainer):
        """Counts the tokens of the answers."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs["labels"] != -100 if objective == "sft" else inputs["completion_mask"]
            spent["tokens"] += float(mask.sum())
            spent["rows"] += len(mask) / (1 if objective == "sft" else 2)
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        """Counts from the end of the warm-up."""

        begun = 0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.begun == WARM_UP:
                spent.update(tokens=0.0, rows=0.0, wall=-time.monotonic(), cpu=-meter.cpu())
            self.begun += 1

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            spent["wall"] += time.monotonic()
            spent["cpu"] += meter.cpu()

    arguments = options(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=LONGEST,
        per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=ROWS // MICRO_BATCH,
        max_steps=WARM_UP + steps, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", save_strategy="no",
        report_to=[], disable_tqdm=True, logging_steps=1000, seed=0,
    )  # fmt: skip
    running = Counted(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train"),
        callbacks=[Clock()],
    )
    running.remove_callback(PrinterCallback)
    running.train()
    assert spent["rows"] == steps * ROWS, spent
    return spent


def compare(objective: str, steps: int) -> None:
    """Run both, one after the other, and print what each took."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parameters = make_model(folder / "model")
        rows = make_rows(objective, ROWS * (WARM_UP + steps))
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"\n{objective}: {parameters:,} parameters, {ROWS} rows a step, {steps} steps, one thread", flush=True)
        rates = {}
        for side in ("ours", "trl"):
            found = _in_fresh_process(side, objective, folder, steps)
            rates[side] = found["tokens"] / found["cpu"], found["tokens"] / found["wall"]
            print(
                f"{side:5}  {found['cpu'] / steps:6.2f} CPU s and {found['wall'] / steps:6.2f} s a step, "
                f"{found['tokens'] / steps:6,.0f} trained tokens a step, {rates[side][0]:7,.0f} a CPU second",
                flush=True,
            )
        ratio = [ours / theirs for ours, theirs in zip(rates["ours"], rates["trl"])]
        print(f"ours over TRL: x {ratio[0]:.2f} by CPU seconds, x {ratio[1]:.2f} by wall", flush=True)


def _in_fresh_process(side: str, objective: str, folder: Path, steps: int) -> dict[str, float]:
    result = folder / f"{side}.json"
    command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--folder", str(folder)]
    command += ["--objective", objective, "--steps", str(steps)]
    subprocess.run(command, env={**os.environ, **THREADS}, check=True)
    return json.loads(result.read_text())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", choices=OBJECTIVES, help="default: both")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        run = run_ours if asked.side == "ours" else run_trl
        found = run(asked.objective, asked.folder, asked.steps)
        (asked.folder / f"{asked.side}.json").write_text(json.dumps(found))
        return
    for objective in [asked.objective] if asked.objective else OBJECTIVES:
        compare(objective, asked.steps)


if __name__ == "__main__":
    main()
