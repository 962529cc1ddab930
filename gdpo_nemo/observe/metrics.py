"""Metrics file (``metrics.jsonl``, one JSON object per row), and the history of a run's metrics."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.observe.run_files import is_step, read_lines, shown_row
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import parse_json

FILE = "metrics.jsonl"


class MetricsLog:
    """Writer of the metrics file. Each row is synced to disk before ``append`` returns."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row. Values that are not finite or None are omitted.

        Raises:
            RunError: if the row cannot be written, for example because the disk is full.
        """
        try:
            self._file.write(json.dumps(clean(row), ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def truncate_after(self, step: int) -> None:
        """Remove the rows of steps after ``step``, which a resumed run writes again, and an incomplete last line.

        If ``step`` is 0, remove all rows, because the run also repeats the validation of the untrained model.
        """
        remaining = [row for row in read_metrics(self.path.parent) if 0 < step >= row["step"]]
        partial = self.path.with_name(FILE + ".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in remaining)
                file.flush()
                os.fsync(file.fileno())
            self._file.close()
            os.replace(partial, self.path)
            self._file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file. Errors are ignored, because ``append`` has already reported them."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read all complete rows in order. The result is empty if the file does not exist.

    An incomplete last line, left by a crash, is ignored.

    Raises:
        RunError: if an earlier line is invalid, or the file cannot be read.
    """
    path = Path(run_dir) / FILE
    lines = read_lines(path)
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):  # The text after the last newline is empty or incomplete.
            raise RunError(f"{path}, line {number}: not a valid metrics row")
    return rows


def clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to JSON values, including NumPy scalars. Values that are None, NaN or infinite are omitted."""
    cleaned = {}
    for key, value in row.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if plain is not None and not (isinstance(plain, float) and not math.isfinite(plain)):
            cleaned[key] = plain
    return cleaned


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse one line of the file. Return None if the line is not a complete row."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not is_step(row.get("step")):
        return None
    return row if all(isinstance(value, (int, float)) for value in row.values()) else None


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written: {error.strerror or error}")


WINDOW = 5
"""Number of steps in a trailing mean, because the metrics of a single batch are noisy."""
_EFFECT = re.compile("gradient/(.+)/change/(.+)")
PHASES = ("rollout", "verify", "train", "sync", "idle")


@dataclass
class History:
    """Training and validation rows of a run, in order."""

    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> History:
        """Create a history from the rows of a metrics file, with printable names and without invalid values."""
        history = cls()
        for row in rows:
            history.add(shown_row(row))
        return history

    def add(self, row: dict[str, Any]) -> None:
        """Add a training or validation row."""
        is_validation = any(key.startswith("validation/") for key in row)
        (self.validation if is_validation else self.training).append(row)

    @property
    def components(self) -> list[str]:
        """Reward components in the order in which they were first reported, without ``total``."""
        names: dict[str, None] = {}
        for row in self.training:
            for key in row:
                if key.startswith("reward/") and key.endswith("/mean"):
                    names[key[len("reward/") : -len("/mean")]] = None
        for row in self.validation:
            for key in row:
                if key.startswith("validation/"):
                    names[key[len("validation/") :]] = None
        names.pop("total", None)
        measured = [n for n in names if self.curve(f"reward/{n}/mean")[0]]
        return measured or [n for n in names if "/" not in n or is_family(n)]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric, from the rows that contain the metric."""
        steps, values = [], []
        for row in (*self.training, *self.validation):
            if key in row:
                steps.append(row["step"])
                values.append(float(row[key]))
        return steps, values

    def first(self, key: str, window: int = WINDOW) -> float | None:
        """Return the mean of the first ``window`` values of a metric, or None if the metric was not measured."""
        return _mean(self.curve(key)[1][:window])

    def last(self, key: str, window: int = WINDOW) -> float | None:
        """Return the mean of the last ``window`` values of a metric, or None if the metric was not measured."""
        return _mean(self.curve(key)[1][-window:])

    @property
    def end_window(self) -> int:
        """Number of steps in the means of the first and of the last steps, which do not overlap: at most ``WINDOW``."""
        return max(1, min(WINDOW, len(self.training) // 2))

    def at(self, key: str, step: int, window: int = WINDOW) -> float | None:
        """Return the mean of a metric over ``window`` steps up to ``step``, or None if it was not measured."""
        return _mean([value for s, value in zip(*self.curve(key)) if step - window < s <= step])

    def trailing(self, key: str, window: int = WINDOW) -> tuple[list[int], list[float]]:
        """Return steps and trailing means of one metric. The first means average fewer values."""
        steps, values = self.curve(key)
        means = []
        for i in range(len(values)):
            recent = values[max(0, i + 1 - window) : i + 1]
            means.append(sum(recent) / len(recent))
        return steps, means

    def direction(self, component: str) -> int:
        """Return 1 if larger rewards of a component are better, and -1 if smaller ones are.

        The recorded weights of the steps give the same answer as ``component_weights.directions`` for the config.
        """
        key = f"reward/{component}/"
        for row in reversed(self.training):
            if key + "at_most" in row or key + "at_least" in row:
                return -1 if key + "at_most" in row else 1
            if weight := row.get(key + "weight"):
                return 1 if weight > 0 else -1
        of_environment = component.partition("/")[2]  # of ``<environment>/<component>``
        return self.direction(of_environment) if of_environment else 1

    def solved(self, component: str, window: int = WINDOW, extremes: Sequence[float] = ()) -> bool:
        """Return True if a reward component varied earlier and stayed at its best value over the last ``window`` steps.

        Args:
            extremes: rewards of single samples, including the best one. If they are unknown, the best mean is used
                instead.
        """
        dead, spread, means = (self.curve(f"reward/{component}/{key}")[1] for key in ("dead_groups", "std", "mean"))
        if not means or min(dead, default=1.0) == 1 or not spread[-window:] or any(spread[-window:]):
            return False
        sign = self.direction(component)
        best = max(sign * value for value in (*extremes, *means))
        return min(sign * mean for mean in means[-window:]) >= best - 1e-6 * abs(best)

    def weights(self) -> list[tuple[str, float, str]]:
        """Return (component, weight, reason) for each component whose weight changes during the run, in the last
        step."""
        row = self.training[-1] if self.training else {}
        found = []
        for name in self.components:
            key = f"reward/{name}/"
            kind = next((kind for kind in ("at_least", "at_most") if key + kind in row), None)
            changes = [after for before, after in pairwise(zip(*self.curve(key + "weight"))) if before[1] != after[1]]
            factor = row.get(key + "factor")
            if key + "weight" not in row or not (kind or changes or factor is not None):
                continue
            if kind:
                mean = f"mean {row[key + 'mean']:.3g} over" if key + "mean" in row else "mean of"
                reason = f"constraint {kind} {row[key + kind]:g}, {mean} {row[key + 'samples']:g} samples"
            elif factor is None:
                reason = f"schedule or changed config, last changed in step {changes[-1][0]}"
            else:
                reason = ""
            if factor is not None:
                reason = f"{reason}, gdpo.weighting with the factor {factor:.3g}".removeprefix(", ")
            found.append((name, row[key + "weight"], reason))
        return found

    def effects(self) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
        """Return the first-order changes of each component's expected reward, by component and by the component or
        other part of the gradient that caused them, as curves (``gdpo.component_gradient_period``)."""
        found: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
        for key in dict.fromkeys(chain.from_iterable(self.training)):
            if match := _EFFECT.fullmatch(key):
                found.setdefault(match[1], {})[match[2]] = self.curve(key)
        return found

    def time_split(self, window: int | None = None) -> dict[str, float]:
        """Return the fraction of wall time of each phase. Asynchronous phases can overlap.

        Args:
            window: number of last steps to use. None uses all steps.
        """
        rows = self.training[-window:] if window else self.training
        total = sum(row.get("time/step", 0.0) for row in rows)
        if total <= 0:
            return {}
        shares = {}
        for phase in PHASES:
            seconds = sum(row.get(f"time/{phase}", 0.0) for row in rows)
            if seconds > 0:
                shares[phase] = seconds / total
        return shares


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
