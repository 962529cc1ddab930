"""From verdicts to updates, on hand-made trajectories: who may change whose advantage, and what every token weighs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.algorithms import target_po_coefficients
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory, UpdateResult, trajectories_of
from gdpo_nemo.environments.tasks.digit_sort import DigitSort
from gdpo_nemo.rollouts.credit import advantages_of, log_ratios, reward_columns, updates_of
from gdpo_nemo.rollouts.group_signal import has_signal, part_with_signal
from gdpo_nemo.rollouts.metrics import check_failures, update_metrics
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.utils.errors import RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
C = "correctness"
F = "format"


def config(*overrides: str) -> Config:
    """The demo's config with two rewards and groups of four."""
    base = [
        "gdpo.num_generations_per_prompt=4",
        "gdpo.num_prompts_per_step=2",
        "gdpo.rewards={correctness: 1, format: 1}",
    ]
    return load_config(DEMO, [*base, *overrides])


def trajectory(prompt: Prompt, sample: int, rewards: dict, tokens: int = 5, **changes) -> Trajectory:
    values = dict(
        prompt=prompt,
        sample_index=sample,
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5 - 0.1 * sample, np.float32),
        policy_version=0,
        text="",
        finish_reason="stop",
        rewards=rewards,
    )
    return Trajectory(**{**values, **changes})


def group(name: str, *rows: dict) -> Group:
    """One trajectory per row of rewards."""
    prompt = Prompt(name, np.arange(3, dtype=np.int32), name, "digit_sort", {"digits": "32145"})
    return Group(prompt, [trajectory(prompt, sample, row, tokens=4 + sample) for sample, row in enumerate(rows)])


def two_groups() -> list[Group]:
    return [
        group("a", {C: 1.0, F: 0.0}, {C: 0.0, F: 1.0}, {C: 1.0, F: 1.0}, {C: 0.0, F: 1.0}),
        group("b", {C: 0.0, F: 0.0}, {C: 0.0, F: 1.0}, {C: 0.0, F: 1.0}, {C: 1.0, F: 1.0}),
    ]


def values_of(groups: list[Group], settings: Config) -> np.ndarray:
    return advantages_of(groups, settings).values.numpy()


