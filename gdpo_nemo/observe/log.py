"""The one thing a trainer talks to: rows, samples, spans and alerts go in, every file and every display comes out.

Metrics are the run's record, so failing to write them ends the run. Everything else is a picture of them: when drawing
fails, the run goes on and says so once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.load import recorded
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group
from gdpo_nemo.errors import printable, without_secrets
from gdpo_nemo.observe.alerts import write_alert
from gdpo_nemo.observe.archive import archive_history
from gdpo_nemo.observe.completion_table import completion_table
from gdpo_nemo.observe.console import make_console
from gdpo_nemo.observe.health_alerts import HealthAlerts
from gdpo_nemo.observe.history import History
from gdpo_nemo.observe.journal import Journal, TrainedBatch
from gdpo_nemo.observe.metric_aliases import alias_values
from gdpo_nemo.observe.metrics import MetricsLog, clean, read_metrics
from gdpo_nemo.observe.redraw import Redraw
from gdpo_nemo.observe.rollouts import remove_rollouts_after
from gdpo_nemo.observe.sample_writer import SampleWriter
from gdpo_nemo.observe.status import RESTARTING
from gdpo_nemo.observe.trace import TraceLog
from gdpo_nemo.observe.trackers import Tracker, wanted


class RunLog:
    """Writes and shows one run. ``close`` belongs in a ``finally``: the live display gives the terminal back there.
    ``start_step`` steps are done already; what later ones left is removed, or archived where none is done.
    ``last_step``: that of the run, null: max_num_steps. ``guard`` is called before a step is recorded and raises where
    the folder is no longer this run's. ``restarted``: why the supervisor started the run again; an alert that would
    otherwise be in the archive alone, where the steps before the failure go.

    Raises:
        RunError: metrics or journal cannot be written, here or in ``trained``, ``step`` and ``validation``.
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
        """Note in the journal what ``step`` trained, at once: ``step`` follows when the weights are published.

        Args:
            published: version of the weights that the engines had meanwhile.
            total_updates: optimizer updates of the whole run.
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
        )

    def step(
        self,
        row: Mapping[str, Any],
        groups: Sequence[Group] | None = None,
        advantages: np.ndarray | None = None,
        trainer_logprobs: Sequence[np.ndarray | None] | None = None,
        terms: Mapping[str, np.ndarray] | None = None,
        turn_advantages: Sequence[np.ndarray] | None = None,
        entropies: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """Record a finished step; ``row["step"]`` counts from 1. ``advantages`` [trajectories], in group order,
        ``terms`` alike by component, ``turn_advantages`` [turns] of each, ``trainer_logprobs`` and ``entropies``
        [completion tokens] of each. The groups are written meanwhile: nobody may change them from here on.

        Raises:
            RunError: besides, a metric of ``health.stop_on`` has left its range.
        """
        self._record(row)
        if groups is not None and self._samples:
            columns = (advantages, trainer_logprobs, terms, turn_advantages, entropies)
            self._try("rollouts", self._samples.write, row["step"], groups, *columns)
        if groups is not None:
            self._completions(row["step"], groups, advantages)
        if self._console:
            self._try("the console", self._console.step, clean(row))
        self._try("report.html", self._redraw.step, row["step"])
        self._health.update(clean(row))

    def validation(self, row: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Record a validation: ``step`` and ``validation/<component>``, and its samples where there are any; of them
        the same holds as of a step's."""
        self._record(row)
        if groups and self._samples:
            self._try("rollouts", self._samples.write, row["step"], groups, validation=True)
        if self._console:
            self._try("the console", self._console.validation, clean(row))

    def flush(self, step: int) -> None:
        """Return when the journal, and the samples of the steps up to ``step``, are on the disk."""
        self._journal.sync()
        if self._samples:
            self._try("rollouts", self._samples.flush, step)

    def alert(self, text: str) -> None:
        """Tells the person who watches, and the report, what is wrong."""
        self._tell("ALERT", text)

    def note(self, text: str) -> None:
        """Tells them what is good to know and not wrong."""
        self._tell("note", text)

    def card(self, folder: Path, step: int) -> None:
        """Write the card of the model that was exported into ``folder`` after ``step`` steps."""
        self._try("the model card", _card, folder, self._config, self._run_dir, step)

    def say(self, line: str) -> None:
        """Shows what is good to see and need not be kept."""
        if self._console:
            self._try("the console", self._console.say, line)

    @property
    def history(self) -> History:
        """The rows so far, those of earlier attempts among them."""
        return self._history

    def _tell(self, level: str, text: str) -> None:
        text = "\n".join(map(printable, without_secrets(text).splitlines()))
        if self._console:
            at = f"step {self._step}: " if self._step else ""
            self._try("the console", self._console.tell, level, at + text)
        try:
            write_alert(self._run_dir, self._step, text, level)
        except OSError as error:
            # No end of the run: a full disk ends it through the metrics. But the alert must be seen somewhere.
            print(f"alert could not be recorded ({error}): {text}", file=sys.stderr)

    def span(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        """Add a span to the timeline; seconds since the epoch."""
        if self._trace:
            self._try("the trace", self._trace.add, lane, name, start, end, **details)

    def stopwatch(self, lane: str, start: float) -> Callable[[str], None]:
        """A function that adds a span named by its argument, from its last call (at first ``start``) until now."""
        last = [start]

        def lap(name: str) -> None:
            now = time.time()
            self.span(lane, name, last[0], now)
            last[0] = now

        return lap

    def close(self, status: str) -> None:
        """Finishes every file and shows the summary; ``status`` is its title: complete, stopped, failed. A run that is
        about to go on in this process (RESTARTING) is not drawn."""
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
                self._try("rewards.png", _plot, self._run_dir)
            self._try("report.html", _report, self._run_dir)
        if self._console:
            self._try("the console", self._console.close, status, self._run_dir)

    def abandon(self, status: str) -> None:
        """In place of ``close``, where the process is about to be lost: give the terminal back, draw nothing."""
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
        kinds = {**({"TensorBoard": _tensorboard} if config.logger.tensorboard.enabled else {}), **wanted(config)}
        settings = recorded(config) if kinds else {}
        started = {
            name: self._try(name, kind, config, self._run_dir, start_step, settings) for name, kind in kinds.items()
        }
        return {name: tracker for name, tracker in started.items() if tracker}

    def _completions(self, step: int, groups: Sequence[Group], advantages: np.ndarray | None) -> None:
        section = self._config.logger
        if self._trackers and section.num_completions and (step == 1 or step % section.completions_period == 0):
            table = completion_table(groups, advantages, section.num_completions)
            for what, tracker in self._trackers.items():
                self._try(what, tracker.completions, step, table)

    def _try(self, what: str, action: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call ``action``; a failure becomes one alert per ``what`` instead of an end of the run."""
        try:
            return action(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever a drawing library raises
            if what not in self._failed:
                self._failed.add(what)
                self.alert(f"{what} failed and is incomplete: {type(error).__name__}: {error}")
            return None


def _tensorboard(config: Config, run_dir: Path, start_step: int, settings: dict[str, Any]) -> Tracker:
    from gdpo_nemo.observe.tensorboard import TensorboardLog

    return TensorboardLog(run_dir, start_step, settings)


def _plot(run_dir: Path) -> Path:
    from gdpo_nemo.observe.plot import plot_rewards  # matplotlib takes a second to import; only the end needs it.

    return plot_rewards(run_dir)


def _card(folder: Path, config: Config, run_dir: Path, step: int) -> Path:
    from gdpo_nemo.observe.model_card import write_card

    return write_card(folder, config.policy.model_name, config, run_dir, step)


def _report(run_dir: Path) -> Path:
    from gdpo_nemo.observe.html_report import write_report

    return write_report(run_dir)
