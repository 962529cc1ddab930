"""``alerts.jsonl``: the alerts of a run, kept for its report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, BinaryIO

from gdpo_nemo.config.reading import parse_json
from gdpo_nemo.errors import RunError, printable_lines
from gdpo_nemo.observe.metrics import read_lines
from gdpo_nemo.observe.run_files import ALERT, ALERT_MORE, fault, printable_texts

FILE = "alerts.jsonl"


def write_alert(run_dir: str | Path, step: int, text: str, level: str = "ALERT") -> None:
    """Append one alert, or what is no more than a ``note``. Raises OSError: it could not be written."""
    text = printable_lines(text)
    line = json.dumps({"time": time.time(), "step": step, "level": level, "text": text}) + "\n"
    with open(Path(run_dir) / FILE, "ab+") as file:
        _remove_torn_line(file)
        file.write(line.encode())


def _remove_torn_line(file: BinaryIO) -> None:
    """Drop what follows the last line break: half an alert that a full disk left, which would spoil the next one."""
    file.seek(0)
    written = file.read()
    whole = written.rfind(b"\n") + 1
    if whole < len(written):
        file.truncate(whole)


def read_alerts(run_dir: str | Path) -> list[dict[str, Any]]:
    """All alerts in order; a torn last line is ignored.

    Raises:
        RunError: a line is not an alert, or the file cannot be read.
    """
    path = Path(run_dir) / FILE
    return [_alert(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path)[:-1], start=1)]


def _alert(line: bytes, where: str) -> dict[str, Any]:
    try:
        alert = parse_json(line)
    except ValueError:
        alert = None
    if not isinstance(alert, dict) or fault(alert, ALERT, ALERT_MORE) is not None:
        raise RunError(f"{where}: not an alert")
    # Lines of a text are kept; a line feed acts on no terminal.
    text = printable_lines(alert["text"])
    return {**printable_texts(alert), "text": text}
