"""What the clips took, as the metrics say it, against a count of the tokens by the definition of each clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from gdpo_nemo.algorithms import LossSettings, TokenFields
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.rollouts.metrics import update_metrics

LOW, HIGH, DUAL = 0.2, 0.5, 3.0
# No ratio is within float32's rounding of a bound: 0.8, 1.5 and 3.
ratios = st.sampled_from([0.05, 0.5, 0.75, 0.9, 1.0, 1.25, 1.75, 2.5, 4.0, 9.0])
tokens = st.lists(st.tuples(ratios, st.sampled_from([-2.0, -0.5, 0.5, 1.0])), min_size=1, max_size=12)


def clip_row(kind: str, drawn: list[tuple[float, float]], dual: float | None) -> dict[str, float]:
    """The step's row of one update of these (ratio, advantage)."""
    ratio, advantages = (torch.tensor(values, dtype=torch.float32) for values in zip(*drawn))
    old = torch.full((len(drawn),), -3.0)
    fields = TokenFields(advantages, torch.ones(len(drawn)), torch.arange(len(drawn)), len(drawn), old_logprobs=old)
    loss = LossSettings(type=kind, ratio_clip_min=LOW, ratio_clip_max=HIGH, ratio_clip_c=dual)
    value, found = policy_loss(old + ratio.log(), None, fields, loss)
    sums = {name: float(total) for name, total in found.sums.items()}
    maxima = {name: float(largest) for name, largest in found.maxima.items()}
    return update_metrics([UpdateResult(float(value), 1.0, 1e-3, False, sums, maxima)], on_policy=True)


@pytest.mark.parametrize("kind", ["clipped_pg", "gspo", "clip_cov"])
@settings(max_examples=60)
@given(tokens, st.sampled_from([None, DUAL]))
@example([(4.0, -0.5), (0.5, 0.5), (1.75, -0.5), (1.75, 0.5), (0.5, -0.5)], DUAL)
def test_clip_metrics_count_the_tokens_that_each_clip_took(kind, drawn, dual):
    """Each token is a sequence, so gspo's ratio is the token's."""
    ratio, advantage = np.array(drawn).T
    row = clip_row(kind, drawn, dual)
    low = (advantage < 0) & (ratio < 1 - LOW)
    high = (advantage > 0) & (ratio > 1 + HIGH)
    beyond = (advantage < 0) & (ratio > (np.inf if dual is None else dual))
    assert row["policy/clip_low"] == pytest.approx(low.mean(), abs=1e-12)
    assert row["policy/clip_high"] == pytest.approx(high.mean(), abs=1e-12)
    assert row["policy/clip_fraction"] == pytest.approx((low | high | beyond).mean(), abs=1e-12)
    assert row.get("policy/clip_dual") == (None if dual is None else pytest.approx(beyond.mean(), abs=1e-12))


@settings(max_examples=40)
@given(tokens)
def test_clip_metrics_of_cispo_count_the_weights_that_each_bound_changed(drawn):
    ratio = np.array(drawn)[:, 0]
    row = clip_row("cispo", drawn, None)
    assert row["policy/clip_low"] == pytest.approx((ratio < 1 - LOW).mean(), abs=1e-12)
    assert row["policy/clip_high"] == pytest.approx((ratio > 1 + HIGH).mean(), abs=1e-12)


@settings(max_examples=60)
@given(tokens)
@example([(1.0, 1.0), (1.25, -0.5)])
def test_a_clip_takes_exactly_the_gradient_of_the_tokens_that_it_counts(drawn):
    ratio = torch.tensor([r for r, _ in drawn], dtype=torch.float32)
    old = torch.full((len(drawn),), -3.0)
    logprobs = (old + ratio.log()).requires_grad_()
    advantages = torch.tensor([a for _, a in drawn], dtype=torch.float32)
    fields = TokenFields(advantages, torch.ones(len(drawn)), torch.arange(len(drawn)), len(drawn), old_logprobs=old)
    loss = LossSettings(ratio_clip_min=LOW, ratio_clip_max=HIGH, ratio_clip_c=DUAL)
    value, _ = policy_loss(logprobs, None, fields, loss)
    gradient = torch.autograd.grad(value, logprobs)[0]
    row = clip_row("clipped_pg", drawn, DUAL)
    assert row["policy/clip_fraction"] == pytest.approx(float((gradient == 0).double().mean()), abs=1e-12)
    parts = [row[f"policy/clip_{part}"] for part in ("low", "high", "dual")]
    assert sum(parts) == pytest.approx(row["policy/clip_fraction"], abs=1e-12)
