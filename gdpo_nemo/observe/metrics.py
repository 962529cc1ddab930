"""``metrics.jsonl``: one JSON object per row, the record of a run from which everything drawn can be drawn again.

A training row holds the keys of one optimizer step; a validation row holds ``step`` and ``validation/<component>``.
``step`` counts finished steps, so the first training row has step 1 and a validation of the untrained model step 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from gdpo_nemo.config.reading import parse_json, read_bytes
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.run_files import is_step

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows that survive a crash: each is flushed and synced before ``append`` returns."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; numbers that are not finite are left out, as is everything that was not measured.

        Raises:
            RunError: the row could not be written, for instance because the disk is full.
        """
        try:
            self._file.write(json.dumps(clean(row), ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after ``step`` and a torn last line, so that a resumed run writes them again.

        After step 0 nothing is kept: a run that starts from the beginning validates the untrained model again too.
        """
        kept = [row for row in read_metrics(self.path.parent) if 0 < step >= row["step"]]
        partial = self.path.with_name(FILE + ".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
                file.flush()
                os.fsync(file.fileno())
            self._file.close()
            os.replace(partial, self.path)
            self._file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file. What a full disk did not take was said when it was written, and is lost."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All complete rows in order; empty where there is no file. A torn last line, as a crash leaves it, is ignored.

    Raises:
        RunError: a line before the last is not a row, or the file cannot be read.
    """
    path = Path(run_dir) / FILE
    lines = read_lines(path)
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):  # The last piece follows the last newline: torn, or empty.
            raise RunError(f"{path}, line {number}: not a row of metrics")
    return rows


def read_lines(path: Path) -> list[bytes]:
    """The pieces of a file between its line breaks, of which the last is empty, or torn by a crash; none where there is
    no file. Raises RunError."""
    try:
        return read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


def clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as plain JSON values: NumPy scalars unpacked; None, NaN and infinities left out."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in row.items()}
    return {
        key: value
        for key, value in plain.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row that a line of the file is; None if it is none, or half of one."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not is_step(row.get("step")):
        return None
    return row if all(isinstance(value, (int, float)) for value in row.values()) else None


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written: {error.strerror or error}")
