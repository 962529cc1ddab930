"""Reductions over groups of rows, without a Python loop over groups.

Rows are sorted by group id once; every reduction is then one `ufunc.reduceat` over contiguous segments. Arrays named
"per row" are [sequences] in sorted order, arrays named "per group" are [groups] in order of ascending id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONSTANT_RANGE = 1e-9
"""A group counts as constant when max - min <= CONSTANT_RANGE * max(1, max |r|)."""


class Groups:
    """The segments that equal ids form, whatever the order and the size of the groups.

    Args:
        ids: integer [sequences], in any order.
    """

    def __init__(self, ids: np.ndarray) -> None:
        # Neighbours are compared, not subtracted: the difference of two hashes overflows int64.
        self.order: np.ndarray | None = None
        if (ids[1:] < ids[:-1]).any():
            self.order = np.argsort(ids, kind="stable")
            ids = ids[self.order]
        self.starts = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1]) + 1))
        self.ids = ids[self.starts]
        self.sizes = np.diff(np.append(self.starts, len(ids)))

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, array: np.ndarray) -> np.ndarray:
        """Caller's row order to sorted row order, along axis 0."""
        return array if self.order is None else array[self.order]

    def put(self, array: np.ndarray) -> np.ndarray:
        """Sorted row order back to the caller's, along the last axis."""
        if self.order is None:
            return array
        result = np.empty_like(array)
        for source, target in zip(np.atleast_2d(array), np.atleast_2d(result), strict=True):
            target[self.order] = source
        return result

    def sum(self, rows: np.ndarray) -> np.ndarray:
        """Sum per group; booleans are counted."""
        return np.add.reduceat(rows, self.starts, dtype=np.int64 if rows.dtype == bool else rows.dtype)

    def min(self, rows: np.ndarray) -> np.ndarray:
        """Smallest value per group."""
        return np.minimum.reduceat(rows, self.starts)

    def max(self, rows: np.ndarray) -> np.ndarray:
        """Largest value per group."""
        return np.maximum.reduceat(rows, self.starts)

    def rows(self, per_group: np.ndarray) -> np.ndarray:
        """Value of each row's group."""
        return np.repeat(per_group, self.sizes)


@dataclass(frozen=True)
class Moments:
    """Centred values of one column and what their groups look like."""

    deviation: np.ndarray
    """Per row, value - mean of the group's present values; exactly 0 where missing or where the group is constant."""
    count: np.ndarray
    """Per group, number of present values."""
    std: np.ndarray
    """Per group, standard deviation of the present values; 0 below two of them."""
    constant: np.ndarray
    """Per group, whether fewer than two values are present or their range is zero: the group says nothing."""


def moments(groups: Groups, values: np.ndarray, present: np.ndarray, ddof: int = 1, exact: bool = True) -> Moments:
    """Two-pass mean and standard deviation of the present values of every group.

    The group's minimum is subtracted first, so neither an offset of 1e6 nor the order of the rows costs digits, and
    constancy is judged by the range: a standard deviation of float noise must not become an advantage.

    Args:
        values: float64 per row, finite (anything finite where not present).
        present: bool per row.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        exact: False keeps rounding noise of groups that are constant only up to `CONSTANT_RANGE`, as most published
            implementations do.
    """
    everywhere = bool(present.all())
    count = groups.sizes if everywhere else groups.sum(present)
    low = groups.min(values if everywhere else np.where(present, values, np.inf))
    low = np.where(count > 0, low, 0.0)
    deviation = values - groups.rows(low)
    if not everywhere:
        deviation[~present] = 0.0
    spread = groups.max(deviation)
    constant = count < 2
    if exact:
        constant = constant | (
            spread <= CONSTANT_RANGE * np.maximum(1.0, np.maximum(np.abs(low), np.abs(low + spread)))
        )
    mean = groups.sum(deviation) / np.maximum(count, 1)
    # Setting the mean of a constant group to the common value would still leave noise: multiply by an exact 0 instead.
    deviation -= groups.rows(mean)
    if constant.any():
        deviation *= groups.rows((~constant).astype(np.float64))
    if not everywhere:
        deviation[~present] = 0.0
    variance = groups.sum(deviation * deviation) / np.maximum(count - ddof, 1)
    return Moments(deviation, count, np.sqrt(variance), constant)
