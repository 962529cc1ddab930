"""What an update may depend on (the batch) and what not (packing, layout, a poisoned batch before it)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import rank_cases
import tiny_models
from hf_reference import relative_error

from gdpo_nemo.algorithms import OffPolicySettings
from gdpo_nemo.algorithms.policy_loss import LossSettings
from gdpo_nemo.data.packing import with_gradient

pytestmark = pytest.mark.slow

LONGEST = max(len(s) for s in tiny_models.make_batch())


@pytest.mark.parametrize("layout", ["TP1", "DP2", "CP2", "PP2"])
def test_gradients_and_logprobs_do_not_depend_on_the_token_budget(on_ranks, model_folder, layout):
    batch = tiny_models.make_batch()
    folder = model_folder("qwen3")
    one_by_one, packed, whole = (
        on_ranks(layout, rank_cases.updates, folder, batch, 1, budget) for budget in (LONGEST, 80, 4000)
    )
    expected = rank_cases.by_sequence([r.before for r in one_by_one], batch)
    for run in (packed, whole):
        assert relative_error(run[0].steps, one_by_one[0].steps) < 2e-6
        for got, value in zip(rank_cases.by_sequence([r.before for r in run], batch), expected):
            np.testing.assert_allclose(got, value, atol=2e-6, rtol=0)


@pytest.mark.parametrize("layout", ["DP2", "DP2+DIST", "PP2", "PP2xVPP2", "CP2", "TP2+SP"])
def test_ranks_without_a_sequence_take_part(on_ranks, model_folder, layout):
    batch = tiny_models.make_batch(1)
    expected = on_ranks("TP1", rank_cases.updates, model_folder("qwen3"), batch)[0]
    for result in on_ranks(layout, rank_cases.updates, model_folder("qwen3"), batch):
        assert relative_error(result.steps, expected.steps) < 1e-5


SETTINGS = {
    "clipped with dual clip": LossSettings(ratio_clip_c=3.0),
    "gspo": LossSettings(type="gspo"),
    "cispo": LossSettings(type="cispo"),
    "target_po": LossSettings(type="target_po"),
    "a loss by its place": LossSettings(type="examples/vespo.py:vespo", options={"k_neg": 1.5}),
    "kl and entropy": LossSettings(reference_policy_kl_penalty=0.1, entropy_bonus=0.01),
    "sequence importance": LossSettings(off_policy=OffPolicySettings(mode="truncate", level="sequence")),
    "sequence mask": LossSettings(off_policy=OffPolicySettings(sequence_mask_threshold=0.01)),
}


def off_policy_batch():
    """Nine sequences with log-probs of an older policy and of a reference, some sequences left out of the loss."""
    rng = np.random.default_rng(3)
    batch = tiny_models.make_batch(9)
    for s in batch:
        s.old_logprobs = (s.sampler_logprobs + rng.normal(0, 0.1, len(s.completion_ids))).astype(np.float32)
        s.reference_logprobs = (s.sampler_logprobs + rng.normal(0, 0.1, len(s.completion_ids))).astype(np.float32)
    batch[2].weight = batch[5].weight = 0.0
    return batch


@pytest.fixture(scope="module")
def losses(on_ranks, model_folder):
    """``losses(layout)``: by name, what an update with each loss measures."""
    arguments = (rank_cases.first_updates, model_folder("qwen2"), off_policy_batch(), SETTINGS)
    return cache(lambda layout: on_ranks(layout, *arguments)[0])


@pytest.mark.parametrize("layout", ["DP2", "PP2", "CP2"])
def test_every_loss_is_the_same_in_every_layout(losses, layout):
    for name, steps in losses(layout).items():
        assert relative_error(steps, losses("TP1")[name]) < 1e-5, name


@pytest.mark.parametrize("layout", ["TP1", "DP2", "PP2", "PP2xVPP2"])
def test_sequences_of_advantage_0_may_be_left_out_of_an_update(on_ranks, model_folder, layout):
    """Of nine four have no advantage and a fifth no weight; what is left takes fewer micro-batches."""
    batch = [replace(s, advantage=0.0) if i % 2 else s for i, s in enumerate(off_policy_batch())]
    live = with_gradient(batch)
    assert len(live) == 4
    whole, part = (on_ranks(layout, rank_cases.updates, model_folder("qwen2"), b, 1) for b in (batch, live))
    assert relative_error(part[0].steps[:, :2], whole[0].steps[:, :2]) < 1e-5
    for name, expected in whole[0].weights.items():
        np.testing.assert_allclose(part[0].weights[name], expected, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", ["TP2+SP", "DP2+OVERLAP", "PP2"])
def test_reference_logprobs_are_those_of_the_start_and_do_not_change_the_weights(on_ranks, model_folder, layout):
    batch = tiny_models.make_batch()
    results = on_ranks(layout, rank_cases.reference_logprobs, model_folder("qwen2-tied"), batch)
    start, moved, reference = (rank_cases.by_sequence([r[i] for r in results], batch) for i in range(3))
    for a, b, c in zip(start, moved, reference):
        np.testing.assert_array_equal(a, c)
        assert not np.array_equal(a, b)
    for *_, before, after in results:
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize(
    "layout, value", [("TP1", "inf"), ("DP2+DIST", "nan"), ("DP2+DIST", "inf"), ("PP2", "nan"), ("CP2", "nan")]
)
def test_a_non_finite_batch_changes_nothing_on_any_rank(on_ranks, model_folder, layout, value):
    batch = tiny_models.make_batch()
    poisoned = [replace(batch[0], advantage=float(value)), *batch[1:]]
    folder = model_folder("qwen2")
    expected = on_ranks(layout, rank_cases.updates, folder, batch, 2)[0].steps
    for skipped, before, after, steps in on_ranks(layout, rank_cases.poisoned_update, folder, batch, poisoned):
        assert skipped
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
        np.testing.assert_array_equal(steps, expected)


@pytest.mark.parametrize("layout", ["TP1", "DP2+DIST"])
def test_freed_gradient_buffers_change_no_update(on_ranks, model_folder, layout):
    batch = tiny_models.make_batch()
    expected = on_ranks(layout, rank_cases.updates, model_folder("qwen2"), batch, 2)[0].steps
    for steps, left in on_ranks(layout, rank_cases.gradients_released, model_folder("qwen2"), batch):
        np.testing.assert_array_equal(steps, expected)
        assert left == 0
