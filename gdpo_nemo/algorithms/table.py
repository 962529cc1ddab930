"""Reward table: checked reward columns by component, sorted by group, and reductions over groups of rows."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RewardTable:
    """Rewards of a whole batch, with rows sorted by group."""

    names: tuple[str, ...]
    """Component of each column. The criteria of a family (`algorithms.rubrics`) are adjacent columns of one name:
    column j of the family contains the j-th criterion of each group, so criteria are compared only within a group."""
    columns: np.ndarray
    """float64 [columns, sequences], rewards; 0 if not present."""
    present: np.ndarray
    """bool [columns, sequences], True if the reward exists and the row is valid."""
    valid: np.ndarray
    """bool [sequences], False for failed rows."""
    weights: np.ndarray
    """float64 [columns], weights of the components. With a family: float64 [columns, sequences], equal within a group,
    and 0 if the row does not have the criterion."""
    groups: Groups
    component_weights: np.ndarray
    """float64 [components], weights of `components`."""
    families: Mapping[str, slice] = field(default_factory=dict)
    """Columns of each family."""
    shares: np.ndarray | None = None
    """float64 [columns, sequences], factor of each column in the weight of its component. None without a family."""
    lengths: np.ndarray | None = None
    """float64 [sequences], number of trained tokens. Only needed by variants that weight by tokens."""
    kl_penalty: np.ndarray | None = None
    """float64 [sequences], beta x (KL - mean KL of the group), which `compute_advantages` subtracts. None without KL in
    the reward.

    The KL is not a component, so that normalisation does not cancel beta.
    """

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Names of the components. A family is one component."""
        return tuple(dict.fromkeys(self.names))

    @property
    def weighted(self) -> np.ndarray:
        """int64 [weighted columns], columns with a non-zero weight in any row."""
        return np.flatnonzero(self.weights if self.weights.ndim == 1 else self.weights.any(axis=1))

    @property
    def row_weights(self) -> np.ndarray:
        """float64 [columns, 1 or sequences], weight of each column in each row."""
        return self.weights[:, None] if self.weights.ndim == 1 else self.weights

    @property
    def group_weights(self) -> np.ndarray:
        """float64 [columns, 1 or groups], weight of each column in each group."""
        return self.weights[:, None] if self.weights.ndim == 1 else self.weights[:, self.groups.starts]

    @property
    def starts(self) -> list[int]:
        """First column of each component."""
        return [self.names.index(name) for name in self.components]

    def by_component(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the columns of each component: [components, ...]."""
        return np.add.reduceat(values, self.starts, axis=0) if self.families else values

    def batch_values(self, k: int) -> np.ndarray:
        """Return the present rewards of column k in the whole batch, float64 [values].

        A criterion only exists in its row, so this includes the rewards of all criteria of its family.
        """
        part = self.families.get(self.names[k], k)
        return np.asarray(self.columns[part][self.present[part]])

    @property
    def scored(self) -> np.ndarray:
        """bool [sequences], True for rows that have a reward with a non-zero weight."""
        if self.weights.ndim == 1:
            return np.asarray(self.present[self.weights != 0].any(axis=0))
        return np.asarray((self.present & (self.weights != 0)).any(axis=0))

    @property
    def gaps(self) -> np.ndarray:
        """bool [columns, sequences], True for missing rewards of valid rows, in columns with a non-zero weight."""
        return np.asarray(~self.present & self.valid & (self.row_weights != 0))

    def zero_filled(self) -> RewardTable:
        """Return the table with all `gaps` filled with rewards of 0. Some trainers fill missing rewards in this way,
        which is a defect."""
        return replace(self, present=self.present | self.gaps)

    def with_kl(self, kl: Any, coefficient: float | None) -> RewardTable:
        """Return the table with KL in the reward. Rows without a reward or without a KL value get no penalty.

        Args:
            kl: summed log-ratio to the reference of each row [sequences], in the caller's order.
            coefficient: beta.

        Raises:
            ValueError: if only one of kl and coefficient is given, the coefficient is not positive, or a KL value
                is infinite or has the wrong shape.
        """
        if kl is None or coefficient is None:
            raise ValueError(
                "kl and kl_coefficient must be given together: "
                + ("kl" if kl is None else "kl_coefficient")
                + " is missing"
            )
        if not 0 < coefficient < float("inf"):
            raise ValueError(f"kl_coefficient must be positive and finite, got {coefficient}")
        values = _as_float(kl, "kl")
        if values.shape != self.valid.shape:
            raise ValueError(f"kl must have one entry per row ({len(self.valid)}), got shape {values.shape}")
        values = self.groups.take(values)
        present = self.scored & ~np.isnan(values)
        if np.isinf(values[present]).any():
            raise ValueError(f"{int(np.isinf(values[present]).sum())} values of kl are infinite")
        deviation = moments(self.groups, np.where(present, values, 0.0), present).deviation
        return replace(self, kl_penalty=coefficient * deviation)

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the weighted sum of each row's rewards, float64 [sequences], and the rows that have a reward, bool
        [sequences]."""
        if self.weights.ndim == 1:
            return self.weights @ self.columns, self.scored
        return np.einsum("ks,ks->s", self.weights, self.columns), self.scored

    def by_score(self) -> RewardTable:
        """Return the table with one column per component. The column of a family is `score` of its criteria."""
        if not self.families:
            return self
        assert self.shares is not None
        columns, present = [], []
        for name in self.components:
            part = self.families.get(name, slice(self.names.index(name), self.names.index(name) + 1))
            if name in self.families:
                value = score(np.where(self.present[part], self.columns[part], np.nan), self.shares[part])
                present.append(~np.isnan(value))
                columns.append(np.nan_to_num(value))
            else:
                columns.append(self.columns[part][0])
                present.append(self.present[part][0])
        return replace(
            self,
            names=self.components,
            columns=np.stack(columns),
            present=np.stack(present),
            weights=self.component_weights,
            families={},
            shares=None,
        )


def score(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted mean of each row's criteria, sum_j w_j r_j / sum_j |w_j| over the criteria with a reward.

    Args:
        rewards: float64 [criteria, ...], NaN for a missing reward.
        weights: weights of the criteria, which may be negative. Same shape.

    Returns:
        float64 [...], NaN if no criterion with a weight has a reward.
    """
    sizes = np.where(np.isnan(rewards), 0.0, np.abs(weights)).sum(axis=0)
    total = np.nansum(weights * rewards, axis=0)
    return np.where(sizes > 0, total / np.where(sizes > 0, sizes, 1.0), np.nan)


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the text `did you mean 'x'?` for the most similar known name, or a list of the known names."""
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(known)}"


def with_array_hint(error: Exception) -> str:
    """Return type and message of an exception of a custom function, with a hint if NumPy and torch are mixed."""
    text = f"{type(error).__name__}: {error}"
    if "must be Tensor, not" in text:
        return f"{text}; rewards are NumPy arrays, so use NumPy functions"
    if "Can't call numpy() on Tensor" in text:
        return "a NumPy function got a tensor; use torch functions, through which the gradient flows"
    return text


def build_table(
    rewards: Any,
    group_ids: Any,
    weights: Any = None,
    valid: Any = None,
    lengths: Any = None,
    *,
    trajectory_ids: Any = None,
    criterion_weights: Mapping[str, Any] | None = None,
    family_scale: str = "sum",
) -> RewardTable:
    """Check the caller's arrays and sort them by group.

    Args: see `compute_advantages`.

    Raises:
        ValueError: if shapes are wrong, components are unknown or have no weight, all weights are 0, rewards are
            infinite, or all weighted rewards are missing. The message contains the rows and components.
    """
    names, columns, families = _columns(rewards, weights)
    count = columns.shape[1]
    ids = _integers(group_ids, count, "group_ids")
    components = tuple(dict.fromkeys(names))
    component_weights = _weights(weights, components)
    rows = _row_mask(valid, count)
    tokens = _lengths(lengths, count)
    missing = np.isnan(columns)
    _refuse_infinite(columns, rows, names)
    groups = Groups(ids, None if trajectory_ids is None else _integers(trajectory_ids, count, "trajectory_ids"))
    if groups.order is not None:
        rows = groups.take(rows)
        tokens = None if tokens is None else groups.take(tokens)
        columns = np.take(columns, groups.order, axis=1)
        missing = np.take(missing, groups.order, axis=1)
    present = ~missing & rows
    weight, shares = component_weights, None
    if families:
        shares = _shares(families, criterion_weights or {}, family_scale, present, groups)
        weight = component_weights[[components.index(name) for name in names], None] * shares
    elif criterion_weights:
        raise ValueError(f"criterion_weights of {min(criterion_weights)!r}, which has no criteria")
    if not present.all():
        columns = np.where(present, columns, 0.0)
    table = RewardTable(
        names, columns, present, rows, weight, groups, component_weights, families, shares, lengths=tokens
    )
    if rows.any() and not present[table.weighted].any():
        weighted_names = ", ".join(name for name, w in zip(components, component_weights, strict=True) if w)
        raise ValueError(
            f"every reward is missing: none of the {int(rows.sum())} valid rows has a value for {weighted_names}"
        )
    return table


def _shares(
    families: Mapping[str, slice],
    criterion_weights: Mapping[str, Any],
    scale: str,
    present: np.ndarray,
    groups: Groups,
) -> np.ndarray:
    """Return `RewardTable.shares`.

    Raises:
        ValueError: if a weight is not finite or differs within a group, or an argument is unknown.
    """
    if scale not in ("sum", "none"):
        raise ValueError(f"family_scale must be sum or none, got {scale!r}")
    for name in criterion_weights:
        if name not in families:
            raise ValueError(f"criterion_weights of {name!r}, which has no criteria; {nearest(name, tuple(families))}")
    shares = np.ones(present.shape)
    for name, part in families.items():
        if name in criterion_weights:
            given = _as_float(criterion_weights[name], f"criterion_weights[{name!r}]")
            expected = (present.shape[1], part.stop - part.start)
            if given.shape != expected:
                raise ValueError(f"criterion_weights[{name!r}] must have the shape {expected}, got {given.shape}")
            weights = np.ascontiguousarray(groups.take(given).T)
        else:  # a criterion without a reward in the whole group does not exist in this row
            weights = np.stack([groups.rows((groups.sum(row) > 0).astype(np.float64)) for row in present[part]])
        if not np.isfinite(weights).all():
            raise ValueError(f"criterion_weights[{name!r}] must be finite")
        if (weights != np.repeat(weights[:, groups.starts], groups.sizes, axis=1)).any():
            raise ValueError(f"criterion_weights[{name!r}] must be equal within each group")
        if scale == "sum":
            total = np.abs(weights).sum(axis=0)
            weights = weights / np.where(total > 0, total, 1.0)
        shares[part] = weights
    return shares


def _columns(rewards: Any, weights: Any) -> tuple[tuple[str, ...], np.ndarray, dict[str, slice]]:
    """Return the component of each column, rewards as float64 [columns, sequences], and the columns of each family."""
    families: dict[str, slice] = {}
    if isinstance(rewards, Mapping):
        if not rewards:
            raise ValueError("rewards is empty: at least one component is required")
        named = {str(name): _as_float(column, f"rewards[{name!r}]") for name, column in rewards.items()}
        shapes = {name: column.shape for name, column in named.items()}
        dimensions = {len(shape) for shape in shapes.values()}
        if not dimensions <= {1, 2} or len({shape[0] for shape in shapes.values()}) > 1:
            raise ValueError(
                f"every component must be one value per sequence, or [sequences, criteria], got shapes {shapes}"
            )
        parts: list[np.ndarray] = []
        repeated: list[str] = []
        for name, column in named.items():
            part = np.atleast_2d(column.T)
            if column.ndim == 2:
                families[name] = slice(len(repeated), len(repeated) + len(part))
            parts.append(part)
            repeated += [name] * len(part)
        columns = np.concatenate(parts)
        names = tuple(repeated)
    else:
        table = _as_float(rewards, "rewards")
        if table.ndim != 2:
            raise ValueError(f"rewards must be [sequences, components] or a mapping of names, got shape {table.shape}")
        named_weights = isinstance(weights, Mapping) and len(weights) == table.shape[1]
        names = tuple(str(n) for n in weights) if named_weights else tuple(f"reward_{k}" for k in range(table.shape[1]))
        columns = np.ascontiguousarray(table.T)
    if columns.size == 0:
        raise ValueError(f"rewards must have at least one row and one component, got {columns.shape[::-1]}")
    return names, columns, families


def _is_tensor(values: Any) -> bool:
    return hasattr(values, "detach")


def _as_float(values: Any, what: str) -> np.ndarray:
    """Convert to a float64 array. None becomes NaN."""
    if _is_tensor(values):
        array: np.ndarray = values.detach().cpu().double().numpy()
        return array
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must contain numbers or None: {error}") from None


def _integers(values: Any, count: int, what: str) -> np.ndarray:
    ids = values.detach().cpu().numpy() if _is_tensor(values) else np.asarray(values)
    if ids.shape != (count,):
        raise ValueError(f"{what} must have one entry per row ({count}), got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {ids.dtype}")
    return ids.astype(np.int64, copy=False)


def _weights(weights: Any, names: tuple[str, ...]) -> np.ndarray:
    if weights is None:
        return np.ones(len(names))
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in names:
                raise ValueError(f"weight for unknown component {name!r}; {nearest(name, names)}")
        for name in names:
            if name not in weights:
                raise ValueError(f"component {name!r} has no weight; set one, or 0 to only log it")
        weights = [weights[name] for name in names]
    weight = _as_float(weights, "weights")
    if weight.shape != (len(names),):
        raise ValueError(f"{weight.size} weights for {len(names)} components ({', '.join(names)})")
    if not np.isfinite(weight).all():
        raise ValueError(f"weight of {names[int(np.argmin(np.isfinite(weight)))]!r} is not finite")
    if not weight.any():
        raise ValueError(f"every weight is 0 ({', '.join(names)}): nothing would be trained")
    return weight


def _row_mask(valid: Any, count: int) -> np.ndarray:
    if valid is None:
        return np.ones(count, dtype=bool)
    mask = valid.detach().cpu().numpy() if _is_tensor(valid) else np.asarray(valid)
    if mask.shape != (count,) or mask.dtype != bool:
        raise ValueError(f"valid must be a boolean per row ({count}), got {mask.dtype} {mask.shape}")
    return mask


def _lengths(lengths: Any, count: int) -> np.ndarray | None:
    if lengths is None:
        return None
    tokens = _as_float(lengths, "lengths")
    if tokens.shape != (count,) or not (np.isfinite(tokens) & (tokens >= 0)).all():
        raise ValueError(f"lengths must be a non-negative number of tokens per row ({count})")
    return tokens


def _refuse_infinite(columns: np.ndarray, rows: np.ndarray, names: tuple[str, ...]) -> None:
    component, row = np.nonzero(np.isinf(columns) & rows)
    if len(row):
        shown = ", ".join(f"row {r} of {names[k]!r}" for k, r in list(zip(component, row, strict=True))[:5])
        raise ValueError(f"{len(row)} infinite rewards: {shown}{', ...' if len(row) > 5 else ''}")


CONSTANT_RANGE = 1e-9
"""A group is considered constant if max - min <= CONSTANT_RANGE * max(1, max |r|)."""


class Groups:
    """Groups of rows with equal ids. The rows are sorted so that each group is contiguous.

    Args:
        ids: integer [sequences], in any order.
        trajectories: integer [sequences], equal for the turns of one trajectory. Each row is then compared with the
            group's other trajectories. None: each row is a trajectory, and is compared with its whole group.
    """

    def __init__(self, ids: np.ndarray, trajectories: np.ndarray | None = None) -> None:
        # Neighbours are compared, not subtracted, because the difference of two hashes may overflow int64.
        self.order: np.ndarray | None = None
        if (ids[1:] < ids[:-1]).any():
            self.order = np.argsort(ids, kind="stable")
            ids = ids[self.order]
        self.starts = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1]) + 1))
        self.ids = ids[self.starts]
        self.sizes = np.diff(np.append(self.starts, len(ids)))
        self.trajectories: np.ndarray | None = None
        """Index of each row's trajectory: int64 [sequences]."""
        if trajectories is not None:
            self.trajectories = np.unique(self.take(trajectories), return_inverse=True)[1]

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, array: np.ndarray) -> np.ndarray:
        """Convert an array from the caller's row order to the sorted order, along axis 0."""
        return array if self.order is None else array[self.order]

    def put(self, array: np.ndarray) -> np.ndarray:
        """Convert an array from the sorted order to the caller's row order, along the last axis."""
        if self.order is None:
            return array
        result = np.empty_like(array)
        for source, target in zip(np.atleast_2d(array), np.atleast_2d(result), strict=True):
            target[self.order] = source
        return result

    def sum(self, rows: np.ndarray) -> np.ndarray:
        """Return the sum of each group. For a bool array, return the number of True values."""
        return np.add.reduceat(rows, self.starts, dtype=np.int64 if rows.dtype == bool else rows.dtype)

    def min(self, rows: np.ndarray) -> np.ndarray:
        """Return the minimum of each group."""
        return np.minimum.reduceat(rows, self.starts)

    def max(self, rows: np.ndarray) -> np.ndarray:
        """Return the maximum of each group."""
        return np.maximum.reduceat(rows, self.starts)

    def rows(self, per_group: np.ndarray) -> np.ndarray:
        """Return for each row the value of its group."""
        return np.repeat(per_group, self.sizes)

    def baseline(self, values: np.ndarray, present: np.ndarray) -> np.ndarray:
        """Return the mean of the present values with which each row is compared: float64 [sequences].

        With `trajectories`, it is the mean over the turns of the group's other trajectories. A trajectory decides
        itself how many turns it has and what they return, so its own turns would bias the gradient. A row without
        other trajectories is compared with itself.

        Args:
            values: float64 [sequences], 0 for absent values.
            present: bool [sequences].
        """
        total, count = self.sum(values), self.sum(present)
        if self.trajectories is None:
            return self.rows(total / np.maximum(count, 1))
        own_count = self._own(present)
        others = self.rows(count) - own_count
        mean = (self.rows(total) - self._own(values)) / np.maximum(others, 1)
        return np.where(others > 0, mean, values)

    def is_single(self, present: np.ndarray) -> np.ndarray:
        """Return the groups in which fewer than two trajectories have a present value: bool [groups]."""
        count = self.sum(present)
        if self.trajectories is None:
            return np.asarray(count < 2)
        return np.asarray(self.max(self._own(present)) == count)

    def _own(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the values of each row's trajectory: float64 [sequences]."""
        assert self.trajectories is not None
        return np.asarray(np.bincount(self.trajectories, values)[self.trajectories])


@dataclass(frozen=True)
class Moments:
    """Centred values of one component, and statistics of its groups."""

    deviation: np.ndarray
    """Per row: value minus `Groups.baseline`. Exactly 0 if missing or if the group is constant."""
    count: np.ndarray
    """Per group: number of present values."""
    std: np.ndarray
    """Per group: standard deviation of the present values; 0 if there are fewer than two values."""
    constant: np.ndarray
    """Per group: True if it has no signal, because fewer than two trajectories have a value or the range is 0."""


def moments(groups: Groups, values: np.ndarray, present: np.ndarray, ddof: int = 1, exact: bool = True) -> Moments:
    """Return mean and standard deviation of the present values of each group, computed in two passes.

    The minimum of the group is subtracted first. Therefore neither an offset of 1e6 nor the order of the rows reduces
    the accuracy. A group is constant if its range is 0, because a standard deviation of float noise must not become an
    advantage.

    Args:
        values: float64 per row; absent values must also be finite.
        present: bool per row.
        ddof: 1 for the sample standard deviation, 0 for the population standard deviation.
        exact: False keeps the rounding noise of groups that are constant up to `CONSTANT_RANGE`, like most published
            implementations.
    """
    everywhere = bool(present.all())
    count = groups.sizes if everywhere else groups.sum(present)
    low = groups.min(values if everywhere else np.where(present, values, np.inf))
    low = np.where(count > 0, low, 0.0)
    deviation = values - groups.rows(low)
    if not everywhere:
        deviation[~present] = 0.0
    spread = groups.max(deviation)
    constant = groups.is_single(present)
    if exact:
        constant = constant | (
            spread <= CONSTANT_RANGE * np.maximum(1.0, np.maximum(np.abs(low), np.abs(low + spread)))
        )
    # Subtracting the mean leaves rounding noise in a constant group, so multiply its rows by 0.
    deviation -= groups.baseline(deviation, present)
    if constant.any():
        deviation *= groups.rows((~constant).astype(np.float64))
    if not everywhere:
        deviation[~present] = 0.0
    variance = groups.sum(deviation * deviation) / np.maximum(count - ddof, 1)
    return Moments(deviation, count, np.sqrt(variance), constant)
