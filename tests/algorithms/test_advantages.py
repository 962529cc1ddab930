"""Properties that every batch of rewards must satisfy, and the refusals."""

import inspect
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings, strategies as st

from gdpo_nemo.algorithms import ESTIMATORS, advantages as module, compute_advantages

WEIGHTS = np.array([1.0, 0.5, 2.0])
PLAIN = sorted(set(ESTIMATORS) - {"sa_mrpo"})


def batch(seed: int, groups: int = 6, missing: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Rewards [sequences, 3] and shuffled group ids; group sizes 1 to 9, a binary, a graded and a real component."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(groups) * 7 - 3, rng.integers(1, 10, groups)))
    size = len(ids)
    rewards = np.stack([rng.integers(0, 2, size), rng.integers(-3, 4, size) / 3, rng.random(size)], axis=1)
    rewards[rng.random(rewards.shape) < missing] = np.nan
    return rewards, ids


def values(rewards, ids, **options):
    return compute_advantages(rewards, ids, **{"weights": WEIGHTS, **options}).values.numpy()


seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:invalid value")  # groups of one sample
@few
@given(seeds)
def test_default_path_in_the_docstring_equals_the_computation(seed):
    code = textwrap.dedent(inspect.getdoc(module).partition("::\n\n")[2].partition("\n\nThe rest")[0])
    rewards, ids = batch(seed)
    rewards[:, 1:] = np.round(rewards[:, 1:])  # some samples equal their group's mean
    names = {"np": np, "rewards": rewards, "group_ids": ids, "weights": WEIGHTS}
    exec(code, names)
    np.testing.assert_allclose(names["advantages"], values(rewards, ids), rtol=1e-9, atol=1e-9)


@few
@given(seeds, st.sampled_from(PLAIN))
@example(0, "gd2po")  # has a sample that is exactly average, whose rounding noise must not count as a sign
def test_advantages_follow_their_rows_through_any_permutation(seed, estimator):
    rewards, ids = batch(seed, missing=0.1)
    order = np.random.default_rng(seed).permutation(len(ids))
    moved = values(rewards[order], ids[order], estimator=estimator)
    np.testing.assert_allclose(moved, values(rewards, ids, estimator=estimator)[order], rtol=0, atol=1e-10)


@few
@given(seeds)
def test_equal_input_gives_equal_bits(seed):
    rewards, ids = batch(seed, missing=0.2)
    assert (values(rewards, ids) == values(rewards.copy(), ids.copy())).all()


@few
@given(seeds)
def test_group_labels_have_no_meaning(seed):
    rewards, ids = batch(seed)
    relabelled = 10**12 - ids * 13
    np.testing.assert_allclose(values(rewards, relabelled), values(rewards, ids), rtol=0, atol=1e-10)


@few
@given(seeds, st.floats(0.1, 100), st.floats(-1e6, 1e6))
def test_a_positive_affine_change_of_one_component_changes_nothing(seed, scale, offset):
    rewards, ids = batch(seed)
    changed = rewards.copy()
    changed[:, 0] = scale * changed[:, 0] + offset
    before = values(rewards, ids, epsilon=1e-12)
    after = values(changed, ids, epsilon=1e-12)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


@few
@given(seeds)
def test_rewards_0_1_and_minus3_3_give_the_same_advantages_up_to_epsilon(seed):
    rewards, ids = batch(seed)
    scaled = rewards.copy()
    scaled[:, 0] = 6 * scaled[:, 0] - 3
    np.testing.assert_allclose(values(scaled, ids), values(rewards, ids), rtol=0, atol=2e-5)


def test_an_offset_of_a_million_costs_no_digits():
    rewards, ids = batch(5)
    rewards = np.round(rewards * 64) / 64  # exactly representable beside the offset
    np.testing.assert_allclose(values(rewards + 1e6, ids), values(rewards, ids), rtol=0, atol=1e-12)


@few
@given(seeds, st.floats(0.01, 100))
def test_only_ratios_of_weights_matter_under_batch_norm(seed, factor):
    rewards, ids = batch(seed)
    scaled = values(rewards, ids, weights=WEIGHTS * factor, batch_epsilon=0.0)
    np.testing.assert_allclose(scaled, values(rewards, ids, batch_epsilon=0.0), rtol=0, atol=1e-9)


@few
@given(seeds)
def test_a_missing_reward_leaves_the_other_components_terms_unchanged(seed):
    rewards, ids = batch(seed)
    holed = rewards.copy()
    holed[np.random.default_rng(seed).random(len(ids)) < 0.3, 1] = np.nan
    assume(not np.isnan(holed).all())
    before = compute_advantages(rewards, ids, weights=WEIGHTS).components
    after = compute_advantages(holed, ids, weights=WEIGHTS).components
    assert (before[:, [0, 2]] == after[:, [0, 2]]).all()
    assert (after[torch.from_numpy(np.isnan(holed[:, 1])), 1] == 0).all()
    assert torch.isfinite(after).all()


@few
@given(seeds, st.floats(-1e3, 1e3), st.integers(1, 20), st.sampled_from(["gdpo", "mo_grpo", "dara", "dvao", "gd2po"]))
def test_a_constant_component_contributes_exactly_zero(seed, constant, size, estimator):
    rng = np.random.default_rng(seed)
    noisy = np.full(4 * size, np.float64(np.float32(constant)))
    noisy[rng.random(4 * size) < 0.5] *= 1 + 1e-15  # the last bits differ, as after a sum in another order
    rewards = np.stack([noisy, np.tile([0.1, 0.2, 0.7, 0.7], size)], axis=1)
    ids = np.repeat(np.arange(size), 4)
    result = compute_advantages(rewards, ids, estimator=estimator)
    assert (result.components[:, 0] == 0).all()
    alone = compute_advantages(rewards[:, :1], ids, estimator=estimator)
    assert (alone.values == 0).all()


@pytest.mark.parametrize("constant", [1 / 3, 0.7, 0.1, 0.3])
def test_batch_without_signal_stays_zero_unlike_in_one_pass_float32(constant):
    """E[x^2] - E[x]^2 in float32, then a batch norm without epsilon, makes +-1 of nothing in another trainer."""
    rewards = np.full((64, 2), np.float32(constant))
    rewards[32:] = np.float32(1 / 3)
    for estimator in PLAIN:
        assert (compute_advantages(rewards, np.repeat(np.arange(4), 16), estimator=estimator).values == 0).all()


@few
@given(seeds, st.sampled_from(PLAIN))
def test_masked_rows_get_zero_and_change_no_other_row(seed, estimator):
    rewards, ids = batch(seed)
    valid = np.random.default_rng(seed).random(len(ids)) < 0.7
    assume(valid.any())
    masked = rewards.copy()
    masked[~valid] = 1e9
    result = values(masked, ids, valid=valid, estimator=estimator)
    assert (result[~valid] == 0).all()
    np.testing.assert_allclose(
        result[valid], values(rewards[valid], ids[valid], estimator=estimator), rtol=0, atol=1e-12
    )


@few
@given(seeds)
def test_duplicated_prompts_are_separate_groups_by_id(seed):
    rewards, ids = batch(seed)
    doubled = values(np.concatenate([rewards, rewards]), np.concatenate([ids, ids + 1000]), batch_norm=False)
    np.testing.assert_array_equal(doubled[: len(ids)], values(rewards, ids, batch_norm=False))


@few
@given(seeds)
def test_every_group_of_complete_rewards_sums_to_zero(seed):
    """Catches groups formed over the wrong axis: with those this sum is not 0, though a run looks healthy."""
    rewards, ids = batch(seed)
    result = values(rewards, ids, batch_norm=False)
    for group in np.unique(ids):
        assert abs(result[ids == group].sum()) < 1e-10


def test_groups_of_the_wrong_axis_give_other_advantages():
    rewards = np.random.default_rng(3).integers(0, 2, (4, 4, 2)).reshape(16, 2).astype(float)
    by_prompt = np.repeat(np.arange(4), 4)
    by_sample = np.tile(np.arange(4), 4)
    right = compute_advantages(rewards, by_prompt, batch_norm=False).values.numpy()
    wrong = compute_advantages(rewards, by_sample, batch_norm=False).values.numpy()
    assert np.abs(right.reshape(4, 4).sum(axis=1)).max() < 1e-12
    assert np.abs(wrong.reshape(4, 4).sum(axis=1)).max() > 0.5


@few
@given(seeds)
def test_values_are_the_batch_normed_sum_of_the_components(seed):
    rewards, ids = batch(seed, missing=0.1)
    result = compute_advantages(rewards, ids, weights=WEIGHTS)
    total = result.components.sum(1)
    has_signal = result.has_signal
    assume(has_signal.sum() > 1)
    expected = (total[has_signal] - total[has_signal].mean()) / (total[has_signal].std() + 1e-6)
    torch.testing.assert_close(result.values[has_signal], expected, rtol=0, atol=1e-9)
    assert (result.values[~has_signal] == 0).all()


def test_batch_statistics_count_only_rows_with_signal():
    """Prompts with their own components: a row whose only reward is constant in its group changes nobody."""
    rewards = {"a": [1, 0, 1, 0, None, None, None, None], "b": [None] * 4 + [1, 1, 1, 1]}
    result = compute_advantages(rewards, [0] * 4 + [1] * 4)
    torch.testing.assert_close(result.values[:4].std(), torch.tensor(1.0).double(), rtol=0, atol=1e-5)
    assert (result.values[4:] == 0).all()
    assert result.has_signal.tolist() == [True] * 4 + [False] * 4


def test_components_of_zero_weight_do_not_train():
    rewards, ids = batch(2)
    with_zero = compute_advantages(rewards, ids, weights=[1, 0, 2])
    without = compute_advantages(rewards[:, [0, 2]], ids, weights=[1, 2])
    torch.testing.assert_close(with_zero.values, without.values, rtol=0, atol=1e-14)
    assert (with_zero.components[:, 1] == 0).all()


def test_every_form_of_input_means_the_same():
    rewards, ids = batch(8, missing=0.2)
    names = {"a": 0, "b": 1, "c": 2}
    columns = {name: [None if np.isnan(x) else x for x in rewards[:, k]] for name, k in names.items()}
    weights = {"c": 2.0, "a": 1.0, "b": 0.5}
    expected = compute_advantages(rewards, ids, weights=WEIGHTS).values
    for form, group_ids in ((columns, ids.tolist()), (torch.from_numpy(rewards), torch.from_numpy(ids))):
        got = compute_advantages(form, group_ids, weights=weights if form is columns else WEIGHTS.tolist())
        assert (got.values == expected).all() and got.values.dtype == torch.float64
    assert compute_advantages(columns, ids, weights=weights).names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"estimator": "gdop"}, "unknown estimator 'gdop'; did you mean 'gdpo'"),
        ({"preset": "trll"}, "unknown preset 'trll'; did you mean 'trl'"),
        ({"preset": "trl", "estimator": "grpo"}, "conflicts with estimator 'grpo'"),
        ({"gama": 1.0, "estimator": "sa_mrpo"}, "unknown option 'gama' of sa_mrpo; did you mean 'gamma'"),
        ({"gamma": 1.0}, "unknown option 'gamma' of gdpo"),
        ({"weights": {"correct": 1, "shrt": 1}}, "unknown component 'shrt'; did you mean 'short'"),
        ({"weights": {"correct": 1}}, "component 'short' has no weight"),
        ({"weights": [1, 2, 3]}, r"3 weights for 2 components \(correct, short\)"),
        ({"weights": [0, 0]}, r"every weight is 0 \(correct, short\)"),
        ({"weights": [1, float("nan")]}, "weight of 'short' is not finite"),
        ({"rewards": {"correct": [None] * 4, "short": [None] * 4}}, "none of the 4 valid rows"),
        (
            {"rewards": {"correct": [1, 0, float("inf"), 0], "short": [1, 0, 0, -float("inf")]}},
            "2 infinite rewards: row 2 of 'correct', row 3 of 'short'",
        ),
        ({"rewards": {"correct": [1, 0], "short": [1, 0, 1, 0]}}, "one value per sequence"),
        ({"rewards": {"correct": [1, 0, 1, "x"], "short": [1, 0, 1, 0]}}, "must contain numbers or None"),
        ({"rewards": {}}, "at least one component"),
        ({"group_ids": [0, 0, 1]}, "one entry per row"),
        ({"group_ids": [0.0, 0.0, 1.0, 1.0]}, "must be integers"),
        ({"valid": [1, 1, 0, 1]}, "boolean per row"),
        ({"preset": "verl"}, "requires `lengths`"),
        ({"lengths": [1, 2, 3, -1]}, "non-negative number of tokens"),
        ({"epsilon": -1.0}, "epsilon must be finite"),
        ({"batch_rows": "all"}, "batch_rows='all'"),
        ({"ddof": 2}, "ddof must be 0 or 1"),
    ],
)
def test_bad_input_is_refused_with_its_name(change, message):
    good = {"rewards": {"correct": [1, 0, 1, 0], "short": [1, 1, 1, 0]}, "group_ids": [0, 0, 1, 1]}
    compute_advantages(**good)
    with pytest.raises(ValueError, match=message):
        compute_advantages(**{**good, **change})


