"""Weighting rules: formulas by hand at 1e-12, frozen vectors of the authors' code, invariances, state and refusals."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms.component_weights import ComponentWeights
from gdpo_nemo.algorithms.weighting import CustomRule, RuleRunner, StepAdvantages, StepGradients, StepRewards
from gdpo_nemo.algorithms.weighting_gradients import minimum_norm_weights
from gdpo_nemo.algorithms.weighting_rules import RULES, added_volume, read_rule, within_groups
from gdpo_nemo.utils.errors import NumericsFailed, UserCodeFailed
from gdpo_nemo.utils.state import from_json, to_json

NAMES = ("right", "short", "polite")
GROUPS = np.repeat([7, 3], 4)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def rule(name: str, **options):
    return read_rule({"rule": name, **options}, NAMES)


def batch(rewards, step: int = 1, weights=None) -> StepRewards:
    columns = {name: np.asarray(column, float) for name, column in rewards.items()}
    return StepRewards(step, weights or dict.fromkeys(rewards, 1.0), columns, GROUPS)


def drawn(seed: int, step: int = 1, weights=None) -> StepRewards:
    draw = np.random.default_rng(seed)
    return batch({name: draw.random(8) for name in NAMES}, step, weights)


def values(factors) -> np.ndarray:
    return np.array(list(factors.values()))


# -- SAW ------------------------------------------------------------------------------------------------------------


def test_saw_shares_the_weight_by_coefficient_of_variation():
    right, short = [1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 1, 0, 0, 0]
    expected = []
    for column in (right, short):
        mean = math.fsum(column) / 8
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in column) / 7)
        expected.append(deviation / (mean + 2e-8))
    found = rule("saw").factors(batch({"right": right, "short": short}))
    np.testing.assert_allclose(values(found), 2 * np.array(expected) / sum(expected), **EXACT)


def test_saw_equals_the_code_of_its_authors():
    """Factors of `gdpo-h` in github.com/Zhaolutuan/SAW at 119951f6, which shifts the correctness in [-3, 3] by 3. That
    code adds 1e-8 to the mean only, so values differ by about 1e-8."""
    correctness = [-3.0, 0.5, 2.0, 3.0, -1.0, 3.0, 1.5, -2.5]
    form = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    found = rule("saw", lower={"right": -3.0}).factors(batch({"right": correctness, "short": form}))
    np.testing.assert_allclose(values(found), [1.05465467154864, 0.945345313135015], rtol=1e-7)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_saw_is_invariant_to_scale_and_not_to_shifts(seed, scale):
    before = drawn(seed)
    scaled = batch(before.rewards | {"right": before.rewards["right"] * scale})
    np.testing.assert_allclose(values(rule("saw").factors(scaled)), values(rule("saw").factors(before)), rtol=1e-5)
    shifted = batch(before.rewards | {"right": before.rewards["right"] + 1.0})
    assert rule("saw").factors(shifted)["right"] < rule("saw").factors(before)["right"]


def test_saw_refuses_rewards_whose_mean_may_be_near_zero():
    runner = RuleRunner(rule("saw"))
    with pytest.raises(
        NumericsFailed, match=r"^gdpo.weighting: saw, step 4: component 'short' has the reward -0.5, be"
    ):
        runner.factors(batch({"right": range(8), "short": [-0.5, 0.5] * 4}, step=4))
    with pytest.raises(NumericsFailed, match="has the mean 1.05e-08 above its lower bound, which is too near 0"):
        runner.factors(batch({"right": range(8), "short": [1e-9, 0] * 4}))
    assert rule("saw").factors(batch({"right": [1] * 8, "short": [0] * 8})) == {"right": 1.0, "short": 1.0}


# -- CTWA -----------------------------------------------------------------------------------------------------------


def test_ctwa_raises_the_weights_of_components_below_their_target():
    """The second formulation sums over pairs of samples: cov(r, A) = sum_ij (r_i - r_j)(A_i - A_j) / 2 n^2."""
    made = rule("ctwa", target={"right": 0.3, "short": 0.2, "polite": 5.0}, lr=0.5, ema=0.25, caps={"polite": -9})
    weights = {"right": 2.0, "short": -1.0, "polite": 1.0}
    logs, averages, deficits = dict.fromkeys(NAMES, 0.0), {}, []
    for step in range(1, 5):
        seen = drawn(step, step, weights)
        np.testing.assert_allclose(values(made.factors(seen)), np.exp(list(logs.values())), **EXACT)
        advantages = np.random.default_rng(step + 50).normal(size=8)
        advantages += 20 * (step > 2) * seen.rewards["right"]  # above the target of right in the last steps
        made.observe(StepAdvantages(seen, advantages, {}))
        for name, target in (("right", 0.3), ("short", 0.2)):
            found = []
            for members in (range(4), range(4, 8)):
                pairs = itertools.product(members, members)
                r = seen.rewards[name]
                found.append(sum((r[i] - r[j]) * (advantages[i] - advantages[j]) for i, j in pairs) / 32)
            covariance = math.copysign(1, weights[name]) * sum(found) / 2
            averages[name] = 0.75 * averages.get(name, covariance) + 0.25 * covariance
            deficits.append(max(target - averages[name], 0))
            logs[name] += 0.5 * deficits[-1]
    np.testing.assert_allclose(values(made.factors(seen)), np.exp(list(logs.values())), **EXACT)
    assert min(logs["right"], logs["short"]) > 0 == logs["polite"] == deficits[-2]


def test_ctwa_equals_the_code_of_its_authors():
    """Covariances of `compute_ctwa_stats` in github.com/yining610/ctwa at e387891c, for ratios of 1."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.25, 1.0, 0.5, 0.0])
    advantages = np.array([1.5, -0.5, -1.0, 0.0, 0.75, -0.25, 0.5, -1.0])
    more = np.array([0.5, 2, -1, 0, 3, 1, 1, 0.5])
    found = [within_groups(column, advantages, GROUPS) for column in (rewards, more)]
    np.testing.assert_allclose(found, [0.2109375, 0.34375], **EXACT)
    missing = rewards.copy()
    missing[[1, 4, 5, 6]] = np.nan
    assert within_groups(missing, advantages, GROUPS) == pytest.approx(np.cov([1, 0, 1], [1.5, -1, 0], ddof=0)[0, 1])
    assert (
        within_groups(np.full(8, np.nan), advantages, GROUPS) is None
        and within_groups(None, advantages, GROUPS) is None
    )


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(-5, 5), st.floats(0.1, 10))
def test_ctwa_is_invariant_to_shifts_and_its_covariance_has_the_scale_of_the_reward(seed, shift, scale):
    seen, advantages = drawn(seed), np.random.default_rng(seed + 1).normal(size=8)
    moved = batch({name: column * scale + shift for name, column in seen.rewards.items()})
    made = [rule("ctwa", target=target) for target in (0.5, 0.5 * scale)]
    for each, rewards in zip(made, (seen, moved)):
        each.observe(StepAdvantages(rewards, advantages, {}))
    first, second = (values(each.state()["averages"]) for each in made)
    np.testing.assert_allclose(second, first * scale, rtol=1e-8, atol=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(-5, 5))
