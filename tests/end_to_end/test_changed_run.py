"""A run is stopped, its config is changed, and it goes on: what people do with a run on the second day."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from launch import LR, MIXED, UNDISTURBED, UNDISTURBED_STEPS as STEPS, arguments, rows, train_here

from gdpo_nemo.commands.cli import main
from gdpo_nemo.config.load import load_config

pytestmark = pytest.mark.slow

LATER = STEPS + 2


@pytest.fixture(scope="module")
def changed(tmp_path_factory, undisturbed):
    """A copy of the undisturbed run takes two more steps with a longer cosine, another estimator, batch, weight decay
    and KL penalty, and without one of its rewards: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("changed") / "run"
    shutil.copytree(undisturbed.run_dir, folder)
    model = load_config(folder / "config.yaml").policy.model_name
    shown = train_here(
        folder,
        model,
        *(override for override in UNDISTURBED if not override.startswith(("gdpo.constraints", "gdpo.weighting"))),
        f"gdpo.max_num_steps={LATER}",
        "gdpo.rewards={correctness: 1.0, length: 0.5}",
        "gdpo.estimator=grpo",
        "gdpo.num_prompts_per_step=2",
        "loss_fn.reference_policy_kl_penalty=0.05",
        "policy.megatron_cfg.optimizer.weight_decay=0.1",
    )
    return folder, shown


def test_a_replay_gives_its_weights_bit_for_bit_through_the_change(changed, tmp_path, capfd):
    """Estimator, batch, decay, reward and penalty change after the twelfth step; the replay has neither engine nor
    environment."""
    folder, _ = changed
    status = main(["replay", str(folder), "--check", "--out", str(tmp_path / "again")])
    out, err = capfd.readouterr()
    assert status == 0, (out, err)
    assert "loss and grad_norm of every step are equal" in out
    checkpoint = folder / "checkpoints" / f"step_{LATER}"
    assert f"weights after step {LATER}, compared with {checkpoint}: bitwise equal" in out
    assert not (tmp_path / "again" / "original").exists()


def test_changed_run_continues_and_reports_the_first_step_of_each_change(changed):
    shown = " ".join(changed[1].split())
    for sentence in (
        "gdpo.max_num_steps: 12 -> 14 from step 13 on",
        "gdpo.estimator: examples/custom_estimator.py:Fading -> grpo from step 13 on",
        "gdpo.num_prompts_per_step: 4 -> 2 from step 13 on",
        "gdpo.rewards.format: 1 -> absent from step 13 on",
        "gdpo.rewards.length: 1 -> 0.5 from step 13 on",
        "gdpo.constraints.length.at_least: 0.9 -> absent from step 13 on",
        "gdpo.weighting.rule: ctwa -> absent from step 13 on",
        "loss_fn.reference_policy_kl_penalty: 0 -> 0.05 from step 13 on",
        "policy.megatron_cfg.optimizer.weight_decay: 0 -> 0.1 from step 13 on",
        "step 13 trains with learning rate 9.90311e-06 (step 12: 3.40742e-06)",
    ):
        assert sentence in shown, (sentence, changed[1])


def test_an_extended_cosine_run_trains_at_the_learning_rate_of_its_new_horizon(changed):
    trained = [row for row in rows(changed[0]) if "loss" in row]
    horizons = [STEPS] * STEPS + [LATER, LATER]
    expected = [LR * 0.5 * (1 + math.cos(math.pi * step / horizon)) for step, horizon in enumerate(horizons)]
    assert [row["lr"] for row in trained] == pytest.approx(expected, abs=1e-12)


def test_the_reference_of_a_penalty_that_is_added_later_is_the_starting_model(changed):
    """Twelve updates had been made before the penalty, so its KL is not 0 in the first step it applies to."""
    trained = [row for row in rows(changed[0]) if "loss" in row]
    before, after = trained[STEPS - 1], trained[STEPS]
    assert "policy/reference_kl" not in before and after["policy/reference_kl"] > 1e-6


def test_rewards_that_go_are_always_measured_and_weighed_while_they_count(changed):
    trained = [row for row in rows(changed[0]) if "loss" in row]
    means = [{name: row[f"reward/{name}/mean"] for name in ("correctness", "format", "length")} for row in trained]
    weights = [{name: row[f"reward/{name}/weight"] for name in mean} for row, mean in zip(trained, means)]
    assert weights[STEPS:] == [{"correctness": 1.0, "format": 0.0, "length": 0.5}] * 2
    for row, weight in zip(trained[:STEPS], weights):
        factors = [row[f"reward/{name}/factor"] for name in ("correctness", "format")]
        assert factors == [weight["correctness"], weight["format"]] and min(factors) >= 1.0
    assert max(weights[STEPS - 1].values()) > 1.0, "a factor has risen, and the replay had the same one"
    for row, mean, weight in zip(trained, means, weights):
        assert row["reward/total/mean"] == pytest.approx(sum(weight[name] * mean[name] for name in weight))


def test_another_lora_rank_ends_with_status_2_and_leaves_the_folder_as_it_was(changed, digit_model, capfd):
    folder = changed[0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["train", *arguments(folder, digit_model, (*MIXED, "policy.lora={rank: 8}"))]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "policy.lora.rank: cannot change from 0 to 8" in line and f"step_{LATER}" in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_folder_contains_both_configs_and_each_checkpoint_its_config(changed):
    folder = changed[0]
    history = sorted((folder / "config_history").iterdir())
    assert [path.name for path in history] == ["0001_from_step_1.yaml", "0002_from_step_13.yaml"]
    assert [load_config(path).gdpo.estimator for path in history] == ["examples/custom_estimator.py:Fading", "grpo"]
    assert load_config(folder / "checkpoints" / f"step_{LATER}" / "config.yaml") == load_config(folder / "config.yaml")
    assert json.loads((folder / "checkpoints" / f"step_{LATER}" / "state.json").read_text())["updates"] == LATER
