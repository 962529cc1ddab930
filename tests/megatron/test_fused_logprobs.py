"""The fused kernels give the log-probs, entropies and gradients of log_softmax of whole logits, shard by shard."""

from __future__ import annotations

import fused_cases
import layouts
import numpy as np
import pytest
import tiny_models
from fused_cases import InterpretingRanks, make_case
from hf_reference import relative_error
from hypothesis import HealthCheck, given, settings, strategies as st
from rank_pool import RankPool

from gdpo_nemo.algorithms import LossSettings

pytestmark = pytest.mark.slow

SAME_SUMS = ("OPENBLAS_CORETYPE", "Prescott")
"""The interpreter multiplies tiles with NumPy. On AMD's CPUs, OpenBLAS sums a row in an order that depends on its place
in the tile, which a GPU does not; its oldest kernels do not either."""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """``interpreted(ranks, function, *arguments)`` where Triton interprets: the results by rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*SAME_SUMS)
        ranks = InterpretingRanks(tmp_path_factory.mktemp("interpreting"))
    yield ranks.run
    ranks.close()


@pytest.fixture(scope="module")
def interpreting_policy(tmp_path_factory):
    """``interpreting_policy(layout name, function, *arguments)`` on such ranks with Megatron."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv(*SAME_SUMS)
        pool = RankPool(tmp_path_factory.mktemp("interpreting_policy"), fork=False)

        def run(name: str, function, *arguments):
            layout = layouts.parse(name)
            return pool.run(function, layout.ranks, layout.config, *arguments)

        yield run
        pool.close()


def whole(results):
    """What the ranks found: log-probs and entropies, which all have, the sum of their shares, their rows together."""
    for other in results[1:]:
        for mine, its in zip(results[0][:2], other[:2]):
            np.testing.assert_array_equal(mine, its)
    hidden, weight = ([r[i] for r in results] for i in (2, 3))
    return *results[0][:2], np.sum(hidden, 0), np.concatenate(weight)


def assert_equal(found, expected, tolerance=1e-6):
    """To ``tolerance`` of the largest element, or of 1 where none is as large."""
    for ours, theirs in zip(found, expected):
        if ours is not None:
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, atol=tolerance * max(1.0, np.abs(theirs).max(initial=0.0)), rtol=0)


# (real vocabulary, padded vocabulary); of the last one two of three ranks hold padding only.
VOCABULARIES = [(101, 105), (1003, 1005), (3, 9)]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("vocabulary, padded", VOCABULARIES)
def test_values_and_gradients_equal_the_reference_to_1e6(interpreted, ranks, vocabulary, padded):
    case = make_case(vocabulary, padded, tokens=37, size=48)
    for temperature in (1.0, 0.7):
        found = whole(interpreted(ranks, fused_cases.fused, case, temperature))
        assert_equal(found, fused_cases.reference(case, temperature))
        assert not found[3][vocabulary:].any()


