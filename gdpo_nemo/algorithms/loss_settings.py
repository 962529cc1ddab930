"""The settings of the loss: the configuration section `loss_fn`, and what the loss is handed on every rank, in one
class.

The string under a field is what ``gdpo-nemo explain loss_fn.KEY`` prints. No torch here: a configuration is checked
with this before anything else is imported. The classes are not frozen, because OmegaConf makes sections of frozen ones
read-only.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, Iterable, Iterator, Mapping, Optional

from gdpo_nemo.algorithms.losses import AGGREGATIONS, KL_KINDS, LOSSES, Loss
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS, LEVELS, Correction
from gdpo_nemo.algorithms.own_functions import (
    Functions,
    check_options,
    correction_entry,
    is_place,
    loss_entry,
)
from gdpo_nemo.algorithms.ranges import Range, check_numbers

KL_GRADIENTS = ("estimator", "score", "importance")
OLD_LOGPROBS = ("trainer", "sampler")


@dataclass
class OffPolicySettings:
    """Correction for the gap between the sampler's and the trainer's log-probs."""

    mode: Optional[str] = None
    """none; truncate (TIS) weighs by the importance ratio of `level`, at most ratio_max; mask (MIS) by that ratio
    inside both bounds and by 0 outside; icepop by the token's own ratio, with the ratio of `level` only deciding who
    stays. Or a function of your own by its place, `file.py:name`: (log_gap, fields, settings) -> weights. Null:
    truncate where stale samples (rollout.max_staleness above 0) meet loss_fn.old_logprobs trainer or type reinforce,
    with type gspo by the level geometric; none elsewhere, with target_po and with a loss of your own."""
    level: str = "token"
    """Level of the importance ratio: token, sequence or geometric (per-token mean over the sequence)."""
    ratio_max: Annotated[float, Range(above=0, most=math.inf)] = 2.0
    """Upper bound of the importance ratio: truncate cuts there, mask and icepop leave out what is above."""
    ratio_min: Annotated[float, Range(0)] = 0.0
    """Lower bound of the importance ratio; mask and icepop, which act on both sides, leave out what is below."""
    sequence_mask_threshold: Annotated[Optional[float], Range()] = None
    """Mask sequences with negative advantage whose mean log-prob gap exceeds this (DeepSeek-V3.2); null: off."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Options of a function of your own: its parameters behind (log_gap, fields, settings)."""

    def check(self, functions: Functions | None = None) -> None:
        """Refuse values that mean nothing. Raises ValueError; the message begins with the key."""
        if not is_place(self.correction):
            _among("off_policy.mode", self.correction, CORRECTIONS)
        _among("off_policy.level", self.level, LEVELS)
        if functions is not None or not is_place(self.correction):
            with _named("off_policy.mode", self.correction):
                known = correction_entry(self.correction, functions).options
            with _named("off_policy.options"):
                check_options(self.options, known, self.correction)
        check_numbers(self, "off_policy.")
        if not self.ratio_min < self.ratio_max:
            raise ValueError(
                f"off_policy.ratio_min: must be below off_policy.ratio_max, got {self.ratio_min} and {self.ratio_max}"
            )

    @property
    def correction(self) -> str:
        """The mode; none if it is null. What null means for a run is in `resolved_loss` of the config package."""
        return self.mode or "none"

    @property
    def by_token(self) -> bool:
        """Whether tokens of one sequence may get unlike weights."""
        return correction_entry(self.correction).by_token or (self.correction != "none" and self.level == "token")


