"""Values that training computes for the samples of a step, which are saved with the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SampleValues:
    """Values of the trajectories of a step, in the order of the groups. None means that a value was not computed."""

    advantages: np.ndarray | None = None
    """Advantage of each trajectory. Shape: [trajectories]."""
    trainer_logprobs: Sequence[np.ndarray | None] | None = None
    """For each trajectory, log-probs from the trainer. Shape: [completion tokens]. None if unknown."""
    terms: Mapping[str, np.ndarray] | None = None
    """Weighted contribution of each component to the advantages. Shape: [trajectories]."""
    criterion_terms: Sequence[Mapping[str, float]] | None = None
    """For each trajectory, weighted contribution of each criterion of its rubrics to the advantages, by component."""
    turn_advantages: Sequence[np.ndarray] | None = None
    """For each trajectory, advantages of its turns, with ``gdpo.credit: turn``. Shape: [turns]."""
    entropies: Sequence[np.ndarray | None] | None = None
    """For each trajectory, entropy in nats of each token's distribution. Shape: [completion tokens]."""

    def check(self, count: int) -> None:
        """Raise ValueError if a column does not have ``count`` entries, one for each trajectory."""
        for name, column in self._columns():
            for key, entries in column.items() if isinstance(column, Mapping) else [(name, column)]:
                if len(entries) != count:
                    raise ValueError(f"{key}: {len(entries)} entries for {count} trajectories")

    def part(self, rows: slice) -> SampleValues:
        """Return the values of some of the trajectories."""
        parts: dict[str, Any] = {}
        for name, column in self._columns():
            if isinstance(column, Mapping):
                parts[name] = {key: entries[rows] for key, entries in column.items()}
            else:
                parts[name] = column[rows]
        return SampleValues(**parts)

    def _columns(self) -> Iterator[tuple[str, Any]]:
        """Yield name and entries of the columns that were computed."""
        for field in fields(self):
            column = getattr(self, field.name)
            if column is not None:
                yield field.name, column


NO_VALUES = SampleValues()
