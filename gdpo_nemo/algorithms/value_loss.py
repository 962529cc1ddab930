"""The loss of a policy with a value head: what ``policy_loss`` gives, and the clipped value loss of PPO beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from gdpo_nemo.algorithms.own_functions import Functions
from gdpo_nemo.algorithms.policy_loss import LossMetrics, policy_loss
from gdpo_nemo.algorithms.ppo_settings import ActorCriticSettings
from gdpo_nemo.algorithms.token_fields import Reduce, TokenFields, required


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of every token, as TRL's PPOTrainer and verl's
    ``compute_value_loss`` have it (https://github.com/openai/baselines, ppo2, is where it comes from).

    Args:
        values: float32 [tokens] with gradient.
        old: float32 [tokens], the values before the step.
        returns: float32 [tokens]
        clip: c; None: (V - R)^2 / 2.

    Returns:
        float32 [tokens], and bool [tokens]: where the clipped value counts, so that there is no gradient.
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
    functions: Functions | None = None,
) -> tuple[Tensor, LossMetrics]:
    """``policy_loss`` of the trained tokens, and ``vf_coef`` times their value loss, weighed by the same weights.

    Args:
        values: float32 [tokens] with gradient; the other arguments are those of ``policy_loss``, with tokens of weight
            0 left out.

    Raises:
        ValueError: as ``policy_loss``, or the values before the step or the returns are missing.
    """
    loss, metrics = policy_loss(logprobs, entropy, fields, settings, reduce, functions, all_trained=True)
    each, clipped = value_losses(
        values, required(fields.old_values, "old_values"), required(fields.returns, "returns"), settings.cliprange_value
    )
    measured = {"value_loss": each, "value_clipped": clipped, "value": values}
    sums = {name: tensor.detach().double().sum() for name, tensor in measured.items()}
    return loss + settings.vf_coef * (fields.weights * each).sum(), LossMetrics(
        {**metrics.sums, **sums}, metrics.maxima
    )
