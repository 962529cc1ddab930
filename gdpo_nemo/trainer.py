"""The loop: take groups, compute advantages, update the policy, publish its weights; validate, save, log.

Read ``Trainer.fit`` first. Setting up is in ``setup.py``; what a step is made of is in ``rollouts`` (samples and
verdicts), ``algorithms`` (advantages and losses), ``megatron`` (the update) and ``cluster`` (processes).
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from gdpo_nemo.algorithms import target_po_coefficients
from gdpo_nemo.checkpoints import RunState
from gdpo_nemo.config.layout import prompts_per_round, updates_per_step
from gdpo_nemo.config.load import save_config
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.component_alerts import ComponentAlerts
from gdpo_nemo.resume import CONFIG
from gdpo_nemo.rollouts.learning import (
    advantages_of,
    check_failures,
    log_ratios,
    old_logprobs_source,
    rollout_metrics,
    update_metrics,
    updates_of,
    validation_metrics,
)
from gdpo_nemo.rollouts.stream import Rollout

METRICS = {
    "step": ("steps", "Optimizer steps done; 0 is the untrained model"),
    "skipped_steps": (
        "",
        "1 where the step's loss or gradient was not finite and no weight changed, else 0",
        {"label": "skipped"},
    ),
    "reward/total/mean": ("reward", "Weighted sum of the components' means: what GRPO would call the reward"),
    "rollout/dropped_groups": ("groups", "Groups that gdpo.dynamic_sampling drew and left out of the step"),
    "rollout/reference_kl": (
        "nats",
        "KL to the starting model that gdpo.kl_in_reward takes from the advantages, mean over trajectories",
    ),
    "time/step": ("s", "Wall time of the step"),
    "time/rollout": ("s", "Sampling of the step's batch; with max_staleness it overlaps the training before it"),
    "time/verify": ("s", "Waiting for the environments' verdicts on the batch"),
    "time/idle": ("s", "From the start of the step until its batch was complete: trainer ranks have nothing to do"),
    "time/train": ("s", "Log-probs, advantages and optimizer updates"),
    "time/advantages": ("s", "Advantages on the driver, part of time/train"),
    "throughput/tokens_per_second": (
        "tokens/s",
        "rollout/tokens over time/step",
        {"label": "throughput"},
    ),
}


class Trainer:
    """One run, set up and ready: ``parts`` holds the policy, the engines, the stream, the log and the checkpoints."""

    def __init__(self, config: Config, parts, state: RunState):
        self.config = config
        self.state = state
        self.policy = parts.policy
        self.stream = parts.stream
        self.sync = parts.sync
        self.log = parts.log
        self.checkpoints = parts.checkpoints
        self.stop = parts.stop
        self.validation_prompts = parts.validation_prompts
        self.prompt_limit = parts.prompt_limit
        self.loss = config.loss_fn
        self.skipped_in_a_row = 0
        self.component_alerts = ComponentAlerts(self.log)

    def fit(self) -> None:
        """Train until the last step, or until somebody asks to stop; the last state is always saved."""
        self.sync.publish(self.state.step)
        if self.state.step == 0 and self.config.gdpo.val_at_start:
            self.validate()
        while not self.complete and not self.stop.requested:
            self.step()
            self.finalize_checkpoint(wait=False)
            if self._due(self.config.gdpo.val_period):
                self.validate()
            if self._due(self.config.checkpointing.save_period) or self.stop.requested:
                self.save()
        self.finalize_checkpoint()

    @property
    def complete(self) -> bool:
        """Whether the last step is done: by ``max_num_steps``, or because ``max_num_epochs`` leaves fewer prompts than
        a step takes."""
        spent = (
            self.prompt_limit is not None and self.state.position + prompts_per_round(self.config) > self.prompt_limit
        )
        return spent or self.state.step >= self.config.gdpo.max_num_steps

    def step(self) -> None:
        """One step: a rollout, its advantages, one or more optimizer updates, new weights for the engines."""
        start = time.time()
        self.stream.schedule(self.state.step)
        rollout = self.stream.get_batch(self.state.step)
        self.sync.sleep_engines()
        rollout_end = time.time()
        check_failures(rollout.trajectories, self.config.rollout.max_env_failure_share)
        divergence = self._kl(rollout)
        advantages_start = time.time()
        advantages = advantages_of(rollout.groups, self.config, divergence)
        advantages_end = time.time()
        results = self.train(rollout, advantages.values.numpy())
        train_end = time.time()
        version = self.state.step
        self.state.step = self.state.step + 1
        self.state.position = rollout.next_position
        self.state.updates += updates_per_step(self.config)
        published = self.sync.publish(self.state.step)
        published["time/advantages"] = advantages_end - advantages_start
        if divergence is not None and not np.isnan(divergence).all():
            published["rollout/reference_kl"] = float(np.nanmean(divergence))
        self.record(rollout, advantages, results, version, published, (start, rollout_end, train_end, time.time()))

    def _kl(self, rollout: Rollout) -> np.ndarray | None:
        """``log_ratios`` of the rollout to the starting model, where ``gdpo.kl_in_reward`` is set."""
        if not kl_in_reward(self.config):
            return None
        sequences = [
            TrainSequence(t.prompt.token_ids, t.completion_ids, t.logprobs, loss_mask=t.loss_mask)
            for t in rollout.trajectories
        ]
        return log_ratios(sequences, self.policy.logprobs(sequences, reference=True))

    def train(self, rollout: Rollout, advantages: np.ndarray) -> list:
        """The optimizer updates of a step.

        Raises:
            RunError: too many steps in a row were not finite.
        """
        updates = updates_of(rollout.trajectories, advantages, self.config)
        several = len(updates) > 1 and old_logprobs_source(self.config) == "trainer"
        for update in updates:
            # Later updates of a step start from other weights; their ratios refer to the weights that sampled.
            if several:
                for sequence, values in zip(update, self.policy.logprobs(update)):
                    sequence.old_logprobs = values
            if self.loss.reference_policy_kl_penalty:
                for sequence, values in zip(update, self.policy.logprobs(update, reference=True)):
                    sequence.reference_logprobs = values
        results = []
        for update in updates:
            if self.loss.type == "target_po":
                self._apply_target_po(update)
            results.append(self.policy.train(update, self.loss))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if any(r.skipped for r in results) else 0
        if self.skipped_in_a_row > self.config.gdpo.max_skipped_steps:
            raise RunError(f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row")
        return results

    def _apply_target_po(self, update: list) -> None:
        """TargetPO: turn scores into the coefficients whose linear loss has its gradient at the current weights."""
        now = self.policy.logprobs(update)
        old = [s.sampler_logprobs if s.old_logprobs is None else s.old_logprobs for s in update]
        size = self.config.gdpo.num_generations_per_prompt
        coefficients = target_po_coefficients(
            [s.where_written(values).sum() for s, values in zip(update, now)],
            [s.where_written(values).sum() for s, values in zip(update, old)],
            [s.advantage for s in update],
            np.arange(len(update)) // size,
            valid=[s.weight > 0 for s in update],
            lengths=[s.num_policy_tokens for s in update],
            temperature=self.loss.target_temperature,
            length_normalize=self.loss.target_length_normalize,
            weights=[s.weight for s in update],
        )
        for sequence, value in zip(update, coefficients.tolist()):
            sequence.advantage = value

    def record(self, rollout: Rollout, advantages, results: list, version: int, published: dict, clock) -> None:
        """Write the step's row, its samples, its spans and what a person should know."""
        start, rollout_end, train_end, sync_end = clock
        trajectories = rollout.trajectories
        on_policy = all(t.policy_version == version for t in trajectories)
        diagnostics = advantages.diagnostics
        row = {
            "step": self.state.step,
            **update_metrics(results, on_policy and old_logprobs_source(self.config) == "trainer"),
            **diagnostics.metrics(),
            "reward/total/mean": _weighted_mean(diagnostics, self.config.gdpo.rewards),
            **rollout_metrics(trajectories, version),
            "rollout/dropped_groups": float(rollout.dropped_groups),
            "time/step": sync_end - start,
            "time/rollout": rollout.generation_s,
            "time/verify": rollout.verify_s,
            "time/idle": rollout_end - start,
            "time/train": train_end - rollout_end,
            **published,
            "skipped_steps": float(any(r.skipped for r in results)),
        }
        row["throughput/tokens_per_second"] = row["rollout/tokens"] / row["time/step"]
        self.log.step(row, rollout.groups, advantages.values.numpy())
        for span in (
            *rollout.spans,
            ("idle", "wait for the rollout", start, rollout_end),
            ("train", f"update {self.state.step}", rollout_end, train_end),
            ("sync", f"weights {self.state.step}", train_end, sync_end),
        ):
            self.log.span(*span)
        self.component_alerts.update(diagnostics.alerts, [t.rewards for t in trajectories])

    def validate(self) -> None:
        """Measure every component on the held-out prompts with the engines' current weights."""
        groups = self.stream.evaluate(self.validation_prompts)
        row = {"step": self.state.step, **validation_metrics(groups)}
        self.log.validation(row)
        self.state.metrics = {name: value for name, value in row.items() if name != "step"}

    def save(self) -> None:
        """Write a checkpoint of the state after the steps done, or start to: see ``checkpointing.async_save``."""
        section = self.config.checkpointing
        if not section.enabled:
            return
        start = time.time()
        self.finalize_checkpoint()
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
            self.checkpoints.finish(self.policy.finish_save)

    def _due(self, period: int) -> bool:
        return period > 0 and (self.state.step % period == 0 or self.complete)


def _weighted_mean(diagnostics, weights: dict[str, float]) -> float:
    """Weighted sum of the components' means: what GRPO would call the reward."""
    means = dict(zip(diagnostics.names, diagnostics.mean))
    return float(np.nansum([weight * means.get(name, np.nan) for name, weight in weights.items()]))


def run(config: Config, begin: float | None = None) -> int:
    """Run a validated config to its end; returns the exit status (0, or 130/143 when asked to stop).

    ``begin``: as for ``run_context``.

    Raises:
        ConfigError, RunError: one sentence on what is wrong; the run's folder holds what was finished.
    """
    from gdpo_nemo.setup import run_context

    with run_context(config, begin) as parts:
        trainer = Trainer(config, parts, parts.state)
        trainer.fit()
        if parts.stop.requested:
            return parts.stop.status
        parts.finish()
    return 0
