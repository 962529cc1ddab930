"""``gdpo-nemo drill``: inject faults into a run and verify that no prompt is lost."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import Commands, add_config, between, say, terminal
from gdpo_nemo.utils.errors import ConfigError

if TYPE_CHECKING:
    from gdpo_nemo.tools.drill.exercise import Result

_DESCRIPTION = """\
Run a config in a new folder, with a step count for this test. Processes are killed or paused, files are truncated and
disk space runs out. On a CPU with on-policy training, an undisturbed run comes first. Exit status 0: every prompt was
trained once, no processes or files were left behind, and losses and weights are bitwise equal to those of the
undisturbed run, if there is one. In runs on several hosts, only processes on this host are targets."""


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "drill", help="inject faults into a run and check that the run recovers", description=_DESCRIPTION
    )
    add_config(command)
    command.add_argument(
        "--faults", type=_names, metavar="NAME,...", help="kinds of faults to inject (default: ten kinds, see --list)"
    )
    command.add_argument("--list", action="store_true", help="list the kinds of faults and exit")
    command.add_argument("--steps", type=between(int, 1, 1000), default=3, metavar="N",
                         help="number of steps between two faults (default: %(default)s)")  # fmt: skip
    command.add_argument(
        "--seed", type=between(int, 0, 2**31), default=0, help="random seed for fault times and targets"
    )
    command.add_argument("--patience", type=between(float, 1, 1e6), default=1800.0, metavar="SECONDS",
                         help="maximum seconds to wait for a step, including a restart (default: "
                             "%(default)g)")  # fmt: skip
    command.add_argument(
        "--out", metavar="DIR", help="new folder for the runs (default: the run's folder with the suffix _drill)"
    )
    command.set_defaults(command=run)


def _names(text: str) -> list[str]:
    return text.split(",")


def run(arguments: argparse.Namespace) -> int:
    """Run the fault-injection test and print the results. The exit status is 1 if the test fails.

    Raises:
        ConfigError: if the config or the options are invalid.
        RunError: if the undisturbed run fails, or a run makes no progress.
    """
    from gdpo_nemo.config.load import load_config
    from gdpo_nemo.tools.drill.exercise import Drill, drill, is_exact
    from gdpo_nemo.tools.drill.faults import FAULTS, TEN
    from gdpo_nemo.training.validation import validate

    if arguments.list:
        for fault in FAULTS.values():
            say(f"{fault.name:16} {fault.what}")
        return 0
    names = arguments.faults or TEN
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"--faults: {name!r} is not one of {', '.join(FAULTS)}")
    run_dir = Path(load_config(arguments.config, arguments.overrides).run.dir)
    out = Path(arguments.out) if arguments.out else run_dir.with_name(f"{run_dir.name}_drill")
    if os.path.lexists(out):
        raise ConfigError(f"--out: {out} already exists; a drill requires a new folder")
    settings = Drill(
        config=arguments.config,
        overrides=arguments.overrides,
        faults=[FAULTS[name] for name in names],
        out=out,
        seed=arguments.seed,
        between=arguments.steps,
        patience_s=arguments.patience,
    )
    resolved = validate(load_config(arguments.config, [*settings.changes, f"run.dir={out / 'disturbed'}"]))
    settings = replace(settings, exact=is_exact(resolved.config), samples=resolved.algorithm.samples)
    result = drill(settings, say)
    (out / "drill.json").write_text(json.dumps(result.record(), indent=1))
    _show(result, out)
    return 0 if result.passed else 1


def _show(result: Result, out: Path) -> None:
    from rich.table import Table

    from gdpo_nemo.tools.drill.exercise import by_fault

    table = Table("fault", "times", "next step after", "longest", box=None)
    for name, times, median, longest in by_fault(result.outcomes):
        table.add_row(name, str(times), *("" if value is None else f"{value:.1f} s" for value in (median, longest)))
    screen = terminal()
    screen.print(table)
    for sentence in result.wrong:
        say(f"wrong: {sentence}")
    if result.passed:
        same = "; losses, gradients and weights are bitwise equal to the undisturbed run" if result.exact else ""
        say(
            f"passed: every prompt of {result.steps} steps was trained once{same}; no processes or files were left "
            "behind"
        )
    else:
        say(f"failed; logs and runs are in {out}")
