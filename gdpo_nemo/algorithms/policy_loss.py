"""The loss of one micro-batch, as the policy worker calls it.

Consumes 1-D tensors of any layout and returns sums: the worker adds them over micro-batches and ranks, and nothing is
divided on the way, because the weights of the tokens already hold the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdpo_nemo.algorithms.loss_settings import LossSettings, OffPolicySettings
from gdpo_nemo.algorithms.losses import kl_penalty, score_weight
from gdpo_nemo.algorithms.offpolicy import sequence_keep_mask
from gdpo_nemo.algorithms.own_functions import Functions, correction_entry, is_place, loss_entry
from gdpo_nemo.algorithms.token_fields import Reduce, TokenFields, required


@dataclass(frozen=True)
class LossMetrics:
    """Measurements over the trained tokens of one micro-batch."""

    sums: dict[str, Tensor]
    """Scalars that add up over micro-batches and ranks; divided by `tokens` at the end they are means."""
    maxima: dict[str, Tensor]
    """Scalars of which the largest counts. Absent when the micro-batch trains no token."""


METRICS = {
    "policy/importance_weight": ("", "Weight of a token by loss_fn.off_policy.mode, mean over the trained tokens"),
    "policy/importance_masked": (
        "share",
        "Trained tokens that loss_fn.off_policy.mode gives the weight 0",
        {
            "max": 0.5,
            "advisory": True,
            "why": "half of what was sampled trains nothing",
            "remedy": "less staleness, a lower learning rate, a wider off_policy.ratio_min and ratio_max",
        },
    ),
    "policy/reference_kl": (
        "nats/token",
        "KL to the starting model by loss_fn.reference_policy_kl_type, mean",
        {
            "max": 1.0,
            "advisory": True,
            "why": "far from the starting model",
            "remedy": "a larger loss_fn.reference_policy_kl_penalty, a lower learning rate",
        },
    ),
    "policy/sequence_masked": ("share", "Trained tokens left out by loss_fn.off_policy.sequence_mask_threshold"),
}


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: TokenFields,
    settings: LossSettings,
    reduce: Reduce | None = None,
    functions: Functions | None = None,
    all_trained: bool = False,
) -> tuple[Tensor, LossMetrics]:
    """Weighted sum of the token losses of one micro-batch.

    Args:
        logprobs: float32 [tokens] with gradient.
        entropy: float32 [tokens] of the policy's distribution, with gradient if there is an entropy bonus; None if
            nobody asked for it.
        reduce: sums a detached [sequences] tensor over the context-parallel ranks; needed where a sequence is spread
            over ranks and a loss or correction works on whole sequences. All of those ranks must call with the same
            settings, also those without a trained token.
        functions: the user's own, by the places that the settings name them by.
        all_trained: the caller has left out the tokens of weight 0. To find them here, a GPU has to be waited for.

    Returns:
        `sum_t weights[t] * loss[t]` as a scalar, and the metrics. Tokens of weight 0 enter neither, whatever their
        log-probs are.

    Raises:
        ValueError: settings that `LossSettings.check` refuses, a KL penalty without reference log-probs, a correction
            without sampler log-probs, a bonus without entropy, a function of the user's own that gives another shape
            or what is not finite.
    """
    _check_inputs(entropy, fields, settings, functions)
    if not all_trained:
        trained = fields.weights > 0
        fields = fields.select(trained)
        logprobs = logprobs[trained]
        entropy = None if entropy is None else entropy[trained]
    given = replace(fields, reduce=reduce)
    fields = given if given.old_logprobs is not None else replace(given, old_logprobs=logprobs.detach())
    if settings.reads_staleness and fields.staleness is None:
        fields = replace(fields, staleness=torch.zeros_like(fields.sequence_ids, dtype=torch.int32))

    loss, per_token = _token_loss(logprobs, fields, settings, functions)
    keep, correction = _correction(logprobs, fields, settings, functions)
    loss = loss * keep
    per_token.update(correction)
    if settings.reference_policy_kl_penalty:
        kl = _reference_kl(logprobs, fields, settings)
        loss = loss + settings.reference_policy_kl_penalty * kl
        per_token["reference_kl"] = kl.detach()
    if entropy is not None:
        loss = loss - settings.entropy_bonus * entropy if settings.entropy_bonus else loss
        per_token["entropy"] = entropy.detach()
    per_token.update(_parity(logprobs, given, settings))
    return (fields.weights * loss).sum(), _collect(per_token, len(logprobs), logprobs)


def _check_inputs(
    entropy: Tensor | None, fields: TokenFields, settings: LossSettings, functions: Functions | None
) -> None:
    settings.check(functions)
    if settings.reference_policy_kl_penalty and fields.reference_logprobs is None:
        raise ValueError("reference_policy_kl_penalty needs reference_logprobs")
    if settings.entropy_bonus and entropy is None:
        raise ValueError("entropy_bonus needs the entropy of the policy")
    weighted = settings.reference_policy_kl_penalty and settings.reference_policy_kl_gradient == "importance"
    if weighted and fields.sampler_logprobs is None:
        raise ValueError("reference_policy_kl_gradient importance needs sampler_logprobs")
    corrected = settings.off_policy.correction != "none" or settings.off_policy.sequence_mask_threshold is not None
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
        required(fields.reference_logprobs, "reference_logprobs"),
        settings.reference_policy_kl_type,
        weight=weight,
        input_clamp=settings.kl_input_clamp_value,
        output_clamp=settings.kl_output_clamp_value,
    )


def _token_loss(
    logprobs: Tensor, fields: TokenFields, settings: LossSettings, functions: Functions | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy term of every token, and what else the loss measured."""
    entry = loss_entry(settings.type, functions)
    if not is_place(settings.type):
        loss, metrics = _with_metrics(entry.function(logprobs, fields, settings, **settings.options))
        return loss, dict(metrics)
    what = f"loss_fn.type: {settings.type}"
    # Of its own, so that a gradient that is not finite is known to be this function's.
    own = logprobs.view_as(logprobs)
    if own.requires_grad:
        hook: Any = own.register_hook  # torch has not annotated it
        hook(lambda gradient: _check_own(gradient, logprobs, f"{what} has a gradient that"))
    loss, metrics = _with_metrics(_called(what, entry.function, own, fields, settings, settings.options))
    _check_own(loss, own, f"{what} returned a loss that")
    for name, values in metrics.items():
        _check_own(values, own, f"{what} returned metric {name!r}, which")
    return loss, {name: values.detach() for name, values in metrics.items()}