def all_of(groups: list[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


# -- advantages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.ENV_FAILED, Outcome.ABORTED])
def test_failed_trajectory_gets_nothing_and_changes_no_other_advantage(outcome):
    groups = two_groups()
    without = two_groups()
    del without[0].trajectories[1]
    groups[0].trajectories[1].outcome = outcome
    groups[0].trajectories[1].rewards = {C: 1e9, F: -1e9}
    values = values_of(groups, config())
    assert values[1] == 0
    np.testing.assert_array_equal(np.delete(values, 1), values_of(without, config()))


def test_a_failed_trajectory_without_any_reward_is_not_a_reward_of_0():
    groups = two_groups()
    zero = two_groups()
    groups[1].trajectories[3].outcome = Outcome.ENV_FAILED
    groups[1].trajectories[3].rewards = {}
    zero[1].trajectories[3].rewards = {C: 0.0, F: 0.0}
    values = values_of(groups, config("gdpo.batch_norm=false"))
    assert values[7] == 0 and not np.allclose(values[4:7], values_of(zero, config("gdpo.batch_norm=false"))[4:7])


def test_a_truncated_trajectory_trains_with_its_own_rewards():
    groups = two_groups()
    groups[0].trajectories[0].outcome = Outcome.TRUNCATED
    np.testing.assert_array_equal(values_of(groups, config()), values_of(two_groups(), config()))


def test_groups_that_have_other_components_are_normalised_by_those_they_have():
    judged = two_groups()[0]
    free = group("c", {F: 1.0}, {F: 0.0}, {F: None}, {F: 0.0})
    mixed = advantages_of([judged, free], config("gdpo.batch_norm=false"))
    np.testing.assert_array_equal(mixed.values[:4], values_of([judged], config("gdpo.batch_norm=false")))
    only = config("gdpo.batch_norm=false")
    only.gdpo.rewards.pop(C)
    np.testing.assert_array_equal(mixed.values[4:], values_of([free], only))
    assert mixed.values[6] == 0
    assert mixed.diagnostics.metrics()[f"reward/{C}/missing"] == 0.5


def test_a_weighted_component_that_a_whole_step_lacks_is_missing_and_not_an_error():
    advantages = advantages_of([group("c", {F: 1.0}, {F: 0.0})], config())
    assert advantages.values.abs().min() > 0
    assert advantages.diagnostics.metrics()[f"reward/{C}/missing"] == 1.0


def test_components_without_a_weight_are_measured_and_change_nothing():
    groups = two_groups()
    for number, t in enumerate(all_of(groups)):
        t.rewards["noise"] = float(number**2)
    advantages = advantages_of(groups, config())
    np.testing.assert_array_equal(advantages.values.numpy(), values_of(two_groups(), config()))
    assert advantages.diagnostics.metrics()["reward/noise/mean"] == 17.5


def test_a_step_without_any_reward_ends_the_run_in_one_sentence():
    with pytest.raises(RunError, match="every reward is missing"):
        advantages_of([group("a", {C: None, F: None}, {C: None, F: None})], config())


def test_groups_are_the_samples_of_one_prompt_and_not_one_sample_of_every_prompt():
    # Against its own group a sample is judged by what it did; along the other axis by which prompt it had. A run with
    # that fault learns and looks healthy where prompts are equally hard; only a comparison like this shows it.
    easy = group("easy", {C: 1.0}, {C: 1.0}, {C: 1.0}, {C: 0.9})
    hard = group("hard", {C: 0.0}, {C: 0.0}, {C: 0.1}, {C: 0.0})
    settings = config("gdpo.rewards.format=0")
    right = values_of([easy, hard], settings)
    assert np.sign(right).tolist() == [1, 1, 1, -1, -1, -1, 1, -1]
    across = [Group(easy.prompt, list(pair)) for pair in zip(easy.trajectories, hard.trajectories)]
    assert np.sign(values_of(across, settings)).tolist() == [1, -1] * 4


def test_the_order_of_groups_and_of_samples_within_them_changes_nothing():
    groups = two_groups()
    expected = dict(zip(map(id, all_of(groups)), values_of(groups, config())))
    shuffled = [Group(g.prompt, g.trajectories[::-1]) for g in groups[::-1]]
    for t, value in zip(all_of(shuffled), values_of(shuffled, config())):
        assert value == pytest.approx(expected[id(t)], abs=1e-12)


def test_the_same_prompt_twice_in_a_step_makes_two_groups():
    groups = [two_groups()[0], two_groups()[0]]
    for t in groups[1].trajectories:
        t.rewards = {C: t.rewards[C] + 10, F: t.rewards[F]}
    values = values_of(groups, config())
    np.testing.assert_allclose(values[:4], values[4:], rtol=1e-12)


# -- shaping --------------------------------------------------------------------------------------------------------


def test_length_conditioned_in_yaml_equals_that_of_the_environment():
    rule = "gdpo.shaping=[{component: length, condition: {on: correctness, ge: 3.0}}]"
    texts = ["<t></t><a>12345</a>", "<t>....</t><a>12345</a>", "<t></t><a>54321</a>", "12345"]
    shaped = []
    own = []
    for groups, conditioned in ((shaped, False), (own, True)):
        environment = DigitSort(
            {"correctness_values": [-3.0, 3.0], "length_if_correct": conditioned, "length_limit": 20}
        )
        made = group("a", {}, {}, {}, {})
        for t, text in zip(made.trajectories, texts):
            t.text = text
            t.completion_ids = np.zeros(len(text) + 1, np.int32)
        for t, verdict in zip(made.trajectories, environment.verify(made.trajectories)):
            t.rewards = dict(verdict.rewards)
        groups.append(made)
    flags = [t.rewards["length"] for t in shaped[0].trajectories]
    assert flags == [1.0, 0.0, 1.0, 1.0]  # unconditioned, the wrong and short answer is paid for its length
    columns = reward_columns(shaped[0].trajectories, config("gdpo.rewards.length=1", rule))
    assert columns["length"].tolist() == [t.rewards["length"] for t in own[0].trajectories] == [1.0, 0.0, 0.0, 1.0]
    np.testing.assert_array_equal(
        values_of(shaped, config("gdpo.rewards.length=1", rule)), values_of(own, config("gdpo.rewards.length=1"))
    )


def test_a_penalty_that_a_rule_creates_is_trained_though_no_environment_gives_it():
    rules = "gdpo.shaping=[{component: overlong, overlong: {buffer: 4, max_length: 8}}]"
    settings = config("gdpo.rewards.overlong=1.0", rules)
    groups = two_groups()  # 4, 5, 6 and 7 tokens
    assert reward_columns(all_of(groups), settings)["overlong"].tolist() == [0, -0.25, -0.5, -0.75] * 2
    assert not np.array_equal(values_of(groups, settings), values_of(groups, config()))


def test_kl_in_the_reward_is_taken_off_with_the_configs_coefficient():
    groups = two_groups()
    kl = np.array([0.0, 1.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0])
    off = [0.75, 0.25, -0.25, -0.75, 0, 0, 0, 0]
    settings = config("gdpo.kl_in_reward=0.5", "gdpo.batch_norm=false")
    with_kl = advantages_of(groups, settings, kl=kl).values.numpy()
    np.testing.assert_allclose(with_kl, values_of(groups, config("gdpo.batch_norm=false")) + off, rtol=1e-12)
    with pytest.raises(RunError, match="kl is missing"):
        advantages_of(groups, settings)


def test_the_kl_in_the_reward_is_policy_over_reference_and_not_the_other_way_round():
    """A policy that is surer than the reference of what it wrote has left it: that must cost, not pay."""
    groups = [group("a", *[{C: 1.0, F: 1.0}] * 4), group("b", *[{C: 0.0, F: float(j)} for j in range(4)])]
    reference = {id(t): t.logprobs - np.float32(0.25 * t.sample_index) for t in all_of(groups)}
    masked = groups[0].trajectories[3]
    masked.loss_mask = np.array([True, False, False, True, True, True, True])
    reference[id(masked)] = np.where(masked.loss_mask, reference[id(masked)], np.nan)
    algorithm = GDPO(config("gdpo.kl_in_reward=0.01"), None, None, None)
    asked = []

    def logprobs(sequences, reference_asked):
        asked.append(reference_asked)
        return [reference[id(t)] for t in all_of(groups)]

    algorithm.policy = SimpleNamespace(logprobs=lambda sequences, reference: logprobs(sequences, reference))
    rollout = SimpleNamespace(trajectories=all_of(groups))
    kl = algorithm._kl(rollout)
    assert asked == [True]
    # 0, 1, 2 and 3 times 0.25 a token, over 4, 5, 6 and 5 (of 7) or 7 written tokens.
    np.testing.assert_allclose(kl, [0, 1.25, 3, 3.75, 0, 1.25, 3, 5.25], rtol=1e-5)
    values = advantages_of(groups, algorithm.config, kl=kl).values
    assert (values[:4].diff() < 0).all()
    algorithm.config = config()
    assert algorithm._kl(rollout) is None


def test_a_trajectory_without_log_probs_has_no_kl_rather_than_one_of_0():
    sampled = trajectory(group("a", {}).prompt, 0, {})
    known = log_ratios([sampled], [np.array([-1.0, np.nan, -1, -1, -1], np.float32)])
    np.testing.assert_allclose(known, [2.0], rtol=1e-6)
    assert np.isnan(log_ratios([sampled], [np.full(5, np.nan, np.float32)])).all()


# -- dynamic sampling -----------------------------------------------------------------------------------------------


def test_a_group_has_no_signal_if_its_weighted_components_are_constant_or_missing():
    assert not has_signal(group("a", {C: 1.0, F: 0.0}, {C: 1.0, F: 0.0}), config())
    assert not has_signal(group("a", {C: 1.0, F: 0.0}, {C: 1.0, F: 1.0}), config("gdpo.rewards.format=0"))
    assert not has_signal(group("a", {C: 1.0, F: None}, {C: None, F: 0.0}), config())
    assert not has_signal(group("a", {C: None}, {C: None}), config())


def test_failed_trajectories_lend_a_group_no_signal():
    dead = group("a", {C: 1.0}, {C: 1.0}, {C: 0.0})
    dead.trajectories[2].outcome = Outcome.ENV_FAILED
    assert not has_signal(dead, config())


def test_signal_is_computed_from_shaped_rewards():
    wrong = group("a", {C: 0.0, "length": 1.0}, {C: 0.0, "length": 0.0})
    conditioned = config(
        "gdpo.rewards.length=1", "gdpo.shaping=[{component: length, condition: {on: correctness, ge: 1}}]"
    )
    assert has_signal(wrong, config("gdpo.rewards.length=1")) and not has_signal(wrong, conditioned)
    made = config("gdpo.rewards={brief: 1, correctness: 0}", "gdpo.shaping=[{component: brief, length: {full: 4}}]")
    assert has_signal(group("a", {C: 0.0}, {C: 0.0}), made)


def test_a_group_whose_rewards_differ_by_less_than_their_noise_has_no_signal():
    alike = group("a", {C: 0.5}, {C: 0.6}, {C: 0.55})
    assert has_signal(alike, config()) and not has_signal(alike, config("gdpo.noise={correctness: 0.1}"))
    assert has_signal(alike, config("gdpo.noise={correctness: 0.01}"))


def test_error_rates_correct_rewards_before_shaping():
    rates = "gdpo.noise={correctness: {false_positive: 0.1, false_negative: 0.2}}"
    condition = "gdpo.shaping=[{component: format, condition: {on: correctness, ge: 1}}]"
    groups = two_groups()
    plain, fixed = (reward_columns(all_of(groups), config(condition, *more)) for more in ([], [rates]))
    np.testing.assert_allclose(fixed[C], (plain[C] - 0.1) / 0.7, rtol=1e-15)
    np.testing.assert_array_equal(fixed[F], plain[F])  # 0.9 / 0.7 also meets the condition
    found = advantages_of(groups, config(rates)).diagnostics.metrics()
    assert found["reward/correctness/mean"] == pytest.approx((3 / 8 - 0.1) / 0.7)
    groups[1].trajectories[2].rewards[C] = 0.5
    with pytest.raises(
        RunError, match="gdpo.noise.correctness: error rates require rewards of 0 or 1, got 0.5 for sam"
    ):
        advantages_of(groups, config(rates))


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("row", [0.5, np.nan, -0.5, np.nan, *[np.nan] * 4]),
        ("prompt", [5 / 9, np.nan, -1 / 9, np.nan, np.nan, np.nan, np.nan, -4 / 9]),
    ],
)
def test_brevity_is_compared_among_the_correct_samples_of_a_group(group_by, expected):
    rule = "gdpo.shaping=[{component: brevity, shortest: {on: correctness, ge: 1}}]"
    made = config("gdpo.rewards={correctness: 1, brevity: 0.5}", rule, f"gdpo.group_by={group_by}")
    groups = two_groups()  # lengths from 4 to 7; both groups have the same prompt tokens
    found = reward_columns(trajectories_of(groups), made)["brevity"]
    np.testing.assert_allclose(found, expected)
    groups[0].trajectories[0] = replace(groups[0].trajectories[0], rewards={}, outcome=Outcome.ENV_FAILED)
    found = reward_columns(trajectories_of(groups), made)["brevity"]
    assert np.isnan(found[0]), "a masked sample is not compared"
    terms = advantages_of(two_groups(), made)
    assert not terms.components[1, list(terms.names).index("brevity")], "a wrong sample has no term for its length"


