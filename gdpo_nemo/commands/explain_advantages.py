"""``gdpo-nemo explain-advantages``: show how the rewards of a recorded step determine its advantages."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, add_overrides, rollout_file, terminal


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "explain-advantages", help="explain how a recorded step's rewards determine its advantages"
    )
    command.add_argument(
        "file", metavar="FILE", help="rollout file, for example results/tiny/rollouts/step_0007.parquet"
    )
    command.add_argument("--config", metavar="FILE", help="config file (default: config.yaml of the run)")
    command.add_argument(
        "--groups", type=int, default=3, metavar="N", help="number of groups to show in full (default: %(default)s)"
    )
    add_overrides(command, "config changes to try")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print how the rewards of a recorded step determine its advantages."""
    from gdpo_nemo.commands.advantage_tables import explain_step

    path = rollout_file(arguments.file)
    terminal().print(explain_step(path, arguments.config, arguments.overrides, arguments.groups))
    return 0
