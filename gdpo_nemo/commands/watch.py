"""``gdpo-nemo watch``: show a run in the terminal, read from its folder."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Group as Stack, RenderableType
from rich.text import Text

from gdpo_nemo.commands.arguments import Commands, between, terminal
from gdpo_nemo.observe import metrics, run_files
from gdpo_nemo.observe.console import duration, run_panel
from gdpo_nemo.observe.metrics import History
from gdpo_nemo.observe.run_files import read_run_config, status_if_whole
from gdpo_nemo.utils.errors import printable
from gdpo_nemo.utils.files import real_path

if TYPE_CHECKING:
    from rich.console import Console


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "watch",
        help="show a run in the terminal, updated live",
        description="Exits when the run ends, with status 0 if the run is complete, otherwise 1. Ctrl-C closes the "
        "view but does not stop the run.",
    )
    command.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    command.add_argument("--once", action="store_true", help="show the run once and exit (default without a terminal)")
    command.add_argument(
        "--every",
        type=between(float, 0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="seconds between updates (default: %(default)g)",
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a run until it ends."""

    screen = terminal()
    now = snapshot(arguments.run_dir)
    if arguments.once or not screen.is_terminal:
        screen.print(view(now))
        return 0
    now = _follow(screen, now, arguments)
    screen.print(view(now))
    return 0 if now.outcome == "complete" else 1


def _follow(screen: Console, now: Snapshot, arguments: argparse.Namespace) -> Snapshot:
    """Update the view until the run ends, and return the last snapshot.

    The view uses the terminal's alternate screen, so that a view larger than the window is also removed completely.
    """
    import time

    from rich.live import Live

    seen = changed(arguments.run_dir)
    with Live(view(now), console=screen, screen=True, auto_refresh=False) as live:
        while now.outcome is None:
            time.sleep(arguments.every)
            stamp = changed(arguments.run_dir)
            # A snapshot ignores an incomplete row. The view is also redrawn without new data, because it displays ages.
            now = snapshot(arguments.run_dir) if stamp != seen else now
            seen = stamp
            live.update(view(now), refresh=True)
    return now


_ALERTS = 4
_WAITS = 3
SILENCE_S = 30.0
"""Seconds without a status update after which the view warns that the driver may be dead."""


@dataclass(frozen=True)
class Snapshot:
    """Current contents of a run folder."""

    name: str
    steps: int
    """Number of optimizer steps in the config, or number of finished steps if the config does not specify it."""
    history: History
    alerts: list[dict[str, Any]]
    status: Mapping[str, Any]
    """Content of ``status.json``. Empty if the run has not written the file yet."""

    @property
    def outcome(self) -> str | None:
        """Outcome of the run, or None while the run is active. A killed driver is detected only on this host."""
        outcome = self.status.get("outcome")
        if isinstance(outcome, str):
            return outcome
        driver = self.status.get("driver")
        is_local = self.status.get("host") == socket.gethostname()
        if is_local and isinstance(driver, int) and not psutil.pid_exists(driver):
            return "killed"
        return None


def snapshot(run_dir: str | Path) -> Snapshot:
    """Read a run folder.

    Raises:
        ConfigError: if the folder does not contain a run.
        RunError: if a file in the folder is damaged.
    """
    run_dir = Path(run_dir)
    history = History.of(metrics.read_metrics(run_dir))
    done = history.training[-1]["step"] if history.training else 0
    steps = read_run_config(run_dir).get("gdpo", {}).get("max_num_steps")
    return Snapshot(
        printable(real_path(run_dir).name),
        steps if isinstance(steps, int) and steps > 0 else max(done, 1),
        history,
        run_files.read_alerts(run_dir),
        status_if_whole(run_dir),
    )


def changed(run_dir: str | Path) -> tuple[int, ...]:
    """Return modification times and sizes of the files that ``snapshot`` reads."""
    stamps = []
    for name in (metrics.FILE, run_files.ALERTS, run_files.STATUS):
        try:
            found = os.stat(Path(run_dir) / name)
            stamps += [found.st_mtime_ns, found.st_size]
        except FileNotFoundError:
            stamps += [0, 0]
    return tuple(stamps)


def view(now: Snapshot) -> RenderableType:
    """Return the run's panel with its waits, recent alerts and outcome."""
    lines = [*_state(now), *_waits(now)]
    shown = [Text(f"{a.get('level', 'ALERT')} step {a['step']}: {a['text']}") for a in now.alerts[-_ALERTS:]]
    for line, alert in zip(shown, now.alerts[-_ALERTS:]):
        line.stylize("dim" if alert.get("level") == "note" else "bold red")
    return Stack(run_panel(now.name, now.steps, now.history, *lines), *shown)


def _state(now: Snapshot) -> list[Text]:
    if now.outcome:
        return [Text(f"the run has ended: {now.outcome}", style="bold")]
    written = now.status.get("time")
    if not isinstance(written, (int, float)):
        return [Text("starting", style="dim")]
    age = time.time() - written
    process_name = f"process {now.status.get('driver')} on {now.status.get('host')}"
    queues = now.status.get("queues")
    parts = [f"{name} {value}" for name, value in queues.items()] if isinstance(queues, dict) else []
    lines = [Text("  ".join([process_name, *parts]), style="dim", no_wrap=True, overflow="ellipsis")]
    if age > SILENCE_S:
        lines.append(Text(f"no update for {duration(age)}; run gdpo-nemo doctor", style="bold red"))
    return lines


def _waits(now: Snapshot) -> list[Text]:
    """Describe the driver's longest waits, one line each, longest first."""
    waits = now.status.get("waits")
    found = []
    for wait in waits if isinstance(waits, list) and not now.outcome else []:
        if isinstance(wait, dict) and isinstance(wait.get("since"), (int, float)):
            found.append((wait["since"], f"{wait.get('what')} ({wait.get('owner')})"))
    lines = []
    for since, what in sorted(found)[:_WAITS]:
        waited = duration(max(0.0, time.time() - since))
        lines.append(Text(f"waiting {waited} for {what}", style="dim", no_wrap=True))
    return lines