def test_signal_may_be_computed_before_shaping():
    """Two right answers, one of which hit the limit and loses its reward."""
    settings = config(
        "gdpo.shaping=[{component: correctness, truncated: {value: 0.0}}]", "gdpo.dynamic_sampling.enabled=true"
    )
    right = group("a", {C: 1.0, F: 1.0}, {C: 1.0, F: 1.0})
    right.trajectories[1].finish_reason = "length"
    assert not has_signal(right, settings)  # as at an anchor of a text: as long as asked, and not cut
    right.trajectories[1].outcome = Outcome.TRUNCATED
    assert has_signal(right, settings)
    settings.gdpo.dynamic_sampling.before_shaping = True
    assert not has_signal(right, settings)


# -- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("size", [None, 4, 2])
def test_the_token_weights_of_every_update_add_up_to_1(aggregation, size):
    settings = config(f"loss_fn.aggregation={aggregation}")
    settings.policy.train_global_batch_size = size
    groups = two_groups()
    groups[0].trajectories[2].outcome = Outcome.ENV_FAILED
    updates = updates_of(all_of(groups), values_of(groups, settings), settings)
    assert len(updates) == 8 // (size or 8)
    for update in updates:
        assert sum(s.weight * len(s.completion_ids) for s in update) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "overrides, length",
    [
        (["loss_fn.constant_length=1"], 1),
        (["loss_fn.constant_length=7"], 7),
        (["policy.generation.max_new_tokens=9"], 9),
        (["policy.generation.max_new_tokens=9", "rollout.turns.max_turns=3"], 27),
        (["policy.generation.max_new_tokens=9", "rollout.turns={max_turns: 3, max_tokens: 20}"], 20),
    ],
)
def test_constant_aggregation_divides_by_the_given_length_or_the_longest_trajectory(overrides, length):
    """Whatever the samples' own lengths are, and by the trained ones of the eight only."""
    trajectories = all_of(two_groups())
    trajectories[3].outcome = Outcome.ENV_FAILED
    (update,) = updates_of(trajectories, np.ones(8), config("loss_fn.aggregation=constant", *overrides))
    assert [s.weight for s in update] == [0.0 if i == 3 else pytest.approx(1 / (7 * length)) for i in range(8)]


