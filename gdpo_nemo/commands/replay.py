"""``gdpo-nemo replay``: train a finished run again from its record, and say whether the result is the same."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import add_verbosity, say, verbosity
from gdpo_nemo.observe.display import covered, shown
from gdpo_nemo.phases import phase

if TYPE_CHECKING:
    from gdpo_nemo.rerun import Plan


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("replay", help="train a run again from its journal and samples, and compare")
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    command.add_argument("--to", type=int, metavar="STEP", help="last step; default: the run's")
    command.add_argument(
        "--from", type=int, default=0, dest="start", metavar="STEP",
        help="start from the newest checkpoint of at most so many steps; default: from the model",
    )  # fmt: skip
    command.add_argument("--out", metavar="DIR", help="folder to write; must be new; default: RUN_DIR/replay_STEP")
    command.add_argument(
        "--check", action="store_true", help="compare the weights, too; the run must have a checkpoint of STEP"
    )
    command.add_argument(
        "--audit", action="store_true", help="train nothing: check that the journal accounts for every prompt"
    )
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Train again and compare, or check the journal; status 1 where something is not as it was, or must be."""
    if arguments.audit:
        from gdpo_nemo.rerun import audit_run

        run_dir = Path(arguments.run_dir)
        return _print_audit(run_dir, audit_run(run_dir))
    with shown(sys.stderr, verbosity(arguments)):
        plan = _train_again(arguments)
    return _print_comparison(plan)


def _train_again(arguments: argparse.Namespace) -> Plan:
    out = None if arguments.out is None else Path(arguments.out)
    # Elsewhere than on a terminal a command that is refused writes its one line and nothing else.
    with contextlib.nullcontext() if sys.stderr.isatty() else covered():
        with phase("imports"):
            from gdpo_nemo.rerun import plan_rerun, rerun
        plan = plan_rerun(Path(arguments.run_dir), arguments.to, out, arguments.start, arguments.check)
    if not arguments.check:
        plan.original = None
    rerun(plan)
    return plan


def _print_audit(run_dir: Path, found: list[str]) -> int:
    from gdpo_nemo.observe.audit import has_positions
    from gdpo_nemo.observe.journal import read_journal

    if found:
        sound = "\n".join(found)
    elif has_positions(read_journal(run_dir)):
        sound = "every position is trained or dropped once, and nothing is too old"
    else:
        sound = "no step is missing and nothing is too old; this journal has no positions to account for"
    say(sound)
    return 1 if found else 0


def _print_comparison(plan: Plan) -> int:
    from gdpo_nemo.rerun import COMPARED, compare_metrics, compare_weights

    other = compare_metrics(plan)
    names = " and ".join(COMPARED)
    steps = f"steps {plan.segments[0].first} to {plan.last}"
    say(f"{steps} trained again in {plan.out}: " + (other[0] if other else f"{names} of every step are equal"))
    if plan.original is None:
        return 1 if other else 0
    differ = compare_weights(plan)
    largest = f"{len(differ)} tensors differ; {differ[0]}" if differ else "bitwise equal"
    say(f"weights after step {plan.last}, against {plan.original}: {largest}")
    return 1 if other or differ else 0
