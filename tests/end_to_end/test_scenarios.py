"""The ways GDPO is run, through the real program, as far as test_run.py does not: context-parallel ranks, one reward,
and the batch normalisation on and off. Full fine-tuning of three rewards is test_run.py's, LoRA that of
test_adapter_start.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from launch import Launch, rows
from test_run import QUICK, _same_first_update

from gdpo_nemo.observe.rollouts import read_rollouts, rollout_path

EPSILON = 1e-6
ONE_STEP = (*QUICK, "gdpo.max_num_steps=1", "gdpo.val_period=0", "checkpointing.metric_name=null")


def gdpo(samples: list[dict], names: list[str], batch_norm: bool) -> np.ndarray:
    """Equations 4 to 6 of arXiv 2601.05242, group by group and reward by reward, on the recorded samples; [samples]."""
    total = np.zeros(len(samples))
    live = np.zeros(len(samples), bool)
    prompts = [sample["prompt_id"] for sample in samples]
    for prompt in dict.fromkeys(prompts):
        members = [index for index, name in enumerate(prompts) if name == prompt]
        for name in names:
            reward = np.array([samples[index]["rewards"][name] for index in members], np.float64)
            if np.ptp(reward):
                live[members] = True
                total[members] += (reward - reward.mean()) / (reward.std(ddof=1) + EPSILON)
    if not batch_norm:
        return total
    return np.where(live, (total - total[live].mean()) / (total[live].std(ddof=1) + EPSILON), 0.0)


def first_step(launch: Launch) -> tuple[dict, list[dict], np.ndarray]:
    """Row, samples and advantages [samples] of step 1."""
    samples = read_rollouts(rollout_path(launch.run_dir, 1))
    row = next(row for row in rows(launch.run_dir) if "loss" in row)
    return row, samples, np.array([sample["advantage"] for sample in samples])


def test_three_rewards_are_normalised_in_their_groups_and_then_over_the_batch(undisturbed):
    row, samples, advantages = first_step(undisturbed[0])
    expected = gdpo(samples, ["correctness", "format", "length"], batch_norm=True)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - gdpo(samples, ["correctness", "format", "length"], batch_norm=False)).max() > 0.1
    assert row["advantage/std"] == pytest.approx(1, abs=1e-3)


def test_one_reward_without_the_batch_normalisation_is_grpo(tmp_path, digit_model):
    launch = Launch(tmp_path / "run", digit_model, "gdpo.rewards={format: 1.0}", "gdpo.batch_norm=false", *ONE_STEP)
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    row, samples, advantages = first_step(launch)
    np.testing.assert_allclose(advantages, gdpo(samples, ["format"], batch_norm=False), rtol=1e-5, atol=1e-6)
    assert row["advantage/std"] != pytest.approx(1, abs=1e-3) and row["grad_norm"] > 0
    assert row["parity/max_abs"] < 1e-4 and launch.left_behind() == []


def test_context_parallel_ranks_make_the_same_first_update(undisturbed, tmp_path, digit_model):
    launch = Launch(tmp_path / "run", digit_model, "policy.megatron_cfg.context_parallel_size=2", *ONE_STEP)
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    _same_first_update(rows(undisturbed[0].run_dir), rows(launch.run_dir))
    assert first_step(launch)[0]["parity/max_abs"] < 1e-4 and launch.left_behind() == []