def test_failed_and_masked_trajectories_leave_their_weight_to_the_others():
    settings = config("loss_fn.mask_truncated=true")
    groups = two_groups()
    without = two_groups()
    groups[0].trajectories[1].outcome = Outcome.ENV_FAILED
    groups[1].trajectories[0].outcome = Outcome.TRUNCATED
    (update,) = updates_of(all_of(groups), np.full(8, 2.0), settings)
    assert [s.weight == 0 for s in update] == [i in (1, 4) for i in range(8)]
    assert [s.advantage for s in update] == [0.0 if i in (1, 4) else 2.0 for i in range(8)]
    del without[0].trajectories[1], without[1].trajectories[0]
    (fewer,) = updates_of(all_of(without), np.full(6, 2.0), settings)
    assert [s.weight for s in update if s.weight] == [s.weight for s in fewer]


def test_no_trajectory_is_masked_by_the_value_of_its_advantage():
    """Advantages are finite by contract (test_custom_estimator.py); 0 is one and holds its place in the mean."""
    (update,) = updates_of(all_of(two_groups()), np.array([0.0, -3.0, *np.ones(6)]), config())
    assert [s.weight > 0 for s in update] == [True] * 8


def test_the_sampler_gives_the_old_log_probs_when_samples_may_be_stale():
    trajectories = all_of(two_groups())
    values = np.ones(8)
    assert all(s.old_logprobs is None for s in updates_of(trajectories, values, config())[0])
    for override in ("rollout.max_staleness=1", "loss_fn.old_logprobs=sampler"):
        (update,) = updates_of(trajectories, values, config(override))
        assert all(s.old_logprobs is s.sampler_logprobs for s in update)
        assert all(np.shares_memory(s.old_logprobs, t.logprobs) for s, t in zip(update, trajectories))


