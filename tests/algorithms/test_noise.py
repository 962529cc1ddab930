"""Measured noise: reliability of z-scores, correction of error rates, the file of a profile, and refusals."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.algorithms import ESTIMATORS, PRESETS, compute_advantages
from gdpo_nemo.algorithms.diagnostics import RELIABLE_SHARE
from gdpo_nemo.algorithms.noise import FlipRates, corrected
from gdpo_nemo.commands.env.check import sample_of
from gdpo_nemo.config.load import load_config, recorded
from gdpo_nemo.config.validate import validate
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.utils.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = EXAMPLES.parent / "configs" / "gdpo_tiny_cpu.yaml"
RATES = {"false_positive": 0.1, "false_negative": 0.2}
BY_COMPONENT = [name for name, entry in ESTIMATORS.items() if not entry.sums_rewards]


def batch(groups=6, size=8, seed=0):
    """Rewards of two components, one of them with missing values and a constant group, and group ids."""
    draw = np.random.default_rng(seed)
    ids = np.repeat(np.arange(groups), size)
    graded = draw.random(groups * size)
    graded[draw.random(groups * size) < 0.1] = np.nan
    graded[:size] = 0.3
    return {"passed": draw.integers(0, 2, groups * size).astype(float), "graded": graded}, ids


@pytest.mark.parametrize("estimator", BY_COMPONENT)
def test_noise_of_zero_changes_no_bit(estimator):
    rewards, ids = batch()
    none = {"graded": 0.0, "passed": {"false_positive": 0.0, "false_negative": 0.0}}
    without, with_noise = (compute_advantages(rewards, ids, estimator=estimator, noise=noise) for noise in ({}, none))
    np.testing.assert_array_equal(without.values.numpy(), with_noise.values.numpy())
    np.testing.assert_array_equal(without.components.numpy(), with_noise.components.numpy())
    np.testing.assert_array_equal(without.has_signal.numpy(), with_noise.has_signal.numpy())


@pytest.mark.parametrize("settings", [{}, {"ddof": 0}, {"scale_rewards": "none"}, {"leave_one_out": True}])
def test_each_group_is_scaled_by_its_own_reliability(settings):
    rewards, ids = batch()
    options = {"estimator": "mo_grpo", "epsilon": 1e-6, **settings}
    before = compute_advantages(rewards, ids, **options).components.numpy()
    after = compute_advantages(rewards, ids, noise={"graded": 0.25}, **options)
    np.testing.assert_array_equal(after.components.numpy()[:, 0], before[:, 0])
    pooled = np.zeros(2)
    for group in np.unique(ids):
        rows = ids == group
        values = rewards["graded"][rows]
        values = values[~np.isnan(values)]
        variance = values.var(ddof=settings.get("ddof", 1))
        share = max(0.0, 1 - 0.25**2 / variance) if np.ptp(values) else 0.0
        np.testing.assert_allclose(after.components.numpy()[rows, 1], share * before[rows, 1], rtol=1e-12, atol=1e-15)
        pooled += (len(values) - 1) * np.array([0.25**2, values.var(ddof=1)])
    assert after.diagnostics.reliability[1] == pytest.approx(1 - pooled[0] / pooled[1], rel=1e-12)
    assert np.isnan(after.diagnostics.reliability[0])
    assert "reward/passed/reliability" not in after.diagnostics.metrics()


@pytest.mark.parametrize("case, error, expected", [("verifier", 0.12, (0.95, 0.76)), ("alike", 0.3, (0.63, 0.68))])
def test_reliability_by_group_is_compared_with_a_pooled_factor(case, error, expected):
    """Correlation of the scores with those of rewards without errors, by group and with a factor for the batch.

    The verifier scores groups of easy and hard prompts, many of which are all right or all wrong.
    """
    draw = np.random.default_rng(0)
    ids = np.repeat(np.arange(2000), 8)
    exact = 0.3 * draw.normal(size=16_000)
    if case == "verifier":
        exact = (draw.random(16_000) < np.repeat(draw.beta(0.5, 0.5, 2000), 8)).astype(float)
    judged = exact + error * draw.normal(size=16_000)

    def scores(rewards, **noise):
        return compute_advantages({"judged": rewards}, ids, estimator="mo_grpo", **noise)

    # A factor for the whole batch does not change a correlation.
    by_group, without = scores(judged, noise={"judged": error}), scores(judged)
    found = [np.corrcoef(scores(exact).values, other.values)[0, 1] for other in (by_group, without)]
    assert found == pytest.approx(expected, abs=0.01)


def test_a_group_whose_variance_is_noise_has_no_signal():
    rewards = {"graded": [0.5, 0.52, 0.48, 0.5, 0.0, 1.0, 0.2, 0.9]}
    found = compute_advantages(rewards, np.repeat([0, 1], 4), noise={"graded": 0.1})
    assert found.has_signal.tolist() == found.has_advantage.tolist() == [False] * 4 + [True] * 4
    assert not found.values.numpy()[:4].any() and found.values.numpy()[4:].all()


def test_a_component_that_is_mostly_noise_is_reported_although_single_groups_are_above_it():
    draw = np.random.default_rng(3)
    ids = np.repeat(np.arange(64), 8)
    rewards = {"passed": draw.integers(0, 2, 512).astype(float), "judged": 0.5 + 0.12 * draw.normal(size=512)}
    found = compute_advantages(rewards, ids, noise={"judged": 0.12})
    assert np.square(found.components.numpy()[:, 1]).mean() > 0.03  # the groups that vary most by chance
    assert found.diagnostics.metrics()["reward/judged/reliability"] < RELIABLE_SHARE
    [alert] = found.diagnostics.alerts
    assert alert.startswith("component 'judged' is mostly noise (gdpo.noise): ")
    rewards["judged"] += rewards["passed"]
    assert not compute_advantages(rewards, ids, noise={"judged": 0.12}).diagnostics.alerts


def test_error_rates_are_corrected_without_bias_and_give_the_variance_of_the_errors():
    rates, draw = FlipRates(0.1, 0.2), np.random.default_rng(0)
    for share in (0.0, 0.3, 1.0):
        right = draw.random(400_000) < share
        judged = np.where(right, draw.random(400_000) >= 0.2, draw.random(400_000) < 0.1).astype(float)
        values = rates.correct(judged)
        assert values.mean() == pytest.approx(share, abs=0.005)
        assert np.mean((values - right) ** 2) == pytest.approx(rates.variance(np.array(share)), abs=0.005)
        # Law of total variance: the rest of the variance is that of the right rewards.
        assert values.var() - rates.variance(np.array(share)) == pytest.approx(share * (1 - share), abs=0.005)


def test_the_correction_changes_a_sum_and_no_z_score_but_its_reliability():
    rewards, ids = batch()
    fixed = corrected(rewards, {"passed": RATES})
    np.testing.assert_allclose(fixed["passed"], (rewards["passed"] - 0.1) / 0.7, rtol=1e-15)
    np.testing.assert_array_equal(fixed["graded"], rewards["graded"])
    z, z_fixed = (compute_advantages(r, ids, estimator="mo_grpo", epsilon=1e-12) for r in (rewards, fixed))
    np.testing.assert_allclose(z_fixed.values.numpy(), z.values.numpy(), rtol=1e-9, atol=1e-9)
    scaled = compute_advantages(fixed, ids, estimator="mo_grpo", epsilon=1e-12, noise={"passed": RATES})
    for group in np.unique(ids):
        rows = ids == group
        right = np.clip(fixed["passed"][rows].mean(), 0, 1)
        error = (right * 0.2 * 0.8 + (1 - right) * 0.1 * 0.9) / 0.7**2
        share = max(0.0, 1 - error / fixed["passed"][rows].var(ddof=1))
        terms = share * z_fixed.components.numpy()[rows, 0]
        np.testing.assert_allclose(scaled.components.numpy()[rows, 0], terms, rtol=1e-12, atol=1e-15)
    sums = [compute_advantages(r, ids, estimator="dr_grpo").values.numpy() for r in (rewards, fixed)]
    assert np.abs(sums[0] - sums[1]).max() > 0.1
    with_rates = compute_advantages(fixed, ids, estimator="dr_grpo", noise={"passed": RATES})
    np.testing.assert_array_equal(with_rates.values.numpy(), sums[1])


def test_the_noise_of_a_family_applies_to_each_criterion():
    draw = np.random.default_rng(5)
    ids, values = np.repeat(np.arange(4), 6), draw.random((24, 3))
    columns = {f"c{j}": values[:, j] for j in range(3)}
    family = compute_advantages({"rubric/*": values}, ids, family_scale="none", noise={"rubric/*": 0.2})
    fixed = compute_advantages(columns, ids, noise=dict.fromkeys(columns, 0.2))
    np.testing.assert_allclose(family.values.numpy(), fixed.values.numpy(), rtol=1e-12, atol=1e-14)
    [pooled] = family.diagnostics.reliability
    assert fixed.diagnostics.reliability.min() < pooled < fixed.diagnostics.reliability.max()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"noise": {"grade": 0.1}}, "noise.grade: not a component; did you mean 'graded'"),
        ({"noise": {"graded": 0.1}, "estimator": "grpo"}, "'noise' has no effect as a standard deviation with grpo"),
        ({"noise": {"passed": RATES}}, "noise.passed: the rewards of a verifier with error rates must be corrected"),
        ({"noise": {"graded": 0.1}, "preset": "trl_fork", "weights": [0, 1]}, "requires at least two components"),
    ],
)
def test_noise_without_an_effect_is_refused_for_rewards(settings, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(*batch(), **settings)
    assert PRESETS["trl_fork"].single_reward == "grpo"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["gdpo.noise={lenght: 0.1}"], "gdpo.noise.lenght: not a component; did you mean 'length'?"),
        (["gdpo.noise={length: -0.1}"], "gdpo.noise.length: must be a standard deviation of at least 0"),
        (["gdpo.noise={length: .nan}"], "gdpo.noise.length: must be a standard deviation of at least 0"),
        (["gdpo.noise={length: true}"], "gdpo.noise.length: must be a standard deviation of at least 0"),
        (["gdpo.noise={length: high}"], "gdpo.noise.length: must be a standard deviation of at least 0"),
        (["gdpo.noise={length: {false_positiv: 0.1}}"], "gdpo.noise.length.false_positiv: unknown rate; did you mean"),
        (
            ["gdpo.noise={length: {false_positive: 1}}"],
            "gdpo.noise.length: false_positive must be at least 0 and below",
        ),
        (
            ["gdpo.noise={length: {false_positive: 0.5, false_negative: 0.5}}"],
            "gdpo.noise.length: false_positive + false_negative must be below 1",
        ),
        (["gdpo.noise={rubric/*: {false_positive: 0.1}}", "gdpo.rewards={rubric/*: 1}"], "a family has no error rates"),
        (["gdpo.noise={length: 0.1}", "gdpo.estimator=rloo"], "gdpo.noise.length: has no effect with rloo, which sums"),
        (["gdpo.noise={length: 0.1}", "algorithm.type=ppo"], "gdpo.noise: has no effect with algorithm ppo"),
        (["gdpo.noise={length: 0.1}", "gdpo.credit=turn", "rollout.turns.max_turns=2"], "conflicts with gdpo.credit"),
        (["gdpo.options={noise: {length: 0.1}}"], "gdpo.options.noise: not an option; set gdpo.noise"),
        (
            ["gdpo.noise={length: {false_positive: 0.1}}", "gdpo.shaping=[{component: length, scale: {by: 2.0}}]"],
            "gdpo.noise.length: error rates conflict with its rule in gdpo.shaping",
        ),
    ],
)
def test_invalid_noise_is_refused_with_its_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        validate(load_config(DEMO, overrides))
    assert message in str(error.value)


def profile_file(folder, **noise):
    """A file like that of ``gdpo-nemo profile``, which tests/tools/test_profile.py reads."""
    components = {name: {"weight": 1.0, "noise_std": value} for name, value in noise.items()}
    (folder / "profile.json").write_text(json.dumps({"profile": {"components": components}}))
    return folder / "profile.json"


def test_a_profile_is_replaced_by_its_values_in_the_config_of_the_run(tmp_path):
    path = profile_file(tmp_path, correctness=0.0, format=0.3, length=0.12, other=0.5)
    config = load_config(DEMO, [f"gdpo.noise={{from: {path}, format: 0.2}}"])
    assert config.gdpo.noise == {"format": 0.2, "correctness": 0.0, "length": 0.12}
    validate(config)
    path.unlink()  # a resumed run does not need the file
    assert load_config(recorded(config)).gdpo.noise == config.gdpo.noise


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "gdpo.noise.from: .*profile.json cannot be read"),
        ("[1]", "gdpo.noise.from: .*profile.json is not a JSON object"),
        ('{"profile": 3}', "gdpo.noise.from: .*profile.json is not a profile.json of gdpo-nemo profile"),
        ('{"profile": {"components": {"format": 3}}}', "has no measured noise of 'correctness'; profile the same"),
        ('{"profile": {"components": {"correctness": {"noise_std": null}}}}', "no measured noise of 'correctness'"),
        ('{"profile": {"components": {"correctness": {"noise_std": "a"}}}}', "gdpo.noise.correctness: must be a stand"),
    ],
)
def test_a_file_that_is_not_the_profile_of_the_rewards_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(DEMO, [f"gdpo.noise={{from: {tmp_path / 'profile.json'}}}", "gdpo.rewards={correctness: 1.0}"])


def test_error_rates_pass_the_checks_of_an_estimator_of_the_sum():
    config = load_config(DEMO, ["gdpo.noise={length: {false_positive: 0.1}}", "gdpo.estimator=grpo"])
    assert validate(config).config.gdpo.noise == {"length": {"false_positive": 0.1}}


def test_the_example_judge_changes_one_component_by_its_error():
    options = {"plugin": f"{EXAMPLES}/noisy_judge.py:NoisyJudge", "error": 0.5, "numbers": [10, 98]}
    environment = load_environment("number_answer", options)
    (row,) = environment.rows("train", 1, 0)
    random.seed(0)  # as a worker does
    verdicts = environment.verify([sample_of(row, row["answer"], "number_answer", index) for index in range(400)])
    rewards = {name: np.array([verdict.rewards[name] for verdict in verdicts]) for name in environment.reward_names}
    assert (rewards["correct"] == 1).all() and len(set(rewards["exact"])) == 1
    errors = rewards["brief"] - rewards["exact"]
    assert abs(errors.mean()) < 0.1 and errors.std() == pytest.approx(0.5, rel=0.15)
