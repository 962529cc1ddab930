"""Settings that all estimators share, and presets for published variants of GDPO.

A preset reproduces the published formula. All arithmetic is float64, so the rounding noise of float32 implementations
is not reproduced. Numerical differences between the variants are in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gdpo_nemo.algorithms.noise import read_noise
from gdpo_nemo.algorithms.table import nearest


@dataclass(frozen=True)
class Settings:
    """Settings of the group statistics and the batch norm. The defaults are gdpo_nemo's variant of GDPO."""

    epsilon: float = 1e-6
    """Constant added to the standard deviation of each group."""
    batch_norm: bool = True
    """Standardise the advantages over the batch (equation 6 of the GDPO paper)."""
    batch_epsilon: float | None = None
    """Constant added to the standard deviation of the batch; None: the value of `epsilon`."""
    batch_epsilon_inside: bool = False
    """Add `batch_epsilon` to the variance, inside the square root."""
    batch_unit: Literal["sequence", "token"] = "sequence"
    """Unit of the batch statistics: sequence or token. "token" weights each sequence by its length."""
    batch_rows: Literal["live", "scored", "kept"] = "live"
    """Rows that the batch statistics include. "live": rows with a training signal, that is, with a weighted
    component that is present and varies in the group. "scored": all rows with a reward. "kept": all rows with a reward
    that the estimator does not drop (gd2po, as in its authors' code).

    With "scored", zero-variance groups reduce the standard deviation of the batch, which enlarges all other advantages.
    """
    residue: float = 1e-9
    """Threshold below which the rewards of a batch are considered to cancel, and all its advantages are set to 0. A
    threshold of 0 disables this check.

    The threshold applies to the standard deviation without epsilon, as a fraction of the size of the terms. Below this
    threshold, only rounding errors and the effect of epsilon remain, and the batch norm would scale them to full size.
    """
    ddof: int = 1
    """1: sample standard deviation; 0: population standard deviation."""
    missing: Literal["exclude", "zero", "error"] = "exclude"
    """Treatment of missing rewards: exclude them from the statistics, count them as 0, or raise an error."""
    singleton: Literal["zero", "raw"] = "zero"
    """Score in a group with only one present value: 0, or the raw reward."""
    single_reward: Literal["gdpo", "grpo", "error"] = "gdpo"
    """Treatment of a single weighted component: as in GDPO (equal to GRPO up to one scalar per batch), as in GRPO
    (without the batch norm), or an error."""
    leave_one_out: bool = False
    """Use mean and standard deviation of the other samples in the group."""
    equal_peers: Literal["divide", "raw"] = "divide"
    """Score of a sample, with `leave_one_out`, whose other samples have equal rewards, so that their deviation is 0.

    divide: divide by the standard deviation of the whole group. raw: do not divide, as in NeMo-RL. An undivided score
    depends on the unit of the reward, and the batch norm may then reverse the signs of the other samples.
    """
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the centred rewards (of each component, or of the sum).

    group: standard deviation of the group. batch: standard deviation of the batch (named batch in TRL, arXiv
    2508.08221). none: no division (NeMo-RL: normalize_rewards false).
    """
    exact_zero: bool = True
    """Give samples of groups with zero range a score of exactly 0. False: only epsilon bounds their rounding noise."""
    noise: Mapping[str, Any] = field(default_factory=dict)
    """Measurement error of components, by name (`noise.read_noise`). Each group's z-scores are multiplied by the share
    of its variance that is not error. With error rates, the rewards must already be corrected (`noise.corrected`)."""

    def __post_init__(self) -> None:
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}; {nearest(getattr(self, name), choices)}")
        for name in ("epsilon", "residue"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof must be 0 or 1, got {self.ddof}")
        for name, value in self.noise.items():
            read_noise(name, value)

    @property
    def batch_eps(self) -> float:
        """Resolved value of `batch_epsilon`."""
        return self.epsilon if self.batch_epsilon is None else self.batch_epsilon


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return the valid values of each setting that has a fixed list of values."""
    hints = get_type_hints(Settings)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


SETTING_NAMES = tuple(field.name for field in fields(Settings))

PRESETS: dict[str, Settings] = {
    "paper": Settings(batch_rows="scored", residue=0.0),
    "trl": Settings(epsilon=1e-4, batch_rows="scored", residue=0.0, exact_zero=False),
    "trl_fork": Settings(
        epsilon=1e-4, batch_rows="scored", residue=0.0, exact_zero=False, missing="zero", single_reward="grpo"
    ),
    "verl": Settings(
        batch_epsilon=1e-8,
        batch_epsilon_inside=True,
        batch_unit="token",
        batch_rows="scored",
        residue=0.0,
        exact_zero=False,
        missing="error",
        singleton="raw",
    ),
    "ms_swift": Settings(epsilon=1e-8, batch_rows="scored", residue=0.0, exact_zero=False),
    "nemo_rl": Settings(
        batch_epsilon=0.0,
        batch_rows="scored",
        residue=0.0,
        missing="zero",
        single_reward="error",
        equal_peers="raw",
    ),
}
"""Published variants of GDPO, with these differences from the defaults:

* paper: arXiv 2601.05242, equations 4-7, over all sequences of the batch.
* trl: Hugging Face TRL `normalize_then_sum`. Epsilon is 1e-4. Constant groups are handled only by epsilon.
* trl_fork: the TRL version of GDPO's authors. Missing rewards become 0 before the statistics, which is biased; a single
  reward component is treated as in GRPO.
* verl: token-weighted whitening. Long answers dominate mean and variance, so group means are not 0 and signs can flip.
  A group with one sample uses its raw reward. Requires `lengths`.
* ms_swift: like TRL with epsilon 1e-8, which enlarges the float noise of constant groups. In ms-swift itself, a sample
  without any reward counts as 0 in the batch norm and gets an advantage.
* nemo_rl: missing rewards become 0, the batch norm has no epsilon, and a single component is an error. NeMo-RL's
  default configuration also enables `leave_one_out`, but its GDPO recipes do not. With `leave_one_out`, versions before
  September 2026 divide by the float32 rounding noise of equal rewards that float32 cannot represent (0.95, 0.3); the
  preset does not divide them, like later versions.

A component of weight 0 does not affect any of these variants. In TRL itself, such a component makes a row count as
scored even if the row has no other reward.
"""
