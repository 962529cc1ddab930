"""Settings of preference losses: the config section `preference`, and the settings of an update that every rank
receives.

``gdpo-nemo explain preference.KEY`` prints the docstring of a field. This module does not import torch, so that a
config can be checked quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Optional

from gdpo_nemo.algorithms.ranges import Range, check_numbers

LOSS_TYPES = {
    "dpo": ("sigmoid", "hinge", "ipo", "robust"),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "simpo": ("sigmoid",),
    "orpo": ("sigmoid",),
    "kto": ("sigmoid",),
    "reward_model": ("sigmoid",),
}
"""Supported values of `preference.loss_type` for each objective."""
PAIRED = ("dpo", "cpo", "simpo", "orpo", "reward_model")
"""Objectives that train on pairs of completions. KTO trains on single completions."""
WITH_REFERENCE = ("dpo", "kto")
"""Objectives that need log-probs of the initial model."""
_SMOOTHED = ("sigmoid", "robust")
_SINGLE_READERS = {
    "simpo_gamma": "simpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "center_rewards_coefficient": "reward_model",
}
"""Options that only one objective reads, with that objective."""


@dataclass
class PreferenceSettings:
    """Objective for `algorithm.type` dpo, kto, orpo, simpo, cpo or reward_model. Keys have the same names as in TRL if
    they exist there."""

    loss_type: str = "sigmoid"
    """Loss function. dpo supports sigmoid, hinge, ipo and robust; cpo supports sigmoid, hinge and ipo. The other
    objectives support only sigmoid."""
    beta: Annotated[Optional[float], Range(above=0)] = None
    """Strength of the preference: the factor of the log-probs, or with dpo and kto of the log-ratios to the initial
    model. With loss_type ipo, this is tau. With orpo, it is the weight of the odds ratio. Null: 2.0 for simpo, 0.1 for
    the other algorithms."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Assumed fraction of wrong preference labels, from 0 to below 0.5. For dpo, loss_type sigmoid is then cDPO and
    robust is robust DPO. Label smoothing is also supported by cpo and simpo."""
    reference_free: bool = False
    """Use no reference model, and assume that it would give all answers the same log-prob. Supported by dpo only."""
    length_normalize: Optional[bool] = None
    """Use the mean instead of the sum of an answer's token log-probs. Null: as published and as in TRL, which is the
    mean for simpo, orpo and loss_type ipo, and the sum otherwise."""
    rpo_alpha: Annotated[Optional[float], Range(0)] = None
    """Weight of an additional cross-entropy loss on the chosen answers, averaged over their tokens (RPO, or cpo_alpha
    in TRL). Null: 1 for cpo and orpo, which are published with this loss, and 0 for the other algorithms."""
    simpo_gamma: Annotated[float, Range(0)] = 0.5
    """Target margin of simpo between the rewards of the chosen and the rejected answer."""
    desirable_weight: Annotated[float, Range(0)] = 1.0
    """Weight of desirable answers in the kto loss."""
    undesirable_weight: Annotated[float, Range(0)] = 1.0
    """Weight of undesirable answers in the kto loss."""
    center_rewards_coefficient: Annotated[Optional[float], Range(0)] = None
    """Coefficient of a term that keeps the mean reward of reward_model near 0: the squared sum of both rewards of a
    pair (arXiv 2312.09244). TRL suggests 0.01. Null: the loss has no such term."""

    def check(self, kind: str) -> None:
        """Raise ValueError if a value is not valid for the objective ``kind``.

        Raises:
            ValueError: if a value is invalid. The message begins with the key.
        """
        if self.loss_type not in LOSS_TYPES[kind]:
            known = ", ".join(LOSS_TYPES[kind])
            raise ValueError(f"loss_type: {self.loss_type!r} is not supported by algorithm {kind}; supported: {known}")
        check_numbers(self)
        if self.label_smoothing and (kind in ("kto", "orpo") or self.loss_type not in _SMOOTHED):
            raise ValueError(f"label_smoothing: has no effect on {kind} with loss_type {self.loss_type}")
        if self.reference_free and kind != "dpo":
            raise ValueError(f"reference_free: is only supported by algorithm dpo, not {kind}")
        if kind in ("orpo", "kto") and self.length_normalize is not None and self.length_normalize != (kind == "orpo"):
            raise ValueError(f"length_normalize: must be {str(kind == 'orpo').lower()} with {kind}, as published")
        if kind == "kto" and self.rpo_alpha:
            raise ValueError("rpo_alpha: not supported by kto, which has no chosen answers")
        self._check_readers(kind)

    def _check_readers(self, kind: str) -> None:
        changed = {name for name in vars(self) if getattr(self, name) != getattr(PreferenceSettings(), name)}
        for name, reader in _SINGLE_READERS.items():
            if kind != reader and name in changed:
                raise ValueError(f"{name}: has no effect unless algorithm.type is {reader}")
        for option in fields(self) if kind == "reward_model" else ():
            if option.name in changed and option.name != "center_rewards_coefficient":
                raise ValueError(f"{option.name}: has no effect on reward_model, whose scores are not log-probs")

    def strength(self, kind: str) -> float:
        """Return ``beta``, or its default for the objective."""
        if self.beta is not None:
            return self.beta
        return 2.0 if kind == "simpo" else 0.1

    def averages(self, kind: str) -> bool:
        """Return ``length_normalize``, or its default for the objective."""
        if self.length_normalize is not None:
            return self.length_normalize
        return kind in ("simpo", "orpo") or self.loss_type == "ipo"

    def supervised_weight(self, kind: str) -> float:
        """Return ``rpo_alpha``, or its default for the objective."""
        return self.rpo_alpha if self.rpo_alpha is not None else float(kind in ("cpo", "orpo"))

    def needs_reference(self, kind: str) -> bool:
        """Return True if the objective needs log-probs of the initial model."""
        return kind in WITH_REFERENCE and not self.reference_free


@dataclass(frozen=True)
class PreferenceUpdate:
    """Settings of a preference-training update, sent to every rank in place of ``LossSettings``."""

    kind: str
    """dpo, kto, orpo, simpo, cpo or reward_model."""
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
    def reads_every_sequence(self) -> str:
        """Reason why sequences with advantage 0 must not be skipped. See ``LossSettings``."""
        return f"algorithm {self.kind} compares completions and does not use advantages"
