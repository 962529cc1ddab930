"""``alerts.jsonl``: what a person should have been told during a run, kept for the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

FILE = "alerts.jsonl"


def write_alert(run_dir: str | Path, step: int, text: str, level: str = "ALERT") -> None:
    """Appends one alert, or what is no more than a ``note``."""
    with open(Path(run_dir) / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "step": step, "level": level, "text": text}) + "\n")


def read_alerts(run_dir: str | Path) -> list[dict[str, Any]]:
    """All alerts in order; a torn last line is ignored."""
    path = Path(run_dir) / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
