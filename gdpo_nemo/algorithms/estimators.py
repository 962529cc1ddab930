"""Advantage estimators: each maps a reward table to weighted terms per component.

All are parts of one pipeline: transform each component -> weight -> mask rollouts -> scale over the batch. An
estimator covers the first three; `advantages.compute_advantages` does the last. Rows are in the table's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gdpo_nemo.algorithms.groups import moments
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import RewardTable


@dataclass(frozen=True)
class Terms:
    """What an estimator returns: a row's advantage before the batch scale is the sum of its terms."""

    components: np.ndarray
    """float64 [components, sequences]"""
    live: np.ndarray
    """bool [sequences]; rows that carry signal. An advantage of 0 by cancellation is still signal."""
    total: np.ndarray | None = None
    """float64 [sequences]; the summed terms where they are known more exactly than by summing."""

    @property
    def values(self) -> np.ndarray:
        """float64 [sequences]"""
        return self.components.sum(axis=0) if self.total is None else self.total


def z_scores(table: RewardTable, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """z = (r - mean) / (std + epsilon) within each group, every component by itself (GDPO eq. 4).

    Returns:
        float64 and bool [components, sequences]: z, and where it comes from a group that varies. Components of
        weight 0 are not computed.
    """
    z = np.zeros_like(table.columns)
    live = np.zeros(table.columns.shape, dtype=bool)
    for k in np.flatnonzero(table.weights):
        z[k], live[k] = _z_score(table, k, settings)
    return z, live


def _z_score(table: RewardTable, k: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    groups, present = table.groups, table.present[k]
    stats = moments(groups, table.columns[k], present, settings.ddof, settings.exact_zero)
    if settings.leave_one_out:
        z = _leave_one_out(table, k, settings)
    else:
        z = stats.deviation
        z *= groups.rows(np.where(stats.constant, 0.0, 1.0 / np.maximum(stats.std + settings.epsilon, 1e-300)))
    if settings.singleton == "raw":
        alone = groups.rows(stats.count == 1) & present
        z[alone] = table.columns[k, alone] / (1.0 + settings.epsilon)
        return z, present & (groups.rows(~stats.constant) | alone)
    return z, present & groups.rows(~stats.constant)


def _leave_one_out(table: RewardTable, k: int, settings: Settings) -> np.ndarray:
    """(r - mean of the others) / std of the others; not divided where the others are constant or a single one."""
    groups, present = table.groups, table.present[k]
    stats = moments(groups, table.columns[k], present, settings.ddof, settings.exact_zero)
    count = groups.rows(np.maximum(stats.count, 2)).astype(np.float64)
    squares = groups.rows(groups.sum(stats.deviation**2))
    others = squares - stats.deviation**2 * count / (count - 1)
    # The difference cancels to noise when this row is the group's only outlier.
    others[others <= 1e-12 * squares] = 0.0
    std = np.sqrt(others / np.maximum(count - 1 - settings.ddof, 1))
    std[count - 1 <= settings.ddof] = 0.0
    difference = stats.deviation * count / (count - 1)
    return np.divide(difference, std + settings.epsilon, out=difference, where=std > 0)


def _weighted(z: np.ndarray, live: np.ndarray, weights: np.ndarray) -> Terms:
    z *= weights[:, None]
    return Terms(z, live.any(axis=0))


def gdpo(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k w_k z_k: each reward normalised in its group, weights after it (arXiv 2601.05242 eq. 4, 5, 7)."""
    if len(table.names) == 1 and settings.single_reward == "error":
        raise ValueError(f"this variant of gdpo needs two components or more, got only {table.names[0]!r}; use grpo")
    if len(table.names) == 1 and settings.single_reward == "grpo":
        return grpo(table, settings)
    return _weighted(*z_scores(table, settings), table.weights)


def _summed(table: RewardTable, settings: Settings, scale: Callable[..., np.ndarray]) -> Terms:
    """Centre the weighted sum of a row's rewards in its group, then multiply by a factor per group.

    The terms are the components' centred shares of that sum, so they show what each reward contributed.
    """
    groups = table.groups
    total, scored = table.total()
    stats = moments(groups, total, scored, settings.ddof, settings.exact_zero)
    factor = groups.rows(np.where(stats.constant, 0.0, scale(stats, settings)))
    shares = table.columns * table.weights[:, None]
    for share in shares:
        share -= groups.rows(groups.sum(share) / np.maximum(stats.count, 1))
        share *= factor
        share[~scored] = 0.0
    return Terms(shares, scored & groups.rows(~stats.constant), stats.deviation * factor)


def grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = (r - mean) / (std + epsilon) of the weighted reward sum r = sum_k w_k r_k (arXiv 2402.03300)."""
    return _summed(table, settings, lambda stats, s: 1.0 / np.maximum(stats.std + s.epsilon, 1e-300))


def dr_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = r - mean of the weighted reward sum, not divided by its deviation (Dr. GRPO, arXiv 2503.20783)."""
    return _summed(table, settings, lambda stats, s: np.ones(len(stats.count)))


def rloo(table: RewardTable, settings: Settings) -> Terms:
    """A = r - mean of the other members' weighted reward sums (RLOO, arXiv 2402.14740) = n / (n - 1) (r - mean)."""
    return _summed(table, settings, lambda stats, s: stats.count / np.maximum(stats.count - 1, 1))


@dataclass(frozen=True)
class Estimator:
    """An entry of the registry."""

    function: Callable[..., Terms]
    batch_norm: bool
    """Whether its published form standardises over the batch."""
    options: tuple[str, ...] = ()
    """Its own options, beyond those of `Settings`."""


ESTIMATORS: dict[str, Estimator] = {
    "gdpo": Estimator(gdpo, batch_norm=True),
    "grpo": Estimator(grpo, batch_norm=False),
    "dr_grpo": Estimator(dr_grpo, batch_norm=False),
    "rloo": Estimator(rloo, batch_norm=False),
}
