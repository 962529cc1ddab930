"""Loss of a micro-batch, selected by the type of the settings, and the policy-gradient losses with and without a value
head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdpo_nemo.algorithms.loss_selection import (
    Functions,
    Objective,
    check_loss,
    correction_entry,
    is_import_path,
    loss_entry,
    reads_staleness,
)
from gdpo_nemo.algorithms.loss_settings import LossByPart, LossSettings, OffPolicySettings, TermLoss
from gdpo_nemo.algorithms.losses import (
    LossMetrics,
    Reduce,
    TokenFields,
    kl_penalty,
    part_metric,
    required,
    score_weight,
)
from gdpo_nemo.algorithms.offpolicy import sequence_keep_mask
from gdpo_nemo.algorithms.ppo import ActorCriticSettings
from gdpo_nemo.algorithms.preference_losses import preference_loss
from gdpo_nemo.algorithms.preference_objectives import PreferenceUpdate
from gdpo_nemo.algorithms.table import with_array_hint

METRICS = {
    "policy/importance_weight": ("", "Mean off-policy correction weight of trained tokens (loss_fn.off_policy.mode)"),
    "policy/importance_masked": (
        "share",
        "Trained tokens that the off-policy correction masks (loss_fn.off_policy.mode)",
        {
            "max": 0.5,
            "advisory": True,
            "why": "half of the sampled tokens are not trained",
            "remedy": "less staleness, a lower learning rate, a wider off_policy.ratio_min and ratio_max",
        },
    ),
    "policy/reference_kl": (
        "nats/token",
        "Mean KL to the initial model, estimated by loss_fn.reference_policy_kl_type",
        {
            "max": 1.0,
            "advisory": True,
            "why": "the policy is far from the initial model",
            "remedy": "a larger loss_fn.reference_policy_kl_penalty, a lower learning rate",
        },
    ),
    "policy/sequence_masked": ("share", "Trained tokens masked by loss_fn.off_policy.sequence_mask_threshold"),
}


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: TokenFields,
    settings: LossSettings,
    reduce: Reduce | None = None,
    *,
    functions: Functions | None = None,
    all_trained: bool = False,
) -> tuple[Tensor, LossMetrics]:
    """Return the weighted sum of the token losses of one micro-batch.

    Args:
        logprobs: float32 [tokens], with gradient.
        entropy: entropies of the policy's distributions, float32 [tokens], with gradient if there is an entropy bonus.
            None if not needed.
        reduce: sums a detached [sequences] tensor over the context-parallel ranks. Required if sequences are split over
            ranks and the loss or correction uses whole sequences. All of these ranks must call this function with the
            same settings, even without a trained token.
        functions: custom functions by their import paths in the settings.
        all_trained: True if the caller has removed all tokens of weight 0. Removing these tokens here requires a GPU
            sync.

    Returns:
        `sum_t weights[t] * loss[t]` as a scalar, and the metrics. Tokens of weight 0 affect neither the loss nor the
        metrics, regardless of their log-probs.

    Raises:
        ValueError: if `check_loss` refuses the settings, required log-probs or entropies are missing, or a custom
            function returns a wrong shape or non-finite values.
    """
    _check_inputs(entropy, fields, settings, functions)
    if not all_trained:
        trained = fields.weights > 0
        fields = fields.select(trained)
        logprobs = logprobs[trained]
        entropy = None if entropy is None else entropy[trained]
    inputs = replace(fields, reduce=reduce)
    fields = _complete(logprobs, inputs, settings)
    loss, per_token = _token_loss(logprobs, fields, settings, functions)
    keep, correction = _correction(logprobs, fields, settings, functions)
    loss = _regularised(loss * keep, logprobs, entropy, fields, settings, per_token)
    per_token.update(correction)
    if entropy is not None:
        per_token["entropy"] = entropy.detach()
    per_token.update(_parity(logprobs, inputs, settings))
    return (fields.weights * loss).sum(), _collect(per_token, len(logprobs), logprobs)


def _complete(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenFields:
    """Return the fields with the old log-probs, and the staleness if it is read, also if they were not given."""
    if fields.old_logprobs is None:
        fields = replace(fields, old_logprobs=logprobs.detach())
    if reads_staleness(settings) and fields.staleness is None:
        fields = replace(fields, staleness=torch.zeros_like(fields.sequence_ids, dtype=torch.int32))
    return fields


def _regularised(
    loss: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: TokenFields,
    settings: LossSettings,
    per_token: dict[str, Tensor],
) -> Tensor:
    """Add KL penalty and entropy bonus to the loss of each token, and the KL to the metrics ``per_token``."""
    if settings.reference_policy_kl_penalty:
        kl = _reference_kl(logprobs, fields, settings)
        loss = loss + settings.reference_policy_kl_penalty * kl
        per_token["reference_kl"] = kl.detach()
    return loss if entropy is None or not settings.entropy_bonus else loss - settings.entropy_bonus * entropy


def term_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: TokenFields,
    settings: TermLoss,
    reduce: Reduce | None = None,
    functions: Functions | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Return one term of ``policy_loss``, or an expected reward (see ``TermLoss``), without metrics.

    Args:
        fields: fields of the trained tokens, with ``terms``. The other arguments are those of ``policy_loss``.

    Raises:
        ValueError: if ``policy_loss`` raises it.
    """
    loss = settings.loss
    terms = required(fields.terms, "terms") if len(logprobs) else logprobs.new_zeros((0, settings.index + 1))
    term = terms[:, settings.index]
    if settings.part == "expected":
        return -(term * logprobs).sum(), LossMetrics({}, {})
    _check_inputs(entropy, fields, loss, functions)
    fields = _complete(logprobs, replace(fields, reduce=reduce), loss)
    sign = torch.where(fields.advantages < 0, -1.0, 1.0)
    per_token, _ = _token_loss(logprobs, replace(fields, advantages=sign), loss, functions)
    per_token = sign * term * per_token * _correction(logprobs, fields, loss, functions)[0]
    if settings.part == "regularisation":
        per_token = _regularised(per_token, logprobs, entropy, fields, loss, {})
    return (fields.weights * per_token).sum(), LossMetrics({}, {})


