"""``gdpo-nemo explain-advantages``: what the rewards of a recorded step did to its advantages."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import add_overrides, rollout_file, terminal


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("explain-advantages", help="what a recorded step's rewards did to its advantages")
    command.add_argument("file", metavar="FILE", help="for instance results/tiny/rollouts/step_0007.parquet")
    command.add_argument("--config", metavar="FILE", help="default: config.yaml of the run")
    command.add_argument("--groups", type=int, default=3, metavar="N", help="groups to show in full (%(default)s)")
    add_overrides(command, "changes to the config: what if")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what the rewards of a recorded step did to its advantages."""
    from gdpo_nemo.rollouts.advantage_tables import explain_step

    path = rollout_file(arguments.file)
    terminal().print(explain_step(path, arguments.config, arguments.overrides, arguments.groups))
    return 0
