"""``gdpo-nemo doctor``: diagnose a live run that makes no progress, or check this machine before a run."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, say
from gdpo_nemo.utils.errors import ConfigError


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "doctor",
        help="find the processes that block a live run, and collect their stacks, waits and logs in one folder",
    )
    command.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="run folder (--environment: folder of new runs)")
    command.add_argument(
        "--environment", action="store_true", help="check the machine and the installation instead of a run"
    )
    command.add_argument(
        "--clean", action="store_true",
        help="remove processes, temporary files and shared memory of runs that were killed on this machine",
    )  # fmt: skip
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Diagnose a live run or check the installation. The exit status is 1 if a process is lost, stopped or silent."""
    from gdpo_nemo.observe.diagnosis import examine

    if arguments.clean:
        return _clean()
    if arguments.environment:
        return _check_installation(arguments.run_dir or ".")
    if arguments.run_dir is None:
        raise ConfigError("doctor: specify a run folder, --environment or --clean")
    found = examine(arguments.run_dir)
    say(found.sentence)
    say(f"stacks, waits, versions and logs: {found.folder}")
    return 1 if found.lost else 0


def _clean() -> int:
    from gdpo_nemo.cluster.worker_processes import remove_leftovers

    for sentence in remove_leftovers() or ["no killed run has left processes or files"]:
        say(sentence)
    return 0


def _check_installation(folder: str) -> int:
    from gdpo_nemo.observe.installation import check_installation, print_checks

    return print_checks(check_installation(folder))
