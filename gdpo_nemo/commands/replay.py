"""``gdpo-nemo replay``: repeat the training of a run from its journal and samples, and compare the results.

Engines and environments are not started. With ``--instead``, the steps are trained with another objective.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.commands.arguments import Commands, add_verbosity, say, terminal, verbosity
from gdpo_nemo.observe.display import covered, shown
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import write_whole
from gdpo_nemo.utils.progress import phase

if TYPE_CHECKING:
    from gdpo_nemo.config.schema import Config
    from gdpo_nemo.observe.journal import Audit
    from gdpo_nemo.training.replay import Plan


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("replay", help="retrain a run from its journal and samples, and compare the results")
    command.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    command.add_argument("--to", type=int, metavar="STEP", help="last step (default: the run's last step)")
    command.add_argument(
        "--from", type=int, default=0, dest="start", metavar="STEP",
        help="start from the newest checkpoint at or before this step (default: start from the initial model)",
    )  # fmt: skip
    command.add_argument("--out", metavar="DIR", help="new output folder (default: RUN_DIR/replay_STEP)")
    command.add_argument(
        "--check", action="store_true", help="also compare the weights; the run must have a checkpoint of STEP"
    )
    command.add_argument(
        "--instead", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="train the recorded samples with another objective, for example gdpo.estimator=grpo, and compare the "
        "advantages and gradients",
    )  # fmt: skip
    command.add_argument(
        "--audit",
        action="store_true",
        help="do not train, but check that the journal accounts for every prompt and sample",
    )
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Repeat the training and compare the results, or check the journal.

    Return exit status 1 for differences or errors.
    """
    if arguments.audit:
        from gdpo_nemo.training.replay import audit_run

        return _print_audit(audit_run(Path(arguments.run_dir)))
    if arguments.check and arguments.instead:
        raise ConfigError("--check: compares equal weights, but --instead trains other weights; remove one of them")
    with shown(sys.stderr, verbosity(arguments)):
        plan = _retrain(arguments)
    return _print_other_objective(plan) if arguments.instead else _print_comparison(plan)


def _retrain(arguments: argparse.Namespace) -> Plan:
    out = None if arguments.out is None else Path(arguments.out)
    # Without a terminal, a failed command prints only its error line.
    with contextlib.nullcontext() if sys.stderr.isatty() else covered():
        with phase("imports"):
            from gdpo_nemo.training.replay import plan_rerun, rerun
        run_dir, last, start = Path(arguments.run_dir), arguments.to, arguments.start
        plan = plan_rerun(run_dir, last, out, start, arguments.check, arguments.instead)
    if not arguments.check and not arguments.instead:
        plan.original = None
    rerun(plan)
    return plan


def _print_audit(result: Audit) -> int:
    sound = (
        f"every prompt was trained or dropped once, no sample is too old, and {result.compared} samples are as trained"
    )
    if result.unknown:
        sound = f"no errors; {result.compared} samples are as trained"
    for line in result.found or [sound]:
        say(line)
    for line in result.unknown:
        say(f"not checked: {line}")
    return 1 if result.found else 0


SIGN_CHANGES = "sign_changes.jsonl"
"""File in the output folder with one line for each sample whose advantage has another sign."""


def _print_other_objective(plan: Plan) -> int:
    """Print how the advantages, gradients and weights differ under the other objective."""
    from rich.table import Table

    from gdpo_nemo.commands.advantage_tables import with_weights_of
    from gdpo_nemo.training.replay import compare_weights

    before, now = _gradient_norms(plan.run_dir), _gradient_norms(plan.out)
    table = Table(
        "step", "cosine of advantages", "samples with another sign", "grad_norm in the run", "grad_norm instead"
    )
    changes: list[dict[str, Any]] = []
    for segment in plan.segments:
        for step in range(segment.first, segment.last + 1):
            config = with_weights_of(plan.out, step, segment.config)
            cosine, other_sign, changed = _compare_advantages(plan.run_dir, step, config)
            table.add_row(str(step), f"{cosine:.3f}", f"{other_sign:.1%}", f"{before[step]:.4g}", f"{now[step]:.4g}")
            changes += changed
    terminal().print(table)
    first = plan.segments[0].first
    say(f"{plan.last - first + 1} steps trained with the other objective in {plan.out}")
    if plan.gradients is not None:
        say(_gradient_comparison(plan, before[first], now[first]))
    if plan.original is not None and (differ := compare_weights(plan)):
        say(f"After step {plan.last}, {len(differ)} tensors differ from those of the run; {differ[0]}.")
    if changes:
        path = plan.out / SIGN_CHANGES
        write_whole(path, "".join(json.dumps(change) + "\n" for change in changes).encode())
        say(f"{path} lists {len(changes)} samples whose advantages have another sign.")
    if any(segment.config.gdpo.dynamic_sampling.enabled for segment in plan.segments):
        say(
            "gdpo.dynamic_sampling: a run with the other objective may train other groups, because the objective "
            "decides which groups have a training signal."
        )
    if plan.last > first:
        say(f"The samples of steps {first + 1} to {plan.last} come from the weights of the original run.")
    return 0