def test_target_po_aims_every_update_by_its_own_whole_groups():
    settings = config("loss_fn.type=target_po")
    settings.policy.train_global_batch_size = 4
    groups = two_groups()
    groups[0].trajectories[1].outcome = Outcome.ENV_FAILED
    values = values_of(groups, settings)
    now = {id(t): t.logprobs + np.float32(0.1 * t.sample_index) for t in all_of(groups)}
    algorithm = GDPO(settings, None, None, None)
    aimed = []
    for update, members in zip(updates_of(all_of(groups), values, settings), groups):
        algorithm.policy = SimpleNamespace(
            logprobs=lambda _, members=members: [now[id(t)] for t in members.trajectories]
        )
        algorithm._apply_target_po(update)
        aimed.append([s.advantage * s.weight for s in update])
    for update, members, place in zip(aimed, groups, (slice(0, 4), slice(4, 8))):
        trained = [t.trains for t in members.trajectories]
        expected = target_po_coefficients(
            [now[id(t)].sum() for t in members.trajectories],
            [t.logprobs.sum() for t in members.trajectories],
            values[place],
            np.zeros(4, np.int64),
            valid=trained,
            lengths=[len(t.completion_ids) for t in members.trajectories],
        )
        np.testing.assert_allclose(update, expected, rtol=1e-9)
        pulls = [a * len(t.completion_ids) for a, t in zip(update, members.trajectories)]
        assert sum(pulls) == pytest.approx(0, abs=1e-12)  # both distributions of a group add up to 1
    assert aimed[0][1] == 0


