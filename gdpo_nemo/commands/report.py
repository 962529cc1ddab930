"""``gdpo-nemo report``: the HTML report of a run."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import say


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("report", help="write report.html for a run, finished or not")
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the HTML report of a run and say where."""
    from gdpo_nemo.observe.html_report import write_report

    say(write_report(arguments.run_dir))
    return 0
