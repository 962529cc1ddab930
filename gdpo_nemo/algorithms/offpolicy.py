"""Off-policy corrections, for tokens whose sampling probabilities differ from those that the trainer computes.

The sampler (another engine, other kernels, possibly older weights) sampled the tokens with `sampler_logprobs`. The
trainer computes `old_logprobs`. The importance ratio exp(old - sampler) is used to weight or to mask the loss, without
gradient. Masked tokens have a weight of exactly 0, because no bound is applied after the mask.

A correction is a function (log_gap, fields, settings, **options) -> weights [tokens]. `CORRECTIONS` lists the values of
`loss_fn.off_policy.mode`. Like `losses.py`, this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdpo_nemo.algorithms.losses import importance_ratio, required

if TYPE_CHECKING:
    from torch import Tensor

    from gdpo_nemo.algorithms.loss_settings import OffPolicySettings
    from gdpo_nemo.algorithms.losses import TokenFields

LEVELS: dict[str, Callable[[Tensor, TokenFields], Tensor]] = {
    "token": lambda gap, fields: gap,
    "sequence": lambda gap, fields: fields.sequence_sums(gap),
    "geometric": lambda gap, fields: fields.sequence_means(gap),
}
"""Levels of the importance ratio: token, sequence (product over the sequence) or geometric (geometric mean over the
sequence)."""


def level_ratio(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """Return the importance ratio rho at the configured `level` [tokens]."""
    return importance_ratio(LEVELS[settings.level](log_gap, fields))


def truncate(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """min(rho, ratio_max) (truncated importance sampling, TIS)."""
    return level_ratio(log_gap, fields, settings).clamp(max=settings.ratio_max)


def mask(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """rho if ratio_min <= rho <= ratio_max, otherwise 0 (masked importance sampling, MIS)."""
    ratio = level_ratio(log_gap, fields, settings)
    return ratio * _inside(ratio, settings)


def icepop(log_gap: Tensor, fields: TokenFields, settings: OffPolicySettings) -> Tensor:
    """The token's own ratio if ratio_min <= rho <= ratio_max, otherwise 0.

    At level token this is IcePop. At the other levels, rho only decides which sequences are masked.
    """
    return importance_ratio(log_gap) * _inside(level_ratio(log_gap, fields, settings), settings)


def _inside(ratio: Tensor, settings: OffPolicySettings) -> Tensor:
    return ((ratio >= settings.ratio_min) & (ratio <= settings.ratio_max)).to(ratio.dtype)


@dataclass(frozen=True)
class Correction:
    """Registry entry of an off-policy correction."""

    function: Callable[..., Tensor] | None
    """Function (log_gap, fields, settings, **options) -> weights. None: no correction."""
    reads: tuple[str, ...] = ()
    """Keys of `loss_fn.off_policy` that the correction reads."""
    options: tuple[str, ...] = ()
    """Names of the correction's options, the keys of `loss_fn.off_policy.options`."""
    by_token: bool = False
    """True if tokens of one sequence may get different weights at every level."""
    reads_staleness: bool = False
    """True if the correction may read `TokenFields.staleness`, which is created only then. Always True for a custom
    correction."""
    skips_zero_advantage: bool = False
    """True if the weights do not depend on other sequences, so that `policy.skip_zero_advantage` may skip some
    sequences.

    A custom function declares this with an attribute of the same name.
    """


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(None, skips_zero_advantage=True),
    "truncate": Correction(truncate, reads=("level", "ratio_max"), skips_zero_advantage=True),
    "mask": Correction(mask, reads=("level", "ratio_max", "ratio_min"), skips_zero_advantage=True),
    "icepop": Correction(icepop, reads=("level", "ratio_max", "ratio_min"), by_token=True, skips_zero_advantage=True),
}


def sequence_keep_mask(logprobs: Tensor, fields: TokenFields, threshold: float) -> Tensor:
    """Return a mask that is 0 for tokens of far off-policy sequences with a negative advantage, and 1 for other tokens.

    A sequence is masked if its mean of sampler_logprob - logprob exceeds `threshold` **and** its advantage is negative
    (DeepSeek-V3.2, arXiv 2512.02556). Sequences with a positive advantage are never masked.

    Returns:
        Mask [tokens].
    """
    gap = (required(fields.sampler_logprobs, "sampler_logprobs") - logprobs.detach()).nan_to_num(nan=0.0)
    far = fields.sequence_means(gap) > threshold
    return (~(far & (fields.advantages < 0))).to(logprobs.dtype)
