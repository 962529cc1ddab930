"""An algorithm that does not sample, through the real program: Ray, a Megatron rank, checkpoints, and no engine."""

from __future__ import annotations

import json
import math

import psutil
import pytest
from launch import STEPS, Launch, rows

OPTIONS = ("logger.plot=false", "logger.tensorboard.enabled=false", "--config", "examples/custom_sft.yaml")


@pytest.fixture(scope="module")
def sft(tmp_path_factory, digit_model):
    """Some steps of examples/custom_sft.py: the launch, the command lines of its processes, status, stdout, stderr."""
    launch = Launch(tmp_path_factory.mktemp("runs") / "sft", digit_model, *OPTIONS)
    launch.wait_for_step(1)
    children = psutil.Process(launch.process.pid).children(recursive=True)
    lines = [" ".join(child.cmdline()) for child in children if child.is_running()]
    return launch, lines, *launch.finish()


def test_supervised_fine_tuning_lowers_its_loss_and_that_of_held_out_rows(sft):
    launch, _, status, out, err = sft
    assert status == 0, (out, err)
    trained = [row for row in rows(launch.run_dir) if "loss" in row]
    losses = [row["loss"] for row in trained]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert losses[-1] < 0.8 * losses[0] and all(math.isfinite(row["grad_norm"]) for row in trained)
    held_out = {row["step"]: row["validation/loss"] for row in rows(launch.run_dir) if "validation/loss" in row}
    assert list(held_out) == list(range(0, STEPS + 1, 3)) and held_out[STEPS] < 0.8 * held_out[0]
    # Under the weights before a step, other rows of the same kind cost as much.
    assert abs(held_out[0] - losses[0]) < 0.2 * losses[0]


def test_no_engine_and_no_environment_is_started_for_it(sft):
    launch, lines, *_ = sft
    assert any("ray::PolicyRank" in line for line in lines)
    assert not [line for line in lines if "Engine" in line or "vllm" in line.lower() or "Worker(" in line]
    spans = json.loads((launch.run_dir / "trace.json").read_text())
    names = [event.get("name", "") for event in (spans if isinstance(spans, list) else spans["traceEvents"])]
    assert "policy" in names and not [name for name in names if "engine" in name]
    assert not any("time/sync" in row or "parity/probe" in row for row in rows(launch.run_dir))


def test_its_model_is_exported_and_nothing_is_left_behind(sft):
    launch = sft[0]
    assert (launch.run_dir / "model" / "model.safetensors").stat().st_size > 0
    assert launch.left_behind() == []