# -- metrics and failures -------------------------------------------------------------------------------------------


def result(tokens: float, **changes) -> UpdateResult:
    sums = {
        "tokens": tokens,
        "entropy": 0.5 * tokens,
        "ratio": tokens,
        "parity_abs": 0.25 * tokens,
        "parity_prob": 0,
        "parity_kl": tokens,
    }
    maxima = {"ratio": 1.5, "parity_abs": 0.75, "parity_prob": 0.125}
    values = dict(loss=1.0, grad_norm=2.0, lr=0.1, skipped=False, sums=sums, maxima=maxima)
    return UpdateResult(**{**values, **changes})


def test_metrics_of_several_updates_are_means_over_their_tokens():
    other = result(30.0, sums={**result(30.0).sums, "entropy": 30.0}, loss=3.0, lr=0.2)
    row = update_metrics([result(10.0), other], on_policy=True)
    assert row["policy/entropy"] == pytest.approx((5 + 30) / 40)
    assert (row["loss"], row["lr"], row["policy/ratio_mean"], row["policy/ratio_max"]) == (2.0, 0.2, 1.0, 1.5)
    assert (row["parity/mean_abs"], row["parity/max_abs"], row["parity/kl"]) == (0.25, 0.75, 1.0)
    assert row["parity/max_prob"] == 0.125


def test_parity_is_measured_only_where_sampler_and_trainer_had_the_same_weights():
    assert not [key for key in update_metrics([result(10.0)], on_policy=False) if key.startswith("parity")]


def test_an_update_that_trained_no_token_gives_finite_metrics():
    row = update_metrics([result(0.0, maxima={})], on_policy=True)
    assert np.isfinite(list(row.values())).all() and "policy/ratio_max" not in row


def test_too_many_environment_failures_stop_the_run_with_the_first_reason():
    trajectories = all_of(two_groups())
    for t in trajectories[:2]:
        t.outcome = Outcome.ENV_FAILED
        t.detail = "time limit"
    check_failures(trajectories, 0.25)
    with pytest.raises(RunError, match=r"2 of 8 samples .* 'digit_sort' .* 0.2\): time limit"):
        check_failures(trajectories, 0.2)


@pytest.mark.parametrize(
    "right, kept",
    [("0000", ""), ("1000", "123"), ("0111", "123"), ("1100", "0123"), ("0x01", "02"), ("01xx", "")],
)
def test_leave_one_out_keeps_the_samples_whose_fellows_vary(right, kept):
    """Of one right answer in four the right one goes: its fellows are alike. x has no verdict, and is no fellow."""
    made = group("a", *({C: None if r == "x" else float(r), F: 0.0} for r in right))
    for trajectory, r in zip(made.trajectories, right):
        trajectory.outcome = Outcome.ENV_FAILED if r == "x" else Outcome.OK
    part = part_with_signal(made, config("gdpo.dynamic_sampling={enabled: true, leave_one_out: true}"))
    assert (part is None) == (kept == "")
    if part is not None:
        assert "".join(str(t.sample_index) for t in part.trajectories) == kept and part.prompt is made.prompt


def test_rows_with_the_same_prompt_are_one_group_where_groups_are_by_prompt():
    """Each row alone is dead; together they vary."""
    rows = [group("a", {C: 1.0, F: 0.0}, {C: 1.0, F: 0.0}), group("b", {C: 0.0, F: 0.0}, {C: 0.0, F: 0.0})]
    assert not advantages_of(rows, config()).values.any()
    np.testing.assert_array_equal(np.sign(advantages_of(rows, config("gdpo.group_by=prompt")).values), [1, 1, -1, -1])
    rows[1].prompt = replace(rows[1].prompt, token_ids=np.arange(1, 4, dtype=np.int32))
    assert not advantages_of(rows, config("gdpo.group_by=prompt")).values.any()
