"""``gdpo-nemo profile``: arguments, and output to the terminal and the output folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gdpo_nemo.commands.arguments import Commands, add_overrides, add_verbosity, between, terminal, verbosity
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import check_creatable_folder
from gdpo_nemo.observe.display import shown
from gdpo_nemo.utils.errors import ConfigError

_MOST = 1_000_000


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("profile", help="measure the rewards of a config before training")
    command.add_argument("config", metavar="CONFIG", help="config file")
    number = between(int, 1, _MOST)
    command.add_argument(
        "--rows", type=number, default=64, metavar="N", help="number of rows, in the run's order (default: %(default)s)"
    )
    command.add_argument(
        "--group", type=between(int, 2, _MOST), metavar="G",
        help="samples per row (default: gdpo.num_generations_per_prompt)",
    )  # fmt: skip
    command.add_argument(
        "--repeat", type=between(int, 0, 1000), default=2, metavar="R",
        help="further verifications of each sample, which measure noise and time (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--out", metavar="DIR", help="output folder (default: run.dir with the suffix _profile)")
    add_verbosity(command)
    add_overrides(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Sample, verify, and write and print the profile."""
    from gdpo_nemo.tools.profile.measure import measure, write
    from gdpo_nemo.tools.profile.page import summary, write_page

    with shown(sys.stderr, verbosity(arguments)):
        config = load_config(arguments.config, arguments.overrides)
        out = Path(arguments.out or f"{config.run.dir}_profile")
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out: {out} is not a folder")
        check_creatable_folder("--out", out if out.is_dir() else out.parent)
        measured = measure(config, arguments.rows, arguments.group, arguments.repeat)
        write(out, measured)
        write_page(out / "profile.html", measured)
    terminal().print(summary(measured, out))
    return 0
