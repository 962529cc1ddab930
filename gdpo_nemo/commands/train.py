"""``gdpo-nemo train``: a run, or with ``--dry-run`` what it would be."""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

from gdpo_nemo.algorithms.own_functions import is_place
from gdpo_nemo.api import run as train
from gdpo_nemo.commands.arguments import add_config, add_verbosity, say, verbosity
from gdpo_nemo.config.description import describe
from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.display import process_start, shown
from gdpo_nemo.phases import phase
from gdpo_nemo.supervisor import supervised
from gdpo_nemo.validation import validate


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("train", help="train, or resume the run of the same folder")
    add_config(command)
    add_verbosity(command)
    command.add_argument(
        "--dry-run", action="store_true", help="validate, print the resolved config and the plan, exit"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Validate the config, then train; with --dry-run stop after showing what would be done."""
    if arguments.dry_run:
        config = load_config(arguments.config, arguments.overrides)
        return _dry_run(config, validate(config))
    level = verbosity(arguments)
    with shown(sys.stdout, level) as display:
        with phase("config"):
            config = load_config(arguments.config, arguments.overrides)
            validate(config)

    started = process_start()

    def attempt(begin: float | None) -> int:
        with shown(sys.stdout, level, begin, None if begin else display):
            return train(config, begin or started).status

    return supervised(config, attempt) if arguments.alone and config.run.max_restarts else attempt(None)


def _dry_run(config: Config, notes: Sequence[str]) -> int:
    """Check the data that is here and print the plan, as comments: the output as a whole is a config file again."""
    from gdpo_nemo.observe.installation import missing_libraries
    from gdpo_nemo.observe.trackers import missing_trackers

    if config.cluster.gpus_per_node == 0 and (missing := missing_libraries()):
        notes = [*notes, missing]
    notes = [*notes, *missing_trackers(config)]
    said = to_yaml(config) + "\n" + plan_of(config, notes, check_inputs(config))
    say(said)
    return 0


def check_inputs(config: Config) -> list[tuple[str, str]]:
    """Read the data that is here, load the user's own functions, and compare with the run that is to be resumed; what
    was found, a (subject, sentence) each.

    Raises:
        ConfigError, RunError: what the run would refuse.
    """
    from gdpo_nemo.commands.dry_run import check_data
    from gdpo_nemo.resume import planned_changes
    from gdpo_nemo.rollouts.own_objective import check_own_functions

    check_own_functions(config)
    if is_place(config.algorithm.type):
        from gdpo_nemo.algorithm import load_algorithm

        load_algorithm(config)
    return [*check_data(config), *(("resume", sentence) for sentence in planned_changes(config))]


def plan_of(config: Config, notes: Sequence[str], found: Sequence[tuple[str, str]]) -> str:
    """What the run would be, as comments of a config file."""
    from gdpo_nemo.planning.plan_report import brief, text

    lines = [*describe(config, notes).splitlines(), *text([*brief(config), *found]).splitlines()]
    return "\n".join(f"# {line}" for line in lines)
