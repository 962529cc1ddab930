"""PPO in the driver: where rewards stand, what a token is trained with, and what is refused before a run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms.ppo import ActorCriticSettings, gae
from gdpo_nemo.commands import cli
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.changes import Change, check_changes
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory, UpdateResult
from gdpo_nemo.planning.speed import evaluations
from gdpo_nemo.rollouts.credit import turn_rows
from gdpo_nemo.training.algorithm import load_algorithm
from gdpo_nemo.training.ppo import action_rewards
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "ppo_tiny_cpu.yaml"
PLAIN = "ppo.whiten_advantages=false"


class Policy:
    """Says of a token that its log-prob is -token / 10, that of the starting model -0.5, its value token / 4."""

    def __init__(self):
        self.calls = []

    def logprobs_and_values(self, sequences, entropies):
        self.calls.append(("values", len(sequences)))
        columns = [-0.1, 0.7, 0.25] if entropies else [-0.1, 0.25]
        found = [s.completion_ids[:, None] * np.array(columns) for s in sequences]
        return [self._masked(s, values) for s, values in zip(sequences, found)]

    def logprobs(self, sequences, reference=False):
        assert reference, "log-probs come with the values"
        self.calls.append(("reference", len(sequences)))
        return [self._masked(s, np.full((len(s.completion_ids), 1), -0.5))[:, 0] for s in sequences]

    @staticmethod
    def _masked(s, values):
        mask = np.ones(len(values), bool) if s.loss_mask is None else s.loss_mask
        return np.where(mask[:, None], values, np.nan).astype(np.float32)


def trajectory(ids, mask=None, outcome=Outcome.OK, rewards=None, **more) -> Trajectory:
    mask = None if mask is None else np.array(mask)
    logprobs = np.where(True if mask is None else mask, -0.25, np.nan).astype(np.float32) * np.ones(len(ids), "f4")
    given = {"correctness": 1.0, "format": 1.0, "length": 0.0} if rewards is None else rewards
    prompt = Prompt("train/0", np.array([1, 2], np.int32), "", "digit_sort")
    return Trajectory(
        prompt, 0, np.array(ids, np.int32), logprobs, 0, "", "stop", given if outcome is Outcome.OK else {},
        outcome=outcome, loss_mask=mask, **more,
    )  # fmt: skip


def batch_of(*trajectories: Trajectory) -> SimpleNamespace:
    groups = [Group(t.prompt, [t]) for t in trajectories]
    return SimpleNamespace(
        trajectories=list(trajectories), groups=groups, version=0, next_position=1, dropped_groups=0, measured={},
        generation_s=0.0, verify_s=0.0,
    )  # fmt: skip


def prepared(*trajectories: Trajectory, overrides=(PLAIN,)):
    config = load_config(CONFIG, list(overrides))
    validate(config)
    algorithm = load_algorithm(config, spec_of(config))(config, Policy(), None, None)
    return algorithm, algorithm.prepare(batch_of(*trajectories))


def test_an_action_gets_its_advantage_value_and_return():
    algorithm, found = prepared(
        trajectory([3, 4, 2]),
        trajectory([5, 6, 7], [True, False, True], rewards={"correctness": 0.5, "format": None, "length": 1.0}),
    )
    ((first, second),) = found.updates
    mean = (3 * 2.0 + 2 * 1.5) / 5  # rewards to come of the five actions
    advantages, returns = gae([0, 0, 2.0], mean + np.array([0.75, 1.0, 0.5]), 1.0, 0.95)
    np.testing.assert_allclose(first.advantage, advantages, rtol=1e-6)
    np.testing.assert_allclose(first.returns, returns - mean, rtol=1e-5)
    np.testing.assert_allclose(first.old_values, [0.75, 1.0, 0.5])
    # The token of the environment is no step of time: the value behind the first action is that before the second.
    advantages, returns = gae([0, 1.5], mean + np.array([1.25, 1.75]), 1.0, 0.95)
    np.testing.assert_allclose(second.advantage[[0, 2]], advantages, rtol=1e-6)
    np.testing.assert_allclose(second.returns[[0, 2]], returns - mean, rtol=1e-5)
    assert first.weight == second.weight == pytest.approx(1 / 5)
    assert first.old_logprobs is None, "the first update's ratio is 1"
    assert isinstance(algorithm.loss, ActorCriticSettings) and algorithm.loss.vf_coef == 0.1


def test_values_are_the_sum_of_a_running_mean_and_the_head():
    """The head's targets are without it, and a run that goes on has it from the checkpoint."""
    algorithm, found = prepared(trajectory([3, 4, 2]))
    assert algorithm.state() == {"value_centre": 2.0}
    algorithm.prepare(batch_of(trajectory([3], rewards={"correctness": 0.0, "format": 0.0, "length": 1.0})))
    assert algorithm.centre == 1.5, "half of it the newest step's mean"
    other, _ = prepared(trajectory([3]))
    other.load_state(algorithm.state())
    for now in (algorithm, other):
        (s,) = now.prepare(batch_of(trajectory([4, 8]))).updates[0]
        advantages, returns = gae([0, 2.0], [2.5, 3.5], 1.0, 0.95)
        np.testing.assert_allclose(s.advantage, advantages, rtol=1e-6)
        np.testing.assert_allclose(s.returns, returns - 1.5, rtol=1e-6)
    assert algorithm.state() == other.state() == {"value_centre": 1.75}


