"""Corrections for tokens that were sampled from other probabilities than the trainer computes.

The sampler (another engine, other kernels, perhaps older weights) drew the tokens with `sampler_logprobs`; the trainer
believes `old_logprobs`. The importance ratio exp(old - sampler) reweights the loss, or tells what to leave out. All of
it is detached, and what is left out has weight exactly 0: no bound is applied after the mask.

A correction is a function (log_gap, fields, settings, **options) -> weights [tokens]; `CORRECTIONS` makes it a value of
`loss_fn.off_policy.mode`. As in `losses.py`, torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdpo_nemo.algorithms.losses import importance_ratio
from gdpo_nemo.algorithms.token_fields import required

if TYPE_CHECKING:
    from torch import Tensor

    from gdpo_nemo.algorithms.loss_settings import OffPolicySettings
    from gdpo_nemo.algorithms.token_fields import TokenFields

LEVELS: dict[str, Callable[[Tensor, TokenFields], Tensor]] = {
    "token": lambda gap, fields: gap,
    "sequence": lambda gap, fields: fields.sequence_sums(gap),
    "geometric": lambda gap, fields: fields.sequence_means(gap),
}
"""What the importance ratio is of: the token, the product over its sequence, or that product's geometric mean."""


def level_ratio(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """The importance ratio rho at `level` [tokens]."""
    return importance_ratio(LEVELS[settings.level](log_gap, fields))


def truncate(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """min(rho, ratio_max) (TIS)."""
    return level_ratio(log_gap, fields, settings).clamp(max=settings.ratio_max)


def mask(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """rho where ratio_min <= rho <= ratio_max, else 0 (MIS)."""
    ratio = level_ratio(log_gap, fields, settings)
    return ratio * _inside(ratio, settings)


def icepop(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """The token's own ratio where ratio_min <= rho <= ratio_max, else 0.

    At level token this is IcePop; at the other levels rho only decides which sequences stay.
    """
    return importance_ratio(log_gap) * _inside(level_ratio(log_gap, fields, settings), settings)


def _inside(ratio: Tensor, settings: OffPolicySettings) -> Tensor:
    return ((ratio >= settings.ratio_min) & (ratio <= settings.ratio_max)).to(ratio.dtype)


@dataclass(frozen=True)
class Correction:
    """An entry of the registry."""

    function: Callable[..., Tensor] | None
    """None: no correction."""
    reads: tuple[str, ...] = ()
    """Keys of `loss_fn.off_policy` that it reads."""
    options: tuple[str, ...] = ()
    """Its own options, the keys of `loss_fn.off_policy.options`."""
    by_token: bool = False
    """Whether tokens of one sequence get unlike weights at every level."""
    reads_staleness: bool = False
    """Whether it reads `TokenFields.staleness`, which is made and sent only then. One of one's own may."""
    skips_zero_advantage: bool = False
    """Whether its weights depend on no other sequence, so that `policy.skip_zero_advantage` may leave some out. A
    function of one's own says so by an attribute of this name."""


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(None, skips_zero_advantage=True),
    "truncate": Correction(truncate, reads=("level", "ratio_max"), skips_zero_advantage=True),
    "mask": Correction(mask, reads=("level", "ratio_max", "ratio_min"), skips_zero_advantage=True),
    "icepop": Correction(icepop, reads=("level", "ratio_max", "ratio_min"), by_token=True, skips_zero_advantage=True),
}
CORRECTION_KEYS = tuple(dict.fromkeys(key for correction in CORRECTIONS.values() for key in correction.reads))
"""Keys of `loss_fn.off_policy` that some corrections read and others do not."""


def sequence_keep_mask(logprobs: Tensor, fields: TokenFields, threshold: float) -> Tensor:
    """0 for the tokens of sequences that are far off-policy and bad, else 1 (DeepSeek-V3.2, arXiv 2512.02556).

    A sequence is left out when its mean of sampler_logprob - logprob exceeds `threshold` **and** its advantage is
    negative. Good samples stay however far they are.

    Returns:
        [tokens]
    """
    gap = (required(fields.sampler_logprobs, "sampler_logprobs") - logprobs.detach()).nan_to_num(nan=0.0)
    far = fields.sequence_means(gap) > threshold
    return (~(far & (fields.advantages < 0))).to(logprobs.dtype)
