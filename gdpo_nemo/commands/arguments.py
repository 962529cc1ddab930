"""What several commands share: the parser, arguments of one meaning, and the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Callable, NoReturn

from gdpo_nemo.config.files import DEMO as DEFAULT_CONFIG
from gdpo_nemo.errors import printable, printable_lines
from gdpo_nemo.observe.display import NORMAL, QUIET, VERBOSE


class Parser(argparse.ArgumentParser):
    """argparse, with one line instead of the usage text before an error."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        self.exit(2, f"error: {printable(message)} (see {self.prog} --help)\n")


def add_config(command: argparse.ArgumentParser) -> None:
    """``--config`` and overrides."""
    command.add_argument(
        "--config", default=str(DEFAULT_CONFIG), metavar="FILE", help="default: the demo, configs/gdpo_tiny_cpu.yaml"
    )
    add_overrides(command)


def add_overrides(command: argparse.ArgumentParser, what: str = "changes to the config") -> None:
    """``section.key=value``, any number of times and anywhere on the command line."""
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help=what)


def add_verbosity(command: argparse.ArgumentParser) -> None:
    """``--quiet`` and ``--verbose``: how much of what the command does is shown."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("--quiet", "-q", action="store_true", help="show errors and the end, nothing else")
    group.add_argument("--verbose", "-v", action="store_true", help="show every phase with its time")


def verbosity(arguments: argparse.Namespace) -> int:
    """The level of ``observe.display`` that the user asked for."""
    return QUIET if arguments.quiet else VERBOSE if arguments.verbose else NORMAL


def add_layout(command: argparse.ArgumentParser) -> None:
    """``--layout`` and ``--precision`` of a policy that stands alone."""
    command.add_argument(
        "--layout", default="", metavar="SIZES", help="for instance tensor=2,pipeline=2,sequence; default: one rank"
    )
    command.add_argument("--precision", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")


def between(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """The type of an argument that is a number of ``kind`` from ``low`` to ``high``."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, not {text}")
        return value

    return number


def rollout_file(path: str) -> str:
    """``path``; where it is the JSONL file that runs used to write and this one wrote Parquet, that, with a note."""
    now = Path(path).with_suffix(".parquet")
    if not path.endswith(".jsonl") or Path(path).exists() or not now.exists():
        return path
    say(f"note: {path} is {now.name} now", to_stderr=True)
    return str(now)


def terminal():
    """Standard output for tables; 120 columns if it is not a terminal and COLUMNS is not set.

    Control characters in what is shown are written out. Those that rich makes of styles are not.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render(self, renderable, options=None):
            for segment in super().render(renderable, options):
                text = segment.text if segment.control else printable_lines(segment.text)
                yield segment if text == segment.text else Segment(text, segment.style)

    return Plain(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def say(text: object, *, to_stderr: bool = False, end: str = "\n") -> None:
    """Print a text at once. Texts of files, and paths, may hold control characters, which a terminal would obey."""
    print(printable_lines(str(text)), file=sys.stderr if to_stderr else sys.stdout, end=end, flush=True)