def _check_inputs(
    entropy: Tensor | None, fields: TokenFields, settings: LossSettings, functions: Functions | None
) -> None:
    check_loss(settings, functions)
    if settings.reference_policy_kl_penalty and fields.reference_logprobs is None:
        raise ValueError("reference_policy_kl_penalty requires reference_logprobs")
    if settings.entropy_bonus and entropy is None:
        raise ValueError("entropy_bonus requires the entropy of the policy")
    weighted = settings.reference_policy_kl_penalty and settings.reference_policy_kl_gradient == "importance"
    if weighted and fields.sampler_logprobs is None:
        raise ValueError("reference_policy_kl_gradient importance requires sampler_logprobs")
    corrected = settings.off_policy.correction != "none" or settings.off_policy.sequence_mask_threshold is not None
    if corrected and fields.sampler_logprobs is None:
        raise ValueError("off_policy corrections require sampler_logprobs")


def _reference_kl(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> Tensor:
    """Return the estimated KL to the reference for each token, with the configured gradient."""
    weight = None
    if settings.reference_policy_kl_gradient != "estimator":
        sampler = fields.sampler_logprobs if settings.reference_policy_kl_gradient == "importance" else None
        weight = score_weight(logprobs, sampler)
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
    """Return the policy-gradient loss of each token, and the metrics of the loss function."""
    entry = loss_entry(settings.type, functions)
    if not is_import_path(settings.type):
        loss, metrics = _with_metrics(entry.function(logprobs, fields, settings, **settings.options))
        return loss, dict(metrics)
    what = f"loss_fn.type: {settings.type}"
    # The hook on a separate view attributes a non-finite gradient to this function.
    view = logprobs.view_as(logprobs)
    if view.requires_grad:
        hook: Any = view.register_hook  # register_hook has no type annotation in torch.
        hook(lambda gradient: _check_custom_result(gradient, logprobs, f"{what} has a gradient that"))
    loss, metrics = _with_metrics(_called(what, entry.function, view, fields, settings, settings.options))
    _check_custom_result(loss, view, f"{what} returned a loss that")
    for name, values in metrics.items():
        _check_custom_result(values, view, f"{what} returned metric {name!r}, which")
    return loss, {name: values.detach() for name, values in metrics.items()}


def _with_metrics(returned: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})


def _called(what: str, function: Any, values: Tensor, fields: TokenFields, settings: Any, options: Any) -> Any:
    """Call a custom function.

    Raises:
        ValueError: if the function raises an exception.
    """
    try:
        return function(values, fields, settings, **options)
    except Exception as error:
        raise ValueError(f"{what} raised {with_array_hint(error)}") from error


