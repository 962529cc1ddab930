"""What the policy's ranks send back to the driver, in types that need neither torch nor Megatron to be read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class UpdateResult:
    """One optimizer update as every rank sees it.

    ``sums`` add up over the update's completion tokens (`tokens` counts them), ``maxima`` are maxima over them.
    ``skipped`` says that loss or gradient was not finite, so that no weight changed.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    sums: dict[str, float]
    maxima: dict[str, float]
    packing: dict[str, float] = field(default_factory=dict)
    """How the update was packed (``data.packing.measure``)."""
    sequences: int = 0
    """Sequences of the update."""
    skipped_sequences: int | None = None
    """Of these left out by ``policy.skip_zero_advantage``; None where it is off."""


@dataclass
class TokenValues:
    """Values of the completion tokens that the policy wrote: ``values[i]`` belongs to token ``offset[i]`` of the
    completion at ``sequence[i]``."""

    sequence: np.ndarray
    offset: np.ndarray
    values: np.ndarray
    """float32 [tokens], or [tokens, values of each]."""
