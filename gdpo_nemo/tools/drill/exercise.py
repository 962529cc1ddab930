"""Fault-injection test: a disturbed run, compared with an undisturbed run if both must be bitwise equal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdpo_nemo.config.schema import Config
from gdpo_nemo.models.hf_folder import differences
from gdpo_nemo.tools.drill.faults import Fault, Then
from gdpo_nemo.tools.drill.run import REPORT_STEPS, DrilledRun, Outcome, trained
from gdpo_nemo.training.replay import COMPARED, audit_run
from gdpo_nemo.utils.errors import RunError

BETWEEN = 3
"""Steps between faults."""
_EXTRA_STEPS = 4
"""Additional steps per fault, which ``Drill.steps`` explains."""
_MAX_SENTENCES = 5
_TEST_OVERRIDES = (
    # The restart limit of the supervisor must not end the test.
    "run.max_restarts=10000", "checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.keep_last=3",
    "checkpointing.metric_name=null", "checkpointing.export_hf=true", "gdpo.val_period=0", "gdpo.val_at_start=false",
    "logger.console=plain", "logger.plot=false", "logger.tensorboard.enabled=false", "logger.wandb.enabled=false",
    "logger.mlflow.enabled=false",
)  # fmt: skip
"""Overrides that make checkpoints frequent, to lose little work, and disable all output outside the two run folders."""


@dataclass(frozen=True)
class Drill:
    """Settings of a fault-injection test."""

    config: str
    overrides: Sequence[str]
    faults: Sequence[Fault]
    out: Path
    seed: int = 0
    between: int = BETWEEN
    patience_s: float = 1800.0
    compared: Path | None = None
    """Folder of the undisturbed run, which is reused if it exists; None: ``out/undisturbed``."""
    exact: bool = True
    """True if a disturbed run must be bitwise equal to an undisturbed run (``is_exact``). Otherwise the
    undisturbed run is left out."""
    samples: bool = True
    """True if the algorithm samples, so that the runs have a journal."""

    @property
    def undisturbed(self) -> Path:
        """Folder of the undisturbed run."""
        return (self.compared or self.out / "undisturbed").absolute()

    @property
    def disturbed(self) -> Path:
        """Folder of the disturbed run."""
        return (self.out / "disturbed").absolute()

    @property
    def steps(self) -> int:
        """Number of steps of both runs."""
        # Each fault takes up to two steps after the interval until injection, one disturbed step, and three steps until
        # it is reported.
        reports = REPORT_STEPS * sum(fault.then is Then.ANY for fault in self.faults)  # all of them always follow
        return (self.between + _EXTRA_STEPS) * (len(self.faults) + 1) + reports

    @property
    def changes(self) -> list[str]:
        """Overrides of both runs.

        The test's overrides come last, so that they take precedence over the user's overrides.
        """
        return [*self.overrides, *_TEST_OVERRIDES, f"gdpo.max_num_steps={self.steps}"]

    def run(self, run_dir: Path) -> DrilledRun:
        """Create one of the two runs without starting it."""
        arguments = ["--config", self.config, *self.changes, f"run.dir={run_dir}"]
        return DrilledRun(run_dir, arguments, self.patience_s, self.seed)


@dataclass
class Result:
    """Result of a fault-injection test."""

    outcomes: list[Outcome] = field(default_factory=list)
    exact: bool = True
    """True if the runs must be bitwise equal."""
    wrong: list[str] = field(default_factory=list)
    """Errors that the test found, one sentence each."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each run in seconds."""
    steps: int = 0

    @property
    def passed(self) -> bool:
        """True if the test found no errors."""
        return not self.wrong and not any(outcome.wrong for outcome in self.outcomes)

    def record(self) -> dict[str, Any]:
        """Return the result as a dictionary for a JSON file."""
        outcomes = [outcome.record() for outcome in self.outcomes]
        return {**vars(self), "outcomes": outcomes, "passed": self.passed}


def is_exact(config: Config) -> bool:
    """Return whether a disturbed run must be bitwise equal to the undisturbed run.

    The runs may differ if rollouts overlap with training, or on a GPU, where the order of summation is not fixed.
    """
    return config.rollout.max_staleness == 0 and config.cluster.gpus_per_node == 0


