"""The loss of one micro-batch, as the policy worker calls it.

Consumes 1-D tensors of any layout and returns sums: the worker adds them over micro-batches and ranks, and nothing is
divided on the way, because the weights of the tokens already hold the mean over the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.losses import (
    Reduce,
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
    kl_penalty,
    score_weight,
)
from gdpo_nemo.algorithms.offpolicy import importance_weights, sequence_keep_mask


@dataclass(frozen=True)
class TokenFields:
    """What a micro-batch brings beside the model's output; every tensor is 1-D [tokens] in the same order.

    Tokens may belong to any sequences, in any order; with context parallelism each rank holds its own share.
    """

    advantages: Tensor
    """float32; the advantage of the token's sequence."""
    weights: Tensor
    """float32; `losses.token_weights` of the token's sequence, 0 for tokens that are not trained."""
    sequence_ids: Tensor
    """int64; number of the token's sequence within the micro-batch, the same on all ranks that share it."""
    num_sequences: int
    """Sequences in the micro-batch, counting those without a token on this rank."""
    old_logprobs: Tensor | None = None
    """float32; log-probs in the denominator of the ratio. None: those of this very forward pass (ratio 1)."""
    sampler_logprobs: Tensor | None = None
    """float32; log-probs under which the tokens were drawn."""
    reference_logprobs: Tensor | None = None
    """float32; log-probs of the reference model, for the KL penalty."""

    def select(self, keep: Tensor) -> TokenFields:
        """The same fields at the tokens where the bool tensor `keep` is True."""
        tensors = {name: value[keep] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True)
class LossMetrics:
    """Measurements over the trained tokens of one micro-batch."""

    sums: dict[str, Tensor]
    """Scalars that add up over micro-batches and ranks; divided by `tokens` at the end they are means."""
    maxima: dict[str, Tensor]
    """Scalars of which the largest counts. Absent when the micro-batch trains no token."""


METRICS = {
    "policy/reference_kl": ("nats/token", "KL to the starting model by loss_fn.reference_policy_kl_type, mean"),
    "policy/sequence_masked": ("share", "Trained tokens left out by loss_fn.off_policy.sequence_mask_threshold"),
}


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: TokenFields,
    settings: LossSettings,
    reduce: Reduce | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Weighted sum of the token losses of one micro-batch.

    Args:
        logprobs: float32 [tokens] with gradient.
        entropy: float32 [tokens] of the policy's distribution, with gradient if there is an entropy bonus; None if
            nobody asked for it.
        reduce: sums a detached [sequences] tensor over the context-parallel ranks; needed where a sequence is spread
            over ranks and a loss or correction works on whole sequences. All of those ranks must call with the same
            settings, also those without a trained token.

    Returns:
        `sum_t weights[t] * loss[t]` as a scalar, and the metrics. Tokens of weight 0 enter neither, whatever their
        log-probs are.

    Raises:
        ValueError: settings that `LossSettings.check` refuses, a KL penalty without reference log-probs, a correction
            without sampler log-probs, a bonus without entropy.
    """
    _check_inputs(entropy, fields, settings)
    trained = fields.weights > 0
    fields = fields.select(trained)
    logprobs = logprobs[trained]
    entropy = None if entropy is None else entropy[trained]

    loss, per_token = _token_loss(logprobs, fields, settings, reduce)
    keep, correction = _correction(logprobs, fields, settings, reduce)
    loss = loss * keep
    per_token.update(correction)
    if settings.reference_policy_kl_penalty:
        kl = _reference_kl(logprobs, fields, settings)
        loss = loss + settings.reference_policy_kl_penalty * kl
        per_token["reference_kl"] = kl.detach()
    if entropy is not None:
        loss = loss - settings.entropy_bonus * entropy if settings.entropy_bonus else loss
        per_token["entropy"] = entropy.detach()
    per_token.update(_parity(logprobs, fields, settings))
    return (fields.weights * loss).sum(), _collect(per_token, len(logprobs), logprobs)


def _check_inputs(entropy: Tensor | None, fields: TokenFields, settings: LossSettings) -> None:
    settings.check()
    if settings.reference_policy_kl_penalty and fields.reference_logprobs is None:
        raise ValueError("reference_policy_kl_penalty needs reference_logprobs")
    if settings.entropy_bonus and entropy is None:
        raise ValueError("entropy_bonus needs the entropy of the policy")
    weighted = settings.reference_policy_kl_penalty and settings.reference_policy_kl_gradient == "importance"
    if weighted and fields.sampler_logprobs is None:
        raise ValueError("reference_policy_kl_gradient importance needs sampler_logprobs")
    corrected = settings.off_policy.mode != "none" or settings.off_policy.sequence_mask_threshold is not None
    if corrected and fields.sampler_logprobs is None:
        raise ValueError("off_policy corrections need sampler_logprobs")


def _reference_kl(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> Tensor:
    """The KL estimate of every token, with the gradient that the settings ask for."""
    weight = None
    if settings.reference_policy_kl_gradient != "estimator":
        drawn = fields.sampler_logprobs if settings.reference_policy_kl_gradient == "importance" else None
        weight = score_weight(logprobs, drawn)
    return kl_penalty(
        logprobs,
        fields.reference_logprobs,
        settings.reference_policy_kl_type,
        weight=weight,
        input_clamp=settings.kl_input_clamp_value,
        output_clamp=settings.kl_output_clamp_value,
    )


def _token_loss(
    logprobs: Tensor, fields: TokenFields, settings: LossSettings, reduce: Reduce | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy term of every token, by type of loss."""
    old = logprobs.detach() if fields.old_logprobs is None else fields.old_logprobs
    clip = {"clip_min": settings.ratio_clip_min, "clip_max": settings.ratio_clip_max}
    if settings.type == "clipped_pg":
        return clipped_policy_loss(logprobs, old, fields.advantages, **clip, dual_clip=settings.ratio_clip_c)
    if settings.type == "gspo":
        ids = fields.sequence_ids
        count = fields.num_sequences
        clip["dual_clip"] = settings.ratio_clip_c
        return gspo_loss(logprobs, old, fields.advantages, ids, count, **clip, reduce=reduce)
    if settings.type == "cispo":
        return cispo_loss(logprobs, old, fields.advantages, **clip)
    # target_po: the advantages hold the coefficients of `target_po_coefficients`; the loss is linear in the log-probs.
    return -fields.advantages * logprobs, {}


