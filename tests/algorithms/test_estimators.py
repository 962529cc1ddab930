"""Each estimator against its formula, written with loops over groups."""

import numpy as np
import pytest

from gdpo_nemo.algorithms import ESTIMATORS, compute_advantages

WEIGHTS = np.array([1.0, 0.5, 2.0])
EPS = 1e-6


def table(seed: int = 0, sizes=(4, 7, 2, 5)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(len(sizes)), sizes)
    rewards = np.stack([rng.integers(0, 2, len(ids)), rng.integers(0, 5, len(ids)) / 4, rng.random(len(ids))], axis=1)
    rewards[ids == 1, 0] = 1
    return rewards, ids


def values(rewards, ids, estimator, **options):
    return compute_advantages(rewards, ids, weights=WEIGHTS, estimator=estimator, **options).values.numpy()


def per_group(rewards, ids, formula):
    result = np.zeros(len(ids))
    for group in np.unique(ids):
        result[ids == group] = formula(rewards[ids == group])
    return result


def z(values):
    spread = values.std(axis=0, ddof=1)
    return np.where(spread > 0, (values - values.mean(axis=0)) / (spread + EPS), 0.0)


def normed(values):
    return (values - values.mean()) / (values.std(ddof=1) + EPS)


def check(estimator, formula, **options):
    for seed in range(4):
        rewards, ids = table(seed)
        got = values(rewards, ids, estimator, batch_norm=False, **options)
        np.testing.assert_allclose(got, per_group(rewards, ids, formula), rtol=0, atol=1e-9)


def test_grpo():
    check("grpo", lambda r: z((r @ WEIGHTS)[:, None])[:, 0])


def test_dr_grpo():
    check("dr_grpo", lambda r: r @ WEIGHTS - (r @ WEIGHTS).mean())


def test_rloo_is_the_distance_to_the_mean_of_the_others():
    def formula(r):
        total = r @ WEIGHTS
        return np.array([x - np.delete(total, i).mean() for i, x in enumerate(total)])

    check("rloo", formula)


@pytest.mark.parametrize("estimator", ["gdpo", "mo_grpo"])
def test_gdpo_and_mo_grpo_before_the_batch_norm(estimator):
    check(estimator, lambda r: z(r) @ WEIGHTS)


def test_dvao_weighs_by_the_groups_deviation_and_stays_below_grpo():
    def formula(r):
        spread = WEIGHTS * r.std(axis=0, ddof=1)
        return z(r) @ (spread / spread.sum())

    check("dvao", formula)
    rewards, ids = table()
    assert (np.abs(values(rewards, ids, "dvao")) <= np.abs(values(rewards, ids, "grpo")) + 1e-4).all()


@pytest.mark.parametrize(("mode", "tau"), [("hard", 0.0), ("snr", 0.3), ("snr", 0.8)])
def test_gd2po_drops_contradicting_rollouts(mode, tau):
    def formula(r):
        terms = z(r) * WEIGHTS
        drop = (terms > 0).any(axis=1) & (terms < 0).any(axis=1)
        if mode == "snr":
            drop &= np.abs(terms.sum(axis=1)) < tau * np.abs(terms).sum(axis=1)
        return np.where(drop, 0.0, terms.sum(axis=1)) * (~drop).mean()

    check("gd2po", formula, mode=mode, tau=tau)


def test_corr_grpo_scales_grpo_by_the_sum_of_correlations():
    def formula(r):
        total = r @ WEIGHTS
        varying = r[:, np.ptp(r, axis=0) > 0]
        correlation = np.atleast_2d(np.corrcoef(varying.T)).sum()
        return (total - total.mean()) / np.sqrt(max(correlation, 0.0) + EPS)

    for seed in range(4):
        rewards, ids = table(seed, sizes=(4, 7, 6, 5))
        got = values(rewards, ids, "corr_grpo")
        np.testing.assert_allclose(got, per_group(rewards, ids, formula), rtol=1e-6, atol=1e-9)


def test_sa_mrpo_lowers_the_weight_of_saturated_rewards_and_gamma_0_is_gdpo():
    rewards, ids = table()
    np.testing.assert_array_equal(values(rewards, ids, "sa_mrpo", gamma=0.0), values(rewards, ids, "gdpo"))
    scaled = rewards * [1, 2, 1] - [0, 1, 0]
    saturation = (scaled.mean(axis=0) - [0, -1, 0]) / [1, 2, 1]
    weights = WEIGHTS * (1 - saturation) ** 0.5
    expected = normed(per_group(scaled, ids, lambda r: z(r) @ weights))
    got = values(scaled, ids, "sa_mrpo", bounds={"reward_1": (-1, 1)})
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"rewards of 'reward_1' span \[.*outside the bounds"):
        values(scaled, ids, "sa_mrpo")
    with pytest.raises(ValueError, match="bounds of unknown component 'reward_9'"):
        values(scaled, ids, "sa_mrpo", bounds={"reward_9": (-1, 1)})


