"""The closing table: where each reward started and ended, where the time went, where the files are."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group as Stack, RenderableType
from rich.table import Table
from rich.text import Text

from gdpo_nemo.observe.history import WINDOW, History
from gdpo_nemo.observe.metric_registry import unit_of

SPEED = "throughput/tokens_per_second"
FILES = {
    "metrics.jsonl": "one row per step",
    "rewards.png": "reward curves",
    "report.html": "report to pass on",
    "rollouts": "every sample with its rewards",
    "checkpoints": "to resume from",
    "model": "final weights, Hugging Face format",
    "tensorboard": "for TensorBoard",
    "trace.json": "timeline for ui.perfetto.dev",
}


def reward_rows(history: History) -> list[tuple[str, ...]]:
    """(component, first steps, last steps, change, validation start, validation end), as text, one per component."""
    rows = []
    for name in [*history.components, "total"]:
        key = f"reward/{name}/mean"
        first = history.first(key)
        last = history.last(key)
        _, held_out = history.curve(f"validation/{name}")
        ends = (held_out[0], held_out[-1]) if held_out else (None, None)
        if first is None and not held_out:
            continue
        change = None if first is None or last is None else last - first
        rows.append((name, number(first), number(last), number(change, signed=True), *map(number, ends)))
    return rows


def summary(history: History, run_dir: Path, status: str) -> RenderableType:
    """The closing summary of a run."""
    title = f"{status} after step {history.training[-1]['step'] if history.training else 0}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    heads = ("reward", f"first {WINDOW} steps", f"last {WINDOW} steps", "change", "validation start", "validation end")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    for row in reward_rows(history):
        table.add_row(*row)
    lines = [Text(f"  {line}") for line in facts(history)]
    files = [(run_dir / name, about) for name, about in FILES.items() if (run_dir / name).exists()]
    width = max((len(str(path)) for path, _ in files), default=0)
    return Stack(
        table, *lines, Text(), *(Text(f"  {str(path):<{width}}  {about}", style="dim") for path, about in files)
    )


def facts(history: History) -> list[str]:
    """Time, speed and parity of the whole run, one line each, only what was measured."""
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
    return lines


def time_split(history: History, window: int | None = None) -> str:
    """``rollout 41 %  train 52 %``: the share of each measured phase."""
    return "  ".join(f"{phase} {share:.0%}" for phase, share in history.time_split(window).items())


def number(value: float | None, signed: bool = False) -> str:
    """Three decimals, or a dash for what was not measured."""
    return "-" if value is None else f"{value:+.3f}" if signed else f"{value:.3f}"


def duration(seconds: float) -> str:
    """``4:05`` or ``2:03:04``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
