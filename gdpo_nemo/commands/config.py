"""``gdpo-nemo config from-nemo-rl``, ``from-trl``, ``from-axolotl``: convert another program's recipe to a config."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import Commands, Parser, say
from gdpo_nemo.tools.interop.nemo_rl.releases import RELEASES

if TYPE_CHECKING:
    from gdpo_nemo.tools.interop.translation import Translation


class _ConfigParser(Parser):
    """Parser that can store the arguments after ``--`` in ``options``, for the options of a training script."""

    takes_options = False

    def parse_known_args(  # type: ignore[override]  # argparse's overloads also accept other namespace classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments before ``--``, and store the arguments after ``--`` in ``options``."""
        tokens = list(args or ())
        end = tokens.index("--") if self.takes_options and "--" in tokens else len(tokens)
        found, unknown = super().parse_known_args(tokens[:end], namespace)
        found.options = tokens[end + 1 :]
        return found, unknown


def add(commands: Commands) -> None:
    """Register the command."""
    configs = commands.add_parser("config", help="translate configs of other programs").add_subparsers(
        required=True, metavar="WHAT", parser_class=_ConfigParser
    )
    command = configs.add_parser(
        "from-nemo-rl",
        help="translate a NeMo-RL recipe (GRPO, GDPO, PPO, distillation, SFT, DPO, reward model) to a gdpo_nemo config",
        epilog="Exit status: 0 if the config can run, 1 if it cannot run, 2 if the recipe is not readable, and 3 if "
        "the run differs and --strict is set.",
    )
    command.add_argument(
        "recipe", metavar="RECIPE", help="YAML file of the recipe; parent files listed under defaults: must also exist"
    )
    command.add_argument(
        "--gym-checkout",
        metavar="DIR",
        help="checkout of NeMo Gym, or the site-packages folder that contains it; required for recipes with NeMo Gym "
        "(default: the submodule of the NeMo-RL checkout)",
    )
    command.add_argument(
        "--release",
        choices=RELEASES,
        help="release of NeMo-RL that the recipe belongs to (default: determined by the recipe's keys)",
    )
    _add_outcome(command)
    command.set_defaults(command=run)
    command = configs.add_parser(
        "from-trl",
        help="translate a TRL script or its arguments to a gdpo_nemo config, key by key",
        usage="gdpo-nemo config from-trl FILE [FILE ...] [--num-processes N] [--out FILE] [--strict] [-- OPTION ...]",
        epilog="Scripts are parsed, never executed. Command-line options of the script follow --. Exit status: "
        "0 if the config can run, 1 if it cannot run, 2 if the input is not readable, and 3 if the run differs and "
        "--strict is set.",
    )
    command.add_argument(
        "sources",
        metavar="FILE",
        nargs="+",
        help="script.py, args.json or args.yaml; a script may be combined with arguments; for trainers other than "
        "GRPOTrainer, the first word is the trl command, such as dpo",
    )
    command.takes_options = True
    _add_processes(command, "TRL")
    _add_outcome(command)
    command.set_defaults(command=run_from_trl)
    command = configs.add_parser(
        "from-axolotl",
        help="translate an axolotl config (SFT, preferences, GRPO, GDPO, EBFT) to a gdpo_nemo config, key by key",
        epilog="Exit status: 0 if the config can run, 1 if it cannot run, 2 if the input is not readable, and 3 if "
        "the run differs and --strict is set.",
    )
    command.add_argument("recipe", metavar="CONFIG", help="YAML file of the axolotl config")
    _add_processes(command, "axolotl")
    _add_outcome(command)
    command.set_defaults(command=run_from_axolotl)


def _add_processes(command: argparse.ArgumentParser, program: str) -> None:
    command.add_argument(
        "--num-processes",
        metavar="N",
        type=int,
        default=1,
        help=f"number of processes that {program} is launched with (default: 1)",
    )


def _add_outcome(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", metavar="FILE", help="write the config and the report on every key to FILE, and print only the summary"
    )
    command.add_argument(
        "--strict", action="store_true", help="exit with status 3 if the run differs in ways that matter"
    )


def run(arguments: argparse.Namespace) -> int:
    """Translate a NeMo-RL recipe. Return the exit status.

    The status is 1 if the recipe cannot run, 3 if the run differs and --strict is set, otherwise 0.
    """
    from gdpo_nemo.tools.interop.nemo_rl.translate import translate

    found = translate(arguments.recipe, arguments.gym_checkout, arguments.release)
    return _deliver(found, arguments.recipe, arguments)


def run_from_trl(arguments: argparse.Namespace) -> int:
    """Translate a TRL script or TRL arguments. Return the same exit statuses as ``run``."""
    from gdpo_nemo.tools.interop.trl.translate import translate_trl

    found = translate_trl(arguments.sources, arguments.out, arguments.num_processes, arguments.options)
    given = f" with {shlex.join(arguments.options)}" if arguments.options else ""
    return _deliver(found, " and ".join(arguments.sources) + given, arguments)


def run_from_axolotl(arguments: argparse.Namespace) -> int:
    """Translate an axolotl config. Return the same exit statuses as ``run``."""
    from gdpo_nemo.tools.interop.axolotl.translate import translate_axolotl

    return _deliver(translate_axolotl(arguments.recipe, arguments.num_processes), arguments.recipe, arguments)


def _deliver(translation: Translation, title: str, arguments: argparse.Namespace) -> int:
    """Write or print the config and the translation report, and return the exit status."""
    from gdpo_nemo.tools.interop.translation import CANNOT_RUN, DIFFERS, write_text

    text = translation.to_text(title)
    if arguments.out:
        write_text(arguments.out, text)
        say(translation.summary() + f"\nwrote the config and the report on every key: {arguments.out}")
    else:
        say(text, end="")
        say(translation.summary(), to_stderr=True)
    if translation.status == CANNOT_RUN:
        return 1
    return 3 if arguments.strict and translation.status == DIFFERS else 0