def test_advantages_are_whitened_over_the_actions_of_the_step():
    _, found = prepared(trajectory([3, 4, 2]), trajectory([5, 6, 7], [True, False, True]), overrides=())
    (update,) = found.updates
    actions = np.concatenate([s.where_written(s.advantage) for s in update])
    assert abs(actions.mean()) < 1e-6 and actions.std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_a_sample_without_a_reward_trains_neither_policy_nor_values():
    _, found = prepared(
        trajectory([3, 4]),
        trajectory([5], outcome=Outcome.ABORTED),
        trajectory([6, 7], rewards=dict.fromkeys(("correctness", "format", "length"))),
    )
    ((_, aborted, unknown),) = found.updates
    for s in (aborted, unknown):
        assert s.weight == 0 and not s.has_advantage and s.returns is not None and s.old_values is not None


def test_ppo_measures_and_whitens_trained_samples_only_if_truncated_ones_are_masked():
    """A bad truncated sample would give the two good ones advantages whose mean is +1."""
    good = [trajectory([3, 4]), trajectory([2, 5], rewards={"correctness": 0.5, "format": 1.0, "length": 0.0})]
    nothing = {"correctness": -9.0, "format": 0.0, "length": 0.0}
    cut = replace(trajectory(range(1, 9), rewards=nothing), outcome=Outcome.TRUNCATED)
    masks = ("loss_fn.mask_truncated=true",)
    algorithm, found = prepared(*good, cut, overrides=masks)
    without, expected = prepared(*good, overrides=masks)
    *trained, masked = found.updates[0]
    advantages = np.concatenate([s.advantage for s in trained])
    assert abs(advantages.mean()) < 1e-6 and advantages.std(ddof=1) == pytest.approx(1, abs=1e-5)
    for ours, other in zip(trained, expected.updates[0], strict=True):
        np.testing.assert_array_equal(ours.advantage, other.advantage)
        np.testing.assert_array_equal(ours.returns, other.returns)
        assert ours.weight == other.weight
    assert masked.weight == 0 and not masked.has_advantage
    assert found.measured == expected.measured and algorithm.centre == without.centre
    algorithm, _ = prepared(*good, cut, overrides=())
    assert algorithm.centre == pytest.approx((4 * 1.75 - 8 * 9) / 12), "without the mask it counts"


def test_token_weights_add_up_to_1_if_a_sample_has_no_reward():
    """Half of the samples without a reward used to halve the step."""
    unknown = dict.fromkeys(("correctness", "format", "length"))
    for aggregation in ("token_mean", "sequence_mean"):
        _, found = prepared(
            trajectory([3, 4]), trajectory([6, 7], rewards=unknown), overrides=(f"loss_fn.aggregation={aggregation}",)
        )
        ((known, empty),) = found.updates
        assert (known.weight, empty.weight) == (0.5, 0.0)


def test_discount_reaches_centre_return_and_explained_variance():
    algorithm, found = prepared(trajectory([3, 4, 2]), trajectory([5], rewards={"correctness": 0.5}), overrides=(
        PLAIN, "ppo.gamma=0.5",
    ))  # fmt: skip
    came = np.array([0.5, 1.0, 2.0, 0.5])
    said = came.mean() + np.array([0.75, 1.0, 0.5, 1.25])
    assert algorithm.centre == pytest.approx(came.mean()), "of the first step: its own mean"
    variance = 1 - np.var(came - said) / np.var(came)
    assert found.measured["value/explained_variance"] == pytest.approx(variance)
    _, returns = gae([0, 0, 2.0], said[:3], 0.5, 0.95)
    np.testing.assert_allclose(found.updates[0][0].returns, returns - came.mean(), rtol=1e-5)


