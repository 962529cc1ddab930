"""Terminal display of a run: a live panel or one line per step, and a closing summary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console as RichConsole, Group as Stack, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gdpo_nemo.observe.display import QUIET, active, covered, under_way
from gdpo_nemo.observe.metric_registry import label_of, unit_of
from gdpo_nemo.observe.metrics import WINDOW, History
from gdpo_nemo.observe.run_files import RESTARTING

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
"""Health metrics that the console shows, with their number formats."""
_HIDDEN_AT_ZERO = ("rollout/env_failed", "skipped_steps")


class Console(Protocol):
    """Display of a run. A metrics row is added to the history before it is passed to the console."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished training step."""

    def validation(self, row: Mapping[str, Any]) -> None:
        """Show a finished validation."""

    def tell(self, level: str, text: str) -> None:
        """Show an alert (level ``ALERT``) or a note (level ``note``)."""

    def say(self, line: str) -> None:
        """Show a line without recording it in the run folder."""

    def close(self, status: str, run_dir: Path) -> None:
        """Show the summary at the end of the run."""


def make_console(mode: str, name: str, steps: int, history: History, terminal: RichConsole | None = None) -> Console:
    """Create a console for ``mode``: live, plain, quiet or auto.

    auto selects live on a terminal that can redraw lines, otherwise plain.
    """
    terminal = terminal or RichConsole(width=None if sys.stdout.isatty() else 120)
    display = active()
    kind: type[PlainConsole] | type[LiveConsole] = PlainConsole
    if mode == "quiet" or (display and display.level == QUIET):
        kind = QuietConsole
    elif mode == "live" or (mode == "auto" and terminal.is_terminal and not terminal.is_dumb_terminal):
        kind = LiveConsole
    return kind(name, steps, history, terminal)