def test_tchebycheff_is_invariant_to_a_shift_of_rewards_and_ideal(seed, shift):
    seen = drawn(seed)
    moved = batch({name: column + shift for name, column in seen.rewards.items()})
    for temperature in (0.0, 0.3):
        found = []
        for rewards, ideal in ((seen, 2.0), (moved, 2.0 + shift)):
            made = rule("tchebycheff", ideal=dict.fromkeys(NAMES, ideal), temperature=temperature)
            found.append(values(made.factors(rewards)))
        np.testing.assert_allclose(*found, atol=1e-9)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_mgda_is_invariant_to_a_common_scale_of_all_gradients_only(seed, scale):
    products = products_of(seed, 3)
    np.testing.assert_allclose(minimum_norm_weights(products * scale), minimum_norm_weights(products), atol=1e-9)
    uneven = np.diag([2.0, 1, 1])
    found = minimum_norm_weights(uneven @ np.eye(3) @ uneven)
    np.testing.assert_allclose(found, [1 / 9, 4 / 9, 4 / 9], **EXACT)


def test_ctwa_without_the_advantages_of_a_step_ends_the_run():
    runner = RuleRunner(rule("ctwa", target=0.1))
    runner.factors(drawn(0))
    with pytest.raises(NumericsFailed, match="ctwa, step 2: has not received the advantages of the previous step"):
        runner.factors(drawn(1, step=2))


# -- POW3R ----------------------------------------------------------------------------------------------------------


