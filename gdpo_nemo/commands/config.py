"""``gdpo-nemo config from-nemo-rl``, ``from-trl``, ``from-axolotl``: another program's recipe as a config of ours."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import Parser, say

if TYPE_CHECKING:
    from gdpo_nemo.interop.translation import Translation


class _ConfigParser(Parser):
    """Keeps what follows ``--`` for a translator that takes the options of a script."""

    takes_options = False

    def parse_known_args(self, args=None, namespace=None):
        """A ``Parser`` that puts the arguments after ``--`` into ``options``."""
        words = list(args or ())
        place = words.index("--") if self.takes_options and "--" in words else len(words)
        found, unknown = super().parse_known_args(words[:place], namespace)
        found.options = words[place + 1 :]
        return found, unknown


def add(commands) -> None:
    """Register the command."""
    configs = commands.add_parser("config", help="translate configs").add_subparsers(
        required=True, metavar="WHAT", parser_class=_ConfigParser
    )
    command = configs.add_parser(
        "from-nemo-rl",
        help="a NeMo-RL GRPO or GDPO recipe as a config of ours, key by key",
        epilog="Exit status: 0 same, or runs but differs (3 with --strict); 1 cannot run; 2 no recipe that can be "
        "read.",
    )
    command.add_argument("recipe", metavar="RECIPE", help="its YAML; parents named under defaults: must be there too")
    _add_outcome(command)
    command.set_defaults(command=run)
    command = configs.add_parser(
        "from-trl",
        help="a script or arguments of TRL as a config of ours, key by key",
        usage="gdpo-nemo config from-trl FILE [FILE ...] [--num-processes N] [--out FILE] [--strict] [-- OPTION ...]",
        epilog="Scripts are read and never run. Options of the script's own command line follow --. Exit status: 0 "
        "same, or runs but differs (3 with --strict); 1 cannot run; 2 nothing that can be read.",
    )
    command.add_argument(
        "sources",
        metavar="FILE",
        nargs="+",
        help="script.py, args.json or args.yaml; a script may come with arguments; arguments of another trainer than "
        "GRPOTrainer come after its command of trl, such as dpo",
    )
    command.takes_options = True
    _add_processes(command, "TRL")
    _add_outcome(command)
    command.set_defaults(command=run_from_trl)
    command = configs.add_parser(
        "from-axolotl",
        help="a config of axolotl (SFT, preferences, GRPO, GDPO, EBFT) as a config of ours, key by key",
        epilog="Exit status: 0 same, or runs but differs (3 with --strict); 1 cannot run; 2 nothing that can be read.",
    )
    command.add_argument("recipe", metavar="CONFIG", help="its YAML")
    _add_processes(command, "axolotl")
    _add_outcome(command)
    command.set_defaults(command=run_from_axolotl)


def _add_processes(command: argparse.ArgumentParser, program: str) -> None:
    command.add_argument(
        "--num-processes",
        metavar="N",
        type=int,
        default=1,
        help=f"processes that {program} is launched with (default 1)",
    )


def _add_outcome(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", metavar="FILE", help="write the config and what became of every key there, and print the summary only"
    )
    command.add_argument(
        "--strict", action="store_true", help="end with status 3 where the run differs in ways that matter"
    )


def run(arguments: argparse.Namespace) -> int:
    """Translate a NeMo-RL recipe; exit status 0, 1 where it cannot run, 3 where it differs and --strict is given."""
    from gdpo_nemo.interop.nemo_rl.translate import translate

    return _deliver(translate(arguments.recipe), arguments.recipe, arguments)


def run_from_trl(arguments: argparse.Namespace) -> int:
    """Translate a script or arguments of TRL; the exit status is as for NeMo-RL's recipes."""
    from gdpo_nemo.interop.trl.from_trl import translate_trl

    found = translate_trl(arguments.sources, arguments.out, arguments.num_processes, arguments.options)
    given = f" with {shlex.join(arguments.options)}" if arguments.options else ""
    return _deliver(found, " and ".join(arguments.sources) + given, arguments)


def run_from_axolotl(arguments: argparse.Namespace) -> int:
    """Translate a config of axolotl; the exit status is as for NeMo-RL's recipes."""
    from gdpo_nemo.interop.axolotl.from_axolotl import translate_axolotl

    return _deliver(translate_axolotl(arguments.recipe, arguments.num_processes), arguments.recipe, arguments)


def _deliver(translation: Translation, title: str, arguments: argparse.Namespace) -> int:
    """Write or print the config and its account; the exit status."""
    from gdpo_nemo.interop.translation import CANNOT_RUN, DIFFERS, write_text

    text = translation.to_text(title)
    if arguments.out:
        write_text(arguments.out, text)
        say(translation.summary() + f"\nwritten, with what became of every key: {arguments.out}")
    else:
        say(text, end="")
        say(translation.summary(), to_stderr=True)
    if translation.status == CANNOT_RUN:
        return 1
    return 3 if arguments.strict and translation.status == DIFFERS else 0
