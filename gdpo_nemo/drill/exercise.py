"""A drill: an undisturbed run, a disturbed one, and what is the same in both."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

from gdpo_nemo.config.schema import Config
from gdpo_nemo.drill.drilled_run import DrilledRun, Outcome, trained
from gdpo_nemo.drill.faults import Fault
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe import journal
from gdpo_nemo.rerun import COMPARED, audit_run
from gdpo_nemo.weights.model_folder import differences

BETWEEN = 3
"""Steps from one fault to the next."""
_FURTHER = 4
"""Steps for each fault besides."""
_MOST_SENTENCES = 5
_OWN = (
    # The supervisor's own limit is not what is tried here.
    "run.max_restarts=10000", "checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.keep_last=3",
    "checkpointing.metric_name=null", "checkpointing.export_hf=true", "gdpo.val_period=0", "gdpo.val_at_start=false",
    "logger.console=plain", "logger.plot=false", "logger.tensorboard.enabled=false", "logger.wandb.enabled=false",
    "logger.mlflow.enabled=false",
)  # fmt: skip
"""Checkpoints often enough to lose little, and nothing that leaves the two folders."""


@dataclass(frozen=True)
class Drill:
    """What is to be done."""

    config: str
    overrides: Sequence[str]
    faults: Sequence[Fault]
    out: Path
    seed: int = 0
    between: int = BETWEEN
    patience_s: float = 1800.0
    compared: Path | None = None
    """Folder of the undisturbed run, which is not done again where it is there; None: in ``out``."""

    @property
    def undisturbed(self) -> Path:
        """Folder of the run in peace."""
        return (self.compared or self.out / "undisturbed").absolute()

    @property
    def disturbed(self) -> Path:
        """Folder of the other one."""
        return (self.out / "disturbed").absolute()

    @property
    def steps(self) -> int:
        """Steps of both runs."""
        # A fault takes the step that it disturbs besides, the moment until it comes another two, and it may be heard of
        # three steps later.
        return (self.between + _FURTHER) * (len(self.faults) + 1)

    @property
    def changes(self) -> list[str]:
        """Overrides of both runs; the user's first, so that a drill stays one."""
        return [*self.overrides, *_OWN, f"gdpo.max_num_steps={self.steps}"]

    def run(self, run_dir: Path) -> DrilledRun:
        """One of the two runs, not started."""
        arguments = ["--config", self.config, *self.changes, f"run.dir={run_dir}"]
        return DrilledRun(run_dir, arguments, self.patience_s, self.seed)


@dataclass
class Result:
    """What came of it."""

    outcomes: list[Outcome] = field(default_factory=list)
    exact: bool = True
    """Whether the runs have to be equal, bit for bit."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for everything that must not be."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each run."""
    steps: int = 0

    @property
    def passed(self) -> bool:
        """Whether everything is as it must be."""
        return not self.wrong and not any(outcome.wrong for outcome in self.outcomes)

    def record(self) -> dict[str, Any]:
        """For a file."""
        outcomes = [outcome.record() for outcome in self.outcomes]
        return {**vars(self), "outcomes": outcomes, "passed": self.passed}


def is_exact(config: Config) -> bool:
    """Whether a run that was disturbed has to be the undisturbed one bit for bit: what is drawn beside training depends
    on the clock, and so do a GPU's sums, whose order is not fixed."""
    return config.rollout.max_staleness == 0 and config.cluster.gpus_per_node == 0


def drill(what: Drill, exact: bool, tell: Callable[[str], None]) -> Result:
    """Do it all; ``tell`` hears how it goes.

    Raises:
        RunError: the undisturbed run failed, or a step took longer than ``patience_s``.
    """
    result = Result(exact=exact)
    if not (what.undisturbed / "model").is_dir():
        _undisturbed(what, result, tell)
    result.steps = max(trained(what.undisturbed))
    run = what.run(what.disturbed)
    begin = time.monotonic()
    try:
        run.start()
        for number, fault in enumerate(what.faults, start=1):
            outcome = _one(run, fault, number, what.between, tell)
            result.outcomes.append(outcome)
            if outcome.wrong:
                return result
        status = run.finish()
        result.seconds["disturbed"] = time.monotonic() - begin
        if status:
            result.wrong.append(f"the disturbed run ended with status {status}; see {run.log}")
        else:
            result.wrong += compared(what, exact)
        result.wrong += [f"left behind: {name}" for name in run.left_behind()]
    finally:
        run.close()
    return result


def _undisturbed(what: Drill, result: Result, tell: Callable[[str], None]) -> None:
    run = what.run(what.undisturbed)
    begin = time.monotonic()
    tell("an undisturbed run, to compare with")
    try:
        run.start()
        if status := run.finish():
            raise RunError(f"the undisturbed run ended with status {status}; see {run.log}")
    finally:
        run.close()
    result.seconds["undisturbed"] = time.monotonic() - begin
    tell(f"{run.step()} steps in {result.seconds['undisturbed']:.0f} s; now the same, disturbed")


def _one(run: DrilledRun, fault: Fault, number: int, between: int, tell: Callable[[str], None]) -> Outcome:
    if not run.wait_for(run.step() + between):
        return Outcome(
            fault.name, "", run.step(), wrong=f"the run ended by itself, with status {run.ended}; see {run.log}"
        )
    run.some_moment()
    outcome = run.disturb(fault)
    tell(f"{number:2}  {describe(outcome)}")
    return outcome


def describe(outcome: Outcome) -> str:
    """A fault and what came of it, in a line."""
    if not outcome.victim:
        return f"{outcome.fault}: {outcome.wrong or 'this run has none'}"
    after = f"after step {outcome.step}"
    if outcome.wrong:
        return f"{outcome.fault} ({outcome.victim}) {after}: {outcome.wrong}"
    again = f", started again {outcome.starts} x" if outcome.starts else ""
    said = f': "{outcome.said[0]}"' if outcome.said else ""
    return f"{outcome.fault} ({outcome.victim}) {after}: next step {outcome.seconds:.1f} s later{again}{said}"


def compared(what: Drill, exact: bool) -> list[str]:
    """What the disturbed run lost, did twice, or, where they have to be equal (``exact``), did otherwise."""
    # One that samples nothing has no journal.
    found = audit_run(what.disturbed) if (what.undisturbed / journal.FILE).exists() else []
    if not exact:
        return found
    found += differing_steps(what.undisturbed, what.disturbed)[:_MOST_SENTENCES]
    return found + differences(what.undisturbed / "model", what.disturbed / "model")[:1]


def differing_steps(undisturbed: Path, disturbed: Path) -> list[str]:
    """A sentence for each step that only one of two runs has, or of which loss or gradient are not the same."""
    before, now = trained(undisturbed), trained(disturbed)
    found = []
    for step in sorted(before.keys() | now.keys()):
        if step not in before or step not in now:
            found.append(f"step {step} is in one of the two runs only")
            continue
        found += [
            f"step {step}: {key} is {now[step].get(key)!r}, undisturbed {before[step].get(key)!r}"
            for key in COMPARED
            if now[step].get(key) != before[step].get(key)
        ]
    return found


def by_fault(outcomes: Iterable[Outcome]) -> list[tuple[str, int, float | None, float | None]]:
    """(fault, times, median seconds to the next step, longest) in the order of their first."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.victim:
            found.setdefault(outcome.fault, []).extend([] if outcome.seconds is None else [outcome.seconds])
    return [
        (name, len(seconds), statistics.median(seconds) if seconds else None, max(seconds, default=None))
        for name, seconds in found.items()
    ]
