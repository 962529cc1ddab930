"""``gdpo-nemo compare``: compare runs side by side."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import Commands, say, terminal

if TYPE_CHECKING:
    from gdpo_nemo.tools.compare.page import Table as ComparisonTable


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "compare",
        help="compare runs: settings, curves with error bands over seeds, and results after equal effort",
        description=(
            "Runs whose settings differ only in the seed form one variant. All variants are compared with the first "
            "variant."
        ),
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders, finished or not, of any tasks")
    command.add_argument(
        "--metric",
        action="append",
        metavar="KEY",
        help="metric to compare, for example validation/correct; repeatable (default: all rewards)",
    )
    command.add_argument(
        "--over",
        choices=("steps", "samples", "time"),
        default="steps",
        help="horizontal axis of the curves (default: %(default)s)",
    )
    command.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="config key, or section with a trailing dot, to ignore when grouping runs into variants; repeatable",
    )
    command.add_argument(
        "--goal",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also show the number of steps until a metric reaches a value, such as reward/format/mean=0.8; repeatable",
    )
    command.add_argument(
        "--out",
        default="results/compare",
        metavar="DIR",
        help="folder for the PNG and HTML files (default: %(default)s)",
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare runs: print tables, and write curves and an HTML page to files."""
    from gdpo_nemo.tools.compare import comparison, page
    from gdpo_nemo.utils.errors import ConfigError

    variants = comparison.variants_of(list(map(comparison.RunRecord.read, arguments.runs)), arguments.ignore)
    metrics = arguments.metric or comparison.components(variants)
    goals = list(map(_goal, arguments.goal))
    runs = list(comparison.all_runs(variants))
    for option, names in (("--metric", metrics), ("--goal", dict(goals))):
        for metric in names:
            if not any(run.history.curve(metric)[0] for run in runs):
                raise ConfigError(f"{option}: no run has the metric {metric}")
    if not metrics:
        raise ConfigError("the runs have no rewards to compare; specify a metric with --metric KEY")
    for table in page.tables(variants, metrics, goals):
        _show(table)
    for path in page.write(variants, metrics, arguments.over, Path(arguments.out), goals):
        say(path)
    return 0


def _goal(text: str) -> tuple[str, float]:
    from gdpo_nemo.utils.errors import ConfigError

    metric, _, value = text.rpartition("=")
    try:
        goal = float(value)
    except ValueError:
        goal = math.nan
    if not metric or not math.isfinite(goal):
        raise ConfigError(f"--goal: expected KEY=VALUE, got {text!r}")
    return metric, goal


def _show(found: ComparisonTable) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=Text(found.title), title_style="bold", title_justify="left")
    for index, head in enumerate(found.heads):
        table.add_column(Text(head), justify="right" if index else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, row))
    screen = terminal()
    screen.print(table)
    if found.note:
        screen.print(Text(found.note, style="dim"))
