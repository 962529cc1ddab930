"""``gdpo-nemo drill``: disturb a run of a config on purpose, and show that nothing is lost."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from gdpo_nemo.commands.arguments import add_config, between, say, terminal
from gdpo_nemo.errors import ConfigError

_DESCRIPTION = """\
Run a config twice, with a step count of its own, in a folder of its own: once in peace, and once while processes are
killed and stopped, files torn and space taken away. Status 0: every prompt was trained once, on a CPU and on-policy
with the same losses and weights bit for bit, and nothing was left behind. Where there are several hosts, processes of
this one are disturbed."""


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "drill", help="kill, stop and starve a run of a config, and see it recover", description=_DESCRIPTION
    )
    add_config(command)
    command.add_argument("--faults", type=_names, metavar="NAME,...", help="default: ten kinds; --list says which")
    command.add_argument("--list", action="store_true", help="list the kinds of faults, and exit")
    command.add_argument("--steps", type=between(int, 1, 1000), default=3, metavar="N",
                         help="steps from one fault to the next (default: %(default)s)")  # fmt: skip
    command.add_argument(
        "--seed", type=between(int, 0, 2**31), default=0, help="of the moments and the processes that are hit"
    )
    command.add_argument("--patience", type=between(float, 1, 1e6), default=1800.0, metavar="SECONDS",
                         help="longest wait for a step, a restart included (default: %(default)g)")  # fmt: skip
    command.add_argument(
        "--out", metavar="DIR", help="folder of both runs; must be new; default: the run's with _drill"
    )
    command.set_defaults(command=run)


def _names(text: str) -> list[str]:
    return text.split(",")


def run(arguments: argparse.Namespace) -> int:
    """Disturb a run, and print what came of it; status 1 where something is not as it must be.

    Raises:
        ConfigError: of the config or the options. RunError: the undisturbed run failed, or one stood still.
    """
    from gdpo_nemo.config.load import load_config
    from gdpo_nemo.drill.exercise import Drill, drill, is_exact
    from gdpo_nemo.drill.faults import FAULTS, TEN
    from gdpo_nemo.validation import validate

    if arguments.list:
        for fault in FAULTS.values():
            say(f"{fault.name:16} {fault.what}")
        return 0
    names = arguments.faults or TEN
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"--faults: {name!r} is not one of {', '.join(FAULTS)}")
    own = Path(load_config(arguments.config, arguments.overrides).run.dir)
    out = Path(arguments.out) if arguments.out else own.with_name(f"{own.name}_drill")
    if os.path.lexists(out):
        raise ConfigError(f"--out: {out} is there already; a drill needs a folder of its own")
    what = Drill(
        arguments.config, arguments.overrides, [FAULTS[name] for name in names], out,
        arguments.seed, arguments.steps, arguments.patience,
    )  # fmt: skip
    config = load_config(arguments.config, [*what.changes, f"run.dir={out / 'disturbed'}"])
    validate(config)
    result = drill(what, is_exact(config), say)
    (out / "drill.json").write_text(json.dumps(result.record(), indent=1))
    _show(result, out)
    return 0 if result.passed else 1


def _show(result, out: Path) -> None:
    from rich.table import Table

    from gdpo_nemo.drill.exercise import by_fault

    table = Table("fault", "times", "next step after", "longest", box=None)
    for name, times, median, longest in by_fault(result.outcomes):
        table.add_row(name, str(times), *("" if value is None else f"{value:.1f} s" for value in (median, longest)))
    screen = terminal()
    screen.print(table)
    for sentence in result.wrong:
        say(f"wrong: {sentence}")
    if result.passed:
        same = "; losses, gradients and weights are those of the undisturbed run, bit for bit" if result.exact else ""
        say(f"passed: every prompt of {result.steps} steps was trained once{same}; nothing was left behind")
    else:
        say(f"failed; logs and runs are in {out}")
