"""The terminal's view of a run: a live panel, or one line per step where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

from rich import box
from rich.console import Console as RichConsole, Group as Stack, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gdpo_nemo.observe.display import QUIET, active, covered, under_way
from gdpo_nemo.observe.history import WINDOW, History
from gdpo_nemo.observe.metric_registry import label_of, unit_of
from gdpo_nemo.observe.status import RESTARTING
from gdpo_nemo.observe.summary import SPEED, duration, number, summary, time_split

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_HEALTH = {
    "loss": ".4f",
    "grad_norm": ".3g",
    "policy/entropy": ".3f",
    "parity/max_abs": ".1e",
    "staleness/max": "g",
    "rollout/mean_length": ".1f",
    "rollout/env_failed": "g",
    "skipped_steps": "g",
}
"""What tells a sound step from a sick one, and how many digits of it."""
_SILENT_AT_ZERO = ("rollout/env_failed", "skipped_steps")


class Console(Protocol):
    """Shows a run. Rows are already part of the history when they arrive here."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A training step is done."""

    def validation(self, row: Mapping[str, Any]) -> None:
        """A validation is done."""

    def tell(self, level: str, text: str) -> None:
        """Something a person should know now: an ``ALERT`` or a ``note``."""

    def say(self, line: str) -> None:
        """Something good to see that nobody needs to keep."""

    def close(self, status: str, run_dir: Path) -> None:
        """The run is over; shows the summary."""


def make_console(mode: str, name: str, steps: int, history: History, terminal: RichConsole | None = None) -> Console:
    """``mode`` is live, plain, quiet or auto: live on a terminal that can redraw."""
    terminal = terminal or RichConsole(width=None if sys.stdout.isatty() else 120)
    display = active()
    kind: type[PlainConsole] | type[LiveConsole] = PlainConsole
    if mode == "quiet" or (display and display.level == QUIET):
        kind = QuietConsole
    elif mode == "live" or (mode == "auto" and terminal.is_terminal and not terminal.is_dumb_terminal):
        kind = LiveConsole
    return kind(name, steps, history, terminal)


class PlainConsole:
    """One line per event, for logs and pipes."""

    def __init__(self, name: str, steps: int, history: History, terminal: RichConsole) -> None:
        self._steps = steps
        self._history = history
        self._terminal = terminal

    def step(self, row: Mapping[str, Any]) -> None:
        """Print the step's line: rewards, health, speed, times and what is left."""
        rewards = "  ".join(f"{n} {row[f'reward/{n}/mean']:.3f}" for n in _components(self._history, row))
        left = f"ETA {eta(self._history, self._steps)}"
        parts = [rewards, "  ".join(health(row)), speed(row), time_split(self._history, 1), left]
        self._print(f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  " + " | ".join(p for p in parts if p))

    def validation(self, row: Mapping[str, Any]) -> None:
        """Print the line of a validation."""
        self._print(validation_line(row))

    def tell(self, level: str, text: str) -> None:
        """Print an alert or a note."""
        self._print(f"{level} {text}")

    def say(self, line: str) -> None:
        """Print the line."""
        self._print(line)

    def close(self, status: str, run_dir: Path) -> None:
        """Print the summary of the run, unless it goes on."""
        if status != RESTARTING:
            with covered():
                self._terminal.print(summary(self._history, run_dir, status))

    def _print(self, line: str) -> None:
        with covered():
            self._terminal.print(line, markup=False, highlight=False, soft_wrap=True)


class QuietConsole(PlainConsole):
    """Alerts and the end, and nothing else."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Print nothing."""

    def validation(self, row: Mapping[str, Any]) -> None:
        """Print nothing."""

    def tell(self, level: str, text: str) -> None:
        """Print an alert."""
        if level == "ALERT":
            super().tell(level, text)

    def say(self, line: str) -> None:
        """Print nothing."""


class _Now:
    """The phases under way whenever it is drawn."""

    def __rich__(self) -> Text:
        return Text(under_way(), style="dim", no_wrap=True, overflow="ellipsis")


class LiveConsole:
    """A panel that is redrawn in place; validations and alerts scroll by above it."""

    def __init__(self, name: str, steps: int, history: History, terminal: RichConsole) -> None:
        self._name = name
        self._steps = steps
        self._history = history
        self._terminal = terminal
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(covered())
        if display := active():
            display.above = self.say
            self._alone.callback(setattr, display, "above", None)
        self._live = Live(self._panel(), console=terminal, refresh_per_second=4)
        self._live.start()

    def step(self, row: Mapping[str, Any]) -> None:
        """Redraw the panel with the step."""
        self._live.update(self._panel())

    def validation(self, row: Mapping[str, Any]) -> None:
        """Print the line of a validation above the panel."""
        self._terminal.print(validation_line(row), markup=False, highlight=False)
        self._live.update(self._panel())

    def tell(self, level: str, text: str) -> None:
        """Print an alert or a note above the panel."""
        self._terminal.print(Text(f"{level} {text}", style="bold red" if level == "ALERT" else "dim"))

    def say(self, line: str) -> None:
        """Print the line above the panel."""
        self._terminal.print(Text(line, style="dim"))

    def close(self, status: str, run_dir: Path) -> None:
        """Take the panel down and print the summary of the run, unless it goes on."""
        self._live.stop()
        if status != RESTARTING:
            self._terminal.print(summary(self._history, run_dir, status))
        self._alone.close()

    def _panel(self) -> Panel:
        return run_panel(self._name, self._steps, self._history, _Now())


def run_panel(name: str, steps: int, history: History, *below: RenderableType) -> Panel:
    """Progress, rewards, speed and health of a run, with what else there is to say below."""
    done = history.training[-1]["step"] if history.training else 0
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        Text(f"step {done}/{steps}", style="bold"),
        ProgressBar(total=steps, completed=done, width=30),
        Text(f"ETA {eta(history, steps)}"),
    )
    title = f"[bold]gdpo_nemo[/] {escape(name)}"
    body = Stack(progress, _rewards(history), *_footer(history), *below)
    return Panel(body, title=title, title_align="left", box=box.ROUNDED)