def test_pow3r_moves_weight_to_contrast_and_keeps_its_sum():
    weights = {"right": 1.0, "short": -3.0, "polite": 0.5}
    made, alphas = rule("pow3r"), dict.fromkeys(NAMES, 1.0)
    for step in range(1, 6):
        seen = drawn(step, step, weights)
        seen.rewards["polite"][:] = 1.0
        sizes = {name: abs(weight) for name, weight in weights.items()}
        kept = 4.5 / sum(sizes[name] * alphas[name] for name in NAMES)
        found = made.factors(seen)
        np.testing.assert_allclose(values(found), [alphas[name] * kept for name in NAMES], **EXACT)
        assert sum(sizes[name] * found[name] for name in NAMES) == pytest.approx(4.5, abs=1e-12)
        contrast = {}
        for name in NAMES:
            column = seen.rewards[name].reshape(2, 4)
            contrast[name] = math.sqrt(np.var(column, axis=1).mean() + 1e-4)
        mean = sum(sizes[name] * contrast[name] for name in NAMES) / 4.5
        for name in NAMES:
            goal = min(max(0.5 + 0.5 * contrast[name] / mean, 0.67), 1.5)
            alphas[name] = min(max(0.8 * alphas[name] + 0.2 * goal, 0.67), 1.5)
    assert alphas["polite"] < 0.8 < 1 < alphas["right"]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(-5, 5))
def test_pow3r_is_invariant_to_shifts_and_to_the_order_of_samples(seed, shift):
    first, second, order = rule("pow3r"), rule("pow3r"), np.random.default_rng(seed).permutation(8)
    for step in (1, 2):
        seen = drawn(seed + step, step)
        moved = {name: column[order] + shift for name, column in seen.rewards.items()}
        expected = first.factors(seen)
        found = second.factors(StepRewards(step, seen.weights, moved, GROUPS[order]))
        np.testing.assert_allclose(values(found), values(expected), rtol=1e-9)


def test_pow3r_keeps_alpha_of_a_component_with_too_few_rewards():
    made = rule("pow3r")
    sparse = drawn(1)
    sparse.rewards["short"][:3] = np.nan
    made.factors(sparse)
    assert "short" not in made.state()["alphas"] and "right" in made.state()["alphas"]


# -- hypervolume ----------------------------------------------------------------------------------------------------


def inclusion_exclusion(points) -> float:
    """Volume of a union of boxes from 0: the alternating sum of the volumes of all their intersections."""
    total = 0.0
    for size in range(1, len(points) + 1):
        for chosen in itertools.combinations(points, size):
            total -= (-1) ** size * np.maximum(np.min(chosen, axis=0), 0).prod()
    return total


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 6))
def test_added_volume_equals_inclusion_and_exclusion(seed, dimensions, count):
    draw = np.random.default_rng(seed)
    points = draw.uniform(-0.2, 1, (count + 1, dimensions)).tolist()
    inside = [point for point in points if min(point) > 0]
    new, others = points[0], [point for point in points[1:] if min(point) > 0]
    expected = inclusion_exclusion(inside) - inclusion_exclusion(others)
    assert added_volume(new, points[1:]) == pytest.approx(expected, abs=1e-12)


def test_hypervolume_equals_the_code_of_its_authors():
    """`compute_score` of github.com/yining610/dynamic-reward-weighting at 238fe655, with the buffer of its trainer."""
    points = [(0.25, 0.5, 0.25), (0.5, 0.75, 0.5), (0.5, 0.7, 0.4), (0.75, 0.6, 0.75), (1, 0.55, 0.3), (0.9, 0.9, 0.9)]
    made = rule("hypervolume")
    found = [made.factors(batch({n: [v] * 8 for n, v in zip(NAMES, point)}))["right"] for point in points]
    expected = [0.5234355928376133, 0.5, 0.5281217045649823, 0.5009374998779297, 0.7001738604722191]
    np.testing.assert_allclose(found, [1.0, *expected], **EXACT)


def test_hypervolume_gives_all_components_the_factor_of_a_new_front():
    """Means by step: (.25, .5), (.5, .75), (.5, .75), (.75, .5), (1, 1), relative to the first."""
    made, found = rule("hypervolume"), []
    for right, short in ((2, 4), (4, 6), (4, 6), (6, 4), (8, 8)):
        columns = {"right": [1] * right + [0] * (8 - right), "short": [1] * short + [0] * (8 - short)}
        factors = made.factors(batch(columns))
        assert len(set(factors.values())) == 1
        found.append(factors["right"])
    gains = [0.25 * 0.25, 0.0, 0.0, 0.75 * 0.5 - 0.25 * 0.25]
    np.testing.assert_allclose(found, [1.0, *(0.5 + 1.5 * math.tanh(gain) for gain in gains)], **EXACT)
    assert made.state()["points"] == [[0.75, 0.5]]