def _gradient_norms(run_dir: Path) -> dict[int, float]:
    from gdpo_nemo.observe.metrics import read_metrics

    return {row["step"]: row["grad_norm"] for row in read_metrics(run_dir) if "grad_norm" in row}


def _gradient_comparison(plan: Plan, before: float, now: float) -> str:
    """Return a sentence about the gradients of the first step with both objectives.

    Args:
        before, now: ``grad_norm`` of this step in the run and in the replay.

    Raises:
        RunError: if the compared gradients are not those of the updates.
    """
    import numpy as np

    from gdpo_nemo.config.algorithm_choice import spec_of
    from gdpo_nemo.config.layout import updates_per_step

    assert plan.gradients is not None
    first = plan.segments[0]
    norms = np.sqrt(plan.gradients.diagonal())
    if updates_per_step(first.config, spec_of(first.config)) == 1 and not np.allclose(norms, [before, now], rtol=0.01):
        raise RunError(
            f"step {first.first}: the compared gradients have norms {norms[0]:.4g} and {norms[1]:.4g}, but the updates "
            f"had grad_norm {before:.4g} and {now:.4g}; report the config as a bug"
        )
    cosine = plan.gradients[0, 1] / norms.prod() if norms.all() else float("nan")
    return (
        f"The gradients of both objectives at the weights before step {first.first} have the cosine {cosine:.3f} "
        "(1: same direction, 0: orthogonal, -1: opposite)."
    )


def _compare_advantages(run_dir: Path, step: int, config: Config) -> tuple[float, float, list[dict[str, Any]]]:
    """Return the cosine of the recorded advantages and those of ``config``, the share of trained samples in which their
    signs differ, and these samples. The numbers are NaN if the run did not record advantages."""
    import numpy as np

    from gdpo_nemo.commands.advantage_tables import read_step
    from gdpo_nemo.observe.samples import rollout_files
    from gdpo_nemo.rollouts.credit import advantages_of

    groups, recorded = read_step(dict(rollout_files(run_dir))[step])
    values = advantages_of(groups, config).values.numpy()
    trajectories = [t for group in groups for t in group.trajectories]
    trained = np.array([t.trains for t in trajectories])
    size = np.linalg.norm(recorded[trained]) * np.linalg.norm(values[trained])
    cosine = recorded[trained] @ values[trained] / size if size else float("nan")
    other_sign = trained & (np.sign(np.round(recorded, 6)) != np.sign(np.round(values, 6)))
    changed = []
    for i in np.flatnonzero(other_sign):
        t = trajectories[i]
        change = {
            "step": step,
            "prompt_id": t.prompt.id,
            "sample": t.sample_index,
            "rewards": {name: r for name, r in t.component_rewards.items() if r is not None and r == r},
            "advantage": float(recorded[i]),
            "instead": float(values[i]),
        }
        changed.append(change)
    return float(cosine), float(other_sign[trained].mean()), changed


def _print_comparison(plan: Plan) -> int:
    from gdpo_nemo.training.replay import COMPARED, compare_metrics, compare_weights

    different = compare_metrics(plan)
    names = " and ".join(COMPARED)
    steps = f"steps {plan.segments[0].first} to {plan.last}"
    say(f"{steps} retrained in {plan.out}: " + (different[0] if different else f"{names} of every step are equal"))
    if plan.original is None:
        return 1 if different else 0
    differ = compare_weights(plan)
    largest = f"{len(differ)} tensors differ; {differ[0]}" if differ else "bitwise equal"
    say(f"weights after step {plan.last}, compared with {plan.original}: {largest}")
    return 1 if different or differ else 0
