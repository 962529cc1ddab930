"""The settings of preference losses: the configuration section `preference`, and what a rank is handed of an update.

The string under a field is what ``gdpo-nemo explain preference.KEY`` prints. No torch here: a configuration is checked
with this before anything else is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Optional

from gdpo_nemo.algorithms.own_functions import Functions
from gdpo_nemo.algorithms.ranges import Range, check_numbers

LOSS_TYPES = {
    "dpo": ("sigmoid", "hinge", "ipo", "robust"),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "simpo": ("sigmoid",),
    "orpo": ("sigmoid",),
    "kto": ("sigmoid",),
    "reward_model": ("sigmoid",),
}
"""Objectives, and the values of `preference.loss_type` that each knows."""
PAIRED = ("dpo", "cpo", "simpo", "orpo", "reward_model")
"""Objectives of pairs; KTO's is one of single completions."""
WITH_REFERENCE = ("dpo", "kto")
"""Objectives that ask for log-probs of the starting model."""
_SMOOTHED = ("sigmoid", "robust")
_SINGLE_READERS = {
    "simpo_gamma": "simpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "center_rewards_coefficient": "reward_model",
}
"""Options that one objective alone reads."""


@dataclass
class PreferenceSettings:
    """The objective of `algorithm.type` dpo, kto, orpo, simpo, cpo and reward_model. Names are TRL's where it has
    them."""

    loss_type: str = "sigmoid"
    """Of dpo: sigmoid, hinge, ipo or robust; of cpo: sigmoid, hinge or ipo. The others have one form each."""
    beta: Annotated[Optional[float], Range(above=0)] = None
    """Strength of the preference: what log-probs (for dpo and kto: their distance to the starting model) are multiplied
    with; for ipo its tau, for orpo the weight of the odds ratio. Null: 0.1, and 2.0 for simpo."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Share of pairs whose labels are taken to be wrong, 0 to below 0.5: cDPO with sigmoid, robust DPO with robust; the
    same for cpo and simpo."""
    reference_free: bool = False
    """Whether dpo takes the starting model to give every answer the same log-prob, so that none is kept."""
    length_normalize: Optional[bool] = None
    """Whether an answer counts by the mean log-prob of its tokens and not by their sum. Null: as published and as in
    TRL, for simpo and orpo, and for loss_type ipo."""
    rpo_alpha: Annotated[Optional[float], Range(0)] = None
    """Weight of the cross-entropy of the chosen answers, mean over their tokens (RPO; cpo_alpha in TRL). Null: 1 for
    cpo and orpo, which are published with it, and 0 for the others."""
    simpo_gamma: Annotated[float, Range(0)] = 0.5
    """Margin that simpo asks for between the rewards of the two answers."""
    desirable_weight: Annotated[float, Range(0)] = 1.0
    """Weight of kto's desirable answers."""
    undesirable_weight: Annotated[float, Range(0)] = 1.0
    """Weight of kto's undesirable answers."""
    center_rewards_coefficient: Annotated[Optional[float], Range(0)] = None
    """Weight of the squared sum of both rewards of a pair in the loss of reward_model, which keeps their mean near 0
    (arXiv 2312.09244); TRL suggests 0.01. Null: no such term."""

    def check(self, kind: str) -> None:
        """Refuse values that mean nothing to the objective ``kind``. Raises ValueError; the message begins with the
        key."""
        if self.loss_type not in LOSS_TYPES[kind]:
            known = ", ".join(LOSS_TYPES[kind])
            raise ValueError(f"loss_type: {self.loss_type!r} is none of algorithm {kind}; known: {known}")
        check_numbers(self)
        if self.label_smoothing and (kind in ("kto", "orpo") or self.loss_type not in _SMOOTHED):
            raise ValueError(f"label_smoothing: has no effect on {kind} with loss_type {self.loss_type}")
        if self.reference_free and kind != "dpo":
            raise ValueError(f"reference_free: is a choice of algorithm dpo; {kind} has none")
        if kind in ("orpo", "kto") and self.length_normalize is not None and self.length_normalize != (kind == "orpo"):
            raise ValueError(f"length_normalize: {kind} is published with {str(kind == 'orpo').lower()} alone")
        if kind == "kto" and self.rpo_alpha:
            raise ValueError("rpo_alpha: kto has no chosen answers whose cross-entropy could be added")
        self._check_readers(kind)

    def _check_readers(self, kind: str) -> None:
        changed = {name for name in vars(self) if getattr(self, name) != getattr(PreferenceSettings(), name)}
        for name, reader in _SINGLE_READERS.items():
            if kind != reader and name in changed:
                raise ValueError(f"{name}: has no effect unless algorithm.type is {reader}")
        for option in fields(self) if kind == "reward_model" else ():
            if option.name in changed and option.name != "center_rewards_coefficient":
                raise ValueError(f"{option.name}: has no effect on reward_model, whose scores are no log-probs")

    def strength(self, kind: str) -> float:
        """``beta`` with its default for the objective."""
        return self.beta if self.beta is not None else 2.0 if kind == "simpo" else 0.1

    def averages(self, kind: str) -> bool:
        """``length_normalize`` with its default for the objective."""
        if self.length_normalize is not None:
            return self.length_normalize
        return kind in ("simpo", "orpo") or self.loss_type == "ipo"

    def supervised_weight(self, kind: str) -> float:
        """``rpo_alpha`` with its default for the objective."""
        return self.rpo_alpha if self.rpo_alpha is not None else float(kind in ("cpo", "orpo"))

    def needs_reference(self, kind: str) -> bool:
        """Whether log-probs of the starting model are asked for."""
        return kind in WITH_REFERENCE and not self.reference_free


@dataclass(frozen=True)
class PreferenceUpdate:
    """What every rank is told of an update of preference training, in place of ``LossSettings``."""

    kind: str
    """dpo, kto, orpo, simpo, cpo or reward_model"""
    settings: PreferenceSettings = field(default_factory=PreferenceSettings)
    count: int = 1
    """Pairs of the whole update; of kto: its completions."""
    chosen_tokens: int = 1
    """Trained tokens of the chosen answers of the whole update."""
    kl: float = 0.0
    """KTO's estimate of the KL to the starting model, nats per completion, never negative."""

    places: tuple[str, ...] = ()
    """No function of the user's own is in it."""
    entropy_bonus: float = 0.0
    """As the field of ``LossSettings``."""

    def why_all_sequences(self, functions: Functions | None = None) -> str:
        """As the method of ``LossSettings``: no sequence may be left out."""
        return f"algorithm {self.kind} compares completions, whose advantages say nothing"
