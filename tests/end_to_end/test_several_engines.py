"""Synchronous runs whose samples three engines draw in parallel: real Ray, a rank, and real engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch import REPOSITORY, START_S, rows, timeless

TWICE = """
import sys
from gdpo_nemo import train

engines, folder, model = sys.argv[1:]
small = {
    "policy.model_name": model, "policy.generation.engines": int(engines), "gdpo.max_num_steps": 2,
    "gdpo.num_prompts_per_step": 4, "gdpo.num_generations_per_prompt": 4, "gdpo.val_period": 0,
    "gdpo.val_at_start": False, "checkpointing.metric_name": None, "logger.plot": False,
    "logger.tensorboard.enabled": False, "logger.console": "plain",
}
for name in ("first", "second"):
    train(overrides={**small, "run.dir": f"{folder}/{name}"})
"""


def test_synchronous_run_of_three_engines_is_bitwise_repeatable(digit_model, tmp_path):
    """One process makes both runs and imports once; each starts its own ranks and engines."""
    command = [sys.executable, "-W", "ignore", "-c", TWICE, "3", str(tmp_path), str(digit_model)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=2 * START_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    first, second = (tmp_path / name for name in ("first", "second"))
    trained = [timeless(row) for row in rows(first)]
    assert [row["step"] for row in trained] == [1, 2] and trained == [timeless(row) for row in rows(second)]
    assert all(row["grad_norm"] > 0 for row in trained)
    weights = [_weights(folder).read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]


def _weights(run_dir: Path) -> Path:
    return run_dir / "model" / "model.safetensors"
