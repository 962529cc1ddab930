"""PPO through the real program: killed and resumed it is the same bit for bit, value head included; what it exports is
a model of transformers without that head."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from launch import STEPS, Launch, rows, timeless

from gdpo_nemo.observe.rollouts import read_rollouts, rollout_path

OPTIONS = (
    *("--config", "configs/ppo_tiny_cpu.yaml"),
    "gdpo.num_prompts_per_step=16",
    "gdpo.num_iterations=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    *("logger.plot=false", "logger.tensorboard.enabled=false"),
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, digit_model) -> Launch:
    """A run of ``STEPS`` steps of two updates each on two pipeline stages."""
    launch = Launch(tmp_path_factory.mktemp("ppo") / "run", digit_model, *OPTIONS)
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    assert launch.left_behind() == []
    return launch


def test_every_step_measures_the_values(straight):
    trained = [row for row in rows(straight.run_dir) if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    names = {f"value/{name}" for name in ("loss", "mean", "return", "clip_fraction", "explained_variance")}
    assert all(names <= row.keys() for row in trained)
    # The head starts at 0. The ratio of a step's second update refers to the weights before the first.
    assert (
        trained[0]["value/explained_variance"] == pytest.approx(0, abs=1e-9)
        and trained[-1]["value/mean"] > trained[0]["value/mean"]
    )
    assert all(abs(row["policy/ratio_mean"] - 1) < 0.2 and row["policy/ratio_max"] != 1 for row in trained)
    samples = read_rollouts(rollout_path(straight.run_dir, 1))
    assert len(samples) == 16 and np.isfinite([sample["advantage"] for sample in samples]).all()


def test_a_killed_run_resumes_bit_for_bit_with_its_value_head(straight, tmp_path, digit_model):
    killed = Launch(tmp_path / "run", digit_model, *OPTIONS)
    killed.wait_for_step(3)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert killed.left_behind() == []
    resumed = Launch(tmp_path / "run", digit_model, *OPTIONS)
    status, out, err = resumed.finish()
    assert status == 0 and "resuming from" in out, (out, err)
    assert [timeless(row) for row in rows(tmp_path / "run")] == [timeless(row) for row in rows(straight.run_dir)]
    weights = [folder / "model" / "model.safetensors" for folder in (straight.run_dir, tmp_path / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_exported_model_is_the_policy_alone(straight):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folder = straight.run_dir / "model"
    _, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with safe_open(folder / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "value" in name or "score" in name]
