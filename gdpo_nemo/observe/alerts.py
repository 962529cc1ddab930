"""``alerts.jsonl``: the alerts of a run, kept for its report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gdpo_nemo.config.reading import parse_json
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.metrics import read_lines

FILE = "alerts.jsonl"


def write_alert(run_dir: str | Path, step: int, text: str, level: str = "ALERT") -> None:
    """Append one alert, or what is no more than a ``note``."""
    with open(Path(run_dir) / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "step": step, "level": level, "text": text}) + "\n")


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
    if not isinstance(alert, dict) or not {"step", "text"} <= set(alert):
        raise RunError(f"{where}: not an alert")
    return alert
