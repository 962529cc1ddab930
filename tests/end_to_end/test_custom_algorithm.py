"""An algorithm that does not sample, through the real program: Ray, a Megatron rank, checkpoints, and no engine."""

from __future__ import annotations

import json
import math
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launch import STEPS, rows, train_here

from gdpo_nemo.cluster.fork_server import ENGINE, RANK
from gdpo_nemo.cluster.worker_launcher import PRELOADED

pytestmark = pytest.mark.slow

OPTIONS = ("logger.plot=false", "logger.tensorboard.enabled=false", "--config", "examples/custom_sft.yaml")


@pytest.fixture(scope="module")
def sft(tmp_path_factory, digit_model) -> tuple[Path, set[str]]:
    """Some steps of examples/custom_sft.py: the run's folder, and the command lines of its processes."""
    run_dir = tmp_path_factory.mktemp("runs") / "sft"
    lines: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    lines.add(" ".join(child.cmdline()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        train_here(run_dir, digit_model, *OPTIONS)
    finally:
        over.set()
        looking.join()
    return run_dir, lines


def test_supervised_fine_tuning_lowers_its_loss_and_that_of_held_out_rows(sft):
    run_dir, _ = sft
    trained = [row for row in rows(run_dir) if "loss" in row]
    losses = [row["loss"] for row in trained]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert losses[-1] < 0.8 * losses[0] and all(math.isfinite(row["grad_norm"]) for row in trained)
    held_out = {row["step"]: row["validation/loss"] for row in rows(run_dir) if "validation/loss" in row}
    assert list(held_out) == list(range(0, STEPS + 1, 3)) and held_out[STEPS] < 0.8 * held_out[0]
    # Under the weights before a step, other rows of the same kind cost as much.
    assert abs(held_out[0] - losses[0]) < 0.2 * losses[0]


def test_no_engine_and_no_environment_is_started_for_it(sft):
    run_dir, lines = sft
    launched = {kind for kind in (RANK, ENGINE) for line in lines if f'"{PRELOADED}": "{kind}"' in line}
    assert launched == {RANK}
    assert not [line for line in lines if "Engine" in line or "vllm" in line.lower() or "Worker(" in line]
    spans = json.loads((run_dir / "trace.json").read_text())
    names = [event.get("name", "") for event in (spans if isinstance(spans, list) else spans["traceEvents"])]
    assert "policy" in names and not [name for name in names if "engine" in name]
    assert not any("time/sync" in row or "parity/probe" in row for row in rows(run_dir))


def test_its_model_is_exported(sft):
    assert (sft[0] / "model" / "model.safetensors").stat().st_size > 0
