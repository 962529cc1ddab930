"""Constraints and schedules of reward weights: the dual of a solvable problem, projection, state and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.component_weights import ComponentWeights, describe_weights, directions, read_constraint
from gdpo_nemo.config.changes import find_changes
from gdpo_nemo.config.load import load_config, recorded
from gdpo_nemo.config.validate import validate
from gdpo_nemo.utils.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
TEMPERATURE, BOUND = 0.5, 0.8
LOGIT = np.log(BOUND / (1 - BOUND))


@pytest.mark.parametrize(
    ("estimator", "dual"),
    [
        ("dr_grpo", 1 + TEMPERATURE * LOGIT),
        ("mo_grpo", 1 + TEMPERATURE * LOGIT * np.sqrt(BOUND * (1 - BOUND))),
    ],
)
def test_the_multiplier_converges_to_the_dual_that_the_estimator_defines(estimator, dual):
    """A policy with one logit chooses between the rewards (1, 0) and (0, 1), with an entropy bonus of 0.5, and the
    second reward must be at least 0.8 on average. In the optimum, (1 - w) p q = -0.5 logit(q) p q. Division by the
    deviation sqrt(p q) of each reward changes the left side to (1 - w) sqrt(p q)."""
    draw = np.random.default_rng(0)
    weights = ComponentWeights({"first": 1.0, "second": 0.0}, {"second": {"at_least": BOUND}}, {})
    logit, found, means = 0.0, [], []
    groups = np.repeat(np.arange(4), 64)
    for step in range(1, 701):
        p = 1 / (1 + np.exp(logit))
        first = (draw.random(256) < p).astype(float)
        columns = {"first": first, "second": 1 - first}
        weights.update(step, columns)
        values = compute_advantages(
            columns, groups, weights=weights.values, estimator=estimator, batch_norm=False
        ).values.numpy()
        logit += 2.0 * ((values * (1 - first - (1 - p))).mean() - TEMPERATURE * logit * p * (1 - p))
        found.append(weights.values["second"])
        means.append(1 - p)
    assert np.mean(found[300:]) == pytest.approx(dual, abs=0.03)
    assert np.mean(means[300:]) == pytest.approx(BOUND, abs=0.005)


@settings(max_examples=40)
@given(
    st.sampled_from(["at_least", "at_most"]),
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0, np.nan]), min_size=1, max_size=5), min_size=1, max_size=8),
)
def test_weights_equal_projected_ascent_and_resume_from_their_state_in_json(kind, batches):
    sign = 1 if kind == "at_least" else -1
    rewards, constraints = {"a": 1.0, "b": 0.5 * sign}, {"b": {kind: 0.6, "lr": 0.7, "max_weight": 1.0}}
    weights, multiplier = ComponentWeights(rewards, constraints, {}), 0.5
    for step, values in enumerate(batches, 1):
        given = [value for value in values if not np.isnan(value)]
        if given:
            multiplier = min(max(multiplier + 0.7 * sign * (0.6 - sum(given) / len(given)), 0.0), 1.0)
        weights.update(step, {"b": np.array(values)})
        assert weights.changed == {"b": pytest.approx(sign * multiplier)} and weights.values["a"] == 1.0
        assert weights.metrics["reward/b/samples"] == len(given) and weights.metrics[f"reward/b/{kind}"] == 0.6
        resumed = ComponentWeights(rewards, constraints, {})
        resumed.load_state(json.loads(json.dumps(weights.state())))
        assert resumed.values == weights.values
        weights = resumed


def test_a_schedule_is_linear_between_its_points_and_constant_after_them():
    weights = ComponentWeights({"a": 1.0, "b": 0.0}, {}, {"b": [[5, 0.0], [9, -2.0]]})
    found = []
    for step in (1, 3, 5, 6, 8, 9, 50):
        weights.update(step, {})
        found.append(weights.changed["b"])
    assert found == [0.0, 0.0, 0.0, -0.5, -1.5, -2.0, -2.0] and weights.state() == {}


def test_direction_of_a_component_is_the_sign_of_its_weight_in_the_step():
    rewards = {"right": 1.0, "penalty": -0.5, "logged": 0.0, "later": 0.0, "turns": 1.0, "ends": -1.0, "cap": 0.0}
    constraints = {"cap": {"at_most": 0.2}}
    schedules = {"later": [[10, 0.0], [20, -1.0]], "turns": [[11, -1.0]], "ends": [[5, 0.0]]}

    def at(step):
        return directions(rewards, constraints, schedules, step)

    assert at(1) == {"right": 1, "penalty": -1, "logged": 1, "later": -1, "turns": 1, "ends": -1, "cap": -1}
    assert [at(step)["turns"] for step in (5, 6, 7, 12)] == [1, -1, -1, -1]  # step 6: 0 on the way to -1
    assert at(50)["ends"] == -1
    weights = ComponentWeights(rewards, constraints, schedules)
    for step in range(1, 25):
        weights.update(step, {})
        found = at(step)
        assert all(weight * found[name] >= 0 for name, weight in weights.values.items())


def test_a_changed_limit_applies_to_the_weight_of_a_checkpoint():
    weights = ComponentWeights({"a": 1.0, "b": 0.0}, {"b": {"at_least": 0.5, "max_weight": 2.0}}, {})
    weights.load_state({"b": 7.0, "removed": 1.0})
    assert weights.values == {"a": 1.0, "b": 2.0}


def test_resume_reports_that_the_weight_of_a_constraint_comes_from_the_checkpoint():
    goal = "gdpo.constraints={length: {at_least: 0.95}}"
    before = recorded(load_config(DEMO, [goal]))
    [change] = find_changes(before, load_config(DEMO, [goal, "gdpo.rewards.length=0.5"]))
    assert (
        change.sentence(5) == "gdpo.rewards.length: 1 -> 0.5 has no effect; the checkpoint contains the current weight"
    )
    changes = find_changes(recorded(load_config(DEMO)), load_config(DEMO, [goal, "gdpo.rewards.length=0.5"]))
    assert changes[0].sentence(5) == "gdpo.rewards.length: 1 -> 0.5 from step 5 on"


def test_the_plan_describes_goals_behind_the_first_weights():
    goals = {"b": {"at_most": 3}}, {"c": [[9, 1], [20, 0.5]]}
    described = "1 a + -1 b (at_most 3) + 0 c (1 in step 9, 0.5 in step 20)"
    assert describe_weights({"a": 1.0, "b": -1.0, "c": 0.0}, *goals) == described


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gdpo.constraints={lenght: {at_least: 1}}"], "gdpo.constraints.lenght: the component must have its first"),
        (["gdpo.constraints={length: {at_leest: 1}}"], "gdpo.constraints.length.at_leest: unknown option; did you"),
        (["gdpo.constraints={length: 0.95}"], "gdpo.constraints.length: must be a mapping such as"),
        (["gdpo.constraints={length: {lr: 1}}"], "gdpo.constraints.length: write exactly one of at_least and at_most"),
        (["gdpo.constraints={length: {at_least: 1, at_most: 2}}"], "write exactly one of at_least and at_most"),
        (["gdpo.constraints={length: {at_least: .nan}}"], "gdpo.constraints.length: at_least must be a finite number"),
        (["gdpo.constraints={length: {at_least: true}}"], "gdpo.constraints.length: at_least must be a finite number"),
        (["gdpo.constraints={length: {at_least: 1, lr: 0}}"], "gdpo.constraints.length: lr must be positive, got 0"),
        (["gdpo.constraints={length: {at_most: 1}}"], "gdpo.rewards.length: must be from -10 to 0 with its constraint"),
        (["gdpo.schedules={length: 0.5}"], "gdpo.schedules.length: must be a list of"),
        (["gdpo.schedules={length: [[2.5, 1]]}"], "gdpo.schedules.length: must be a list of"),
        (["gdpo.schedules={length: [[1, 1]]}"], "gdpo.schedules.length: steps must ascend from 2 or later, got [1]"),
        (["gdpo.schedules={length: [[9, 1], [9, 2]]}"], "gdpo.schedules.length: steps must ascend"),
        (
            ["gdpo.schedules={length: [[9, 1]]}", "gdpo.constraints={length: {at_least: 1}}"],
            "gdpo.schedules.length: conflicts with constraints.length; remove one",
        ),
        (
            ["gdpo.rewards={length: 1}", "gdpo.constraints={length: {at_least: 1}}"],
            "gdpo.rewards: at least one component without a constraint or schedule needs a weight",
        ),
        (
            ["gdpo.rewards={length: 1, format: 1}", "gdpo.schedules={length: [[9, 0]]}", "gdpo.preset=nemo_rl"],
            "gdpo.preset: this variant of gdpo requires at least two components with a weight, got only 'format'",
        ),
        (
            ["gdpo.constraints={length: {at_least: 1}}", "gdpo.dynamic_sampling.enabled=true"],
            "gdpo.dynamic_sampling.enabled: conflicts with gdpo.constraints",
        ),
    ],
)
def test_an_invalid_goal_is_refused_with_its_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        validate(load_config(DEMO, overrides))
    assert message in str(error.value)


def test_a_constraint_stops_after_the_given_steps_and_stays_stopped_after_a_resume():
    limits = {"a": {"at_least": 0.5, "lr": 1.0, "stop_after": 2}}

    def step(weights: ComponentWeights, number: int, mean: float) -> float:
        weights.update(number, {"a": np.full(4, mean), "b": np.arange(4.0)})
        return weights.values["a"]

    weights = ComponentWeights({"a": 3.0, "b": 1.0}, limits, {})
    assert step(weights, 1, 0.75) == 2.75
    assert step(weights, 2, 0.25) == 3.0  # the bound is missed, so the count starts anew
    assert step(weights, 3, 0.5) == 3.0
    resumed = ComponentWeights({"a": 3.0, "b": 1.0}, limits, {})
    resumed.load_state(weights.state())
    for of_run in (weights, resumed):
        assert step(of_run, 4, 1.0) == 2.5
        assert [step(of_run, number, mean) for number, mean in ((5, 0.0), (6, 1.0))] == [0.0, 0.0]
    assert resumed.state() == weights.state() == {"a": 0.0, "a/met": 2.0}
    with pytest.raises(ValueError, match="constraints.a: stop_after must be a positive number of steps, got 0"):
        read_constraint("a", {"at_least": 1.0, "stop_after": 0})