# -- Tchebycheff ----------------------------------------------------------------------------------------------------


def test_tchebycheff_trains_the_component_that_is_farthest_from_its_ideal():
    weights = {"right": 1.0, "short": -2.0}
    columns = {"right": [0.2, 0.6] * 4, "short": [0.3, 0.5] * 4}
    seen = batch(columns, weights=weights)
    distances = [1.0 * (1.0 - 0.4), 2.0 * (0.4 - 0.3)]
    assert rule("tchebycheff", ideal={"right": 1.0}).factors(seen) == {"right": 2.0, "short": 0.0}
    found = rule("tchebycheff", ideal={"right": 1.0}, temperature=0.3).factors(seen)
    shares = np.exp(np.array(distances) / 0.3)
    np.testing.assert_allclose(values(found), 2 * shares / shares.sum(), **EXACT)
    tied = rule("tchebycheff").factors(batch({"right": [0, 1] * 4, "short": [1, 0] * 4}))
    assert tied == {"right": 1.0, "short": 1.0}


def test_smooth_tchebycheff_is_the_gradient_of_its_scalarisation():
    """d/dJ_k of mu log sum_k exp(|w_k| (z_k - J_k) / mu) is -w_k factor_k / n."""
    weights, ideal, temperature = {"right": 1.5, "short": 0.5, "polite": 1.0}, dict.fromkeys(NAMES, 2.0), 0.4
    seen = drawn(3, weights=weights)
    factors = rule("tchebycheff", ideal=ideal, temperature=temperature).factors(seen)
    means = np.array([seen.rewards[name].mean() for name in NAMES])
    w = np.array(list(weights.values()))

    def objective(mean):
        return temperature * np.log(np.exp(w * (2.0 - mean) / temperature).sum())

    for k in range(3):
        step = np.eye(3)[k] * 1e-5
        slope = (objective(means + step) - objective(means - step)) / 2e-5
        assert slope == pytest.approx(-w[k] * values(factors)[k] / 3, rel=1e-7)


# -- gradients ------------------------------------------------------------------------------------------------------


