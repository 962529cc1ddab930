"""``trace.json``: who did what when, for ui.perfetto.dev or chrome://tracing.

The file is the array form of the Chrome trace format, one event a line, whose closing bracket is optional: a trace of a
killed run opens like any other, and a resumed run goes on writing where it ended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdpo_nemo.config.reading import parse_json, read_bytes

FILE = "trace.json"


class TraceLog:
    """Spans in named lanes; times are seconds since the epoch."""

    def __init__(self, run_dir: str | Path) -> None:
        path = Path(run_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_trace(path)
        self._lanes = {e["args"]["name"]: e["tid"] for e in earlier if e.get("name") == "thread_name"}
        self._file = open(path, "w", encoding="utf-8")
        self._file.write("[\n")
        for event in earlier:
            self._write(event)
        self._file.flush()

    def add(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        """Add the span ``name`` from ``start`` to ``end`` to ``lane``; ``details`` show when it is clicked."""
        if lane not in self._lanes:
            self._lanes[lane] = len(self._lanes) + 1
            self._write({"ph": "M", "pid": 1, "tid": self._lanes[lane], "name": "thread_name", "args": {"name": lane}})
        times = {"ts": round(start * 1e6), "dur": max(0, round((end - start) * 1e6))}
        self._write({"ph": "X", "pid": 1, "tid": self._lanes[lane], "name": name, **times, "args": details})
        self._file.flush()

    def close(self) -> None:
        """Completes the array, so that strict JSON readers take the file too."""
        self._write({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "gdpo_nemo"}}, last=True)
        self._file.close()

    def _write(self, event: dict[str, Any], last: bool = False) -> None:
        self._file.write(json.dumps(event) + ("\n]\n" if last else ",\n"))


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The spans and lane names of a trace, complete or torn; empty where there is no file."""
    if not Path(path).exists():
        return []
    events = []
    for line in read_bytes(path).decode("utf-8", errors="replace").splitlines():
        try:
            event = parse_json(line.rstrip().rstrip(","))
        except ValueError:
            continue  # A bracket, or the line a crash tore.
        if isinstance(event, dict) and event.get("name") != "process_name":
            events.append(event)
    return events
