"""Each estimator against its formula, written with loops over groups."""

import inspect

import numpy as np
import pytest

from gdpo_nemo.algorithms import ESTIMATORS, Settings, compute_advantages
from gdpo_nemo.algorithms.selection import check_selection
from gdpo_nemo.algorithms.table import build_table

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


@pytest.mark.parametrize("batch_norm", [False, True])
def test_gd2po_multiplies_by_the_retained_share_of_the_scored_rollouts_of_the_group(batch_norm):
    rewards, ids = table(sizes=(6, 7, 5, 8))
    failed = np.arange(len(ids)) % 5 == 1
    empty = np.arange(len(ids)) % 7 == 3
    expected = np.zeros(len(ids))
    shares = []
    for group in range(4):
        rows = np.flatnonzero((ids == group) & ~failed & ~empty)
        terms = z(rewards[rows]) * WEIGHTS
        kept = ~((terms > 0).any(axis=1) & (terms < 0).any(axis=1))
        shares.append(kept.sum() / len(rows))
        expected[rows] = np.where(kept, terms.sum(axis=1), 0.0) * shares[-1]
    assert len(set(shares)) > 2
    if batch_norm:
        live = expected != 0
        expected[live] = normed(expected[live])
    rewards[empty] = np.nan
    got = values(rewards, ids, "gd2po", valid=~failed, batch_norm=batch_norm)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


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


def test_gd2po_standardises_over_the_retained_rollouts_only():
    rewards, ids = table()
    before = values(rewards, ids, "gd2po", batch_norm=False)
    kept = compute_advantages(rewards, ids, weights=WEIGHTS, estimator="gd2po").has_signal.numpy()
    after = values(rewards, ids, "gd2po")
    assert 0 < kept.sum() < len(ids) and (after[~kept] == 0).all()
    np.testing.assert_allclose(after[kept], normed(before[kept]), rtol=0, atol=1e-9)


def test_gd2po_whitens_over_the_tokens_of_all_retained_rollouts_as_its_authors_do():
    """Also over those of zero-variance groups, which thereby get an advantage."""
    rewards, ids = table()
    rewards[ids == ids[0]] = 0.5
    lengths = 1 + np.arange(len(ids)) % 7
    terms = compute_advantages(rewards, ids, weights=WEIGHTS, estimator="mo_grpo").components.numpy()
    kept = ~((terms > 0).any(axis=1) & (terms < 0).any(axis=1))
    before = values(rewards, ids, "gd2po", batch_norm=False)
    tokens = np.repeat(before[kept], lengths[kept])
    expected = np.where(kept, (before - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), 0.0)
    options = dict(batch_rows="kept", batch_unit="token", batch_epsilon=1e-8, batch_epsilon_inside=True)
    after = values(rewards, ids, "gd2po", lengths=lengths, **options)
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-9)
    assert not kept.all() and (after[ids == ids[0]] != 0).all()


def test_dvao_shares_stay_bounded_with_a_penalty_of_negative_weight():
    rewards, ids = table(sizes=(8, 8))
    result = compute_advantages(rewards, ids, weights=[1, -1, 1], estimator="dvao", batch_norm=False)
    assert result.components.abs().max() < np.sqrt(7)


@pytest.mark.parametrize("equal_peers", ["divide", "raw"])
def test_leave_one_out_grpo_compares_each_reward_with_the_others_only(equal_peers):
    """Mean and sample deviation of the other members, as numpy has them; the only outlier of its group is divided by
    the deviation of the whole group, or not divided."""
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0])
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    options = {"leave_one_out": True, "equal_peers": equal_peers}
    got = compute_advantages({"r": rewards}, groups, estimator="grpo", **options).values.numpy()
    for row, group in enumerate(groups):
        others = np.array([rewards[i] for i in range(8) if groups[i] == group and i != row])
        spread = others.std(ddof=1)
        whole = np.array([rewards[i] for i in range(8) if groups[i] == group]).std(ddof=1)
        alone = 1.0 if equal_peers == "raw" else whole + 1e-6
        expected = (rewards[row] - others.mean()) / (spread + 1e-6 if spread > 0 else alone)
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


@pytest.mark.parametrize("scale", ["batch", "none"])
@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_scale_rewards_divides_by_the_deviation_of_the_batch_or_by_none(estimator, scale):
    """As TRL's ``scale_rewards`` has it for the sum, and NeMo-RL's ``normalize_rewards: false`` for each component."""
    rewards, ids = table()
    columns = rewards if estimator == "gdpo" else (rewards @ WEIGHTS)[:, None]
    deviation = columns.std(axis=0, ddof=1) + EPS if scale == "batch" else 1.0
    centred = columns - np.stack([columns[ids == g].mean(axis=0) for g in ids])
    expected = (centred / deviation) @ (WEIGHTS if estimator == "gdpo" else np.ones(1))
    got = values(rewards, ids, estimator, scale_rewards=scale, batch_norm=False)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
    if estimator == "gdpo":
        np.testing.assert_allclose(values(rewards, ids, estimator, scale_rewards=scale), normed(expected), atol=1e-8)


