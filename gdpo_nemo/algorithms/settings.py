"""Switches that all estimators share, and the published variants of GDPO as named sets of them.

Figures that tell the variants apart are in the tests. What a preset reproduces is the formula; all arithmetic is
float64, so the rounding noise of float32 originals is not reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from gdpo_nemo.algorithms.table import nearest


@dataclass(frozen=True)
class Settings:
    """How group statistics and the batch scale are taken. The defaults are this project's GDPO."""

    epsilon: float = 1e-6
    """Added to every standard deviation of a group."""
    batch_norm: bool = True
    """Standardise the advantages over the batch (eq. 6 of the GDPO paper)."""
    batch_epsilon: float | None = None
    """Added to the standard deviation of the batch; None takes `epsilon`."""
    batch_epsilon_inside: bool = False
    """Add `batch_epsilon` to the variance, inside the root."""
    batch_unit: Literal["sequence", "token"] = "sequence"
    """What the batch statistics average over. "token" weights each sequence by its length."""
    batch_rows: Literal["live", "scored"] = "live"
    """Rows of the batch statistics: those that carry signal (a weighted component that is present and varies in the
    group), or all that have a reward. With "scored", dead groups shrink the batch's standard deviation and so enlarge
    everybody else's advantage."""
    residue: float = 1e-9
    """A batch in which opposed rewards cancel is set to 0: where its standard deviation, epsilon left out, is below
    this share of its terms' own size, only rounding and the trace of epsilon are left, and the batch norm would lift
    those to full size. 0: never."""
    ddof: int = 1
    """1: sample standard deviation; 0: population."""
    missing: Literal["exclude", "zero", "error"] = "exclude"
    """Missing rewards leave the statistics, count as rewards of 0, or are refused."""
    singleton: Literal["zero", "raw"] = "zero"
    """What a group with one present value gives: nothing, or the raw reward."""
    single_reward: Literal["gdpo", "grpo", "error"] = "gdpo"
    """What one component alone means: GDPO (GRPO up to one scalar per batch), plain GRPO, or a refusal."""
    leave_one_out: bool = False
    """Baseline and standard deviation of the other members of the group."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Deviation by which rewards (of each component, or summed) are divided once their group's mean is subtracted: that
    of their group, of the batch (TRL's name for it; arXiv 2508.08221), or none (NeMo-RL: normalize_rewards false)."""
    exact_zero: bool = True
    """Groups of zero range give exactly 0; False leaves that to the epsilon."""

    def __post_init__(self) -> None:
        hints = get_type_hints(Settings)
        for name in ("batch_unit", "batch_rows", "missing", "singleton", "single_reward", "scale_rewards"):
            if getattr(self, name) not in get_args(hints[name]):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}; {nearest(getattr(self, name), get_args(hints[name]))}"
                )
        for name in ("epsilon", "residue"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof must be 0 or 1, got {self.ddof}")

    @property
    def batch_eps(self) -> float:
        """The epsilon of the batch standard deviation."""
        return self.epsilon if self.batch_epsilon is None else self.batch_epsilon


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
    "nemo_rl": Settings(batch_epsilon=0.0, batch_rows="scored", residue=0.0, missing="zero", single_reward="error"),
}
"""Published variants of GDPO; each entry of the list below names what is unusual in it.

A component of weight 0 changes nothing in any of them; in TRL its rewards make a row count that has no other.

* paper: arXiv 2601.05242 eq. 4-7, over all sequences of the batch.
* trl: Hugging Face TRL `normalize_then_sum`. Epsilon 1e-4, constant groups left to it.
* trl_fork: the authors' TRL. Missing rewards become 0 before the statistics (biased); one component falls back to GRPO.
* verl: token-weighted whitening, so long answers dominate mean and variance, group means leave 0 and signs can flip;
  a group of one passes its raw reward; needs `lengths`.
* ms_swift: as TRL with epsilon 1e-8, which enlarges float noise of constant groups.
* nemo_rl: missing rewards filled with 0, no epsilon in the batch norm, one component refused. Its default
  configuration also switches `leave_one_out` on; its GDPO recipes do not.
"""
