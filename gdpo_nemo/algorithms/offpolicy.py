"""Corrections for tokens that were sampled from other probabilities than the trainer computes.

The sampler (another engine, other kernels, perhaps older weights) drew the tokens with `sampler_logprobs`; the trainer
believes `old_logprobs`. The importance ratio exp(old - sampler) reweights the loss, or tells what to leave out. All of
it is detached, and what is left out has weight exactly 0: no bound is applied after the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdpo_nemo.algorithms.loss_settings import OffPolicySettings
from gdpo_nemo.algorithms.losses import Reduce, importance_ratio, sequence_means, sequence_sums

METRICS = {
    "policy/importance_weight": ("", "Weight of a token by loss_fn.off_policy.mode, mean over the trained tokens"),
    "policy/importance_masked": ("share", "Trained tokens that loss_fn.off_policy.mode gives the weight 0"),
}


def importance_weights(
    log_gap: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    settings: OffPolicySettings,
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight of every token from the gap between trainer and sampler.

    With rho the ratio at `level` (the token's own, the product over the sequence, or its geometric mean):

    * none: 1;
    * truncate: min(rho, ratio_max) (TIS);
    * mask: rho where ratio_min <= rho <= ratio_max, else 0 (MIS);
    * icepop: the token's own ratio where ratio_min <= rho <= ratio_max, else 0. At level token this is IcePop; at the
      other levels rho only decides which sequences stay.

    Args:
        log_gap: old_logprobs - sampler_logprobs [tokens]. NaN, where the sampler gave no log-prob, counts as no gap.
        sequence_ids: int64 [tokens], 0 <= id < num_sequences.
        reduce: sums [sequences] over the ranks that share sequences.

    Returns:
        weights [tokens] and metrics [tokens]: `importance_weight`, and `importance_masked`, 1 where the weight is 0.
    """
    gap = torch.nan_to_num(log_gap.detach(), nan=0.0)
    if settings.mode == "none":
        return torch.ones_like(gap), {}
    own = importance_ratio(gap)
    ratio = own
    if settings.level == "sequence":
        ratio = importance_ratio(sequence_sums(gap, sequence_ids, num_sequences, reduce))[sequence_ids]
    elif settings.level == "geometric":
        ratio = importance_ratio(sequence_means(gap, sequence_ids, num_sequences, reduce))[sequence_ids]
    if settings.mode == "truncate":
        weights = ratio.clamp(max=settings.ratio_max)
        masked = torch.zeros_like(weights)
    else:
        inside = (ratio >= settings.ratio_min) & (ratio <= settings.ratio_max)
        weights = torch.where(inside, own if settings.mode == "icepop" else ratio, torch.zeros_like(ratio))
        masked = (~inside).to(weights.dtype)
    return weights, {"importance_weight": weights, "importance_masked": masked}


def sequence_keep_mask(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    threshold: float,
    reduce: Reduce | None = None,
) -> Tensor:
    """0 for the tokens of sequences that are far off-policy and bad, else 1 (DeepSeek-V3.2, arXiv 2512.02556).

    A sequence is left out when its mean of sampler_logprob - logprob exceeds `threshold` **and** its advantage is
    negative. Good samples stay however far they are.

    Returns:
        [tokens]
    """
    gap = torch.nan_to_num(sampler_logprobs - logprobs.detach(), nan=0.0)
    far = sequence_means(gap, sequence_ids, num_sequences, reduce)[sequence_ids] > threshold
    return (~(far & (advantages < 0))).to(logprobs.dtype)