def _correction(
    logprobs: Tensor, fields: TokenFields, settings: LossSettings, reduce: Reduce | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Factor of every token's policy term for the gap to the sampler, with its metrics."""
    factor = torch.ones_like(logprobs)
    metrics = {}
    off_policy = settings.off_policy
    ids = fields.sequence_ids
    count = fields.num_sequences
    if off_policy.mode != "none":
        old = logprobs.detach() if fields.old_logprobs is None else fields.old_logprobs
        factor, metrics = importance_weights(old - fields.sampler_logprobs, ids, count, off_policy, reduce)
    if off_policy.sequence_mask_threshold is not None:
        threshold = off_policy.sequence_mask_threshold
        kept = sequence_keep_mask(logprobs, fields.sampler_logprobs, fields.advantages, ids, count, threshold, reduce)
        factor = factor * kept
        metrics["sequence_masked"] = 1.0 - kept
    return factor, metrics


def _parity(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> dict[str, Tensor]:
    """How far the sampler is from the trainer: |difference of log-probs|, |difference of probabilities| and k3 of
    KL(sampler || trainer).

    The trainer's are those from before the update, or of this pass where the sampler's serve as the old ones.
    """
    if fields.sampler_logprobs is None:
        return {}
    own = fields.old_logprobs is None or settings.old_logprobs == "sampler"
    believed = logprobs.detach() if own else fields.old_logprobs
    gap = torch.nan_to_num(fields.sampler_logprobs - believed, nan=0.0)
    off = believed.exp() * torch.expm1(gap)
    return {
        "parity_abs": gap.abs(),
        "parity_prob": off.abs(),
        "parity_kl": kl_penalty(gap, torch.zeros_like(gap), "k3"),
    }


def _collect(per_token: dict[str, Tensor], tokens: int, like: Tensor) -> LossMetrics:
    """Sums of every per-token measurement, and the maxima of three of them. float64, so that 1e8 tokens still count."""
    sums = {name: value.double().sum() for name, value in per_token.items()}
    sums["tokens"] = torch.tensor(float(tokens), dtype=torch.float64, device=like.device)
    maxima = {
        name: per_token[name].max() for name in ("ratio", "parity_abs", "parity_prob") if name in per_token and tokens
    }
    return LossMetrics(sums, maxima)
