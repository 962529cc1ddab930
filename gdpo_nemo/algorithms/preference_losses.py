"""Losses of preferences between completions: DPO, KTO, ORPO, SimPO, CPO, and Bradley-Terry of a reward model.

A loss here is a function of whole completions: of the sums of their tokens' log-probs. The loss of an update is its
mean over pairs (KTO: over completions), with `rpo_alpha` times the mean cross-entropy of the chosen tokens beside it.

No gradient crosses ranks: the sums are detached and added up over the context-parallel ranks, the loss is
differentiated by them right there, and every token then carries that derivative as the coefficient of its own
log-prob. Both completions of a pair have to be in one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gdpo_nemo.algorithms.policy_loss import LossMetrics
from gdpo_nemo.algorithms.preference_settings import PreferenceSettings, PreferenceUpdate
from gdpo_nemo.algorithms.token_fields import Reduce, TokenFields, required


@dataclass(frozen=True)
class PairSums:
    """Sums over the trained tokens of both completions of each pair; every tensor is [pairs].

    Where only one of the two is there, as for KTO, the tokens of the other are 0.
    """

    chosen: Tensor
    """Log-probs of the policy, summed; of a reward model the completion's score."""
    rejected: Tensor
    reference_chosen: Tensor
    """Log-probs of the starting model, summed; 0 where none is kept."""
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    def scores(self, averaged: bool) -> tuple[Tensor, Tensor]:
        """Log-ratios to the starting model of the chosen and of the rejected completions."""
        chosen = self.chosen - self.reference_chosen
        rejected = self.rejected - self.reference_rejected
        if not averaged:
            return chosen, rejected
        return chosen / self.chosen_tokens.clamp(min=1), rejected / self.rejected_tokens.clamp(min=1)


def preference_losses(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """The loss of each pair [pairs], without the cross-entropy of `rpo_alpha`; of each completion for KTO.

    Raises:
        ValueError: an objective that there is not.
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
    """Losses of the difference of both scores.

    DPO (arXiv 2305.18290 eq. 7), with label smoothing cDPO (Mitchell 2023), robust DPO (arXiv 2403.00409), the hinge of
    SLiC (arXiv 2305.10425), IPO (arXiv 2310.12036 eq. 17; per token, as its authors confirmed to TRL), CPO (arXiv
    2401.08417 eq. 3), SimPO (arXiv 2405.14734 eq. 6).
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
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), odds of the mean log-prob (arXiv 2403.07691 eq. 7)."""
    chosen, rejected = sums.scores(averaged=True)
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)). A token that is certain has none, so p stays below 1 by one step of float32."""
    below = logprob.clamp(max=-(2.0**-23))
    return below - torch.log(-torch.expm1(below))