def drill(settings: Drill, report: Callable[[str], None]) -> Result:
    """Run the test. ``report`` is called with progress messages.

    Raises:
        RunError: if the undisturbed run fails, or a step takes longer than ``patience_s``.
    """
    result = Result(exact=settings.exact)
    if settings.exact and not (settings.undisturbed / "model").is_dir():
        _undisturbed(settings, result, report)
    run = settings.run(settings.disturbed)
    begin = time.monotonic()
    try:
        run.start()
        for number, fault in enumerate(settings.faults, start=1):
            outcome = _inject(run, fault, number, settings.between, report)
            result.outcomes.append(outcome)
            if outcome.wrong:
                return result
        status = run.finish()
        result.seconds["disturbed"] = time.monotonic() - begin
        if status:
            result.wrong.append(f"the disturbed run ended with exit status {status}; see {run.log}")
        else:
            result.wrong += compared(settings)
            result.steps = max(trained(settings.disturbed))
        result.wrong += [f"left behind: {name}" for name in run.left_behind()]
    finally:
        run.close()
    return result


def _undisturbed(settings: Drill, result: Result, report: Callable[[str], None]) -> None:
    run = settings.run(settings.undisturbed)
    begin = time.monotonic()
    report("starting the undisturbed run, for comparison")
    try:
        run.start()
        if status := run.finish():
            raise RunError(f"the undisturbed run ended with status {status}; see {run.log}")
    finally:
        run.close()
    result.seconds["undisturbed"] = time.monotonic() - begin
    report(f"{run.step()} steps in {result.seconds['undisturbed']:.0f} s; starting the same run with faults")


def _inject(run: DrilledRun, fault: Fault, number: int, between: int, report: Callable[[str], None]) -> Outcome:
    if not run.wait_for(run.step() + between):
        return Outcome(
            fault.name,
            "",
            run.step(),
            wrong=f"the run ended before the next fault with exit status {run.ended}; see {run.log}",
        )
    run.some_moment()
    outcome = run.disturb(fault)
    report(f"{number:2}  {describe(outcome)}")
    return outcome


def describe(outcome: Outcome) -> str:
    """Describe a fault and its outcome in one line."""
    if not outcome.victim:
        return f"{outcome.fault}: {outcome.wrong or 'skipped, the run has no such target'}"
    after = f"after step {outcome.step}"
    if outcome.wrong:
        return f"{outcome.fault} ({outcome.victim}) {after}: {outcome.wrong}"
    restarts = f", restarted {outcome.starts} times" if outcome.starts else ""
    said = f': "{outcome.said[0]}"' if outcome.said else ""
    return f"{outcome.fault} ({outcome.victim}) {after}: next step {outcome.seconds:.1f} s later{restarts}{said}"


def compared(settings: Drill) -> list[str]:
    """Return sentences on lost or repeated prompts and, if they must be equal, on differences between the two runs."""
    found = audit_run(settings.disturbed).found if settings.samples else []
    if not settings.exact:
        return found
    found += differing_steps(settings.undisturbed, settings.disturbed)[:_MAX_SENTENCES]
    return found + differences(settings.undisturbed / "model", settings.disturbed / "model")[:1]


def differing_steps(undisturbed: Path, disturbed: Path) -> list[str]:
    """Return a sentence for each step that exists in only one run, or whose metrics in ``COMPARED`` differ."""
    undisturbed_rows, disturbed_rows = trained(undisturbed), trained(disturbed)
    found = []
    for step in sorted(undisturbed_rows.keys() | disturbed_rows.keys()):
        if step not in undisturbed_rows or step not in disturbed_rows:
            found.append(f"step {step} exists in only one of the two runs")
            continue
        for key in COMPARED:
            value, expected = disturbed_rows[step].get(key), undisturbed_rows[step].get(key)
            if value != expected:
                found.append(f"step {step}: {key} is {value!r}, undisturbed {expected!r}")
    return found


def by_fault(outcomes: Iterable[Outcome]) -> list[tuple[str, int, float | None, float | None]]:
    """Return (fault, count, median and maximum seconds to the next step), in order of first occurrence."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.victim:
            found.setdefault(outcome.fault, []).extend([] if outcome.seconds is None else [outcome.seconds])
    rows = []
    for name, seconds in found.items():
        median = statistics.median(seconds) if seconds else None
        rows.append((name, len(seconds), median, max(seconds, default=None)))
    return rows
