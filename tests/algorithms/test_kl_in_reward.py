"""KL to the reference in the reward: A <- A - beta (KL - mean of its group's KL), never normalised itself."""

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from gdpo_nemo.algorithms import ESTIMATORS, Terms, compute_advantages

NORMALISING = ("gdpo", "mo_grpo", "dvao", "gd2po", "sa_mrpo", "dara")
SUMMING = ("grpo", "dr_grpo", "rloo", "corr_grpo")
few = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards [rows, 2] of which some groups are dead, shuffled group ids, and KL per row."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(6), rng.integers(2, 6, 6))
    rewards = rng.integers(0, 2, (len(ids), 2)).astype(float)
    rewards[ids < 2] = 0.5
    order = rng.permutation(len(ids))
    return rewards[order], ids[order], rng.normal(2.0, 3.0, len(ids))


def values(rewards, ids, **options) -> np.ndarray:
    return compute_advantages(rewards, ids, **options).values.numpy()


def centred(kl: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """KL less the mean of its group, by a loop; NaN counts nowhere and stays 0."""
    result = np.zeros(len(kl))
    for group in np.unique(ids):
        rows = np.flatnonzero((ids == group) & ~np.isnan(kl))
        if len(rows) > 1:
            result[rows] = kl[rows] - kl[rows].mean()
    return result


@few
@given(seeds, st.sampled_from(NORMALISING), st.sampled_from([0.001, 1.0, 100.0]))
def test_kl_is_added_to_normalised_terms_with_its_coefficient_and_its_sign(seed, estimator, beta):
    rewards, ids, kl = batch(seed)
    plain = values(rewards, ids, estimator=estimator, batch_norm=False)
    got = values(rewards, ids, estimator=estimator, batch_norm=False, kl=kl, kl_coefficient=beta)
    np.testing.assert_allclose(got, plain - beta * centred(kl, ids), rtol=0, atol=1e-9 * max(1.0, beta))


@few
@given(seeds, st.sampled_from(SUMMING), st.sampled_from([0.001, 1.0, 100.0]))
def test_estimators_of_the_sum_have_the_kl_in_the_sum(seed, estimator, beta):
    """The published form: r - beta KL is the reward of the estimator."""
    rewards, ids, kl = batch(seed)
    assume(estimator != "corr_grpo")  # whose divisor is made of the components' correlations
    got = values(rewards, ids, estimator=estimator, kl=kl, kl_coefficient=beta)
    summed = values(rewards.sum(1, keepdims=True) - beta * kl[:, None], ids, estimator=estimator)
    np.testing.assert_allclose(got, summed, rtol=0, atol=1e-6)


@few
@given(seeds, st.sampled_from(["live", "scored"]))
def test_under_the_batch_norm_the_kl_counts_beta_times_beside_the_rewards(seed, rows):
    rewards, ids, kl = batch(seed)
    assume(np.abs(values(rewards, ids)).max() > 0)
    for beta in (0.001, 1.0, 100.0):
        before = values(rewards, ids, batch_norm=False)
        after = before - beta * centred(kl, ids)
        has_signal = compute_advantages(rewards, ids).has_signal.numpy() if rows == "live" else np.ones(len(ids), bool)
        expected = (after - after[has_signal].mean() * has_signal) / (after[has_signal].std(ddof=1) + 1e-6)
        got = values(rewards, ids, kl=kl, kl_coefficient=beta, batch_rows=rows)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9 * max(1.0, beta))
        if has_signal.sum() > 4:  # what the KL counts beside the rewards, from the advantages alone
            parts = np.stack([before[has_signal], centred(kl, ids)[has_signal], np.ones(has_signal.sum())], axis=1)
            (reward, divergence, _), *_ = np.linalg.lstsq(parts, got[has_signal])
            assert divergence / reward == pytest.approx(-beta, rel=1e-3)


@few
@given(seeds, st.sampled_from(["gdpo", "gd2po", "dara"]))
def test_noise_of_the_kl_stays_noise(seed, estimator):
    """Before the first update the KL is the rounding of two engines; a z-score would make a third of the signal of
    it."""
    rewards, ids, kl = batch(seed)
    plain = values(rewards, ids, estimator=estimator)
    assume(np.abs(plain).max() > 0)
    noisy = values(rewards, ids, estimator=estimator, kl=3e-6 * kl / np.abs(kl).max(), kl_coefficient=1.0)
    np.testing.assert_allclose(noisy, plain, rtol=0, atol=1e-4)


def test_a_batch_without_signal_stays_0_however_much_the_kl_varies():
    kl = np.array([0.0, 1.0, 2.0, 5.0])
    assert (values(np.ones((4, 2)), [0, 0, 1, 1], kl=kl, kl_coefficient=1.0) == 0).all()
    opposed = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert (values(opposed, [0, 0, 1, 1], kl=1e-5 * kl, kl_coefficient=1.0) == 0).all()