def products_of(seed: int, count: int, parameters: int = 6) -> np.ndarray:
    gradients = np.random.default_rng(seed).normal(size=(count, parameters))
    return gradients @ gradients.T


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
def test_minimum_norm_weights_equal_the_best_of_all_supports(seed, count, parameters):
    """The minimum over a face of the simplex solves a linear system; the best feasible one is the minimum."""
    products = products_of(seed, count, parameters)
    found = minimum_norm_weights(products)
    assert found.min() >= 0 and found.sum() == pytest.approx(1, abs=1e-12)
    best = min(np.diag(products))
    for size in range(2, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = products[np.ix_(chosen, chosen)]
            system = np.block([[2 * part, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            solution = np.linalg.lstsq(system, np.eye(size + 1)[-1], rcond=None)[0][:size]
            if solution.min() >= 0:
                best = min(best, float(solution @ part @ solution))
    assert found @ products @ found == pytest.approx(best, abs=1e-10)
    slopes = products @ found
    assert slopes.min() >= found @ products @ found - 1e-10, "every component improves along the combined gradient"


def test_mgda_of_two_gradients_has_the_closed_form():
    first, second = np.array([1.0, 0.5, -1, 2]), np.array([0.25, -1, 1, 1])
    difference = first - second
    share = second @ (second - first) / (difference @ difference)
    made = rule("mgda")
    gradients = np.stack([first, second])
    made.observe_gradients(StepGradients(("right", "short"), gradients @ gradients.T))
    found = made.factors(batch({"right": [0] * 8, "short": [0] * 8}))
    np.testing.assert_allclose(values(found), [2 * share, 2 * (1 - share)], **EXACT)
    np.testing.assert_allclose(values(found), [0.592, 1.408], **EXACT)  # compute_mgda_weights of the repository ctwa
    third = np.array([-1, 0.5, 0.5, 1.5])
    all_three = np.stack([first, second, third])
    # That function stops its descent at changes of 1e-6.
    expected = [0.189090813272, 0.513939010666, 0.296970176062]
    np.testing.assert_allclose(minimum_norm_weights(all_three @ all_three.T), expected, atol=1e-6)


def test_a_component_whose_gradient_is_not_needed_keeps_the_floor():
    made = rule("mgda", floor=0.02)
    gradients = np.array([[3.0, 0.0], [1.0, 1.0]])
    made.observe_gradients(StepGradients(("right", "short"), gradients @ gradients.T))
    assert made.factors(batch({"right": [0] * 8, "short": [0] * 8})) == {"right": 0.02, "short": 2.0}


def observed(made, *products):
    seen = []
    for number, product in enumerate(products):
        made.observe_gradients(StepGradients(NAMES, product))
        seen.append(values(made.factors(drawn(number, number + 2))))
    return seen


def test_gradnorm_equals_the_code_of_its_authors():
    """Weights of `update_policy_gradnorm` in github.com/yining610/ctwa at e387891c, whose loss ratios are 1 here, for
    gradients of the norms (1, 2, 4), (1, 1, 3) and (2, 2, 2), with a learning rate of 0.05."""
    norms = np.array([(1, 2, 4), (1, 1, 3), (2, 2, 2)], float)
    found = observed(rule("gradnorm", lr=0.05), *(np.diag(row * row) for row in norms))
    expected = [
        [1.067796610169492, 1.11864406779661, 0.8135593220338984],
        [1.136742315426602, 1.188451594369434, 0.6748060902039644],
        [1.072492050441312, 1.12598440796838, 0.8015235415903079],
    ]
    np.testing.assert_allclose(found, expected, **EXACT)
    w = np.ones(3)
    for row, values_of_step in zip(norms, found):
        w = w - 0.05 * np.sign(w * row - (w * row).mean()) * row
        w = w * 3 / w.sum()
        np.testing.assert_allclose(values_of_step, w, **EXACT)


def test_gradnorm_balances_training_rates_by_alpha():
    made = rule("gradnorm", alpha=1.5, lr=0.1, best=dict.fromkeys(NAMES, 1.0))
    made.factors(batch(dict.fromkeys(NAMES, [0.0] * 8)))
    made.factors(batch({"right": [0.5] * 8, "short": [0.0] * 8, "polite": [0.25] * 8}, step=2))
    made.observe_gradients(StepGradients(NAMES, np.eye(3)))
    left = np.array([0.5, 1.0, 0.75])
    moved = 1 - 0.1 * np.sign(1 - (left / left.mean()) ** 1.5)
    found = made.factors(batch({"right": [0.5] * 8, "short": [0.0] * 8, "polite": [0.25] * 8}, step=3))
    np.testing.assert_allclose(values(found), moved * 3 / moved.sum(), **EXACT)
    with pytest.raises(NumericsFailed, match="gradnorm, step 1: component 'right' has its best reward in its first st"):
        RuleRunner(rule("gradnorm", alpha=1.0, best=dict.fromkeys(NAMES, 0.5))).factors(batch({"right": [0.5] * 8}))


def test_influence_equals_the_code_of_its_authors():
    """Softmax of log weights plus lr / regularisation times row sums of the Gram matrix, as in
    `ray_trainer_optimization.py` of github.com/yining610/dynamic-reward-weighting at 238fe655."""
    first = np.array([[1.0, 0.5, -1, 2], [0.25, -1, 1, 1], [-1, 0.5, 0.5, 1.5]])
    second = np.array([[0.5, 0, 1, 0], [1, 1, 0, -1], [0, 2, 0, 1]])
    found = observed(rule("influence", rate=0.1), first @ first.T, second @ second.T)
    expected = [
        [1.195062460106687, 0.826503151954939, 0.9784343879383737],
        [0.9485167020901067, 0.8636342851950611, 1.187849012714832],
    ]
    np.testing.assert_allclose(found, expected, **EXACT)


# -- all rules ------------------------------------------------------------------------------------------------------

OPTIONS = {
    "ctwa": {"target": 0.2},
    "gradnorm": {"alpha": 0.5, "best": dict.fromkeys(NAMES, 1.5)},
    "tchebycheff": {"temperature": 0.2},
}


def one_step(runner: RuleRunner, step: int) -> np.ndarray:
    draw = np.random.default_rng(step)
    found = values(runner.factors(drawn(step, step)))
    runner.observe(draw.normal(size=8), {})
    runner.observe_gradients(StepGradients(NAMES, products_of(step, 3)))
    return found


@pytest.mark.parametrize("name", RULES)
def test_a_rule_resumes_from_its_state_in_json_bit_for_bit(name):
    runner = RuleRunner(rule(name, **OPTIONS.get(name, {})))
    for step in range(1, 5):
        one_step(runner, step)
    resumed = RuleRunner(rule(name, **OPTIONS.get(name, {})))
    resumed.rule.load_state(from_json(json.loads(json.dumps(to_json(runner.rule.state())))))
    fresh = RuleRunner(rule(name, **OPTIONS.get(name, {})))
    expected = np.stack([one_step(runner, step) for step in range(5, 9)])
    np.testing.assert_array_equal(np.stack([one_step(resumed, step) for step in range(5, 9)]), expected)
    if name != "saw":  # the only rule without state
        assert not np.array_equal(np.stack([one_step(fresh, step) for step in range(5, 9)]), expected)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_factors_follow_the_names_and_not_the_order_of_components(name, seed):
    runners = [RuleRunner(rule(name, **OPTIONS.get(name, {}))) for _ in range(2)]
    order = np.random.default_rng(seed).permutation(3)
    names = tuple(NAMES[i] for i in order)
    for step in range(1, 4):
        seen, products = drawn(seed + step, step), products_of(seed + step, 3)
        turned = StepRewards(step, {n: seen.weights[n] for n in names}, seen.rewards, GROUPS)
        advantages = np.random.default_rng(seed + step).normal(size=8)
        first, second = (runner.factors(rewards) for runner, rewards in zip(runners, (seen, turned)))
        assert tuple(second) == names
        np.testing.assert_allclose([second[n] for n in NAMES], values(first), rtol=1e-9)
        for runner in runners:
            runner.observe(advantages, {})
        runners[0].observe_gradients(StepGradients(NAMES, products))
        runners[1].observe_gradients(StepGradients(names, products[np.ix_(order, order)]))


@pytest.mark.parametrize("name", RULES)
def test_a_component_without_rewards_keeps_its_weight(name):
    runner = RuleRunner(rule(name, **OPTIONS.get(name, {})))
    seen = batch({"right": [0, 1] * 4, "short": [np.nan] * 8, "polite": [0, 0, 0, 1] * 2})
    assert runner.factors(seen)["short"] == 1.0


def test_the_rule_multiplies_the_weights_of_constraints_and_schedules():
    rewards, constraint, schedule = (
        {"right": 1.0, "short": 0.0, "polite": 1.0},
        {"at_least": 0.9, "lr": 1.0},
        [[3, 3.0]],
    )
    columns = drawn(5).rewards
    weights = ComponentWeights(rewards, {"short": constraint}, {"polite": schedule}, rule("saw"))
    base = ComponentWeights(rewards, {"short": constraint}, {"polite": schedule})
    for step in (1, 2, 3):
        weights.update(step, columns, GROUPS)
        base.update(step, columns)
        nonzero = {name: weight for name, weight in base.values.items() if weight}
        factors = rule("saw").factors(StepRewards(step, nonzero, columns, GROUPS))
        assert weights.values == {name: weight * factors.get(name, 1.0) for name, weight in base.values.items()}
        assert weights.changed == weights.values and set(base.changed) == {"short", "polite"}
        assert weights.metrics["reward/right/factor"] == factors["right"] and weights.state() == base.state()
    assert weights.values["polite"] != 3.0 == base.values["polite"]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"right": math.nan, "short": 1.0}, "returned nan for component 'right'; a factor must be a finite number"),
        ({"right": -0.5, "short": 1.0}, "returned -0.5 for component 'right'"),
        ({"right": math.inf, "short": 1.0}, "returned inf for component 'right'"),
        ({"right": True, "short": 1.0}, "returned True for component 'right'"),
        ({"right": "1", "short": 1.0}, "returned '1' for component 'right'"),
        ({"right": 1.0}, r"returned factors of other components \(right\); expected right, short"),
        ({"right": 1.0, "sort": 1.0}, r"returned factors of other components \(right, sort\)"),
        ({}, r"returned factors of other components \(none\)"),
        ([1.0, 1.0], "returned list; expected a mapping of component to factor"),
        (None, "returned NoneType"),
        ({"right": 0.0, "short": 0.0}, "returned the factor 0 for every component"),
        (ZeroDivisionError("oh"), "raised ZeroDivisionError: oh"),
        (SystemExit(3), "raised .*3"),
    ],
)
def test_an_invalid_result_names_the_rule_and_the_step(result, problem):
    def function(seen):
        if isinstance(result, BaseException):
            raise result
        return result

    runner = RuleRunner(CustomRule("mine.py:rule", function, {}))
    with pytest.raises(UserCodeFailed, match=f"^gdpo.weighting: mine.py:rule, step 9: {problem}"):
        runner.factors(batch({"right": range(8), "short": range(8)}, step=9))
