"""The loop: get a batch, let the algorithm prepare it, update the policy, publish its weights; validate, save, log.

Read ``Trainer.fit`` first. Setting up is in ``setup.py``; what a batch becomes is in ``algorithm.py``, and below it in
``rollouts`` (samples and verdicts), ``algorithms`` (advantages and losses), ``megatron`` (the update) and ``cluster``
(processes).
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.algorithm import ask, ask_next
from gdpo_nemo.checkpoints import RunState
from gdpo_nemo.config.layout import prompts_per_round, updates_per_step
from gdpo_nemo.config.load import save_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.errors import GdpoError, NumericsFailed, present
from gdpo_nemo.observe.display import active
from gdpo_nemo.observe.journal import TrainedBatch
from gdpo_nemo.phases import phase
from gdpo_nemo.resume import CONFIG
from gdpo_nemo.supervisor import current_attempt
from gdpo_nemo.waits import waiting

if TYPE_CHECKING:
    from gdpo_nemo.kept import Kept
    from gdpo_nemo.setup import RunComponents

METRICS = {
    "step": ("steps", "Optimizer steps done; 0 is the untrained model"),
    "skipped_steps": (
        "",
        "1 where the step's loss or gradient was not finite and no weight changed, else 0",
        {"label": "skipped"},
    ),
    "time/step": ("s", "Wall time of the step"),
    "time/idle": ("s", "From the start of the step until its batch was complete: trainer ranks have nothing to do"),
    "idle/trainer": (
        "share",
        "time/idle over time/step",
        {
            "max": 0.95,
            "advisory": True,
            "why": "the trainer's devices wait for samples",
            "remedy": "gdpo-nemo plan; more engines, rollout.max_staleness, cluster.placement colocated",
        },
    ),
    "time/train": ("s", "Log-probs, advantages and optimizer updates"),
    "throughput/tokens_per_second": (
        "tokens/s",
        "Trained tokens over time/step",
        {"label": "throughput"},
    ),
}


class Trainer:
    """One run, set up and ready: ``parts`` holds algorithm, policy, stream, engines, log and checkpoints."""

    def __init__(self, config: Config, parts: RunComponents, state: RunState):
        self.config = config
        self.state = state
        self.algorithm = present(parts.algorithm, "the algorithm")
        self.policy = present(parts.policy, "the policy")
        self.stream = present(parts.stream, "the stream")
        self.sync = parts.sync
        self.log = parts.log
        self.checkpoints = parts.checkpoints
        self.stop = parts.stop
        self.validation_prompts = parts.validation_prompts
        self.prompt_limit = parts.prompt_limit
        self.total_updates = parts.total_updates
        self.skipped_in_a_row = 0
        self.recovered = False
        """Whether a step was trained in this attempt."""
        self.validation: tuple[int, Future[Any]] | None = None
        """Of which step, and what it will give."""
        self.saving = 0
        """Steps behind the checkpoint that was begun last."""

    def fit(self) -> None:
        """Train until the last step, or until somebody asks to stop; the last state is always saved.

        Groups of later steps are started as soon as weights are published (``schedule``). On-policy engines validate
        before, alone; with ``rollout.max_staleness`` they do so beside them, while the next step trains.
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
        """Whether the last step is done: by ``max_num_steps``, or because ``max_num_epochs`` leaves fewer prompts than
        a step takes."""
        spent = (
            self.prompt_limit is not None and self.state.position + prompts_per_round(self.config) > self.prompt_limit
        )
        return spent or self.state.step >= self.config.gdpo.max_num_steps

    def step(self) -> bool:
        """One step: a batch, what the algorithm makes of it, one or more optimizer updates, new weights for the
        engines. False where the prompts no longer fill a batch."""
        start = time.time()
        version = self.state.step
        with phase(f"step {version + 1}: batch", self.stream.progress):
            batch: Any = self.stream.get_batch(version)
        if batch is None:
            self.log.note(f"step {version + 1}: fewer prompts are left than a step takes")
            return False
        if self.sync is not None:
            self.sync.sleep_engines()
        batch_end = time.time()
        with phase(f"step {version + 1}: training"):
            prepared = ask(self.algorithm, "prepare", batch)
            results, tokens = self.train(prepared)
        train_end = time.time()
        self.state.step += 1
        self.state.position = batch.next_position
        self.state.updates += updates_per_step(self.config)
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
            **ask(self.algorithm, "metrics", prepared, results, version),
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
        ask(self.algorithm, "record", row, prepared)
        for span in (
            *batch.spans,
            ("idle", "wait for the batch", start, batch_end),
            ("train", f"update {self.state.step}", batch_end, train_end),
            ("sync", f"weights {self.state.step}", train_end, end),
        ):
            self.log.span(*span)
        return True

    def _recovery(self, now: float) -> dict[str, float]:
        """What the supervisor's restarts add to a row; of the first step after one, and what that took."""
        attempt = current_attempt()
        row = attempt.metrics(None if self.recovered else now)
        if not self.recovered and attempt.lost_at is not None:
            self.log.note(f"{attempt}: trained again {now - attempt.lost_at:.0f} s after the failure")
        self.recovered = True
        return row

    def schedule(self) -> None:
        """Start what the published weights may sample."""
        self.stream.schedule(self.state.step)

    @property
    def _publishes(self) -> bool:
        """Whether the engines get these weights: those of every ``rollout.sync_every`` steps, and those that are
        validated."""
        period = self.config.rollout.sync_every
        return self.state.step % period == 0 or self._due(self.config.gdpo.val_period)

    @property
    def _barrier(self) -> bool:
        """Whether validation comes next and has the engines to itself."""
        return self.config.rollout.max_staleness == 0 and self._due(self.config.gdpo.val_period)

    def train(self, prepared: Any) -> tuple[list[UpdateResult], int]:
        """The optimizer updates of a step, and the tokens that they trained.

        Raises:
            NumericsFailed: too many steps in a row were not finite.
        """
        results = []
        tokens = 0
        updates = iter(ask(self.algorithm, "updates", prepared))
        while (update := ask_next(self.algorithm, updates)) is not None:
            results.append(self.policy.train(update, self.algorithm.loss))
            ask(self.algorithm, "observe", results[-1])
            tokens += self.algorithm.count_tokens(update)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if any(r.skipped for r in results) else 0
        if self.skipped_in_a_row > self.config.gdpo.max_skipped_steps:
            raise NumericsFailed(f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row")
        return results, tokens

    def publish(self) -> dict[str, float]:
        """Give the engines, where there are any, the weights after the steps done; returns what it measured."""
        if self.sync is None or not (self.sync.version is None or self._publishes):
            return {}
        self.finish_validation()  # its samples are of the version before
        with phase(f"weights {self.state.step}"):
            return self.sync.publish(self.state.step)

    def validate(self) -> None:
        """Measure the held-out prompts under the published weights; wait for it where the engines do nothing else."""
        self.finish_validation()
        self.validation = (self.state.step, self.stream.evaluate(self.validation_prompts))
        if self.config.rollout.max_staleness == 0:
            self.finish_validation()

    def finish_validation(self) -> None:
        """Wait for the validation under way, if there is one, and record it under its step."""
        if self.validation is None:
            return
        step, evaluated = self.validation
        self.validation = None
        with waiting("validation", "rollouts"), phase("validation", self.stream.progress):
            groups = evaluated.result()
        row = {"step": step, **ask(self.algorithm, "validate", groups)}
        self.log.validation(row, [group for group in groups if isinstance(group, Group)])
        self.state.metrics = {name: value for name, value in row.items() if name != "step"}

    def save(self) -> None:
        """Write a checkpoint of the state after the steps done, or start to: see ``checkpointing.async_save``."""
        section = self.config.checkpointing
        if not section.enabled:
            return
        start = time.time()
        with phase(f"checkpoint {self.state.step}"):
            self.finalize_checkpoint()
            if section.metric_name:
                self.finish_validation()
            self.state.ledger = self.stream.ledger()
            self.state.algorithm = ask(self.algorithm, "state")
            self.saving = self.state.step
            self.checkpoints.begin(self.state, self._write_checkpoint)
            if not section.async_save:
                self.finalize_checkpoint()
        self.log.span("save", f"checkpoint {self.state.step}", start, time.time())

    def _write_checkpoint(self, folder: Path) -> None:
        save_config(self.config, folder / CONFIG)
        self.policy.begin_save(folder, self.config.checkpointing.async_save)

    def finalize_checkpoint(self, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one; without ``wait`` only when its files are
        there."""
        if self.checkpoints.pending and (wait or self.policy.save_is_written()):
            self.checkpoints.finish(self._finish_files)

    def _finish_files(self) -> None:
        # A run that resumes here writes the samples of later steps only.
        self.log.flush(self.saving)
        self.policy.finish_save()

    def _due(self, period: int) -> bool:
        return period > 0 and (self.state.step % period == 0 or self.complete)


def run(config: Config, begin: float | None = None) -> int:
    """Run a validated config to its end; returns the exit status (0, or 130/143 when asked to stop).

    ``begin``: as for ``run_context``.

    Raises:
        ConfigError, RunError: one sentence on what is wrong; the run's folder holds what was finished.
    """
    with phase("imports"):
        from gdpo_nemo.kept import Kept

    kept = Kept()
    with contextlib.closing(kept):
        while True:
            try:
                return _once(config, begin, kept)
            except GdpoError:
                if not kept.goes_on:
                    raise
            begin = time.time()
            if display := active():
                display.begin_again()


def _once(config: Config, begin: float | None, kept: Kept) -> int:
    from gdpo_nemo.setup import run_context

    with run_context(config, begin, kept) as parts:
        trainer = Trainer(config, parts, parts.state)
        trainer.fit()
        if parts.stop.requested:
            return parts.stop.status
        parts.finish()
    return 0
