"""Loss of an update of preference training.

The objectives are in `preference_objectives.py`. They are functions of whole completions, through the sums of their
token log-probs. The loss of an update is the mean over pairs (KTO: over completions), plus `rpo_alpha` times the mean
cross-entropy of the chosen tokens.

No gradient crosses ranks. The sums are detached and reduced over the context-parallel ranks, and each rank
differentiates the loss with respect to them. The derivative is then the coefficient of the log-prob of each token. Both
completions of a pair must be in the same micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gdpo_nemo.algorithms.losses import LossMetrics, Reduce, TokenFields, required
from gdpo_nemo.algorithms.preference_objectives import PairSums, PreferenceUpdate


def rewards(sums: PairSums, update: PreferenceUpdate) -> tuple[Tensor, Tensor]:
    """Return the rewards of chosen and rejected completions, as TRL logs them.

    For a reward model, the rewards are its scores. Otherwise the rewards are implicit: beta times the log-ratios.
    """
    if update.objective.trains_scores:
        return sums.chosen, sums.rejected
    # TRL logs the sums of log-ratios also if the loss uses their means.
    averaged = update.settings.averages(update.kind) and not update.objective.uses_reference
    chosen, rejected = sums.scores(averaged)
    return update.beta * chosen, update.beta * rejected


def preference_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    fields: TokenFields,
    update: PreferenceUpdate,
    reduce: Reduce | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Return the part of an update's loss for the pairs of one micro-batch on this rank.

    Args:
        logprobs: float32 [tokens], with gradient.
        entropy: float32 [tokens], only used as a metric; None if not needed.
        fields: must contain ``pairs``, and ``reference_logprobs`` if the objective needs a reference model.
        reduce: sums a detached tensor over the context-parallel ranks. All of these ranks must call it.

    Returns:
        A scalar and metrics. Summed over micro-batches and ranks, the scalar has the value and the gradient of the
        update's loss. Metrics are sums over pairs, and the value of a pair is divided among the pair's tokens.

    Raises:
        ValueError: if the pairs or required reference log-probs are missing.
    """
    pairs = required(fields.pairs, "pairs")
    pair = pairs.abs() - 1
    chosen = pairs > 0
    found = _sums(logprobs.detach(), fields, pair, chosen, update, reduce)
    leaves = [found.chosen.requires_grad_(), found.rejected.requires_grad_()]
    with torch.enable_grad():
        # An index without tokens is unused in this micro-batch and contributes nothing.
        exists = found.tokens > 0
        losses = update.objective.loss(_finite(found, exists), update)
        each = torch.where(exists, losses, torch.zeros_like(losses)) / update.count
        by_chosen, by_rejected = torch.autograd.grad(each.sum(), leaves)
    slopes = torch.where(chosen, by_chosen[pair], by_rejected[pair]).to(logprobs.dtype)
    values = (each.detach() / found.tokens.clamp(min=1))[pair]
    share = update.settings.supervised_weight(update.kind) / max(update.chosen_tokens, 1)
    slopes = slopes - share * chosen.to(slopes.dtype)
    values = values - share * chosen * logprobs.detach().double()
    surrogate = (slopes * (logprobs - logprobs.detach())).sum()
    metrics = _metrics(found, losses.detach(), update, pair, chosen, logprobs)
    if entropy is not None:
        metrics["entropy"] = entropy.detach().double().sum()
    metrics["tokens"] = torch.full((), float(len(logprobs)), dtype=torch.float64, device=logprobs.device)
    return surrogate + values.sum().to(logprobs.dtype), LossMetrics(metrics, {})


def _sums(
    logprobs: Tensor,
    fields: TokenFields,
    pair: Tensor,
    chosen: Tensor,
    update: PreferenceUpdate,
    reduce: Reduce | None,
) -> PairSums:
    """Return the sums for all pairs, over all ranks that share them: float64, detached."""
    reference = torch.zeros_like(logprobs)
    if update.settings.needs_reference(update.kind):
        reference = required(fields.reference_logprobs, "reference_logprobs")
    columns = [logprobs.double(), reference.double(), torch.ones_like(logprobs, dtype=torch.float64)]
    values = torch.stack([torch.stack([c * chosen for c in columns]), torch.stack([c * ~chosen for c in columns])])
    totals = values.new_zeros(2, 3, fields.num_sequences)
    totals.index_add_(2, pair, values)
    if reduce is not None:
        totals = reduce(totals)
    of_chosen, of_rejected = totals.unbind(0)
    logprob_chosen, reference_chosen, chosen_tokens = of_chosen.unbind(0)
    logprob_rejected, reference_rejected, rejected_tokens = of_rejected.unbind(0)
    return PairSums(
        chosen=logprob_chosen.clone(),
        rejected=logprob_rejected.clone(),
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )


def _finite(sums: PairSums, exists: Tensor) -> PairSums:
    """Return the sums with log-probs of -1 for absent pairs, so that no loss is infinite and no gradient is NaN."""
    constant = torch.full_like(sums.chosen, -1.0)
    return replace(sums, chosen=sums.chosen.where(exists, constant), rejected=sums.rejected.where(exists, constant))


def _metrics(
    sums: PairSums,
    losses: Tensor,
    update: PreferenceUpdate,
    pair: Tensor,
    chosen: Tensor,
    logprobs: Tensor,
) -> dict[str, Tensor]:
    """Return sums over pairs, or over chosen or rejected completions. A pair whose tokens are on several ranks is
    divided among these ranks."""
    reward_chosen, reward_rejected = (values.detach() for values in rewards(sums, update))
    margin = reward_chosen - reward_rejected
    per_pair = (1.0 / sums.tokens.clamp(min=1))[pair]
    per_chosen = chosen / sums.chosen_tokens.clamp(min=1)[pair]
    per_rejected = ~chosen / sums.rejected_tokens.clamp(min=1)[pair]
    both = ((sums.chosen_tokens > 0) & (sums.rejected_tokens > 0)).double()
    values = logprobs.detach().double()
    return {
        "preference_loss": (losses[pair] * per_pair).sum(),
        "rewards_chosen": (reward_chosen[pair] * per_chosen).sum(),
        "rewards_rejected": (reward_rejected[pair] * per_rejected).sum(),
        "rewards_margins": (margin[pair] * both[pair] * per_pair).sum(),
        "rewards_accuracies": ((reward_chosen > reward_rejected).double()[pair] * both[pair] * per_pair).sum(),
        "logps_chosen": (values * chosen).sum(),
        "logps_rejected": (values * ~chosen).sum(),
        "chosen": per_chosen.sum(),
        "rejected": per_rejected.sum(),
        "pairs": (both[pair] * per_pair).sum(),
    }