def test_a_batch_that_failed_entirely_gets_zeros_instead_of_an_error():
    result = compute_advantages(np.full((4, 2), np.nan), [0, 0, 1, 1], valid=np.zeros(4, dtype=bool))
    assert (result.values == 0).all()


def test_hash_like_group_ids_keep_their_groups_together():
    """The difference of two int64 ids can overflow: M - (-M) is then 1 or negative, and a group falls apart."""
    m = 2**64 // 3
    rewards = [1.0, 0.0, 2.0, 0.5]
    for hashes in ([0, m, -m, 0], [m, -m, -m, m], [2**63 - 1, -(2**63), 2**63 - 1, -(2**63)]):
        small = np.unique(hashes, return_inverse=True)[1]
        got, expected = (
            values([[r] for r in rewards], ids, weights=[1]) for ids in (np.array(hashes, np.int64), small)
        )
        np.testing.assert_array_equal(got, expected)
    assert np.abs(got).max() > 0.5


@few
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5, unique=True), seeds)
def test_advantages_do_not_depend_on_the_values_of_group_ids(names, seed):
    rng = np.random.default_rng(seed)
    place = rng.integers(0, len(names), 12)
    rewards = rng.integers(0, 3, (12, 2)).astype(float)
    ids = np.array(names, np.int64)[place]
    rank = np.argsort(np.argsort(names))[place]
    np.testing.assert_allclose(
        values(rewards, ids, weights=[1, 2]), values(rewards, rank, weights=[1, 2]), rtol=0, atol=1e-12
    )