def test_values_and_log_probs_come_from_one_pass_and_serve_as_old_ones():
    algorithm, found = prepared(
        trajectory([3, 4]), trajectory([5]), overrides=(PLAIN, "gdpo.num_iterations=2", "gdpo.num_prompts_per_step=2")
    )
    assert algorithm.policy.calls == [("values", 2)]
    for s in found.updates[0]:
        np.testing.assert_allclose(s.old_logprobs, -s.completion_ids / 10, rtol=1e-6)
    np.testing.assert_allclose(found.trainer_logprobs[0], [-0.3, -0.4], rtol=1e-6)
    assert found.entropies is None and len(list(algorithm.updates(found))) == 2
    _, found = prepared(trajectory([3, 4]), overrides=("rollout.save_entropies=true",))
    np.testing.assert_allclose(found.entropies[0], [2.1, 2.8], rtol=1e-6)
    np.testing.assert_allclose(found.updates[0][0].old_values, [0.75, 1.0], rtol=1e-6)


def test_kl_is_taken_from_the_reward_of_each_action():
    overrides = (PLAIN, "gdpo.kl_in_reward=0.1")
    algorithm, found = prepared(trajectory([3, 4, 6], [True, False, True]), overrides=overrides)
    (s,) = found.updates[0]
    gaps = np.array([-0.3 + 0.5, -0.6 + 0.5])
    rewards = np.array([0, 2.0]) - 0.1 * gaps
    advantages, _ = gae(rewards, np.array([0.75, 1.5]) + rewards[::-1].cumsum().mean(), 1.0, 0.95)
    np.testing.assert_allclose(s.advantage[[0, 2]], advantages, rtol=1e-5)
    assert found.measured["rollout/reference_kl"] == pytest.approx(gaps.sum(), abs=1e-6)
    assert ("reference", 1) in algorithm.policy.calls and algorithm.needs_reference(algorithm.config)


TURNS = "rollout.turns.max_turns=3"
weighted = cache(
    lambda credit: load_config(CONFIG, [TURNS, credit, "gdpo.rewards={correctness: 2.0, format: 1.0, length: 0.5}"])
)
DRAWN = st.lists(st.tuples(st.integers(1, 4), st.none() | st.floats(-2, 2)), min_size=1, max_size=4)


@given(DRAWN, st.floats(-2, 2), st.booleans())
def test_rewards_of_turns_stand_where_credit_by_turn_has_them(turns, total, written_by_both):
    tokens = [count for count, _ in turns]
    rewards = {"correctness": total, "format": None, "length": 1.0}
    mask = None
    if written_by_both and len(turns) > 1:
        mask = sum(([True] * n + [False] for n in tokens), [])[:-1]
    t = trajectory(
        list(range(len(mask) if mask else sum(tokens))), mask, rewards=rewards, turns=len(turns),
        turn_tokens=tuple(tokens), turn_rewards=tuple({"correctness": value} for _, value in turns),
    )  # fmt: skip
    (found,) = action_rewards([t], weighted("gdpo.credit=turn"))
    rows = turn_rows([t], ["correctness", "length"], 1.0)
    from_each_turn = 2.0 * rows.columns["correctness"] + 0.5 * rows.columns["length"]
    starts = np.cumsum([0, *tokens[:-1]])
    np.testing.assert_allclose(found[::-1].cumsum()[::-1][starts], from_each_turn, atol=1e-9)
    ends = np.cumsum(tokens) - 1
    assert not np.delete(found, ends).any()
    (whole,) = action_rewards([t], weighted("gdpo.credit=sequence"))
    np.testing.assert_allclose(whole[-1], 2 * total + 0.5)
    assert not whole[:-1].any()


def test_rewards_count_as_they_are_shaped():
    config = load_config(CONFIG, ["gdpo.shaping=[{component: length, scale: 3.0}]"])
    (found,) = action_rewards([trajectory([3, 4], rewards={"correctness": 1.0, "format": 0.0, "length": 2.0})], config)
    np.testing.assert_array_equal(found, [0.0, 7.0])


def test_a_turn_in_which_nothing_was_written_shares_an_action():
    rewards = {"correctness": 3.0, "format": None, "length": None}
    t = trajectory(
        [5, 6], rewards=rewards, turns=3, turn_tokens=(0, 2, 0),
        turn_rewards=({"correctness": 1.0}, {"correctness": 0.5}, {"correctness": 1.5}),
    )  # fmt: skip
    (found,) = action_rewards([t], load_config(CONFIG, [TURNS, "gdpo.credit=turn"]))
    np.testing.assert_array_equal(found, [1.0, 2.0])