def test_scale_rewards_batch_is_the_advantage_of_trls_own_lines():
    import torch
    from trl.trainer.utils import nanstd

    rewards, ids = table(sizes=(4, 4, 4))
    summed = torch.from_numpy((rewards * WEIGHTS).sum(axis=1))
    theirs = (summed - summed.view(-1, 4).mean(1).repeat_interleave(4)) / (nanstd(summed).expand_as(summed) + 1e-4)
    got = values(rewards, ids, "grpo", scale_rewards="batch", epsilon=1e-4)
    # TRL's correction n / (n - 1) is of float32.
    np.testing.assert_allclose(got, theirs.numpy(), rtol=1e-7)


def test_missing_rewards_are_not_part_of_the_batch_deviation():
    got = compute_advantages(
        {"a": [1.0, 0.0, None, 4.0, 2.0]}, [0, 0, 0, 1, 1], scale_rewards="batch", batch_norm=False
    )
    deviation = np.std([1.0, 0.0, 4.0, 2.0], ddof=1) + EPS
    np.testing.assert_allclose(got.values, np.array([0.5, -0.5, 0.0, 1.0, -1.0]) / deviation, atol=1e-12)


def test_gpg_rescales_by_the_share_of_groups_with_a_gradient():
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0])
    ids = np.array([0, 0, 1, 1, 2, 2, 2])
    centred = per_group(rewards, ids, lambda r: r - r.mean())
    for f_norm in (1.0, 4.0):
        got = compute_advantages({"r": rewards}, ids, estimator="gpg", f_norm=f_norm).values
        np.testing.assert_allclose(got, centred * 7 / 5 / f_norm, atol=1e-12)
    with pytest.raises(ValueError, match="f_norm must be positive"):
        compute_advantages({"r": rewards}, ids, estimator="gpg", f_norm=0.0)


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_standardises_rewards_over_the_batchs_tokens(minus_baseline):
    """The formula of NeMo-RL's estimator: less the group's mean or not, then every token of the batch counts once."""
    rewards = np.array([1.0, 0.0, 3.0, 3.0, 0.5])
    ids = [0, 0, 1, 1, 2]
    lengths = np.array([3, 1, 2, 6, 4])
    raw = rewards - [0.5, 0.5, 3.0, 3.0, 0.5] if minus_baseline else rewards
    tokens = np.repeat(raw, lengths)
    options = {"batch_unit": "token", "batch_rows": "scored", "ddof": 0, "batch_epsilon": 0.0, "residue": 0.0}
    got = compute_advantages(
        {"r": rewards}, ids, estimator="reinforce_plus_plus", lengths=lengths, minus_baseline=minus_baseline, **options
    )
    np.testing.assert_allclose(got.values, (raw - tokens.mean()) / tokens.std(), atol=1e-12)


@pytest.mark.parametrize(
    ("estimator", "options", "said"),
    [
        ("rloo", {"scale_rewards": "batch"}, "'scale_rewards' has no effect with rloo"),
        ("gpg", {"scale_rewards": "none"}, "'scale_rewards' has no effect with gpg"),
        ("dr_grpo", {"leave_one_out": True}, "'leave_one_out' has no effect with dr_grpo"),
        ("gdpo", {"equal_peers": "raw"}, "'equal_peers' has no effect without leave_one_out"),
        ("gdpo", {"equal_peers": "raw", "leave_one_out": True, "scale_rewards": "none"}, "'equal_peers' has no effect"),
        ("gdpo", {"scale_rewards": "goup"}, "scale_rewards='goup'; did you mean 'group'"),
    ],
)
def test_a_scale_that_an_estimator_does_not_take_is_refused(estimator, options, said):
    with pytest.raises(ValueError, match=said):
        check_selection(estimator, None, None, 1e-6, options, {"a": 1.0})
    with pytest.raises(ValueError, match=said):
        compute_advantages({"a": [0.0, 1.0]}, [0, 0], estimator=estimator, **options)


@pytest.mark.parametrize("estimator", ["mo_grpo", "grpo"])
@pytest.mark.parametrize("scale, divisor", [("none", 1.0), ("batch", np.std([0.0, 4.0, 1.0, 3.0, 3.0, 6.0], ddof=1))])
def test_leave_one_out_is_divided_according_to_scale_rewards(estimator, scale, divisor):
    """The mean is that of the others; only the division by their deviation is replaced."""
    rewards = np.array([0.0, 4.0, 1.0, 3.0, 3.0, 6.0])
    options = {"leave_one_out": True, "scale_rewards": scale, "epsilon": 0.0}
    got = compute_advantages({"r": rewards}, [0, 0, 0, 1, 1, 1], estimator=estimator, **options).values.numpy()
    others = [(np.delete(rewards[part], i)).mean() for part in (slice(0, 3), slice(3, 6)) for i in range(3)]
    np.testing.assert_allclose(got, (rewards - others) / divisor)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_registry_entry_declares_the_properties_of_its_estimator(name):
    entry = ESTIMATORS[name]
    rewards = {"a": [0.1, 0.5, 0.9, 0.3], "b": [0.2, 0.6, 0.4, 0.8]}

    def terms(**settings):
        return entry.function(build_table(rewards, [0, 0, 0, 0]), Settings(**settings))

    def values(**settings) -> np.ndarray:
        return terms(**settings).values

    assert terms().holds_kl is entry.sums_rewards
    assert np.allclose(values(), values(epsilon=0.5)) is (entry.scale == "none")
    assert np.allclose(values(), values(scale_rewards="none")) is (entry.scale != "settings")
    parameters = list(inspect.signature(entry.function).parameters)
    assert tuple(parameters[2:]) == entry.options
    assert entry.drops_rows or terms().dropped is None