def _check_custom_result(values: Any, like: Tensor, what: str) -> None:
    """Check a tensor that a custom function has returned.

    Raises:
        ValueError: if its shape or type is wrong, or a value is not finite.
    """
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
    """Return the off-policy factor of each token's loss, and its metrics."""
    factor = torch.ones_like(logprobs)
    metrics: dict[str, Tensor] = {}
    off_policy = settings.off_policy
    if off_policy.correction != "none":
        factor = importance_weights(fields, settings.off_policy, functions)
        metrics = {"importance_weight": factor, "importance_masked": (factor == 0).to(factor.dtype)}
    if off_policy.sequence_mask_threshold is not None:
        mask = sequence_keep_mask(logprobs, fields, off_policy.sequence_mask_threshold)
        factor = factor * mask
        metrics["sequence_masked"] = 1.0 - mask
    return factor, metrics


def importance_weights(fields: TokenFields, settings: OffPolicySettings, functions: Functions | None = None) -> Tensor:
    """Return the off-policy correction weight of each token [tokens], from the gap old_logprobs - sampler_logprobs.

    The gap is 0 if the sampler's log-prob is NaN (unknown). For the modes see `offpolicy.py`.
    """
    old = required(fields.old_logprobs, "old_logprobs")
    gap = (old - required(fields.sampler_logprobs, "sampler_logprobs")).detach().nan_to_num(nan=0.0)
    entry = correction_entry(settings.correction, functions)
    if entry.function is None:
        return torch.ones_like(gap)
    if not is_import_path(settings.correction):
        return entry.function(gap, fields, settings, **settings.options)
    what = f"loss_fn.off_policy.mode: {settings.mode}"
    weights: Tensor = _called(what, entry.function, gap, fields, settings, settings.options)
    _check_custom_result(weights, gap, f"{what} returned a weight that")
    return weights  # The result has no gradient, because no input of the function has one.