@pytest.mark.parametrize("asymmetric", [False, True])
def test_dara_amplifies_rare_signals_up_to_the_cap(asymmetric):
    rewards = np.random.default_rng(0).random((80, 3)).round(1)
    ids = np.repeat(np.arange(20), 4)
    rewards[ids >= 5, 0] = 1
    rewards[ids >= 1, 1] = 0
    factor = np.array([2.0, min(3.0, np.sqrt(20)), 1.0])

    def formula(r):
        terms = z(r) * WEIGHTS
        return np.where((terms > 0) | (not asymmetric), terms * factor, terms).sum(axis=1)

    got = values(rewards, ids, "dara", cap=3.0, asymmetric=asymmetric, batch_norm=False)
    np.testing.assert_allclose(got, per_group(rewards, ids, formula), rtol=0, atol=1e-9)


def test_batch_norm_is_on_where_the_published_form_has_it():
    on = {name for name, entry in ESTIMATORS.items() if entry.batch_norm}
    assert on >= {"gdpo", "gd2po", "sa_mrpo", "dara"}
    assert not on & {"grpo", "dr_grpo", "rloo", "mo_grpo", "dvao", "corr_grpo"}
    rewards, ids = table()
    for name in ESTIMATORS:
        result = compute_advantages(rewards, ids, estimator=name)
        assert (abs(result.values[result.has_signal].std() - 1) < 1e-5) == (name in on)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "corr_grpo"])
def test_shares_of_summed_rewards_add_up_and_unscored_rows_have_none(estimator):
    rewards, ids = table()
    rewards[3] = np.nan
    result = compute_advantages(rewards, ids, weights=WEIGHTS, estimator=estimator)
    np.testing.assert_allclose(result.components.sum(1), result.values, rtol=0, atol=1e-9)
    assert (result.components[3] == 0).all() and result.values[3] == 0


def test_corr_grpo_drops_components_that_are_constant_up_to_rounding():
    rewards, ids = table()
    noisy = 0.1 * (1 + 1e-15 * (np.arange(len(ids)) % 2))
    with_noise = compute_advantages(np.column_stack([rewards, noisy]), ids, estimator="corr_grpo").values
    without = compute_advantages(rewards, ids, estimator="corr_grpo").values
    np.testing.assert_allclose(with_noise, without, rtol=0, atol=1e-9)


def test_gd2po_standardises_over_the_kept_rollouts_only():
    rewards, ids = table()
    before = values(rewards, ids, "gd2po", batch_norm=False)
    kept = compute_advantages(rewards, ids, weights=WEIGHTS, estimator="gd2po").has_signal.numpy()
    after = values(rewards, ids, "gd2po")
    assert 0 < kept.sum() < len(ids) and (after[~kept] == 0).all()
    np.testing.assert_allclose(after[kept], normed(before[kept]), rtol=0, atol=1e-9)


def test_dvao_shares_stay_bounded_with_a_penalty_of_negative_weight():
    rewards, ids = table(sizes=(8, 8))
    result = compute_advantages(rewards, ids, weights=[1, -1, 1], estimator="dvao", batch_norm=False)
    assert result.components.abs().max() < np.sqrt(7)


def test_leave_one_out_grpo_is_each_reward_against_the_others_alone():
    """Mean and sample deviation of the other members, as numpy has them; the only outlier of its group is not
    divided."""
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0])
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    got = compute_advantages({"r": rewards}, groups, estimator="grpo", leave_one_out=True).values.numpy()
    for row, group in enumerate(groups):
        others = np.array([rewards[i] for i in range(8) if groups[i] == group and i != row])
        spread = others.std(ddof=1)
        expected = (rewards[row] - others.mean()) / (spread + 1e-6 if spread > 0 else 1.0)
        assert np.isclose(got[row], expected), row


def test_leave_one_out_grpo_adds_its_components_up():
    rewards = {"a": [1.0, 0.0, 0.5, 0.2], "b": [0.0, 2.0, 1.0, 0.0]}
    both = compute_advantages(rewards, [0] * 4, estimator="grpo", leave_one_out=True)
    total = compute_advantages(
        {"sum": np.add(rewards["a"], rewards["b"])}, [0] * 4, estimator="grpo", leave_one_out=True
    )
    np.testing.assert_allclose(both.values, total.values)
    np.testing.assert_allclose(both.components.sum(1), both.values)


def test_reinforce_plus_plus_is_mean_centred_dr_grpo_over_the_tokens_of_the_batch():
    """The options that `config from-nemo-rl` writes against the formula: population statistics, every token once."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    lengths = np.array([3, 1, 2, 6])
    options = {"batch_unit": "token", "batch_rows": "scored", "ddof": 0, "batch_epsilon": 0.0, "residue": 0.0}
    got = compute_advantages(
        {"r": rewards}, [0, 0, 1, 1], estimator="dr_grpo", batch_norm=True, lengths=lengths, **options
    ).values.numpy()
    tokens = np.repeat(rewards - 0.5, lengths)
    np.testing.assert_allclose(got, (rewards - 0.5 - tokens.mean()) / tokens.std())