def test_row_contains_the_quality_of_values_and_no_metrics_of_groups():
    algorithm, found = prepared(
        trajectory([3, 4]), trajectory([5], rewards={"correctness": 0.0, "format": 0.0, "length": 0.0})
    )
    sums = {"tokens": 3.0, "value_loss": 6.0, "value_clipped": 1.5, "value": 4.5, "ratio": 3.0}
    row = algorithm.metrics(found, [UpdateResult(1.0, 1.0, 1e-4, False, sums, {})], 0)
    mean = (2 + 2 + 0) / 3
    assert (row["value/loss"], row["value/clip_fraction"], row["value/mean"]) == (2.0, 0.5, 1.5 + mean)
    assert "policy/value" not in row
    said, came = np.array([0.75, 1.0, 1.25]), np.array([2.0, 2.0, 0.0])
    assert row["value/explained_variance"] == pytest.approx(1 - np.var(came - said) / np.var(came))
    assert row["reward/total/mean"] == 1.0 and row["reward/correctness/mean"] == 0.5
    assert not [name for name in row if name.startswith("advantage/") or name.endswith("dead_groups")]
    written = []
    algorithm.log = SimpleNamespace(step=lambda row, groups, values: written.append(values.advantages))
    algorithm.record(row, found)
    np.testing.assert_allclose(written[0], [s.advantage.mean() for s in found.updates[0]], rtol=1e-6)


def test_the_plan_counts_the_pass_that_values_take():
    assert (
        evaluations(resolve(load_config(CONFIG)))
        == evaluations(resolve(load_config(CONFIG, ["gdpo.num_iterations=2"])))
        == 1
    )
    assert evaluations(resolve(load_config(CONFIG, ["algorithm.type=gdpo"]))) == 0


REFUSED = [
    ("ppo.gamma=2", "ppo.gamma: must be 0 or more and at most 1, got 2"),
    ("ppo.gamma=-0.5", "ppo.gamma: must be 0 or more"),
    ("ppo.lam=nan", "ppo.lam: expected a number"),
    ("ppo.lam=1.5", "ppo.lam: must be 0 or more and at most 1"),
    ("ppo.vf_coef=-1", "ppo.vf_coef: must be 0 or more"),
    ("ppo.vf_coef=1e300", "ppo.vf_coef: must be at most"),
    ("ppo.head_lr_mult=0", "ppo.head_lr_mult: must be more than 0"),
    ("ppo.cliprange_value=0", "ppo.cliprange_value: must be more than 0"),
    ("ppo.cliprange=0.2", "did you mean ppo.cliprange_value?"),
    ("ppo.whiten_advantages=3", "ppo.whiten_advantages: expected"),
    ("policy.lora.rank=4", "policy.lora.rank: ppo trains the whole model"),
    ("policy.skip_zero_advantage=true", "policy.skip_zero_advantage: would change the gradient"),
    ("gdpo.estimator=grpo", "gdpo.estimator: has no effect with algorithm ppo"),
    ("gdpo.batch_norm=false", "gdpo.batch_norm: has no effect with algorithm ppo"),
    ("gdpo.discount=0.5", "gdpo.discount: has no effect"),
    ("loss_fn.type=target_po", "loss_fn.type: target_po does not support the token-level advantages"),
    ("loss_fn.off_policy.sequence_mask_threshold=0.1", "sequence_mask_threshold: conflicts with algorithm ppo, which"),
    ("gdpo.dynamic_sampling.enabled=true", "gdpo.dynamic_sampling.enabled: would drop every group"),
    ("gdpo.num_generations_per_prompt=0", "gdpo.num_generations_per_prompt: must be at least"),
    ("algorithm.type=gdpo", "gdpo.num_generations_per_prompt: must be at least 2"),
]  # fmt: skip


@pytest.mark.parametrize("override, sentence", REFUSED, ids=[case[0] for case in REFUSED])
def test_impossible_training_is_refused_in_one_line(override, sentence, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert cli.main(["train", "--config", str(CONFIG), override, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_keys_of_ppo_have_no_effect_on_others():
    for override in ("ppo.gamma=0.9", "ppo.whiten_advantages=false", "ppo.vf_coef=0.5"):
        with pytest.raises(ConfigError, match=r"has no effect unless algorithm.type is (one of )?ppo"):
            validate(load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", [override]))


@pytest.mark.parametrize(
    "before, now", [("gdpo", "ppo"), ("ppo", "gdpo"), ("sft", "reward_model"), ("ppo", "reward_model")]
)
def test_run_does_not_resume_with_another_head(before, now):
    with pytest.raises(ConfigError, match=r"^algorithm.type: cannot change .* only .* trains a "):
        check_changes([Change("algorithm.type", before, now)], "checkpoint step_1")
    check_changes([Change("algorithm.type", "gdpo", "distillation")], "checkpoint step_1")
