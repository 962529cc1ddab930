"""``gdpo-nemo compare``: runs side by side."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from gdpo_nemo.commands.arguments import say, terminal


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "compare",
        help="runs side by side: settings, curves with bands over seeds, tables at equal effort",
        description=(
            "Runs whose settings differ in the seed alone are one variant; the first variant is what the others are "
            "compared with."
        ),
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders, finished or not, of any tasks")
    command.add_argument(
        "--metric",
        action="append",
        metavar="KEY",
        help="of metrics.jsonl, any number of times, for instance validation/correct; default: every reward",
    )
    command.add_argument(
        "--over", choices=("steps", "samples", "time"), default="steps", help="what curves are drawn over (%(default)s)"
    )
    command.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="a setting that makes no variant, or a section with a dot behind; any number of times",
    )
    command.add_argument(
        "--goal",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also the steps until a metric reaches this, any number of times: reward/format/mean=0.8",
    )
    command.add_argument("--out", default="results/compare", metavar="DIR", help="for PNG and HTML (%(default)s)")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare runs: tables on standard output, curves and a page in files."""
    from gdpo_nemo.errors import ConfigError
    from gdpo_nemo.observe import comparison, comparison_page

    variants = comparison.variants_of(
        [comparison.RunRecord.read(folder) for folder in arguments.runs], arguments.ignore
    )
    metrics = arguments.metric or comparison.components(variants)
    goals = [_goal(text) for text in arguments.goal]
    runs = [run for variant in variants for run in variant.runs]
    for option, names in (("--metric", metrics), ("--goal", [metric for metric, _ in goals])):
        for metric in names:
            if not any(run.history.curve(metric)[0] for run in runs):
                raise ConfigError(f"{option}: no run measured {metric}")
    if not metrics:
        raise ConfigError("the runs have no rewards to compare; name what to compare with --metric KEY")
    for table in comparison_page.tables(variants, metrics, goals):
        _show(table)
    for path in comparison_page.write(variants, metrics, arguments.over, Path(arguments.out), goals):
        say(path)
    return 0


def _goal(text: str) -> tuple[str, float]:
    from gdpo_nemo.errors import ConfigError

    metric, _, value = text.rpartition("=")
    try:
        goal = float(value)
    except ValueError:
        goal = math.nan
    if not metric or not math.isfinite(goal):
        raise ConfigError(f"--goal: expected KEY=VALUE, got {text!r}")
    return metric, goal


def _show(found) -> None:
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