@given(
    vocabulary=st.integers(1, 300),
    padding=st.integers(0, 5),
    tokens=st.integers(0, 70),
    size=st.integers(1, 70),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    entropy=st.sampled_from(["none", "value", "gradient"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_shape_equals_the_reference(interpreted, vocabulary, padding, tokens, size, temperature, entropy, seed):
    case = make_case(vocabulary, vocabulary + padding, tokens, size, seed)
    (found,) = interpreted(1, fused_cases.fused, case, temperature, entropy)
    expected = fused_cases.reference(case, temperature, entropy)
    assert (found[1] is None) == (entropy == "none")
    assert_equal(found, expected, tolerance=1e-6 / min(1.0, temperature))


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_token_gives_no_value_and_no_gradient(interpreted, ranks):
    case = make_case(101, 104, tokens=0, size=32)
    for logprobs, entropies, hidden, weight in interpreted(ranks, fused_cases.fused, case):
        assert logprobs.shape == entropies.shape == (0,)
        assert hidden.shape == (0, 32)
        assert not weight.any()


def test_a_token_without_weight_leaves_no_gradient(interpreted):
    case = make_case(101, 104, tokens=37, size=32)
    case.gradients[:, ::3] = 0.0
    (found,) = interpreted(1, fused_cases.fused, case)
    assert not found[2][::3].any()
    kept = np.arange(37) % 3 != 0
    alone = case._replace(hidden=case.hidden[kept], targets=case.targets[kept], gradients=case.gradients[:, kept])
    assert_equal(found[3:], fused_cases.reference(alone)[3:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_has_the_same_bits_in_any_company(interpreted, ranks):
    case = make_case(1003, 1004, tokens=150, size=48)
    among = interpreted(ranks, fused_cases.fused, case)
    some = slice(61, 75)
    alone = case._replace(hidden=case.hidden[some], targets=case.targets[some], gradients=case.gradients[:, some])
    for a, b in zip(among, interpreted(ranks, fused_cases.fused, alone)):
        for value, own in zip(a[:2], b[:2]):
            np.testing.assert_array_equal(value[some], own)


@pytest.mark.parametrize("ranks", [1, 2])
def test_slices_of_the_backward_pass_add_up(interpreted, ranks):
    case = make_case(1003, 1004, tokens=37, size=48)
    found = whole(interpreted(ranks, fused_cases.fused, case, limit=37 * 4 * 128))
    assert_equal(found, fused_cases.reference(case))


def test_large_logits_neither_overflow_nor_lose_the_small_part(interpreted):
    case = make_case(101, 104, tokens=37, size=48)
    case.hidden[:, 0] = 60.0  # every logit shifted by the same 300: exp(300) is not a float32
    case.weight[:, 0] = 5.0
    (found,) = interpreted(1, fused_cases.fused, case)
    assert_equal(found[:2], fused_cases.reference(case), tolerance=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weight_gradient_is_added_to_main_grad_in_float32(interpreted, ranks):
    case = make_case(101, 104, tokens=37, size=48)
    found = whole(interpreted(ranks, fused_cases.fused, case, main_grad=2.0))
    expected = fused_cases.reference(case)
    assert_equal((found[3] - 2.0,), expected[3:])


@pytest.mark.parametrize("precision, rounding", [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_is_accumulated_in_float32(interpreted, precision, rounding):
    """Of the rounded inputs the values are those of float32, and the gradients those up to their own rounding."""
    import torch

    case = make_case(1003, 1004, tokens=37, size=48)
    hidden, weight = (
        torch.from_numpy(x).to(getattr(torch, precision)).float().numpy() for x in (case.hidden, case.weight)
    )
    expected = fused_cases.reference(case._replace(hidden=hidden, weight=weight))
    (found,) = interpreted(1, fused_cases.fused, case, precision=precision, main_grad=0.0)
    assert_equal(found[:2], expected, tolerance=1e-6)
    for ours, theirs in zip(found[2:], expected[2:]):
        assert np.abs(ours - theirs).max() < 2 * rounding * np.abs(theirs).max()


@pytest.mark.parametrize(
    "layout, model",
    [("TP1", "qwen2"), ("TP2+SP", "qwen2"), ("TP2+SP", "qwen2-tied"), ("DP2+OVERLAP", "qwen2"),
     ("PP2", "qwen2-tied")],
)  # fmt: skip
def test_a_policy_with_fused_kernels_trains_like_one_without(
    interpreting_policy, on_ranks, model_folder, layout, model
):
    import rank_cases

    batch = tiny_models.make_batch()
    bonus = LossSettings(entropy_bonus=0.01)
    folder = model_folder(model)
    plain = on_ranks(layout, rank_cases.updates, folder, batch, 2, 80, bonus)
    found = interpreting_policy(layout, fused_cases.updates, folder, batch, 80, bonus)
    assert sum(runs for _, runs in found) > 0
    assert relative_error(found[0][0].steps, plain[0].steps) < 1e-5
    for name, weight in plain[0].weights.items():
        np.testing.assert_allclose(found[0][0].weights[name], weight, atol=2e-5, err_msg=name)