def _kto(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """1 - sigmoid(beta (score - kl)) for a desirable completion, 1 - sigmoid(beta (kl - score)) for another (arXiv
    2402.01306 eq. 8), with the weights of both."""
    beta = update.settings.strength("kto")
    chosen, rejected = sums.scores(averaged=False)
    desirable = torch.sigmoid(-beta * (chosen - update.kl)) * update.settings.desirable_weight
    undesirable = torch.sigmoid(-beta * (update.kl - rejected)) * update.settings.undesirable_weight
    return torch.where(sums.chosen_tokens > 0, desirable, undesirable)


def _bradley_terry(sums: PairSums, centering: float) -> Tensor:
    """-log sigmoid(chosen - rejected) of the scores of a reward model (arXiv 2203.02155 eq. 1), and ``centering`` times
    the square of their sum (arXiv 2312.09244)."""
    return -logsigmoid(sums.chosen - sums.rejected) + centering * (sums.chosen + sums.rejected) ** 2


def rewards(sums: PairSums, update: PreferenceUpdate) -> tuple[Tensor, Tensor]:
    """Implicit rewards, beta times the scores, of chosen and rejected completions, or those that a reward model gives:
    what TRL logs."""
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
    """This rank's part of an update's loss, of the pairs of one micro-batch.

    Args:
        logprobs: float32 [tokens] with gradient.
        entropy: float32 [tokens], for the metric alone; None if nobody asked for it.
        fields: ``pairs`` says whose a token is; ``reference_logprobs`` are there where the objective asks for them.
        reduce: sums a detached tensor over the context-parallel ranks, all of which call this.

    Returns:
        A scalar whose value and gradient add up, over micro-batches and ranks, to those of the update; and sums of
        metrics over pairs, each pair in parts over its tokens.

    Raises:
        ValueError: the pairs or the log-probs of the starting model are missing.
    """
    pairs = required(fields.pairs, "pairs")
    place = pairs.abs() - 1
    chosen = pairs > 0
    found = _sums(logprobs.detach(), fields, place, chosen, update, reduce)
    leaves = [found.chosen.requires_grad_(), found.rejected.requires_grad_()]
    with torch.enable_grad():
        # A place without tokens is of a pair that another micro-batch has: it counts for nothing.
        there = (found.chosen_tokens + found.rejected_tokens) > 0
        losses = preference_losses(_harmless(found, there), update)
        each = torch.where(there, losses, torch.zeros_like(losses)) / update.count
        by_chosen, by_rejected = torch.autograd.grad(each.sum(), leaves)
    slopes = torch.where(chosen, by_chosen[place], by_rejected[place]).to(logprobs.dtype)
    tokens = (found.chosen_tokens + found.rejected_tokens).clamp(min=1)
    values = (each.detach() / tokens)[place]
    share = update.settings.supervised_weight(update.kind) / max(update.chosen_tokens, 1)
    slopes = slopes - share * chosen.to(slopes.dtype)
    values = values - share * chosen * logprobs.detach().double()
    surrogate = (slopes * (logprobs - logprobs.detach())).sum()
    metrics = _metrics(found, losses.detach(), update, place, chosen, logprobs, tokens)
    if entropy is not None:
        metrics["entropy"] = entropy.detach().double().sum()
    metrics["tokens"] = torch.full((), float(len(logprobs)), dtype=torch.float64, device=logprobs.device)
    return surrogate + values.sum().to(logprobs.dtype), LossMetrics(metrics, {})


def _sums(
    logprobs: Tensor,
    fields: TokenFields,
    place: Tensor,
    chosen: Tensor,
    update: PreferenceUpdate,
    reduce: Reduce | None,
) -> PairSums:
    """The sums of all pairs, over all ranks that share them, in float64 and without gradient."""
    reference = torch.zeros_like(logprobs)
    if update.settings.needs_reference(update.kind):
        reference = required(fields.reference_logprobs, "reference_logprobs")
    columns = [logprobs.double(), reference.double(), torch.ones_like(logprobs, dtype=torch.float64)]
    here = torch.stack([torch.stack([c * chosen for c in columns]), torch.stack([c * ~chosen for c in columns])])
    totals = here.new_zeros(2, 3, fields.num_sequences)
    totals.index_add_(2, place, here)
    if reduce is not None:
        totals = reduce(totals)
    (won, reference_won, won_tokens), (lost, reference_lost, lost_tokens) = (
        half.unbind(0) for half in totals.unbind(0)
    )
    return PairSums(won.clone(), lost.clone(), reference_won, reference_lost, won_tokens, lost_tokens)


def _harmless(sums: PairSums, there: Tensor) -> PairSums:
    """The same sums, and -1 where there is no pair, so that no loss is infinite there, nor its gradient NaN."""
    one = torch.full_like(sums.chosen, -1.0)
    return replace(sums, chosen=sums.chosen.where(there, one), rejected=sums.rejected.where(there, one))


def _metrics(
    sums: PairSums,
    losses: Tensor,
    update: PreferenceUpdate,
    place: Tensor,
    chosen: Tensor,
    logprobs: Tensor,
    tokens: Tensor,
) -> dict[str, Tensor]:
    """Sums over pairs, or over completions of a kind; a pair that several ranks share is counted in parts by each."""
    won, lost = (values.detach() for values in rewards(sums, update))
    of_pair = (1.0 / tokens)[place]
    of_won = chosen / sums.chosen_tokens.clamp(min=1)[place]
    of_lost = ~chosen / sums.rejected_tokens.clamp(min=1)[place]
    both = ((sums.chosen_tokens > 0) & (sums.rejected_tokens > 0)).double()
    values = logprobs.detach().double()
    return {
        "preference_loss": (losses[place] * of_pair).sum(),
        "rewards_chosen": (won[place] * of_won).sum(),
        "rewards_rejected": (lost[place] * of_lost).sum(),
        "rewards_margins": ((won - lost)[place] * both[place] * of_pair).sum(),
        "rewards_accuracies": ((won > lost).double()[place] * both[place] * of_pair).sum(),
        "logps_chosen": (values * chosen).sum(),
        "logps_rejected": (values * ~chosen).sum(),
        "chosen": of_won.sum(),
        "rejected": of_lost.sum(),
        "pairs": (both[place] * of_pair).sum(),
    }
