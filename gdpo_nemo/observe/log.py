"""Log of a run: writes metrics, samples, spans and alerts to files and displays, and archives old records."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.config.load import recorded
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group
from gdpo_nemo.observe import journal, metrics, run_files, sample_images, samples
from gdpo_nemo.observe.console import make_console
from gdpo_nemo.observe.health import HealthAlerts
from gdpo_nemo.observe.html_report import Redraw, write_report
from gdpo_nemo.observe.journal import Journal, TrainedBatch
from gdpo_nemo.observe.metric_registry import alias_values
from gdpo_nemo.observe.metrics import History, MetricsLog, clean, read_metrics
from gdpo_nemo.observe.plot import plot_rewards
from gdpo_nemo.observe.run_files import RESTARTING, TraceLog, write_alert
from gdpo_nemo.observe.sample_values import NO_VALUES, SampleValues
from gdpo_nemo.observe.sample_writer import SampleWriter
from gdpo_nemo.observe.samples import remove_rollouts_after
from gdpo_nemo.observe.trackers import Tracker, completion_table, enabled_trackers
from gdpo_nemo.utils.errors import RunError, printable, without_secrets


class RunLog:
    """Log of one run, which is written to files and shown on displays.

    Call ``close`` in a ``finally`` block, because ``close`` restores the terminal after the live display.

    Args:
        start_step: number of finished steps. Records of later steps are removed, or archived if ``start_step`` is 0.
        last_step: last step of the run. None means ``gdpo.max_num_steps``.
        guard: function that is called before a step is recorded. The function raises an exception if another process
            has taken over the run folder.
        restarted: reason why the supervisor restarted the run. If the earlier steps are archived together with the
            original alert, the reason is reported again.

    Raises:
        RunError: if metrics or journal cannot be read or written. Later method calls raise the same error.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path,
        start_step: int = 0,
        last_step: int | None = None,
        guard: Callable[[], None] = lambda: None,
        restarted: str | None = None,
    ) -> None:
        self._guard = guard
        self._config = config
        self._run_dir = Path(run_dir)
        self._step = start_step
        self._failed: set[str] = set()
        archived = archive_history(run_dir) if start_step == 0 else None
        self._metrics = MetricsLog(run_dir)
        self._metrics.truncate_after(start_step)
        self._journal = Journal(run_dir)
        self._journal.truncate_after(start_step)
        self._history = History.of(read_metrics(run_dir))
        self._console = None
        self._console = self._try(
            "the console",
            make_console,
            config.logger.console,
            config.run.name,
            last_step or config.gdpo.max_num_steps,
            self._history,
        )
        self._health = HealthAlerts(config, self.alert, self._history.training)
        self._try("rollouts", remove_rollouts_after, run_dir, start_step)
        rollout = config.rollout
        self._samples = SampleWriter(run_dir, self.alert, rollout.save_groups) if rollout.save_samples else None
        self._trace = self._try("the trace", TraceLog, run_dir)
        self._redraw = Redraw(run_dir, config.logger.report_period, config.logger.plot)
        self._trackers = self._start_trackers(start_step)
        if archived:
            self.note(archived)
            if restarted:
                self.alert(restarted)

    def trained(self, step: int, batch: TrainedBatch, published: int | None, total_updates: int) -> None:
        """Record the groups that ``step`` trained in the journal. Call this before ``RunLog.step``.

        Args:
            published: version of the weights that the engines used during the step.
            total_updates: number of optimizer updates in the whole run.
        """
        self._guard()
        self._journal.append(
            step,
            batch.groups,
            batch.dropped,
            position=batch.next_position,
            published=published,
            total_updates=total_updates,
            again=batch.again,
            weights=batch.weights,
        )

    def step(
        self,
        row: Mapping[str, Any],
        groups: Sequence[Group] | None = None,
        values: SampleValues = NO_VALUES,
    ) -> None:
        """Record a finished step. The groups are written in the background and must not be changed afterwards.

        Args:
            row: metrics of the step. ``row["step"]`` counts from 1.
            values: values of the groups' trajectories.

        Raises:
            NumericsFailed: if a metric in ``health.stop_on`` has left its range.
        """
        self._record(row)
        if groups is not None and self._samples:
            self._try("rollouts", self._samples.write, row["step"], groups, values)
        if groups is not None:
            self._completions(row["step"], groups, values.advantages)
        if self._console:
            self._try("the console", self._console.step, clean(row))
        self._try("report.html", self._redraw.step, row["step"])
        self._health.update(clean(row))

    def validation(self, row: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Record a validation and its samples. The groups must not be changed afterwards.

        Args:
            row: ``step`` and the metrics ``validation/...``.
        """
        self._record(row)
        if groups and self._samples:
            self._try("rollouts", self._samples.write, row["step"], groups, validation=True)
        if self._console:
            self._try("the console", self._console.validation, clean(row))

    def flush(self, step: int) -> None:
        """Wait until the journal and the samples of the steps up to ``step`` are on disk."""
        self._journal.sync()
        if self._samples:
            self._try("rollouts", self._samples.flush, step)

    def alert(self, text: str) -> None:
        """Report a problem on the console and in the HTML report."""
        self._tell("ALERT", text)

    def note(self, text: str) -> None:
        """Report information other than a problem on the console and in the HTML report."""
        self._tell("note", text)

    def card(self, folder: Path, step: int) -> None:
        """Write the model card for the weights that were exported to ``folder`` after ``step`` steps."""
        self._try("the model card", _card, folder, self._config, self._run_dir, step)

    def say(self, line: str) -> None:
        """Show a line on the console without recording it."""
        if self._console:
            self._try("the console", self._console.say, line)

    @property
    def history(self) -> History:
        """Metrics rows so far, including rows from before a restart."""
        return self._history

    def _tell(self, level: str, text: str) -> None:
        text = "\n".join(map(printable, without_secrets(text).splitlines()))
        if self._console:
            at = f"step {self._step}: " if self._step else ""
            self._try("the console", self._console.tell, level, at + text)
        try:
            write_alert(self._run_dir, self._step, text, level)
        except OSError as error:
            # On a full disk, the run ends later, when it writes metrics. The alert must still reach the user.
            print(f"alert could not be recorded ({error}): {text}", file=sys.stderr)

    def span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        """Add a span to the timeline. ``start`` and ``end`` are in seconds since the epoch."""
        if self._trace:
            self._try("the trace", self._trace.add, track, name, start, end, **details)

    def stopwatch(self, track: str, start: float) -> Callable[[str], None]:
        """Return a function that adds a span from its previous call to now. The function's argument is the span's name.

        The first span begins at ``start``.
        """
        last = [start]

        def lap(name: str) -> None:
            now = time.time()
            self.span(track, name, last[0], now)
            last[0] = now

        return lap

    def close(self, status: str) -> None:
        """Close all files and show the summary.

        ``status`` is complete, stopped, failed or ``RESTARTING``. For ``RESTARTING``, no plots are drawn and no summary
        is shown.
        """
        self._metrics.close()
        if self._samples:
            self._try("rollouts", self._samples.close)
        if self._trace:
            self._try("the trace", self._trace.close)
        for what, tracker in self._trackers.items():
            self._try(what, tracker.close, status)
        self._try("report.html", self._redraw.close)
        if status != RESTARTING and (self._history.training or self._history.validation):
            if self._config.logger.plot and self._history.components:
                self._try("rewards.png", plot_rewards, self._run_dir)
            self._try("report.html", write_report, self._run_dir)
        if self._console:
            self._try("the console", self._console.close, status, self._run_dir)

    def abandon(self, status: str) -> None:
        """Restore the terminal without closing files or drawing plots, because the process is about to exit."""
        if self._console:
            self._try("the console", self._console.close, status, self._run_dir)

    def _record(self, row: Mapping[str, Any]) -> None:
        self._guard()
        self._metrics.append(row)
        self._step = row["step"]
        self._history.add(clean(row))
        if self._trackers:
            row = {**row, **alias_values(row, self._config.logger.aliases)}
        for what, tracker in self._trackers.items():
            self._try(what, tracker.write, row)

    def _start_trackers(self, start_step: int) -> dict[str, Tracker]:
        config = self._config
        kinds: dict[str, Any] = {"TensorBoard": _tensorboard} if config.logger.tensorboard.enabled else {}
        kinds |= enabled_trackers(config.logger)
        settings = recorded(config) if kinds else {}
        started = {}
        for name, kind in kinds.items():
            if tracker := self._try(name, kind, config, self._run_dir, start_step, settings):
                started[name] = tracker
        return started

    def _completions(self, step: int, groups: Sequence[Group], advantages: np.ndarray | None) -> None:
        section = self._config.logger
        if self._trackers and section.num_completions and (step == 1 or step % section.completions_period == 0):
            table = completion_table(groups, advantages, section.num_completions)
            for what, tracker in self._trackers.items():
                self._try(what, tracker.completions, step, table)

    def _try(self, what: str, action: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call ``action``. If ``action`` fails, report one alert per ``what`` instead of ending the run."""
        try:
            return action(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - drawing libraries may raise any exception
            if what not in self._failed:
                self._failed.add(what)
                self.alert(f"{what} failed and is incomplete: {type(error).__name__}: {error}")
            return None


def _tensorboard(config: Config, run_dir: Path, start_step: int, settings: dict[str, Any]) -> Tracker:
    from gdpo_nemo.observe.tensorboard import TensorboardLog

    return TensorboardLog(run_dir, start_step, settings)


def _card(folder: Path, config: Config, run_dir: Path, step: int) -> Path:
    from gdpo_nemo.observe.model_card import write_card

    return write_card(folder, config.policy.model_name, config, run_dir, step)


FOLDER = "archive"
_PARTS = (
    journal.FILE, samples.FOLDER, samples.VALIDATION, sample_images.FOLDER, run_files.ALERTS, run_files.TRACE,
    metrics.FILE,
)  # fmt: skip
"""Files to archive. The metrics file is moved last, so that an interrupted move is repeated while this file exists."""


def archive_history(run_dir: str | Path) -> str | None:
    """Archive the records of all steps, for a run that restarts at step 0.

    Returns:
        A sentence that names the archive, or None if no step was recorded.

    Raises:
        RunError: if the metrics cannot be read or the files cannot be moved.
    """
    run_dir = Path(run_dir)
    last = max((row["step"] for row in metrics.read_metrics(run_dir)), default=0)
    if last < 1:
        return None
    taken = [int(path.name) for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal()]
    archive = run_dir / FOLDER / f"{max(taken, default=0) + 1:04d}"
    try:
        archive.mkdir(parents=True)
        for name in _PARTS:
            if (run_dir / name).exists():
                os.rename(run_dir / name, archive / name)
    except OSError as error:
        raise RunError(f"{archive} cannot be written: {error.strerror or error}") from None
    return f"no checkpoint can resume the recorded steps up to {last}; their records were moved to {archive}"