@few
@given(seeds, st.sampled_from(NORMALISING + ("grpo", "rloo")))
def test_masked_and_missing_members_leave_the_kls_group_mean(seed, estimator):
    rewards, ids, kl = batch(seed)
    rng = np.random.default_rng(seed)
    valid = rng.random(len(ids)) < 0.8
    known = rng.random(len(ids)) < 0.8
    assume(valid.sum() > 2)
    holed = np.where(known, kl, np.nan)
    wild = np.where(valid, holed, 1e9)
    options = dict(estimator=estimator, batch_norm=False, valid=valid)
    got = values(rewards, ids, kl=wild, kl_coefficient=0.5, **options)
    assert (got[~valid] == 0).all()
    if estimator in NORMALISING:
        off = 0.5 * centred(np.where(valid, holed, np.nan), ids)
        np.testing.assert_allclose(got, values(rewards, ids, **options) - off, rtol=0, atol=1e-9)
    else:
        alone = values(
            rewards[valid], ids[valid], estimator=estimator, batch_norm=False, kl=holed[valid], kl_coefficient=0.5
        )
        np.testing.assert_allclose(got[valid], alone, rtol=0, atol=1e-9)


@few
@given(seeds, st.sampled_from(NORMALISING + SUMMING), st.floats(-1e3, 1e3))
def test_an_offset_of_the_kl_changes_nothing(seed, estimator, offset):
    rewards, ids, kl = batch(seed)
    got = values(rewards, ids, estimator=estimator, kl=kl + offset, kl_coefficient=0.1)
    np.testing.assert_allclose(
        got, values(rewards, ids, estimator=estimator, kl=kl, kl_coefficient=0.1), rtol=0, atol=1e-7
    )


def test_terms_of_a_custom_estimator_also_get_the_kl():
    def mine(table, settings):
        return Terms(np.array([[1.0, -1.0, 0.0, 0.0]]), np.array([True, True, False, False]))

    got = values(
        {"a": [1, 0, 0, 0]}, [0, 0, 1, 1], estimator=mine, batch_norm=False, kl=[2, 0, 4, 0], kl_coefficient=0.5
    )
    assert got.tolist() == [0.5, -0.5, -1, 1]


def test_a_lone_component_that_a_preset_hands_to_grpo_gets_the_kl_once():
    rewards = [[0.0], [1.0], [1.0], [1.0]]
    ids = [0, 0, 0, 0]
    kl = [1.0, 0.0, 2.0, 3.0]
    one = values(rewards, ids, preset="trl_fork", batch_norm=False, kl=kl, kl_coefficient=0.1)
    np.testing.assert_allclose(
        one, values(rewards, ids, estimator="grpo", epsilon=1e-4, kl=kl, kl_coefficient=0.1), atol=1e-12
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kl": [1.0, 2.0]}, "kl_coefficient is missing"),
        ({"kl_coefficient": 0.1}, "kl is missing"),
        ({"kl": [1.0, 2.0], "kl_coefficient": 0.0}, "kl_coefficient must be positive"),
        ({"kl": [1.0, 2.0], "kl_coefficient": float("inf")}, "kl_coefficient must be positive and finite"),
        ({"kl": [1.0, 2.0, 3.0], "kl_coefficient": 0.1}, r"one entry per row \(2\)"),
        ({"kl": [1.0, float("inf")], "kl_coefficient": 0.1}, "1 values of kl are infinite"),
        ({"kl": ["x", 1.0], "kl_coefficient": 0.1}, "kl must contain numbers"),
    ],
)
def test_bad_kl_is_refused_with_a_reason(change, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages({"a": [1, 0]}, [0, 0], **change)


@few
@given(seeds, st.sampled_from(sorted(ESTIMATORS)), st.booleans(), st.booleans())
def test_contributions_of_the_components_and_the_kl_sum_to_the_advantages(seed, estimator, norm, tokens):
    rewards, ids, kl = batch(seed)
    rewards[::5, 1] = np.nan
    options = dict(estimator=estimator, batch_norm=norm, lengths=1 + np.arange(len(ids)))
    options |= dict(batch_unit="token", batch_rows="scored") if tokens and norm else {}
    plain = compute_advantages(rewards, ids, **options)
    np.testing.assert_allclose(plain.contributions.sum(axis=1), plain.values.numpy(), rtol=0, atol=1e-9)
    with_kl = compute_advantages(rewards, ids, kl=kl, kl_coefficient=0.1, **options)
    left = with_kl.values.numpy() - with_kl.contributions.sum(axis=1)
    if estimator in NORMALISING and not norm:
        np.testing.assert_allclose(left, -0.1 * centred(kl, ids), rtol=0, atol=1e-9)