def _rewards(history: History) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("reward", "now", f"mean {WINDOW}", "trend", label_of("reward/NAME/dead_groups"), "validation"):
        table.add_column(head, justify="left" if head in ("reward", "trend") else "right")
    row = history.training[-1] if history.training else {}
    for index, name in enumerate(history.components):
        key = f"reward/{name}/mean"
        colour = _COLOURS[index % len(_COLOURS)]
        dead = row.get(f"reward/{name}/dead_groups")
        held_out = history.curve(f"validation/{name}")[1]
        table.add_row(
            Text(name, style=colour),
            number(row.get(key)),
            number(history.last(key)),
            Text(sparkline(history.curve(key)[1]), style=colour),
            "-" if dead is None else f"{dead:g}",
            number(held_out[-1] if held_out else None),
        )
    return table


def _footer(history: History) -> Sequence[RenderableType]:
    if not history.training:
        return []
    row = history.training[-1]
    split = "   ".join(f"{phase} {_bar(share)} {share:.0%}" for phase, share in history.time_split(10).items())
    return [Text(speed(row)), Text(split), Text("  ".join(health(row)), style="dim")]


def health(row: Mapping[str, Any]) -> list[str]:
    """The numbers that tell a sound step from a sick one, only those measured."""
    shown = {key: row[key] for key in _HEALTH if key in row and (row[key] or key not in _SILENT_AT_ZERO)}
    return [f"{label_of(key)} {value:{_HEALTH[key]}}" for key, value in shown.items()]


def speed(row: Mapping[str, Any]) -> str:
    """``2,345 tokens/s  0.52 s/step``."""
    tokens = row.get(SPEED)
    seconds = row.get("time/step")
    parts = [
        f"{tokens:,.0f} {unit_of(SPEED)}" if tokens is not None else "",
        f"{seconds:.2f} s/step" if seconds is not None else "",
    ]
    return "  ".join(part for part in parts if part)


def eta(history: History, steps: int) -> str:
    """Time left, from the mean of the last ten steps."""
    seconds = history.last("time/step", 10)
    return "?" if seconds is None else duration(seconds * max(0, steps - history.training[-1]["step"]))


def validation_line(row: Mapping[str, Any]) -> str:
    """One line for one validation."""
    values = {k.removeprefix("validation/"): v for k, v in row.items() if k.startswith("validation/")}
    return f"validation after step {row['step']}  " + "  ".join(f"{k} {v:.3f}" for k, v in values.items())


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """The curve as ``width`` block characters at most, each the mean of its share of the values, low to high."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low = min(means)
    high = max(means)
    if high == low:
        return _BARS[0] * count
    return "".join(_BARS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def _components(history: History, row: Mapping[str, Any]) -> list[str]:
    return [name for name in history.components if f"reward/{name}/mean" in row]


def _bar(share: float, width: int = 6) -> str:
    filled = min(width, round(share * width))
    return "█" * filled + "░" * (width - filled)