class PlainConsole:
    """Console for logs and pipes, with one line per event."""

    def __init__(self, name: str, steps: int, history: History, terminal: RichConsole) -> None:
        self._steps = steps
        self._history = history
        self._terminal = terminal

    def step(self, row: Mapping[str, Any]) -> None:
        """Print one line for the step: rewards, health, speed, times and remaining time."""
        rewards = "  ".join(f"{n} {row[f'reward/{n}/mean']:.3f}" for n in _components(self._history, row))
        left = f"ETA {eta(self._history, self._steps)}"
        parts = [rewards, "  ".join(health(row)), speed(row), time_split(self._history, 1), left]
        self._print(f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  " + " | ".join(filter(None, parts)))
        if lines := weight_lines(self._history):
            self._print("  weights  " + "; ".join(lines))

    def validation(self, row: Mapping[str, Any]) -> None:
        """Print one line for the validation."""
        self._print(validation_line(row))

    def tell(self, level: str, text: str) -> None:
        """Print an alert or a note."""
        self._print(f"{level} {text}")

    def say(self, line: str) -> None:
        """Print the line."""
        self._print(line)

    def close(self, status: str, run_dir: Path) -> None:
        """Print the summary of the run, unless the run is about to restart."""
        if status != RESTARTING:
            with covered():
                self._terminal.print(summary(self._history, run_dir, status))

    def _print(self, line: str) -> None:
        with covered():
            self._terminal.print(line, markup=False, highlight=False, soft_wrap=True)


class QuietConsole(PlainConsole):
    """Console that prints only alerts and the final summary."""

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


class _ActivePhases:
    """Renderable that shows the phases that are active when it is drawn."""

    def __rich__(self) -> Text:
        return Text(under_way(), style="dim", no_wrap=True, overflow="ellipsis")


class LiveConsole:
    """Console with a panel that is redrawn in place. Validations and alerts are printed above the panel."""

    def __init__(self, name: str, steps: int, history: History, terminal: RichConsole) -> None:
        self._name = name
        self._steps = steps
        self._history = history
        self._terminal = terminal
        self._cleanup = contextlib.ExitStack()
        self._cleanup.enter_context(covered())
        if display := active():
            display.above = self.say
            self._cleanup.callback(setattr, display, "above", None)
        self._live = Live(self._panel(), console=terminal, refresh_per_second=4)
        self._live.start()

    def step(self, row: Mapping[str, Any]) -> None:
        """Redraw the panel with the step."""
        self._live.update(self._panel())

    def validation(self, row: Mapping[str, Any]) -> None:
        """Print the results of a validation above the panel."""
        self._terminal.print(validation_line(row), markup=False, highlight=False)
        self._live.update(self._panel())

    def tell(self, level: str, text: str) -> None:
        """Print an alert or a note above the panel."""
        self._terminal.print(Text(f"{level} {text}", style="bold red" if level == "ALERT" else "dim"))

    def say(self, line: str) -> None:
        """Print the line above the panel."""
        self._terminal.print(Text(line, style="dim"))

    def close(self, status: str, run_dir: Path) -> None:
        """Remove the panel and print the summary of the run, unless the run is about to restart."""
        self._live.stop()
        if status != RESTARTING:
            self._terminal.print(summary(self._history, run_dir, status))
        self._cleanup.close()

    def _panel(self) -> Panel:
        return run_panel(self._name, self._steps, self._history, _ActivePhases())


def run_panel(name: str, steps: int, history: History, *below: RenderableType) -> Panel:
    """Return a panel with progress, rewards, speed and health of a run, followed by the renderables ``below``."""
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
    weights = [Text(f"weight of {line}") for line in weight_lines(history)]
    return [*weights, Text(speed(row)), Text(split), Text("  ".join(health(row)), style="dim")]


def weight_lines(history: History) -> list[str]:
    """Return one line for each weight that ``gdpo.constraints``, ``gdpo.schedules`` or ``gdpo.weighting`` changes, with
    the reason for its value."""
    return [f"{name} {weight:.3g}: {reason}" for name, weight, reason in history.weights()]


def health(row: Mapping[str, Any]) -> list[str]:
    """Return the health metrics of a row as text, each with its name and value."""
    shown = []
    for key, form in _HEALTH.items():
        if key in row and (row[key] or key not in _HIDDEN_AT_ZERO):
            shown.append(f"{label_of(key)} {row[key]:{form}}")
    return shown


def speed(row: Mapping[str, Any]) -> str:
    """Return the speed as text: ``2,345 tokens/s  0.52 s/step``."""
    tokens = row.get(SPEED)
    seconds = row.get("time/step")
    parts = []
    if tokens is not None:
        parts.append(f"{tokens:,.0f} {unit_of(SPEED)}")
    if seconds is not None:
        parts.append(f"{seconds:.2f} s/step")
    return "  ".join(parts)


def eta(history: History, steps: int) -> str:
    """Return the estimated remaining time as text, from the mean of the last ten steps."""
    seconds = history.last("time/step", 10)
    return "?" if seconds is None else duration(seconds * max(0, steps - history.training[-1]["step"]))


def validation_line(row: Mapping[str, Any]) -> str:
    """Return one line of text for a validation."""
    values = []
    for key, value in row.items():
        if key.startswith("validation/") and not key.endswith("/error"):
            error = row.get(f"{key}/error")
            spread = "" if error is None else f" ± {error:.3f}"
            values.append(f"{key.removeprefix('validation/')} {value:.3f}{spread}")
    return f"validation after step {row['step']}  " + "  ".join(values)


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """Draw a curve with at most ``width`` block characters. Each character shows the mean of consecutive values."""
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


SPEED = "throughput/tokens_per_second"
FILES = {
    "metrics.jsonl": "one row per step",
    "rewards.png": "reward curves",
    "report.html": "self-contained report",
    "rollouts": "every sample with its rewards",
    "images": "images of the samples",
    "checkpoints": "checkpoints to resume from",
    "model": "final weights, Hugging Face format",
    "tensorboard": "for TensorBoard",
    "trace.json": "timeline for ui.perfetto.dev",
}


def reward_table(history: History) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column titles, and one row of text for each reward component and for the total.

    Columns: name, mean of the first steps, mean of the last steps, change, first validation, last validation. The first
    and the last steps do not overlap, so a run of one step has no change.
    """
    window = history.end_window
    steps = f"{window} steps" if window > 1 else "step"
    rows = []
    for name in [*history.components, "total"]:
        key = f"reward/{name}/mean"
        first = history.first(key, window)
        last = history.last(key, window) if len(history.training) > 1 else None
        _, held_out = history.curve(f"validation/{name}")
        ends = (held_out[0], held_out[-1]) if held_out else (None, None)
        if first is None and not held_out:
            continue
        change = None if first is None or last is None else last - first
        rows.append((name, number(first), number(last), number(change, signed=True), *map(number, ends)))
    return ("reward", f"first {steps}", f"last {steps}", "change", "validation start", "validation end"), rows


def summary(history: History, run_dir: Path, status: str) -> RenderableType:
    """Return the summary that is shown at the end of a run."""
    title = f"{status} after step {history.training[-1]['step'] if history.training else 0}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    heads, rows = reward_table(history)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    lines = [Text(f"  {line}") for line in facts(history)]
    lines.append(Text())
    files = {str(run_dir / name): about for name, about in FILES.items() if (run_dir / name).exists()}
    width = max(map(len, files), default=0)
    for path, about in files.items():
        lines.append(Text(f"  {path:<{width}}  {about}", style="dim"))
    return Stack(table, *lines)


def facts(history: History) -> list[str]:
    """Return one line each for time, speed, parity and skipped steps of the run.

    Lines without measured values are omitted.
    """
    seconds = sum(history.curve("time/step")[1])
    speed = history.last(SPEED, len(history.training))
    lines = [f"time        {duration(seconds)} in steps: {time_split(history)}"] if seconds else []
    if speed is not None:
        lines.append(f"speed       {speed:,.0f} {unit_of(SPEED)} on average")
    parity = history.curve("parity/max_abs")[1]
    if parity:
        lines.append(f"parity      largest log-prob difference between trainer and sampler {max(parity):.2g}")
    skipped = history.curve("skipped_steps")[1]
    if any(skipped):
        lines.append(f"skipped     {sum(skipped):.0f} steps with a non-finite loss or gradient")
    return [*lines, *moved(history)]


def moved(history: History) -> list[str]:
    """Return one line for each component: how much its expected reward was changed by each component's gradient, to
    first order, summed over the steps with such a measurement. The list is empty without measurements."""
    lines = []
    for name, parts in history.effects().items():
        sums = {part: sum(values) for part, (_, values) in parts.items()}
        causes = sorted(sums, key=lambda part: (part != name, -abs(sums[part])))
        text = ", ".join(f"by {'itself' if part == name else part} {sums[part]:+.3f}" for part in causes)
        steps = max(len(values) for _, values in parts.values())
        lines.append(f"gradients   estimated change of mean {name}: {text} (sum of {steps} steps)")
    return lines


def time_split(history: History, window: int | None = None) -> str:
    """Return the fraction of time of each phase as text: ``rollout 41%  train 52%``."""
    return "  ".join(f"{phase} {share:.0%}" for phase, share in history.time_split(window).items())


def number(value: float | None, signed: bool = False) -> str:
    """Format a number with three decimals. None becomes a dash."""
    if value is None:
        return "-"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Format a duration as ``4:05`` or ``2:03:04``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
