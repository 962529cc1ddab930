"""Training loop of a run: get a batch, prepare it, update the policy, send the weights to the engines, validate, save
and log.

Start reading at ``Trainer.fit``. ``setup.py`` creates the components of a run, and ``algorithm.py`` prepares batches.
The other packages are ``rollouts`` (samples and their verification), ``algorithms`` (advantages and losses),
``megatron`` (policy updates) and ``cluster`` (processes).
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.config.layout import Resolved, prompts_per_round
from gdpo_nemo.config.load import CONFIG, save_config
from gdpo_nemo.data.records import Group, UpdateResult
from gdpo_nemo.observe.display import active
from gdpo_nemo.observe.journal import TrainedBatch
from gdpo_nemo.rollouts.environment_metrics import environment_metrics
from gdpo_nemo.training.goals import Goals
from gdpo_nemo.training.supervisor import FIRST_ATTEMPT, Attempt
from gdpo_nemo.utils.errors import GdpoError, NumericsFailed, UserCodeFailed
from gdpo_nemo.utils.progress import frozen, phase
from gdpo_nemo.utils.state import to_json
from gdpo_nemo.utils.waits import waiting

if TYPE_CHECKING:
    from gdpo_nemo.training.components import RunComponents
    from gdpo_nemo.training.recovery import RetainedSession

METRICS = {
    "step": ("steps", "Completed optimizer steps, where 0 is the untrained model"),
    "skipped_steps": (
        "",
        "1 if the step's loss or gradient was not finite and no weight changed, otherwise 0",
        {"label": "skipped"},
    ),
    "time/step": ("s", "Wall time of the step"),
    "time/idle": (
        "s",
        "Time from the start of the step until its batch was complete, during which trainer ranks are idle",
    ),
    "idle/trainer": (
        "share",
        "time/idle divided by time/step",
        {
            "max": 0.95,
            "advisory": True,
            "why": "the trainer's devices wait for samples",
            "remedy": "gdpo-nemo plan; more engines, rollout.max_staleness, cluster.placement colocated",
        },
    ),
    "time/train": ("s", "Time spent on log-probs, advantages and optimizer updates"),
    "throughput/tokens_per_second": (
        "tokens/s",
        "Trained tokens divided by time/step",
        {"label": "throughput"},
    ),
}


class Trainer:
    """Training loop of one run. ``parts`` contains algorithm, policy, batch stream, engines, log and checkpoints."""

    def __init__(self, parts: RunComponents):
        self.config = parts.config
        self.attempt = parts.attempt
        self.state = parts.state
        self.updates_per_step = parts.resolved.updates_per_step
        self.algorithm = parts.algorithm
        self.policy = parts.policy
        self.stream = parts.stream
        self.sync = parts.sync
        self.log = parts.log
        self.checkpoints = parts.checkpoints
        self.stop = parts.stop
        self.validation_prompts = parts.validation_prompts
        self.prompt_limit = parts.prompt_limit
        self.total_updates = parts.total_updates
        self.goals = Goals(self.config.gdpo)
        self.skipped_in_a_row = 0
        self.recovered = False
        """True if this attempt has completed a step."""
        self.validation: tuple[int, Future[Any]] | None = None
        """Step and future result of the validation in progress; None if there is none."""
        self.saving = 0
        """Step of the checkpoint that was started last."""

    def fit(self) -> None:
        """Train until the last step or until a stop is requested. The final state is always saved.

        Sampling of later steps starts as soon as the weights are published (``schedule``). On-policy engines first
        finish a validation that is due. With ``rollout.max_staleness`` above 0, validation and sampling share the
        engines while the next step trains.
        """
        self.publish()
        if self.state.step == 0 and self.config.gdpo.val_at_start:
            self.validate()
        self.schedule()
        while not self.complete and not self.stop.requested:
            if not self.step():
                break
            self.finalize_checkpoint(wait=False)
            if self._due(self.config.gdpo.val_period):
                self.validate()
            self.schedule()
            if self._due(self.config.checkpointing.save_period) or self.stop.requested:
                self.save()
        self.finish_validation()
        self.finalize_checkpoint()

    @property
    def complete(self) -> bool:
        """True if the last step is done: ``max_num_steps`` is reached, ``max_num_epochs`` leaves too few prompts for
        another step, or a validation met the goals."""
        spent = (
            self.prompt_limit is not None
            and self.state.position + prompts_per_round(self.config.gdpo) > self.prompt_limit
        )
        return spent or self.goals.reached(self.state) or self.state.step >= self.config.gdpo.max_num_steps

    def step(self) -> bool:
        """Run one step: get a batch, prepare it, run its optimizer updates, and send the weights to the engines.

        Returns:
            False if there are too few prompts for a batch, otherwise True.
        """
        start = time.time()
        version = self.state.step
        with phase(f"step {version + 1}: batch", self.stream.progress):
            batch: Any = self.stream.get_batch(version)
        if batch is None:
            self.log.note(f"step {version + 1}: fewer prompts are left than a step requires")
            return False
        if self.sync is not None:
            self.sync.sleep_engines()
        batch_end = time.time()
        with phase(f"step {version + 1}: training"):
            prepared = self.algorithm.prepare(batch)
            results, tokens = self.train(prepared)
        train_end = time.time()
        self.state.step += 1
        self.state.position = batch.next_position
        self.state.updates += self.updates_per_step
        if self.config.policy.sync_ref_model and self.state.step % self.config.policy.ref_model_sync_steps == 0:
            self.policy.sync_reference(self.config.policy.ref_model_mixup_alpha)
        if self.sync is not None and isinstance(batch, TrainedBatch):
            self.log.trained(self.state.step, batch, self.sync.version, self.total_updates)
        published = self.publish()
        if not self._barrier:
            self.schedule()
        end = time.time()
        row = {
            "step": self.state.step,
            **self.algorithm.metrics(prepared, results, version),
            **(environment_metrics(batch.groups, self.config) if isinstance(batch, TrainedBatch) else {}),
            **published,
            "time/step": end - start,
            "time/idle": batch_end - start,
            "idle/trainer": (batch_end - start) / (end - start),
            "time/train": train_end - batch_end,
            "skipped_steps": float(any(result.skipped for result in results)),
        }
        row["throughput/tokens_per_second"] = tokens / row["time/step"]
        row |= self._recovery(end)
        for line in self.stream.take_events():
            self.log.alert(line)
        self.algorithm.record(row, prepared)
        for span in (
            *batch.spans,
            ("idle", "wait for the batch", start, batch_end),
            ("train", f"update {self.state.step}", batch_end, train_end),
            ("sync", f"weights {self.state.step}", train_end, end),
        ):
            self.log.span(*span)
        return True

    def _recovery(self, now: float) -> dict[str, float]:
        """Return the metrics of restarts for a row. The first row after a restart includes the recovery time."""
        attempt = self.attempt
        row = attempt.metrics(None if self.recovered else now)
        if not self.recovered and attempt.lost_at is not None:
            self.log.note(f"{attempt}: training continued {now - attempt.lost_at:.0f} s after the failure")
        self.recovered = True
        return row

    def schedule(self) -> None:
        """Start all rollouts that the published weights allow."""
        self.stream.schedule(self.state.step)

    @property
    def _publishes(self) -> bool:
        """True if the engines get the weights after this step: every ``rollout.sync_every`` steps, and before a
        validation."""
        period = self.config.rollout.sync_every
        return self.state.step % period == 0 or self._due(self.config.gdpo.val_period)

    @property
    def _barrier(self) -> bool:
        """True if a validation follows that must finish before further sampling."""
        return self.config.rollout.max_staleness == 0 and self._due(self.config.gdpo.val_period)

    def train(self, prepared: Any) -> tuple[list[UpdateResult], int]:
        """Run the optimizer updates of a step. Returns their results and the number of trained tokens.

        Raises:
            NumericsFailed: if more than ``gdpo.max_skipped_steps`` consecutive steps had a non-finite loss or gradient.
        """
        results = []
        tokens = 0
        for update in self.algorithm.updates(prepared):
            results.append(self.policy.train(update, self.algorithm.loss))
            self.algorithm.observe(results[-1])
            tokens += self.algorithm.count_tokens(update)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if any(r.skipped for r in results) else 0
        if self.skipped_in_a_row > self.config.gdpo.max_skipped_steps:
            raise NumericsFailed(f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row")
        return results, tokens

    def publish(self) -> dict[str, float]:
        """Send the current weights to the engines if they are due. Returns metrics of the transfer, or an empty
        mapping."""
        if self.sync is None or not (self.sync.version is None or self._publishes):
            return {}
        self.finish_validation()  # The samples of the validation use the previous weights.
        with phase(f"weights {self.state.step}"):
            return self.sync.publish(self.state.step)

    def validate(self) -> None:
        """Start a validation with the published weights. With ``rollout.max_staleness`` 0, also wait for its result."""
        self.finish_validation()
        self.validation = (self.state.step, self.stream.evaluate(self.validation_prompts))
        if self.config.rollout.max_staleness == 0:
            self.finish_validation()

    def finish_validation(self) -> None:
        """Wait for the validation in progress, if there is one, and log its result with the step at which it
        started."""
        if self.validation is None:
            return
        step, evaluated = self.validation
        self.validation = None
        with waiting("validation", "rollouts"), phase("validation", self.stream.progress):
            groups = evaluated.result()
        row = {"step": step, **self.algorithm.validate(groups)}
        self.log.validation(row, [group for group in groups if isinstance(group, Group)])
        self.state.metrics = {name: value for name, value in row.items() if name != "step"}
        was_reached = self.goals.reached(self.state)
        self.goals.count(self.state)
        if self.goals.reached(self.state) and not was_reached:
            goals = self.goals.describe(row)
            self.log.note(f"the validation after step {step} meets all goals of gdpo.stop_when: {goals}; the run ends")

    def save(self) -> None:
        """Write a checkpoint of the current state. With ``checkpointing.async_save``, only begin to write it."""
        section = self.config.checkpointing
        if not section.enabled:
            return
        start = time.time()
        with phase(f"checkpoint {self.state.step}"):
            self.finalize_checkpoint()
            if section.metric_name:
                self.finish_validation()
            self.state.ledger = self.stream.ledger()
            try:
                self.state.algorithm = to_json(self.algorithm.state())
            except ValueError as error:
                raise UserCodeFailed(f"checkpoint {self.state.step}: the algorithm's {error}") from error
            self.saving = self.state.step
            self.checkpoints.begin(self.state, self._write_checkpoint)
            if not section.async_save:
                self.finalize_checkpoint()
        self.log.span("save", f"checkpoint {self.state.step}", start, time.time())

    def _write_checkpoint(self, folder: Path) -> None:
        save_config(self.config, folder / CONFIG)
        self.policy.begin_save(folder, self.config.checkpointing.async_save)

    def finalize_checkpoint(self, wait: bool = True) -> None:
        """Complete the pending checkpoint, if there is one. With ``wait=False``, only if its files are already
        written."""
        if self.checkpoints.pending and (wait or self.policy.save_is_written()):
            self.checkpoints.finish(self._finish_files)

    def _finish_files(self) -> None:
        # A run that resumes from this checkpoint writes only the samples of later steps.
        self.log.flush(self.saving)
        self.policy.finish_save()

    def _due(self, period: int) -> bool:
        return period > 0 and (self.state.step % period == 0 or self.complete)


def run(resolved: Resolved, attempt: Attempt = FIRST_ATTEMPT) -> int:
    """Run a validated config until its end. Returns the exit status: 0, or 129, 130 or 143 if a signal stopped the run.

    Raises:
        ConfigError: if the config or an input is invalid.
        RunError: if the run failed. Files that were written before the failure remain in the run folder.
    """
    with phase("imports"):
        from gdpo_nemo.training.recovery import Decision, RetainedSession

    retained = RetainedSession(attempt)
    with contextlib.closing(retained):
        while True:
            try:
                return _once(resolved, retained)
            except GdpoError:
                if retained.decision is Decision.FAIL:
                    raise
            retained.attempt = replace(retained.attempt, begin=time.time())
            if display := active():
                display.restart()


def _once(resolved: Resolved, retained: RetainedSession) -> int:
    from gdpo_nemo.training.setup import run_context

    with run_context(resolved, retained) as parts:
        trainer = Trainer(parts)
        with frozen():
            trainer.fit()
        if parts.stop.requested:
            return parts.stop.status
        parts.finish()
    return 0
