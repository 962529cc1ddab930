"""A run as its folder shows it, drawn again and again: for a terminal other than the one that it was started in."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import psutil
from rich.console import Group as Stack, RenderableType
from rich.text import Text

from gdpo_nemo.config.reading import real_path
from gdpo_nemo.errors import printable
from gdpo_nemo.observe import alerts, metrics, status
from gdpo_nemo.observe.console import run_panel
from gdpo_nemo.observe.history import History
from gdpo_nemo.observe.run_files import read_run_config, status_if_whole
from gdpo_nemo.observe.summary import duration

_ALERTS = 4
_WAITS = 3
SILENCE_S = 30.0
"""A driver on another host that has not renewed its status for so long may be dead."""


@dataclass(frozen=True)
class Snapshot:
    """What the folder of a run says now."""

    name: str
    steps: int
    """Optimizer steps that the config asks for; what is done, where it does not say."""
    history: History
    alerts: list[dict[str, Any]]
    status: Mapping[str, Any]
    """``status.json``; empty where the run has not written it yet."""

    @property
    def outcome(self) -> str | None:
        """How the run ended; None while it goes on, as far as can be told from here."""
        said = self.status.get("outcome")
        if isinstance(said, str):
            return said
        driver = self.status.get("driver")
        near = self.status.get("host") == socket.gethostname()
        if near and isinstance(driver, int) and not psutil.pid_exists(driver):
            return "killed"
        return None


def snapshot(run_dir: str | Path) -> Snapshot:
    """Read the folder of a run.

    Raises:
        ConfigError: it holds no run. RunError: a file in it is damaged.
    """
    run_dir = Path(run_dir)
    history = History.of(metrics.read_metrics(run_dir))
    done = history.training[-1]["step"] if history.training else 0
    steps = read_run_config(run_dir).get("gdpo", {}).get("max_num_steps")
    return Snapshot(
        printable(real_path(run_dir).name),
        steps if isinstance(steps, int) and steps > 0 else max(done, 1),
        history,
        alerts.read_alerts(run_dir),
        status_if_whole(run_dir),
    )


def changed(run_dir: str | Path) -> tuple[int, ...]:
    """What is another one whenever ``snapshot`` would be."""
    stamps = []
    for name in (metrics.FILE, alerts.FILE, status.FILE):
        try:
            found = os.stat(Path(run_dir) / name)
            stamps += [found.st_mtime_ns, found.st_size]
        except FileNotFoundError:
            stamps += [0, 0]
    return tuple(stamps)


def view(now: Snapshot) -> RenderableType:
    """The panel of the run, what it waits for, its last alerts, and how it ended."""
    lines = [*_state(now), *_waits(now)]
    shown = [Text(f"{a.get('level', 'ALERT')} step {a['step']}: {a['text']}") for a in now.alerts[-_ALERTS:]]
    for line, alert in zip(shown, now.alerts[-_ALERTS:]):
        line.stylize("dim" if alert.get("level") == "note" else "bold red")
    return Stack(run_panel(now.name, now.steps, now.history, *lines), *shown)


def _state(now: Snapshot) -> list[Text]:
    if now.outcome:
        return [Text(f"the run is over: {now.outcome}", style="bold")]
    written = now.status.get("time")
    if not isinstance(written, (int, float)):
        return [Text("starting", style="dim")]
    age = time.time() - written
    where = f"process {now.status.get('driver')} on {now.status.get('host')}"
    queues = now.status.get("queues")
    parts = [f"{name} {value}" for name, value in queues.items()] if isinstance(queues, dict) else []
    lines = [Text("  ".join([where, *parts]), style="dim", no_wrap=True, overflow="ellipsis")]
    if age > SILENCE_S:
        lines.append(Text(f"no sign of life for {duration(age)}; ask gdpo-nemo doctor", style="bold red"))
    return lines


def _waits(now: Snapshot) -> list[Text]:
    """What the driver waits for, longest first."""
    waits = now.status.get("waits")
    found = []
    for wait in waits if isinstance(waits, list) and not now.outcome else []:
        if isinstance(wait, dict) and isinstance(wait.get("since"), (int, float)):
            found.append((wait["since"], f"{wait.get('what')} ({wait.get('owner')})"))
    return [
        Text(f"waits {duration(max(0.0, time.time() - since))} for {what}", style="dim", no_wrap=True)
        for since, what in sorted(found)[:_WAITS]
    ]
