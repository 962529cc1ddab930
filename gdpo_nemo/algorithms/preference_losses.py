"""Preference losses: DPO, KTO, ORPO, SimPO, CPO, and the Bradley-Terry loss of reward models.

These losses are functions of whole completions, through the sums of their token log-probs. The loss of an update is the
mean over pairs (KTO: over completions), plus `rpo_alpha` times the mean cross-entropy of the chosen tokens.

No gradient crosses ranks. The sums are detached and reduced over the context-parallel ranks, and each rank
differentiates the loss with respect to them. The derivative is then the coefficient of the log-prob of each token. Both
completions of a pair must be in the same micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gdpo_nemo.algorithms.losses import LossMetrics, Reduce, TokenFields, required
from gdpo_nemo.algorithms.preference_settings import PreferenceSettings, PreferenceUpdate


@dataclass(frozen=True)
class PairSums:
    """Sums over the trained tokens of both completions of each pair. All tensors are [pairs].

    If there is only one completion, as in KTO, the token count of the other is 0.
    """

    chosen: Tensor
    """Policy log-probs summed over the completion, or its score from a reward model."""
    rejected: Tensor
    reference_chosen: Tensor
    """Summed log-probs of the initial model; 0 without a reference."""
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    def scores(self, averaged: bool) -> tuple[Tensor, Tensor]:
        """Return the log-ratios to the initial model of the chosen and the rejected completions.

        Args:
            averaged: divide the log-ratios by the number of tokens.
        """
        chosen = self.chosen - self.reference_chosen
        rejected = self.rejected - self.reference_rejected
        if not averaged:
            return chosen, rejected
        return chosen / self.chosen_tokens.clamp(min=1), rejected / self.rejected_tokens.clamp(min=1)


def preference_losses(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """Return the loss of each pair, or with KTO of each completion: [pairs]. The loss does not include the `rpo_alpha`
    term.

    Raises:
        ValueError: if the objective is unknown.
    """
    if update.kind == "kto":
        return _kto(sums, update)
    if update.kind == "orpo":
        return _orpo(sums, update.settings.strength("orpo"))
    if update.kind == "reward_model":
        return _bradley_terry(sums, update.settings.center_rewards_coefficient or 0.0)
    if update.kind not in ("dpo", "cpo", "simpo"):
        raise ValueError(f"unknown objective {update.kind!r}")
    return _contrast(sums, update.kind, update.settings)


def _contrast(sums: PairSums, kind: str, settings: PreferenceSettings) -> Tensor:
    """Return losses of the score difference, chosen minus rejected.

    DPO (arXiv 2305.18290, equation 7), cDPO with label smoothing (Mitchell 2023), robust DPO (arXiv 2403.00409), the
    hinge loss of SLiC (arXiv 2305.10425), IPO (arXiv 2310.12036, equation 17, per token, as its authors confirmed to
    TRL), CPO (arXiv 2401.08417, equation 3), SimPO (arXiv 2405.14734, equation 6).
    """
    beta = settings.strength(kind)
    chosen, rejected = sums.scores(settings.averages(kind))
    gap = chosen - rejected
    if kind == "simpo":
        gap = gap - settings.simpo_gamma / beta
    if settings.loss_type == "hinge":
        return (1 - beta * gap).relu()
    if settings.loss_type == "ipo":
        return (gap - 1 / (2 * beta)) ** 2
    wrong = settings.label_smoothing
    right = -logsigmoid(beta * gap)
    flipped = -logsigmoid(-beta * gap)
    if settings.loss_type == "robust":
        return ((1 - wrong) * right - wrong * flipped) / (1 - 2 * wrong)
    return (1 - wrong) * right + wrong * flipped


def _orpo(sums: PairSums, beta: float) -> Tensor:
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), with the odds of mean log-probs (arXiv 2403.07691,
    equation 7)."""
    chosen, rejected = sums.scores(averaged=True)
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)). p is kept below 1 by one step of float32, because the result is undefined for p = 1."""
    below = logprob.clamp(max=-(2.0**-23))
    return below - torch.log(-torch.expm1(below))


def _kto(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """1 - sigmoid(beta (score - kl)) for desirable completions, 1 - sigmoid(beta (kl - score)) for undesirable ones.

    Each loss is multiplied by its weight (KTO, arXiv 2402.01306, equation 8).
    """
    beta = update.settings.strength("kto")
    chosen, rejected = sums.scores(averaged=False)
    desirable = torch.sigmoid(-beta * (chosen - update.kl)) * update.settings.desirable_weight
    undesirable = torch.sigmoid(-beta * (update.kl - rejected)) * update.settings.undesirable_weight
    return torch.where(sums.chosen_tokens > 0, desirable, undesirable)


def _bradley_terry(sums: PairSums, centering: float) -> Tensor:
    """-log sigmoid(chosen - rejected) of reward-model scores (arXiv 2203.02155, equation 1), plus ``centering`` times
    their squared sum (arXiv 2312.09244)."""
    return -logsigmoid(sums.chosen - sums.rejected) + centering * (sums.chosen + sums.rejected) ** 2


def rewards(sums: PairSums, update: PreferenceUpdate) -> tuple[Tensor, Tensor]:
    """Return the rewards of chosen and rejected completions, as TRL logs them.

    For a reward model, the rewards are its scores. Otherwise the rewards are implicit: beta times the log-ratios.
    """
    if update.kind == "reward_model":
        return sums.chosen, sums.rejected
    beta = update.settings.strength(update.kind)
    chosen, rejected = sums.scores(update.settings.averages(update.kind) and update.kind != "dpo")
    return beta * chosen, beta * rejected


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
        exists = (found.chosen_tokens + found.rejected_tokens) > 0
        losses = preference_losses(_finite(found, exists), update)
        each = torch.where(exists, losses, torch.zeros_like(losses)) / update.count
        by_chosen, by_rejected = torch.autograd.grad(each.sum(), leaves)
    slopes = torch.where(chosen, by_chosen[pair], by_rejected[pair]).to(logprobs.dtype)
    tokens = (found.chosen_tokens + found.rejected_tokens).clamp(min=1)
    values = (each.detach() / tokens)[pair]
    share = update.settings.supervised_weight(update.kind) / max(update.chosen_tokens, 1)
    slopes = slopes - share * chosen.to(slopes.dtype)
    values = values - share * chosen * logprobs.detach().double()
    surrogate = (slopes * (logprobs - logprobs.detach())).sum()
    metrics = _metrics(found, losses.detach(), update, pair, chosen, logprobs, tokens)
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
    tokens: Tensor,
) -> dict[str, Tensor]:
    """Return sums over pairs, or over chosen or rejected completions. A pair whose tokens are on several ranks is
    divided among these ranks."""
    reward_chosen, reward_rejected = (values.detach() for values in rewards(sums, update))
    margin = reward_chosen - reward_rejected
    per_pair = (1.0 / tokens)[pair]
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
