"""Supervised and preference training through the real program: they learn, resume exactly, and start no engine."""

from __future__ import annotations

import signal

import pytest
from launch import Launch, rows, timeless

QUIET = ("logger.plot=false", "logger.tensorboard.enabled=false", "gdpo.num_prompts_per_step=16")
SFT = (*QUIET, "--config", "configs/sft_tiny_cpu.yaml")
STEPS = 9
OF_PAIRS = (*QUIET, f"gdpo.max_num_steps={STEPS}", "gdpo.val_prompts=48", "--config", "configs/dpo_tiny_cpu.yaml")


def held_out(launch: Launch, key: str) -> dict[int, float]:
    return {row["step"]: row[f"validation/{key}"] for row in rows(launch.run_dir) if f"validation/{key}" in row}


def finished(launch: Launch) -> Launch:
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    return launch


@pytest.fixture(scope="module")
def dpo(tmp_path_factory, digit_model):
    return finished(Launch(tmp_path_factory.mktemp("runs") / "dpo", digit_model, *OF_PAIRS))


def test_supervised_training_lowers_the_loss_of_held_out_rows(tmp_path, digit_model):
    launch = finished(Launch(tmp_path / "sft", digit_model, *SFT))
    losses = held_out(launch, "loss")
    assert list(losses) == [0, 3, 6] and losses[6] < 0.8 * losses[0]
    assert (launch.run_dir / "model" / "model.safetensors").stat().st_size and launch.left_behind() == []


def test_dpo_parts_held_out_pairs_from_log_two_on(dpo):
    losses = held_out(dpo, "loss")
    # Before the first update both models are one.
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[STEPS] < 0.95 * losses[0]
    assert held_out(dpo, "margins")[0] == pytest.approx(0, abs=1e-5) and held_out(dpo, "margins")[STEPS] > 0.05
    trained = [row for row in rows(dpo.run_dir) if "rewards/margins" in row]
    assert trained[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and trained[-1]["rewards/margins"] > 0.05
    assert trained[-1]["rewards/accuracies"] > 0.6 and not any("time/sync" in row for row in trained)


@pytest.mark.parametrize("kind", ["kto", "orpo", "simpo"])
def test_other_objectives_raise_the_margin_of_held_out_answers(tmp_path, digit_model, kind):
    launch = finished(Launch(tmp_path / kind, digit_model, *OF_PAIRS, f"algorithm.type={kind}"))
    if kind == "kto":  # which has no pairs
        trained = [row for row in rows(launch.run_dir) if "rewards/chosen" in row and "rewards/rejected" in row]
        parted = {row["step"]: row["rewards/chosen"] - row["rewards/rejected"] for row in trained}
    else:
        parted = held_out(launch, "margins")
    assert parted[max(parted)] > parted[min(parted)] + 0.01
    losses = held_out(launch, "loss")
    assert losses[STEPS] < losses[0]


def test_dpo_resumes_bit_for_bit_after_sigterm(dpo, tmp_path, digit_model):
    first = Launch(tmp_path / "run", digit_model, *OF_PAIRS)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    status, out, err = first.finish()
    assert status == 128 + signal.SIGTERM, (out, err)
    finished(Launch(tmp_path / "run", digit_model, *OF_PAIRS))
    assert [timeless(row) for row in rows(tmp_path / "run")] == [timeless(row) for row in rows(dpo.run_dir)]
