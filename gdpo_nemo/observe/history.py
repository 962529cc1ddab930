"""Rows of metrics as curves: which components there are, trailing means, first and last values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable

from gdpo_nemo.observe.run_files import shown_row

WINDOW = 5
"""Steps in a trailing mean; one batch alone is too noisy to read."""
PHASES = ("rollout", "verify", "train", "sync", "idle")


@dataclass
class History:
    """The training and validation rows of a run so far, in order."""

    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> History:
        """Sort rows that were read from a file into training and validation, each as it can be shown."""
        history = cls()
        for row in rows:
            history.add(shown_row(row))
        return history

    def add(self, row: dict[str, Any]) -> None:
        """Take in one row of either kind."""
        is_validation = any(key.startswith("validation/") for key in row)
        (self.validation if is_validation else self.training).append(row)

    @property
    def components(self) -> list[str]:
        """Reward components in the order in which they were first reported; ``total`` is not one."""
        names: dict[str, None] = {}
        for row in self.training:
            means = (key for key in row if key.startswith("reward/") and key.endswith("/mean"))
            names.update((key[len("reward/") : -len("/mean")], None) for key in means)
        for row in self.validation:
            names.update((key[len("validation/") :], None) for key in row if key.startswith("validation/"))
        names.pop("total", None)
        measured = [n for n in names if self.curve(f"reward/{n}/mean")[0]]
        return measured or [n for n in names if "/" not in n]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one key, without the rows that lack it."""
        rows = [row for row in (*self.training, *self.validation) if key in row]
        return [row["step"] for row in rows], [float(row[key]) for row in rows]

    def first(self, key: str, window: int = WINDOW) -> float | None:
        """Mean of the first ``window`` values."""
        return _mean(self.curve(key)[1][:window])

    def last(self, key: str, window: int = WINDOW) -> float | None:
        """Mean of the last ``window`` values."""
        return _mean(self.curve(key)[1][-window:])

    def at(self, key: str, step: int, window: int = WINDOW) -> float | None:
        """Mean over the ``window`` steps that end with ``step``."""
        return _mean([value for s, value in zip(*self.curve(key)) if step - window < s <= step])

    def trailing(self, key: str, window: int = WINDOW) -> tuple[list[int], list[float]]:
        """The curve smoothed by its trailing mean; shorter windows at its start."""
        steps, values = self.curve(key)
        smooth = (_mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values)))
        return steps, [value for value in smooth if value is not None]  # no window is empty

    def solved(self, component: str, window: int = WINDOW, highest: float | None = None) -> bool:
        """Whether a reward component that varied before stands still, over the last ``window`` steps, at the best it
        has been.

        Args:
            highest: the largest reward that a single sample has had, where that is known; else the best mean has to do.
        """
        dead, spread, means = (self.curve(f"reward/{component}/{key}")[1] for key in ("dead_groups", "std", "mean"))
        if not means or min(dead, default=1.0) == 1 or not spread[-window:] or any(spread[-window:]):
            return False
        best = max(means) if highest is None else max(highest, *means)
        return min(means[-window:]) >= best - 1e-6 * abs(best)

    def time_split(self, window: int | None = None) -> dict[str, float]:
        """Share of wall time per phase, of the last ``window`` steps or all; phases can overlap when asynchronous."""
        rows = self.training[-window:] if window else self.training
        total = sum(row.get("time/step", 0.0) for row in rows)
        if total <= 0:
            return {}
        seconds = {phase: sum(row.get(f"time/{phase}", 0.0) for row in rows) for phase in PHASES}
        return {phase: spent / total for phase, spent in seconds.items() if spent > 0}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
