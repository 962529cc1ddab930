"""A run is stopped, its config is changed, and it goes on: what people do with a run on the second day."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from launch import REPOSITORY, START_S, Launch, rows

from gdpo_nemo.config.load import load_config

LR = 1e-3


@pytest.fixture(scope="module")
def changed(tmp_path_factory, digit_model):
    """Two steps; then two more with a longer cosine, another estimator, batch, weight decay, reward and a KL
    penalty."""
    folder = tmp_path_factory.mktemp("changed") / "run"
    common = (
        "gdpo.val_period=0",
        "logger.tensorboard.enabled=false",
        "checkpointing.save_period=1",
        "checkpointing.metric_name=null",
    )
    first = Launch(
        folder,
        digit_model,
        *common,
        "gdpo.max_num_steps=2",
        "gdpo.rewards={correctness: 1.0, format: 1.0}",
        f"policy.megatron_cfg={{optimizer: {{lr: {LR}}}, scheduler: {{lr_decay_style: cosine}}}}",
    )
    before = first.finish()
    second = Launch(
        folder,
        digit_model,
        *common,
        "gdpo.max_num_steps=4",
        "gdpo.rewards={correctness: 1.0, length: 0.5}",
        "gdpo.estimator=grpo",
        "gdpo.num_prompts_per_step=2",
        "loss_fn.reference_policy_kl_penalty=0.05",
        f"policy.megatron_cfg={{optimizer: {{lr: {LR}, weight_decay: 0.1}}, scheduler: {{lr_decay_style: cosine}}}}",
    )
    return folder, before, second.finish()


def test_a_replay_gives_its_weights_bit_for_bit_through_the_change(changed, tmp_path):
    """Estimator, batch, decay, reward and penalty change after step 2; the replay has neither engine nor
    environment."""
    folder, *_ = changed
    command = [sys.executable, "-m", "gdpo_nemo", "replay", str(folder), "--check", "--out", str(tmp_path / "again")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "loss and grad_norm of every step are equal" in done.stdout
    assert f"weights after step 4, compared with {folder / 'checkpoints' / 'step_4'}: bitwise equal" in done.stdout
    assert not (tmp_path / "again" / "original").exists()


def test_a_changed_run_goes_on_and_says_what_applies_from_which_step(changed):
    _, (status, _, err), (again, out, complaint) = changed
    assert (status, again) == (0, 0), (err, complaint)
    shown = " ".join(out.split())
    for sentence in (
        "gdpo.max_num_steps: 2 -> 4 from step 3 on",
        "gdpo.estimator: gdpo -> grpo from step 3 on",
        "gdpo.num_prompts_per_step: 4 -> 2 from step 3 on",
        "gdpo.rewards.format: 1 -> absent from step 3 on",
        "gdpo.rewards.length: absent -> 0.5 from step 3 on",
        "loss_fn.reference_policy_kl_penalty: 0 -> 0.05 from step 3 on",
        "policy.megatron_cfg.optimizer.weight_decay: 0 -> 0.1 from step 3 on",
        "step 3 trains with learning rate 0.000146447 (step 2: 0)",
    ):
        assert sentence in shown, (sentence, out)


def test_an_extended_cosine_run_trains_at_the_learning_rate_of_its_new_horizon(changed):
    trained = [row for row in rows(changed[0]) if "loss" in row]
    horizons = [2, 2, 4, 4]
    expected = [LR * 0.5 * (1 + math.cos(math.pi * step / horizon)) for step, horizon in zip((1, 2, 3, 4), horizons)]
    assert [row["lr"] for row in trained] == pytest.approx(expected, abs=1e-12)


def test_the_reference_of_a_penalty_that_is_added_later_is_the_starting_model(changed):
    """Two updates had been made before the penalty, so its KL is not 0 in the first step it applies to."""
    trained = [row for row in rows(changed[0]) if "loss" in row]
    assert "policy/reference_kl" not in trained[1] and trained[2]["policy/reference_kl"] > 1e-6


def test_rewards_that_come_and_go_are_always_measured_and_weighed_while_they_count(changed):
    trained = [row for row in rows(changed[0]) if "loss" in row]
    means = [{name: row[f"reward/{name}/mean"] for name in ("correctness", "format", "length")} for row in trained]
    weights = [{"correctness": 1.0, "format": 1.0}] * 2 + [{"correctness": 1.0, "length": 0.5}] * 2
    for row, mean, weight in zip(trained, means, weights):
        assert row["reward/total/mean"] == pytest.approx(sum(weight[name] * mean[name] for name in weight))


def test_another_lora_rank_ends_with_status_2_and_leaves_the_folder_as_it_was(changed, digit_model):
    folder = changed[0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    launch = Launch(folder, digit_model, "policy.lora={rank: 8}", "gdpo.val_period=0", "checkpointing.metric_name=null")
    out, err = launch.process.communicate(timeout=START_S)
    assert launch.process.returncode == 2, (out, err)
    (line,) = err.splitlines()
    assert "policy.lora.rank: cannot change from 0 to 8" in line and "step_4" in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_folder_holds_both_configs_and_each_checkpoint_its_own(changed):
    folder = changed[0]
    history = sorted((folder / "config_history").iterdir())
    assert [path.name for path in history] == ["0001_from_step_1.yaml", "0002_from_step_3.yaml"]
    assert [load_config(path).gdpo.estimator for path in history] == ["gdpo", "grpo"]
    assert load_config(folder / "checkpoints" / "step_4" / "config.yaml") == load_config(folder / "config.yaml")
    assert json.loads((folder / "checkpoints" / "step_4" / "state.json").read_text())["updates"] == 4
