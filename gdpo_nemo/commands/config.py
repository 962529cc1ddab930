"""``gdpo-nemo config from-nemo-rl``: a recipe of NeMo-RL as a config of ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gdpo_nemo.commands.arguments import Parser


def add(commands) -> None:
    """Register the command."""
    configs = commands.add_parser("config", help="translate configs").add_subparsers(
        required=True, metavar="WHAT", parser_class=Parser
    )
    command = configs.add_parser(
        "from-nemo-rl",
        help="a NeMo-RL GRPO or GDPO recipe as a config of ours, key by key",
        epilog="Exit status: 0 same, or runs but differs (3 with --strict); 1 cannot run; 2 no recipe that can be "
        "read.",
    )
    command.add_argument("recipe", metavar="RECIPE", help="its YAML; parents named under defaults: must be there too")
    command.add_argument(
        "--out", metavar="FILE", help="write the config and what became of every key there, and print the summary only"
    )
    command.add_argument(
        "--strict", action="store_true", help="end with status 3 where the run differs in ways that matter"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Translate a NeMo-RL recipe; exit status 0, 1 where it cannot run, 3 where it differs and --strict is given."""
    from gdpo_nemo.interop.nemo_rl.translate import translate
    from gdpo_nemo.interop.translation import CANNOT_RUN, DIFFERS

    translation = translate(arguments.recipe)
    text = translation.to_text(arguments.recipe)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
        print(translation.summary() + f"\nwritten, with what became of every key: {arguments.out}")
    else:
        print(text, end="")
        print(translation.summary(), file=sys.stderr)
    if translation.status == CANNOT_RUN:
        return 1
    return 3 if arguments.strict and translation.status == DIFFERS else 0