@dataclass
class LossSettings:
    """The policy-gradient loss. Every mean is over the global batch, whatever the layout."""

    # The driver spends `aggregation`, `constant_length`, `old_logprobs`, `mask_truncated`, `target_*` and `*_cov_*`:
    # they are in the token weights, the old log-probs, the advantages and the marks that reach a rank; and it gives
    # `entropy_bonus` the value that `use_adaptive_entropy` found.
    type: str = "clipped_pg"
    """clipped_pg, gspo, cispo, clip_cov, kl_cov, target_po or reinforce, or a function of your own by its place,
    `file.py:name` (see `examples/sapo.py`). gspo takes importance corrections (off_policy) of whole sequences only."""
    ratio_clip_min: Annotated[float, Range(0, 1)] = 0.2
    """Lower clip: the ratio is clipped at 1 - ratio_clip_min."""
    ratio_clip_max: Annotated[float, Range(0)] = 0.28
    """Upper clip: the ratio is clipped at 1 + ratio_clip_max."""
    ratio_clip_c: Annotated[Optional[float], Range(above=1)] = None
    """Dual clip for negative advantages (> 1); null: off."""
    aggregation: str = "token_mean"
    """token_mean, sequence_mean (mean of the sequences' token means), sequence_sum (mean of their sums; with type gspo:
    LUSPO) or constant (Dr. GRPO)."""
    constant_length: Annotated[Optional[int], Range(1)] = None
    """Length by which `aggregation: constant` divides; null: all that the policy may write in one trajectory,
    rollout.turns.max_tokens, or without it policy.generation.max_new_tokens times rollout.turns.max_turns."""
    old_logprobs: Optional[str] = None
    """Denominator of the ratio: trainer or sampler. Null: trainer when on-policy and with type reinforce, which has no
    ratio; sampler when rollout.max_staleness > 0."""
    reference_policy_kl_penalty: Annotated[float, Range(0)] = 0.0
    """Weight of the KL penalty to the starting model; 0 keeps no reference model."""
    reference_policy_kl_type: str = "k3"
    """Estimator of that KL: k1, k2, k3, abs or mse."""
    reference_policy_kl_gradient: str = "estimator"
    """estimator: the gradient of that estimator alone. score: plus that of the probability of having drawn the token
    (a weight of pi over its own detached value), which for k1 and k3 gives the reverse KL's gradient, as NeMo-RL has
    it. importance: the weight is pi over the sampler's probability (NeMo-RL's use_on_policy_kl_approximation)."""
    kl_input_clamp_value: Annotated[Optional[float], Range(above=0)] = 20.0
    """The log-ratio to the starting model is clamped to plus and minus this before the estimator; null: not at all."""
    kl_output_clamp_value: Annotated[Optional[float], Range(above=0)] = None
    """A token's KL estimate is clamped to plus and minus this, and has no gradient beyond it; null: not clamped."""
    entropy_bonus: Annotated[float, Range()] = 0.0
    """Weight of the policy's entropy, added to the objective; with use_adaptive_entropy the one to begin with."""
    use_adaptive_entropy: bool = False
    """Move the weight of the entropy after every update, by entropy_coef_delta, up where the entropy is at
    entropy_target or below and else down, and use it only where the last update's was (Skywork-OR1; TRL)."""
    entropy_target: Annotated[float, Range(above=0)] = 0.2
    """Entropy that use_adaptive_entropy aims at, nats per token."""
    entropy_coef_delta: Annotated[float, Range(above=0)] = 0.005
    """Change of the weight in one update."""
    entropy_coef_min: Annotated[float, Range(0)] = 0.0
    """Smallest weight."""
    entropy_coef_max: Annotated[float, Range(0)] = 1.0
    """Largest weight."""
    mask_truncated: bool = False
    """Leave samples that hit the length limit out of the loss."""
    target_temperature: Annotated[float, Range(above=0)] = 1.0
    """Temperature eta of target_po's target distribution."""
    target_length_normalize: bool = True
    """Whether target_po divides sequence log-probs by the sequence length."""
    clip_cov_ratio: Annotated[float, Range(above=0, most=1)] = 0.0002
    """Share of an update's tokens that clip_cov takes the gradient from, at least one token; its paper takes 2e-4."""
    clip_cov_lb: Annotated[float, Range()] = 1.0
    """Lower bound of the covariance of log-prob and advantage of those tokens."""
    clip_cov_ub: Annotated[float, Range()] = 5.0
    """Upper bound of that covariance."""
    kl_cov_ratio: Annotated[float, Range(above=0, most=1)] = 0.002
    """Share of an update's tokens, those of the largest covariance, that kl_cov holds near the old policy, at least one
    token; its paper takes 2e-3 for 7B and 2e-4 for 32B."""
    kl_cov_coef: Annotated[float, Range(0)] = 1.0
    """Weight of the absolute log-ratio to the old policy of those tokens."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Options of a function of your own: its parameters behind (logprobs, fields, settings)."""
    off_policy: OffPolicySettings = field(default_factory=OffPolicySettings)

    def check(self, functions: Functions | None = None) -> None:
        """Refuse values and combinations that mean nothing. Raises ValueError; the message begins with the key.

        Args:
            functions: the user's own by their places; without them, what these places name is taken for granted.
        """
        if not is_place(self.type):
            _among("type", self.type, LOSSES)
        if functions is not None or not is_place(self.type):
            with _named("type", self.type):
                known = loss_entry(self.type, functions).options
            with _named("options"):
                check_options(self.options, known, self.type)
        _among("aggregation", self.aggregation, AGGREGATIONS)
        _among("reference_policy_kl_type", self.reference_policy_kl_type, KL_KINDS)
        _among("reference_policy_kl_gradient", self.reference_policy_kl_gradient, KL_GRADIENTS)
        _among("old_logprobs", self.old_logprobs, (None, *OLD_LOGPROBS))
        check_numbers(self)
        self._check_entropy()
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb: must be below clip_cov_ub, got {self.clip_cov_lb} and {self.clip_cov_ub}")
        self.off_policy.check(functions)
        if self.old_logprobs == "sampler" and not loss_entry(self.type).has_ratio:
            raise ValueError(
                f"old_logprobs: sampler has no effect with type {self.type}, which has no ratio to correct the "
                "sampler's samples by; use trainer, or null"
            )
        if self.old_logprobs == "sampler" and self.off_policy.correction != "none":
            raise ValueError(
                "off_policy.mode: has no effect with old_logprobs: sampler, whose ratio is that very correction"
            )
        if loss_entry(self.type).by_sequence and self.off_policy.by_token:
            raise ValueError(
                "off_policy: unlike weights for the tokens of a sequence (mode icepop, or level token) take the "
                f"gradient of type {self.type} away from that of the sequence; use mode truncate or mask with level "
                "sequence or geometric, or mode none"
            )

    def _check_entropy(self) -> None:
        if not self.entropy_coef_min <= self.entropy_coef_max:
            raise ValueError(
                "entropy_coef_min: must be at most entropy_coef_max, got "
                f"{self.entropy_coef_min} and {self.entropy_coef_max}"
            )
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_bonus <= self.entropy_coef_max:
            raise ValueError(
                "entropy_bonus: use_adaptive_entropy begins with it, so it must be between entropy_coef_min and "
                f"entropy_coef_max, got {self.entropy_bonus}"
            )

    def why_all_sequences(self, functions: Functions | None = None) -> str | None:
        """What the gradient takes from sequences of advantage 0; None: nothing, they may be left out of an update."""
        if self.reference_policy_kl_penalty:
            return "loss_fn.reference_policy_kl_penalty holds every sequence near the starting model"
        if self.entropy_bonus or self.use_adaptive_entropy:
            return f"loss_fn.{'entropy_bonus' if self.entropy_bonus else 'use_adaptive_entropy'} counts every sequence"
        entries: dict[str, Loss | Correction] = {
            f"type {self.type}": loss_entry(self.type, functions),
            f"off_policy.mode {self.off_policy.correction}": correction_entry(self.off_policy.correction, functions),
        }
        for name, entry in entries.items():
            if not entry.skips_zero_advantage:
                return (
                    f"loss_fn.{name} may read every sequence; a function of your own that gives those of advantage 0 "
                    "no "
                    "gradient, and takes nothing from them for others, says so: FUNCTION.skips_zero_advantage = True"
                )
        return None

    @property
    def reads_staleness(self) -> bool:
        """Whether loss or correction ask how old the weights were that sampled each token."""
        return loss_entry(self.type).reads_staleness or correction_entry(self.off_policy.correction).reads_staleness

    @property
    def places(self) -> tuple[str, ...]:
        """Where the functions of the user's own are that these settings name."""
        return tuple(name for name in (self.type, self.off_policy.correction) if is_place(name))

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> LossSettings:
        """The settings in a plain `loss_fn` mapping, with `off_policy` as a nested one."""
        values = dict(section)
        return cls(**{**values, "off_policy": OffPolicySettings(**values.get("off_policy", {}))})


@contextlib.contextmanager
def _named(*words: str) -> Iterator[None]:
    """Put key and value before what is wrong with them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{': '.join(words)}: {error}") from None


def _among(key: str, value: Any, known: Iterable[Any]) -> None:
    if value not in known:
        raise ValueError(f"{key}: unknown {value!r}; known: {', '.join(map(str, known))}")
