"""``gdpo-nemo report``: write the HTML report of a run."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, say


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("report", help="write report.html for a run")
    command.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the HTML report of a run and print its path."""
    from gdpo_nemo.observe.html_report import write_report

    say(write_report(arguments.run_dir))
    return 0
