"""Clip-Cov and KL-Cov choose tokens, and give the gradient, as in their paper (arXiv 2505.22617)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms import LossSettings, TokenFields
from gdpo_nemo.algorithms.entropy import clip_cov, covariances, kl_cov
from gdpo_nemo.algorithms.loss_selection import check_loss
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.rollouts.credit import choose_by_covariance

SEEDS = st.integers(0, 10_000)


def batch(seed, masked=True):
    """Sequences of an update, and log-probs of the weights that it starts from, which are near the old ones."""
    draw = np.random.default_rng(seed)
    made, now = [], []
    for length in draw.integers(1, 12, 6):
        old = -draw.random(length).astype(np.float32) * 4
        mask = draw.random(length) < 0.8 if masked else None
        sampler = np.zeros(length, np.float32)
        tokens = np.arange(length, dtype=np.int32)
        made.append(
            TrainSequence(tokens[:1], tokens, sampler, float(draw.normal()) * 3, 0.1, old_logprobs=old, loss_mask=mask)
        )
        now.append(
            np.where(True if mask is None else mask, old + draw.normal(0, 0.2, length), np.nan).astype(np.float32)
        )
    made[0].weight = 0.0
    return made, now


def flat(update, arrays):
    parts = [a[s.loss_mask] if s.loss_mask is not None else a for s, a in zip(update, arrays) if s.weight]
    return torch.from_numpy(np.concatenate(parts).astype(np.float64))


def published(update, now):
    """Log-probs as a leaf, old ones, advantages and covariance of the trained tokens, as the paper's listing has it."""
    logprobs = flat(update, now).requires_grad_()
    old = flat(update, [s.old_logprobs for s in update])
    credit = flat(update, [s.token_advantages() for s in update])
    with torch.no_grad():
        cov = (logprobs - logprobs.mean()) * (credit - credit.mean())
    return logprobs, old, credit, cov


def trained(update, settings, now):
    """Gradient by the log-probs of the trained tokens."""
    leaf = flat(update, now).requires_grad_()
    chosen = None if update[1].chosen is None else flat(update, [s.chosen for s in update]).bool()
    fields = TokenFields(
        flat(update, [s.token_advantages() for s in update]), torch.ones(len(leaf)), torch.zeros(len(leaf)).long(), 1,
        old_logprobs=flat(update, [s.old_logprobs for s in update]), chosen=chosen,
    )  # fmt: skip
    loss, _ = policy_loss(leaf, None, fields, settings)
    loss.backward()
    return loss.detach(), leaf.grad


@given(seed=SEEDS, ratio=st.floats(0.01, 1.0), coefficient=st.floats(0.0, 3.0))
def test_kl_cov_is_the_papers_loss(seed, ratio, coefficient):
    update, now = batch(seed)
    settings = LossSettings(type="kl_cov", kl_cov_ratio=ratio, kl_cov_coef=coefficient)
    logprobs, old, credit, cov = published(update, now)
    each = -credit * (logprobs - old).exp()
    largest = torch.topk(cov, max(1, int(len(cov) * ratio))).indices if len(cov) else []
    penalty = torch.zeros_like(each)
    penalty[largest] = 1.0
    (each + coefficient * penalty * (logprobs - old).abs()).sum().backward()
    share = choose_by_covariance(update, now, settings, (0, 0, 0))
    assert share == pytest.approx(float(penalty.mean())) if len(cov) else share == 0.0
    # What reaches a rank is in float32; a token's two terms may cancel.
    torch.testing.assert_close(trained(update, settings, now)[1], logprobs.grad, rtol=1e-6, atol=1e-6)


@given(seed=SEEDS, ratio=st.floats(0.01, 1.0))
def test_clip_cov_takes_the_gradient_from_tokens_between_its_bounds_and_from_no_other(seed, ratio):
    update, now = batch(seed)
    settings = LossSettings(type="clip_cov", clip_cov_ratio=ratio, clip_cov_lb=0.1, clip_cov_ub=4.0)
    plain = trained(update, LossSettings(), now)[1]
    _, _, _, cov = published(update, now)
    share = choose_by_covariance(update, now, settings, (seed, 1, 2))
    found = trained(update, settings, now)[1]
    eligible = (cov > 0.1) & (cov < 4.0) & (plain != 0)
    count = min(max(1, int(ratio * len(cov))), int(eligible.sum()))
    changed = found != plain
    assert int(changed.sum()) == count == round(share * len(cov)) and bool((eligible | ~changed).all())
    assert (found[changed] == 0).all()


def test_clip_cov_samples_tokens_by_its_seed():
    draws = []
    for seed in ((1, 2, 3), (1, 2, 3), (1, 2, 4)):
        update, now = batch(5, masked=False)
        choose_by_covariance(
            update, now, LossSettings(type="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=-50, clip_cov_ub=50), seed
        )
        draws.append(np.concatenate([s.token_advantages() for s in update]))
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()


def test_no_token_is_chosen_if_none_is_trained():
    none = np.zeros(0)
    assert not len(covariances(none, none)) and not len(kl_cov(none, none, ratio=0.5))
    draw = np.random.default_rng(0)
    assert not clip_cov(none, none, none.astype(bool), ratio=0.5, bounds=(0, 1), draw=draw).any()


@pytest.mark.parametrize("options, key", [
    (dict(clip_cov_ratio=0.0), "clip_cov_ratio"),
    (dict(kl_cov_ratio=1.5), "kl_cov_ratio"),
    (dict(kl_cov_ratio=float("nan")), "kl_cov_ratio"),
    (dict(clip_cov_lb=5.0), "clip_cov_lb"),
    (dict(clip_cov_lb=float("nan")), "clip_cov_lb"),
    (dict(kl_cov_coef=-1.0), "kl_cov_coef"),
    (dict(kl_cov_coef=float("inf")), "kl_cov_coef"),
    (dict(entropy_target=0.0), "entropy_target"),
    (dict(entropy_coef_delta=float("nan")), "entropy_coef_delta"),
    (dict(entropy_coef_min=2.0), "entropy_coef_min"),
    (dict(use_adaptive_entropy=True, entropy_bonus=2.0), "entropy_bonus"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(options, key):
    with pytest.raises(ValueError, match=f"^{key}:"):
        check_loss(LossSettings(**options))