def _with_metrics(returned: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})


def _called(what: str, function: Any, values: Tensor, fields: TokenFields, settings: Any, options: Any) -> Any:
    """What a function of the user's own returns. Raises ValueError: it raised."""
    try:
        return function(values, fields, settings, **options)
    except Exception as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error


def _check_own(values: Any, like: Tensor, what: str) -> None:
    """Refuse what a function of the user's own must not give. Raises ValueError."""
    if not isinstance(values, Tensor) or values.shape != like.shape or not values.is_floating_point():
        shape = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{what} is {shape}, not a float tensor {list(like.shape)}")
    wrong = ~values.isfinite()
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise ValueError(f"{what} is {values[token].item()} at {int(wrong.sum())} of {len(wrong)} tokens")


def _correction(
    logprobs: Tensor, fields: TokenFields, settings: LossSettings, functions: Functions | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Factor of every token's policy term for the gap to the sampler, with its metrics."""
    factor = torch.ones_like(logprobs)
    metrics: dict[str, Tensor] = {}
    off_policy = settings.off_policy
    if off_policy.correction != "none":
        factor = importance_weights(fields, settings.off_policy, functions)
        metrics = {"importance_weight": factor, "importance_masked": (factor == 0).to(factor.dtype)}
    if off_policy.sequence_mask_threshold is not None:
        kept = sequence_keep_mask(logprobs, fields, off_policy.sequence_mask_threshold)
        factor = factor * kept
        metrics["sequence_masked"] = 1.0 - kept
    return factor, metrics


def importance_weights(fields: TokenFields, settings: OffPolicySettings, functions: Functions | None = None) -> Tensor:
    """Weight of every token [tokens] from the gap between trainer and sampler, old_logprobs - sampler_logprobs.

    Where the sampler gave no log-prob (NaN) there is no gap. What the modes make of it is said in `offpolicy.py`.
    """
    old = required(fields.old_logprobs, "old_logprobs")
    gap = (old - required(fields.sampler_logprobs, "sampler_logprobs")).detach().nan_to_num(nan=0.0)
    entry = correction_entry(settings.correction, functions)
    if entry.function is None:
        return torch.ones_like(gap)
    if not is_place(settings.correction):
        return entry.function(gap, fields, settings, **settings.options)
    what = f"loss_fn.off_policy.mode: {settings.mode}"
    weights: Tensor = _called(what, entry.function, gap, fields, settings, settings.options)
    _check_own(weights, gap, f"{what} returned a weight that")
    return weights  # without a gradient: nothing that the function is given has one


def _parity(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> dict[str, Tensor]:
    """How far the sampler is from the trainer: |difference of log-probs|, |difference of probabilities| and k3 of
    KL(sampler || trainer).

    The trainer's are those from before the update, or of this pass if the sampler's serve as the old ones.
    """
    if fields.sampler_logprobs is None:
        return {}
    before = None if settings.old_logprobs == "sampler" else fields.old_logprobs
    believed = logprobs.detach() if before is None else before
    gap = torch.nan_to_num(fields.sampler_logprobs - believed, nan=0.0)
    off = believed.exp() * torch.expm1(gap)
    return {
        "parity_abs": gap.abs(),
        "parity_prob": off.abs(),
        "parity_kl": kl_penalty(gap, torch.zeros_like(gap), "k3"),
    }


def _collect(per_token: dict[str, Tensor], tokens: int, like: Tensor) -> LossMetrics:
    """Sums of every per-token measurement, and the maxima of four. float64, so that 1e8 tokens still count.

    `clipped_low` counts the clipped tokens with a ratio below 1; `ratio_negated` is the largest of -ratio, as parts of
    a batch join maxima.
    """
    ratio = per_token.get("ratio")
    if ratio is not None and "clipped" in per_token:
        per_token["clipped_low"] = per_token["clipped"] * (ratio < 1)
    sums = {name: value.double().sum() for name, value in per_token.items()}
    sums["tokens"] = torch.full((), float(tokens), dtype=torch.float64, device=like.device)
    maxima: dict[str, Tensor] = {
        name: per_token[name].max() for name in ("ratio", "parity_abs", "parity_prob") if name in per_token and tokens
    }
    if ratio is not None and tokens:
        maxima["ratio_negated"] = (-ratio).max()
    return LossMetrics(sums, maxima)
