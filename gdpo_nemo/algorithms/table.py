"""The reward table: one column per named component, checked once, sorted by group.

Missing entries (NaN or None) are "not applicable", never a reward of 0; rows outside `valid` exist for nobody. A
component of weight 0 is there for the logs only: what is missing or present in it changes no advantage. Tensors are
taken as they come, but torch is not imported here: a configuration is checked with this code in an instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.groups import Groups, moments


@dataclass(frozen=True)
class RewardTable:
    """Rewards of a whole batch, in the row order of `groups`."""

    names: tuple[str, ...]
    columns: np.ndarray
    """float64 [components, sequences]; 0 where not present."""
    present: np.ndarray
    """bool [components, sequences]; the reward exists and its row is valid."""
    valid: np.ndarray
    """bool [sequences]"""
    weights: np.ndarray
    """float64 [components]"""
    groups: Groups
    lengths: np.ndarray | None = None
    """float64 [sequences], trained tokens; only variants that weight by tokens need it."""
    kl_penalty: np.ndarray | None = None
    """float64 [sequences], beta x (KL - mean of the group's); subtracted by `compute_advantages`. No component, so that
    no normalisation erases beta."""

    @property
    def scored(self) -> np.ndarray:
        """bool [sequences], rows with at least one reward that has a weight."""
        return np.asarray(self.present[self.weights != 0].any(axis=0))

    @property
    def gaps(self) -> np.ndarray:
        """bool [components, sequences], valid rows without the reward of a component that has a weight."""
        return np.asarray(~self.present & self.valid & (self.weights != 0)[:, None])

    def zero_filled(self) -> RewardTable:
        """Return the table with every one of `gaps` turned into a reward of 0, a defect that some trainers have."""
        return replace(self, present=self.present | self.gaps)

    def with_kl(self, kl: Any, coefficient: float | None) -> RewardTable:
        """The same table with KL in the reward; rows without a reward or without a KL have no part in it.

        Args: `kl` and `kl_coefficient` of `compute_advantages`.

        Raises:
            ValueError: one of the two without the other, a coefficient that is not positive, a KL of the wrong shape or
                infinite.
        """
        if kl is None or coefficient is None:
            raise ValueError(
                "kl and kl_coefficient go together: " + ("kl" if kl is None else "kl_coefficient") + " is missing"
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
        """Weighted sum of the present rewards, and which rows have one: float64 and bool [sequences]."""
        return self.weights @ self.columns, self.scored


def nearest(name: str, known: Sequence[str]) -> str:
    """`, did you mean 'x'?` for the closest of the known names, or the list of them."""
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(known)}"


def build_table(
    rewards: Any, group_ids: Any, weights: Any = None, valid: Any = None, lengths: Any = None
) -> RewardTable:
    """Check the caller's arrays and sort them by group.

    Args: see `compute_advantages`.

    Raises:
        ValueError: wrong shapes, unknown or unweighted components, all-zero weights, infinite rewards, no reward with
            a weight at all; the message names rows and components.
    """
    names, columns = _columns(rewards, weights)
    count = columns.shape[1]
    ids = _integers(group_ids, count)
    weight = _weights(weights, names)
    rows = _row_mask(valid, count)
    tokens = _lengths(lengths, count)
    missing = np.isnan(columns)
    _refuse_infinite(columns, rows, names)
    weighted = np.flatnonzero(weight)
    if rows.any() and missing[weighted][:, rows].all():
        wanted = ", ".join(names[k] for k in weighted)
        raise ValueError(f"every reward is missing: none of the {int(rows.sum())} valid rows has a value for {wanted}")
    groups = Groups(ids)
    if groups.order is not None:
        rows = groups.take(rows)
        tokens = None if tokens is None else groups.take(tokens)
        columns = np.take(columns, groups.order, axis=1)
        missing = np.take(missing, groups.order, axis=1)
    present = ~missing & rows
    if not present.all():
        columns = np.where(present, columns, 0.0)
    return RewardTable(names, columns, present, rows, weight, groups, tokens)


def _columns(rewards: Any, weights: Any) -> tuple[tuple[str, ...], np.ndarray]:
    """Component names and float64 [components, sequences], contiguous per component."""
    if isinstance(rewards, Mapping):
        if not rewards:
            raise ValueError("rewards is empty: at least one component is needed")
        named = {str(name): _as_float(column, f"rewards[{name!r}]") for name, column in rewards.items()}
        shapes = {name: column.shape for name, column in named.items()}
        if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
            raise ValueError(f"every component must be one value per sequence, got shapes {shapes}")
        columns = np.stack(list(named.values()))
        names = tuple(named)
    else:
        table = _as_float(rewards, "rewards")
        if table.ndim != 2:
            raise ValueError(f"rewards must be [sequences, components] or a mapping of names, got shape {table.shape}")
        named_weights = isinstance(weights, Mapping) and len(weights) == table.shape[1]
        names = tuple(str(n) for n in weights) if named_weights else tuple(f"reward_{k}" for k in range(table.shape[1]))
        columns = np.ascontiguousarray(table.T)
    if columns.size == 0:
        raise ValueError(f"rewards must have at least one row and one component, got {columns.shape[::-1]}")
    return names, columns


def _is_tensor(values: Any) -> bool:
    return hasattr(values, "detach")


def _as_float(values: Any, what: str) -> np.ndarray:
    """float64 array; None becomes NaN."""
    if _is_tensor(values):
        array: np.ndarray = values.detach().cpu().double().numpy()
        return array
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must hold numbers or None: {error}") from None


def _integers(group_ids: Any, count: int) -> np.ndarray:
    ids = group_ids.detach().cpu().numpy() if _is_tensor(group_ids) else np.asarray(group_ids)
    if ids.shape != (count,):
        raise ValueError(f"group_ids must have one entry per row ({count}), got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"group_ids must be integers, got {ids.dtype}")
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
                raise ValueError(f"component {name!r} has no weight; give it one, or 0 to log it only")
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
