"""Objectives of preference training: losses, properties and settings of DPO, CPO, SimPO, ORPO, KTO and reward models.

A loss is a function ``(sums, update)`` that returns the loss of each pair, [pairs], from sums over whole completions.
`PREFERENCES` lists the objectives. `PreferenceSettings` is the config section `preference`, and ``gdpo-nemo explain
preference.KEY`` prints the docstring of a field. This module does not import torch, so that a config can be checked
quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated

from gdpo_nemo.algorithms.ranges import Range, check_numbers

if TYPE_CHECKING:
    from torch import Tensor


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

    @property
    def tokens(self) -> Tensor:
        """Number of tokens of both completions."""
        return self.chosen_tokens + self.rejected_tokens

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


def _contrast(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """Return losses of the score difference, chosen minus rejected.

    DPO (arXiv 2305.18290, equation 7), cDPO with label smoothing (Mitchell 2023), robust DPO (arXiv 2403.00409), the
    hinge loss of SLiC (arXiv 2305.10425), IPO (arXiv 2310.12036, equation 17, per token, as its authors confirmed to
    TRL), CPO (arXiv 2401.08417, equation 3).
    """
    return _of_gap(_gap(sums, update), update)


def _simpo(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """Return losses of the score difference minus a target margin (SimPO, arXiv 2405.14734, equation 6)."""
    return _of_gap(_gap(sums, update) - update.settings.simpo_gamma / update.beta, update)


def _gap(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    chosen, rejected = sums.scores(update.settings.averages(update.kind))
    return chosen - rejected


def _of_gap(gap: Tensor, update: PreferenceUpdate) -> Tensor:
    beta = update.beta
    loss_type = update.settings.loss_type
    if loss_type == "hinge":
        return (1 - beta * gap).relu()
    if loss_type == "ipo":
        return (gap - 1 / (2 * beta)) ** 2
    wrong = update.settings.label_smoothing
    right = -_log_sigmoid(beta * gap)
    flipped = -_log_sigmoid(-beta * gap)
    if loss_type == "robust":
        return ((1 - wrong) * right - wrong * flipped) / (1 - 2 * wrong)
    return (1 - wrong) * right + wrong * flipped


def _orpo(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), with the odds of mean log-probs (arXiv 2403.07691,
    equation 7)."""
    chosen, rejected = sums.scores(averaged=True)
    return -update.beta * _log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)). p is kept below 1 by one step of float32, because the result is undefined for p = 1."""
    below = logprob.clamp(max=-(2.0**-23))
    return below - (-below.expm1()).log()


def _kto(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """1 - sigmoid(beta (score - kl)) for desirable completions, 1 - sigmoid(beta (kl - score)) for undesirable ones.

    Each loss is multiplied by its weight (KTO, arXiv 2402.01306, equation 8).
    """
    chosen, rejected = sums.scores(averaged=False)
    desirable = (-update.beta * (chosen - update.kl)).sigmoid() * update.settings.desirable_weight
    undesirable = (-update.beta * (update.kl - rejected)).sigmoid() * update.settings.undesirable_weight
    return desirable.where(sums.chosen_tokens > 0, undesirable)


def _bradley_terry(sums: PairSums, update: PreferenceUpdate) -> Tensor:
    """-log sigmoid(chosen - rejected) of reward-model scores (arXiv 2203.02155, equation 1), plus
    ``center_rewards_coefficient`` times their squared sum (arXiv 2312.09244)."""
    centering = update.settings.center_rewards_coefficient or 0.0
    return -_log_sigmoid(sums.chosen - sums.rejected) + centering * (sums.chosen + sums.rejected) ** 2


def _log_sigmoid(values: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)


@dataclass(frozen=True)
class PreferenceObjective:
    """Registry entry of an objective of preference training, which is also a value of ``algorithm.type``."""

    loss: Callable[[PairSums, PreferenceUpdate], Tensor]
    loss_types: tuple[str, ...] = ("sigmoid",)
    """Supported values of `preference.loss_type`."""
    paired: bool = True
    """True if rows are pairs of completions. False if they are single completions with a label."""
    uses_reference: bool = False
    """True if scores are log-ratios to the initial model."""
    estimates_kl: bool = False
    """True if the loss needs `PreferenceUpdate.kl`."""
    trains_scores: bool = False
    """True if the policy is a reward model, whose scores take the place of log-probs."""
    beta: float = 0.1
    """Default of `preference.beta`."""
    averaged: bool = False
    """Default of `preference.length_normalize`, except with loss_type ipo."""
    fixed_average: bool = False
    """True if only the default of `preference.length_normalize` is supported."""
    smoothed: bool = True
    """True if `preference.label_smoothing` has an effect."""
    supervised_weight: float = 0.0
    """Default of `preference.rpo_alpha`."""
    reads: tuple[str, ...] = ()
    """Keys of `preference` that only some objectives read."""


PREFERENCES = {
    "dpo": PreferenceObjective(
        _contrast, ("sigmoid", "hinge", "ipo", "robust"), uses_reference=True, reads=("reference_free",)
    ),
    "cpo": PreferenceObjective(_contrast, ("sigmoid", "hinge", "ipo"), supervised_weight=1.0),
    "simpo": PreferenceObjective(_simpo, beta=2.0, averaged=True, reads=("simpo_gamma",)),
    "orpo": PreferenceObjective(_orpo, averaged=True, fixed_average=True, smoothed=False, supervised_weight=1.0),
    "kto": PreferenceObjective(
        _kto,
        paired=False,
        uses_reference=True,
        estimates_kl=True,
        fixed_average=True,
        smoothed=False,
        reads=("desirable_weight", "undesirable_weight"),
    ),
    "reward_model": PreferenceObjective(_bradley_terry, trains_scores=True, reads=("center_rewards_coefficient",)),
}
"""Objectives by name. A new objective only needs an entry here, and a field of `PreferenceSettings` for each new
option."""


def readers_of(key: str) -> tuple[str, ...]:
    """Return the objectives that read a key of `preference`. Empty if all objectives read the key."""
    return tuple(name for name, objective in PREFERENCES.items() if key in objective.reads)


_SMOOTHED = ("sigmoid", "robust")


@dataclass
class PreferenceSettings:
    """Objective for `algorithm.type` dpo, kto, orpo, simpo, cpo or reward_model. Keys have the same names as in TRL if
    they exist there."""

    loss_type: str = "sigmoid"
    """Loss function. dpo supports sigmoid, hinge, ipo and robust; cpo supports sigmoid, hinge and ipo. The other
    objectives support only sigmoid."""
    beta: Annotated[float | None, Range(above=0)] = None
    """Strength of the preference: the factor of the log-probs, or with dpo and kto of the log-ratios to the initial
    model. With loss_type ipo, this is tau. With orpo, it is the weight of the odds ratio. Null: 2.0 for simpo, 0.1 for
    the other algorithms."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Assumed fraction of wrong preference labels, from 0 to below 0.5. For dpo, loss_type sigmoid is then cDPO and
    robust is robust DPO. Label smoothing is also supported by cpo and simpo."""
    reference_free: bool = False
    """Use no reference model, and assume that it would give all answers the same log-prob. Supported by dpo only."""
    length_normalize: bool | None = None
    """Use the mean instead of the sum of an answer's token log-probs. Null: as published and as in TRL, which is the
    mean for simpo, orpo and loss_type ipo, and the sum otherwise."""
    rpo_alpha: Annotated[float | None, Range(0)] = None
    """Weight of an additional cross-entropy loss on the chosen answers, averaged over their tokens (RPO, or cpo_alpha
    in TRL). Null: 1 for cpo and orpo, which are published with this loss, and 0 for the other algorithms."""
    simpo_gamma: Annotated[float, Range(0)] = 0.5
    """Target margin of simpo between the rewards of the chosen and the rejected answer."""
    desirable_weight: Annotated[float, Range(0)] = 1.0
    """Weight of desirable answers in the kto loss."""
    undesirable_weight: Annotated[float, Range(0)] = 1.0
    """Weight of undesirable answers in the kto loss."""
    center_rewards_coefficient: Annotated[float | None, Range(0)] = None
    """Coefficient of a term that keeps the mean reward of reward_model near 0: the squared sum of both rewards of a
    pair (arXiv 2312.09244). TRL suggests 0.01. Null: the loss has no such term."""

    def check(self, kind: str) -> None:
        """Raise ValueError if a value is not valid for the objective ``kind``.

        Raises:
            ValueError: if a value is invalid. The message begins with the key.
        """
        objective = PREFERENCES[kind]
        if self.loss_type not in objective.loss_types:
            known = ", ".join(objective.loss_types)
            raise ValueError(f"loss_type: {self.loss_type!r} is not supported by algorithm {kind}; supported: {known}")
        check_numbers(self)
        if self.label_smoothing and (not objective.smoothed or self.loss_type not in _SMOOTHED):
            raise ValueError(f"label_smoothing: has no effect on {kind} with loss_type {self.loss_type}")
        if self.reference_free and "reference_free" not in objective.reads:
            known = ", ".join(readers_of("reference_free"))
            raise ValueError(f"reference_free: is only supported by algorithm {known}, not {kind}")
        if objective.fixed_average and self.length_normalize not in (None, objective.averaged):
            raise ValueError(f"length_normalize: must be {str(objective.averaged).lower()} with {kind}, as published")
        if not objective.paired and self.rpo_alpha:
            raise ValueError(f"rpo_alpha: not supported by {kind}, which has no chosen answers")
        self._check_readers(kind, objective)

    def _check_readers(self, kind: str, objective: PreferenceObjective) -> None:
        default = PreferenceSettings()
        for option in fields(self):
            name = option.name
            if getattr(self, name) == getattr(default, name) or name in objective.reads:
                continue
            if readers := readers_of(name):
                raise ValueError(f"{name}: has no effect unless algorithm.type is {' or '.join(readers)}")
            if objective.trains_scores:
                raise ValueError(f"{name}: has no effect on {kind}, whose scores are not log-probs")

    def strength(self, kind: str) -> float:
        """Return ``beta``, or its default for the objective."""
        return PREFERENCES[kind].beta if self.beta is None else self.beta

    def averages(self, kind: str) -> bool:
        """Return ``length_normalize``, or its default for the objective."""
        if self.length_normalize is not None:
            return self.length_normalize
        return PREFERENCES[kind].averaged or self.loss_type == "ipo"

    def supervised_weight(self, kind: str) -> float:
        """Return ``rpo_alpha``, or its default for the objective."""
        return PREFERENCES[kind].supervised_weight if self.rpo_alpha is None else self.rpo_alpha

    def needs_reference(self, kind: str) -> bool:
        """Return True if the objective needs log-probs of the initial model."""
        return PREFERENCES[kind].uses_reference and not self.reference_free


@dataclass(frozen=True)
class PreferenceUpdate:
    """Settings of a preference-training update, sent to every rank in place of ``LossSettings``."""

    kind: str
    """Name of the objective in ``PREFERENCES``."""
    settings: PreferenceSettings = field(default_factory=PreferenceSettings)
    count: int = 1
    """Number of pairs in the whole update; with kto, the number of completions."""
    chosen_tokens: int = 1
    """Number of trained tokens in the chosen answers of the whole update."""
    kl: float = 0.0
    """KTO's estimate of the KL to the initial model in nats per completion, at least 0."""
    entropy_bonus: float = 0.0
    """See ``LossSettings``."""

    @property
    def objective(self) -> PreferenceObjective:
        """Registry entry of the objective."""
        return PREFERENCES[self.kind]

    @property
    def beta(self) -> float:
        """Strength of the preference."""
        return self.settings.strength(self.kind)

    @property
    def reads_every_sequence(self) -> str:
        """Reason why sequences with advantage 0 must not be skipped. See ``LossSettings``."""
        return f"algorithm {self.kind} compares completions and does not use advantages"