def _parity(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> dict[str, Tensor]:
    """Return per-token differences between sampler and trainer.

    The results are the absolute difference of log-probs, the absolute difference of probabilities, and the k3 estimate
    of KL(sampler || trainer). The trainer's log-probs are those before the update. If the sampler's log-probs are used
    as old log-probs, the trainer's log-probs are those of this forward pass.
    """
    if fields.sampler_logprobs is None:
        return {}
    before = None if settings.old_logprobs == "sampler" else fields.old_logprobs
    trainer = logprobs.detach() if before is None else before
    gap = torch.nan_to_num(fields.sampler_logprobs - trainer, nan=0.0)
    # The larger of the two probabilities: a product with exp(gap) would be 0 * inf if the trainer's underflows.
    difference = torch.where(gap > 0, fields.sampler_logprobs, trainer).exp() * torch.expm1(-gap.abs())
    return {
        "parity_abs": gap.abs(),
        "parity_prob": difference.abs(),
        "parity_kl": kl_penalty(gap, torch.zeros_like(gap), "k3"),
    }


def _collect(per_token: dict[str, Tensor], tokens: int, like: Tensor) -> LossMetrics:
    """Sum all per-token metrics, and compute the maxima of some metrics. Sums are float64, so that counts of 1e8 tokens
    are exact.

    `clipped_low` counts clipped tokens with a ratio below 1. `ratio_negated` is the maximum of -ratio, because parts of
    a batch are combined by maximum.
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


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) for each token.

    This is the value loss of TRL's PPOTrainer and verl's ``compute_value_loss``, which comes from
    https://github.com/openai/baselines (ppo2).

    Args:
        values: value head outputs V, float32 [tokens], with gradient.
        old: values V_old before the step, float32 [tokens].
        returns: targets R, float32 [tokens].
        clip: clip range c; None: no clipping, (V - R)^2 / 2.

    Returns:
        float32 [tokens], and bool [tokens]: True if the clipped value applies, which has no gradient.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (values.clamp(old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def actor_critic_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    values: Tensor,
    fields: TokenFields,
    settings: ActorCriticSettings,
    reduce: Reduce | None = None,
    *,
    functions: Functions | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Return ``policy_loss`` plus ``vf_coef`` times the value loss, with the same token weights.

    Args:
        values: value head outputs, float32 [tokens], with gradient. The other arguments are those of ``policy_loss``,
            without tokens of weight 0.

    Raises:
        ValueError: if ``policy_loss`` raises it, or old values or returns are missing.
    """
    loss, metrics = policy_loss(logprobs, entropy, fields, settings, reduce, functions=functions, all_trained=True)
    each, clipped = value_losses(
        values, required(fields.old_values, "old_values"), required(fields.returns, "returns"), settings.cliprange_value
    )
    measured = {"value_loss": each, "value_clipped": clipped, "value": values}
    sums = {name: tensor.detach().double().sum() for name, tensor in measured.items()}
    return loss + settings.vf_coef * (fields.weights * each).sum(), LossMetrics(
        {**metrics.sums, **sums}, metrics.maxima
    )


# -- dispatch by settings type ------------------------------------------------------------------------------------

Columns = tuple[Tensor, ...]
"""Model outputs for the trained tokens, each float32 [tokens] with gradient: log-probs, entropies (except for a reward
model), and with a value head the values of the state before each token."""


def _policy_gradient(
    columns: Columns, fields: TokenFields, settings: LossSettings, reduce: Reduce | None, functions: Functions
) -> tuple[Tensor, LossMetrics]:
    return policy_loss(columns[0], _entropy(columns), fields, settings, reduce, functions=functions, all_trained=True)


def _actor_critic(
    columns: Columns, fields: TokenFields, settings: ActorCriticSettings, reduce: Reduce | None, functions: Functions
) -> tuple[Tensor, LossMetrics]:
    logprobs, entropy, values = columns
    return actor_critic_loss(logprobs, entropy, values, fields, settings, reduce, functions=functions)


def _term(
    columns: Columns, fields: TokenFields, settings: TermLoss, reduce: Reduce | None, functions: Functions
) -> tuple[Tensor, LossMetrics]:
    return term_loss(columns[0], _entropy(columns), fields, settings, reduce, functions)


def _by_part(
    columns: Columns, fields: TokenFields, settings: LossByPart, reduce: Reduce | None, functions: Functions
) -> tuple[Tensor, LossMetrics]:
    """Return the sum of the losses of the parts, and the metrics of all tokens and of each part (``part_metric``).

    A metric that a part does not have is not a metric of all tokens, because the tokens of this part would count as 0.
    """
    part_of = required(fields.part, "part") if len(columns[0]) else fields.sequence_ids
    total = columns[0].new_zeros(())
    parts: list[LossMetrics] = []
    for number, part in enumerate(settings.parts):
        # Also without a token: all context-parallel ranks of a sequence must take part in its sums.
        chosen = part_of == number
        found = policy_loss(
            columns[0][chosen],
            None if len(columns) < 2 else columns[1][chosen],
            fields.select(chosen),
            part,
            reduce,
            functions=functions,
            all_trained=True,
        )
        total = total + found[0]
        parts.append(found[1])
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for name in parts[0].sums:
        if all(name in part.sums for part in parts):
            sums[name] = torch.stack([part.sums[name] for part in parts]).sum()
    for number, part_metrics in enumerate(parts):
        for name, value in part_metrics.maxima.items():
            maxima[name] = maxima[name].maximum(value) if name in maxima else value
        sums |= {part_metric(number, name): value for name, value in part_metrics.sums.items()}
        maxima |= {part_metric(number, name): value for name, value in part_metrics.maxima.items()}
    return total, LossMetrics(sums, maxima)


def _preference(
    columns: Columns, fields: TokenFields, settings: PreferenceUpdate, reduce: Reduce | None, functions: Functions
) -> tuple[Tensor, LossMetrics]:
    return preference_loss(columns[0], _entropy(columns), fields, settings, reduce)


def _entropy(columns: Columns) -> Tensor | None:
    return columns[1] if len(columns) > 1 else None


ObjectiveLoss = Callable[[Columns, TokenFields, Any, "Reduce | None", Functions], tuple[Tensor, LossMetrics]]
OBJECTIVES: dict[type[Objective], ObjectiveLoss] = {
    LossSettings: _policy_gradient,
    ActorCriticSettings: _actor_critic,
    PreferenceUpdate: _preference,
    TermLoss: _term,
    LossByPart: _by_part,
}
"""Loss function for each type of settings. The caller must remove tokens of weight 0."""


def objective_loss(settings: Objective) -> ObjectiveLoss:
    """Return the loss function that ``OBJECTIVES`` lists for the type of the settings, or for one of its base classes.

    Raises:
        TypeError: if no type matches.
    """
    for kind in type(settings).__mro__:
        if kind in OBJECTIVES:
            return OBJECTIVES[kind]
    raise TypeError(f"no loss function for settings of type {type(settings).__name__}")
