"""``gdpo-nemo explain-advantages``: show how the rewards of a recorded step determine its advantages.

The step may be a rollout dump of TRL or verl.
"""

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
    command.add_argument(
        "--from",
        dest="trainer",
        metavar="TRAINER",
        help="trainer that wrote the file, trl or verl (default: gdpo_nemo); gdpo.rewards is 1 for each component "
        "unless set",
    )
    command.add_argument("--config", metavar="FILE", help="config file (default: config.yaml of the run)")
    command.add_argument(
        "--groups", type=int, default=3, metavar="N", help="number of groups to show in full (default: %(default)s)"
    )
    add_overrides(command, "config changes to try")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print how the rewards of a recorded step determine its advantages."""
    from gdpo_nemo.commands.advantage_tables import explain_dump, explain_step

    overrides, shown = arguments.overrides, arguments.groups
    if arguments.trainer:
        explanation = explain_dump(arguments.file, arguments.trainer, arguments.config, overrides, shown)
    else:
        explanation = explain_step(rollout_file(arguments.file), arguments.config, overrides, shown)
    terminal().print(explanation)
    return 0
