"""``gdpo-nemo doctor``: why a live run does not go on, and whether this machine is fit for one."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import say
from gdpo_nemo.errors import ConfigError


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "doctor", help="who blocks a live run: stacks, waits and logs of all its processes in one folder"
    )
    command.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="the folder of the run, or where runs will be")
    command.add_argument("--environment", action="store_true", help="check this machine and installation instead")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Why a live run does not go on; status 1 when a process is lost, stopped or silent."""
    from gdpo_nemo.observe.diagnosis import examine

    if arguments.environment:
        return _check_installation(arguments.run_dir or ".")
    if arguments.run_dir is None:
        raise ConfigError("doctor: name the folder of a run, or ask for --environment")
    found = examine(arguments.run_dir)
    say(found.sentence)
    say(f"stacks, waits, versions and logs: {found.folder}")
    return 1 if found.lost else 0


def _check_installation(folder: str) -> int:
    from gdpo_nemo.observe.installation import check_installation, print_checks

    return print_checks(check_installation(folder))
