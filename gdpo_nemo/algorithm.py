"""What the loop asks for: an algorithm turns the batch of a step into optimizer updates, and says what it measured.

``Trainer`` has the only loop. It gets a batch, lets the algorithm ``prepare`` it, trains each of its ``updates`` and
records its ``metrics``. ``GDPO`` is the built-in one; ``examples/custom_sft.py`` is another, which does not sample.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.algorithms.own_functions import loss_entry
from gdpo_nemo.config.algorithm_choice import ALGORITHMS, samples
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.objects import absolute_place, load_object
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence, with_gradient
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.errors import ConfigError, GdpoError, UserCodeFailed
from gdpo_nemo.observe.component_alerts import ComponentAlerts
from gdpo_nemo.rollouts.learning import advantages_of, log_ratios, old_logprobs_source, updates_of
from gdpo_nemo.rollouts.step_metrics import check_failures, rollout_metrics, update_metrics, validation_metrics
from gdpo_nemo.rollouts.turn_credit import TurnAdvantages

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import Advantages
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.rollout_batch import Rollout

METRICS = {
    "reward/total/mean": ("reward", "Weighted sum of the components' means: what GRPO would call the reward"),
    "rollout/dropped_groups": ("groups", "Groups that gdpo.dynamic_sampling drew and left out of the step"),
    "rollout/reference_kl": (
        "nats",
        "KL to the starting model that gdpo.kl_in_reward takes from the advantages, mean over trajectories",
    ),
    "time/rollout": ("s", "Sampling of the step's batch; with max_staleness it overlaps the training before it"),
    "time/verify": ("s", "Waiting for the environments' verdicts on the batch"),
    "time/advantages": ("s", "Advantages on the driver, part of time/train"),
}


class Algorithm(ABC):
    """Base of all algorithms; lives in the driver. What ``prepare`` returns is the algorithm's own affair.

    Args:
        policy: evaluates log-probs, under the current or the reference weights; the loop trains it.
    """

    samples: bool = True
    """Whether batches are rollouts, drawn by engines and judged by environments, or else rows of the data. Write
    ``samples = False`` into the class: it is read before the file may be run."""

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Any, log: RunLog):
        self.config = config
        self.policy = policy
        self.tokenizer = tokenizer
        self.log = log
        self.loss: LossSettings = with_absolute_places(config.loss_fn)
        """What the ranks compute the loss of an update with."""

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse a config that this algorithm cannot run; before any process starts. Raises ConfigError."""
        return

    @classmethod
    def needs_reference(cls, config: Config) -> bool:
        """Whether it will ask for log-probs of the starting weights, a copy of which is then kept."""
        return config.loss_fn.reference_policy_kl_penalty > 0

    @abstractmethod
    def prepare(self, batch: Any) -> Any:
        """What the updates of a step need: log-probs, advantages, sequences. The weights are those of before the step.

        Args:
            batch: ``Rollout`` where the algorithm samples, else ``PromptBatch``.
        """

    @abstractmethod
    def updates(self, prepared: Any) -> Iterable[list[TrainSequence]]:
        """The sequences of each optimizer update in turn, as many as ``config.layout.updates_per_step`` counts. In a
        generator, what stands behind a ``yield`` sees the weights after that update. Token weights add up per update.
        """

    def metrics(self, prepared: Any, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """What the step's row says besides times. ``version``: of the weights before the step."""
        return update_metrics(results, on_policy=False)

    def record(self, row: Mapping[str, Any], prepared: Any) -> None:
        """Write the finished row, and what an algorithm has beside it."""
        self.log.step(row)

    def validate(self, evaluated: Sequence[Any]) -> dict[str, float]:
        """The keys ``validation/...`` of the held-out prompts: groups with verdicts where the algorithm samples, else
        ``Prompt``."""
        return validation_metrics(evaluated, self.config.gdpo.val_pass_at_k)


def with_absolute_places(loss: LossSettings) -> LossSettings:
    """The settings, with functions of the user's own named so that the ranks, which work elsewhere, find them."""
    if not loss.places:
        return loss
    off_policy = replace(loss.off_policy, mode=absolute_place(loss.off_policy.mode))
    return replace(loss, type=absolute_place(loss.type), off_policy=off_policy)


def load_algorithm(config: Config) -> type[Algorithm]:
    """The class of the run's algorithm, checked against the config.

    Raises:
        ConfigError: it is not there, is no ``Algorithm``, or refuses the config.
    """
    name = config.algorithm.type
    try:
        found = load_object(ALGORITHMS.get(name, name))
    except ConfigError as error:
        raise ConfigError(f"algorithm.type: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm.type: {name} is no subclass of gdpo_nemo.algorithm.Algorithm")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"algorithm.type: {name} does not define {' and '.join(missing)}")
    if found.samples != samples(config):
        raise ConfigError(f"algorithm.type: write `samples = {found.samples}` into the class {found.__name__} itself")
    if config.algorithm.options and name in ALGORITHMS:
        raise ConfigError(f"algorithm.options: {name} has none")
    _call(found, "check", lambda: found.check(config), ConfigError)
    return found


def ask(algorithm: Algorithm, method: str, *arguments: Any) -> Any:
    """Call a method of an algorithm; what the user's own raises ends the run in a sentence. Raises UserCodeFailed."""
    return _call(type(algorithm), method, lambda: getattr(algorithm, method)(*arguments), UserCodeFailed)


def ask_next(algorithm: Algorithm, updates: Iterator[list[TrainSequence]]) -> list[TrainSequence] | None:
    """The next update, None after the last; errors as of ``ask``."""
    update: list[TrainSequence] | None = _call(type(algorithm), "updates", lambda: next(updates, None), UserCodeFailed)
    return update


def _call(owner: type, method: str, action: Any, kind: type[GdpoError]) -> Any:
    try:
        return action()
    except GdpoError:
        raise
    except Exception as error:
        if owner.__module__.startswith("gdpo_nemo."):
            raise
        raise kind(f"algorithm.type: {owner.__name__}.{method} raised {first_line(error)}") from error


@dataclass
class PreparedRollout:
    """A rollout, its advantages, and the sequences of its updates."""

    rollout: Rollout
    advantages: Advantages | TurnAdvantages
    updates: list[list[TrainSequence]]
    measured: dict[str, float]
    trainer_logprobs: list[np.ndarray | None] | None = None
    """Per trajectory, [completion tokens], as far as the trainer computed them; None: of none."""


class GDPO(Algorithm):
    """Groups of samples, rewards by component, an estimator's advantages, a policy-gradient loss.

    Which estimator and loss is the business of ``algorithms``: GRPO, RLOO, GSPO, ... are this algorithm, too.
    """

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Any, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.component_alerts = ComponentAlerts(log)

    @classmethod
    def needs_reference(cls, config: Config) -> bool:
        """For the KL in the loss or in the reward."""
        return super().needs_reference(config) or kl_in_reward(config)

    def prepare(self, batch: Rollout) -> PreparedRollout:
        """Advantages of all trajectories, and the log-probs that the updates start from.

        Raises:
            RunError: too many verifications failed; no trajectory has a reward.
        """
        check_failures(batch.trajectories, self.config.rollout.max_env_failure_share)
        divergence = self._kl(batch)
        start = time.time()
        advantages = advantages_of(batch.groups, self.config, divergence)
        measured = {"time/advantages": time.time() - start}
        if divergence is not None and not np.isnan(divergence).all():
            measured["rollout/reference_kl"] = float(np.nanmean(divergence))
        of_sequences = (
            advantages.of_sequences(batch.trajectories)
            if isinstance(advantages, TurnAdvantages)
            else advantages.values.numpy()
        )
        updates = updates_of(batch.trajectories, of_sequences, self.config, batch.version)
        several = len(updates) > 1 and old_logprobs_source(self.config) == "trainer"
        # TargetPO's coefficients, which are yet to come, need the whole group.
        skips = self.config.policy.skip_zero_advantage and not loss_entry(self.loss.type).by_group
        for update in updates:
            # Later updates of a step start from other weights; their ratios refer to the weights that sampled.
            if several:
                scored = with_gradient(update) if skips else update
                for sequence, values in zip(scored, self.policy.logprobs(scored)):
                    sequence.old_logprobs = values
            if self.loss.reference_policy_kl_penalty:
                for sequence, values in zip(update, self.policy.logprobs(update, reference=True)):
                    sequence.reference_logprobs = values
        return PreparedRollout(batch, advantages, updates, measured, self._known_logprobs(updates, several))

    def _known_logprobs(self, updates: list[list[TrainSequence]], scored: bool) -> list[np.ndarray | None] | None:
        """The trainer's log-probs at the start of the step: those that the updates refer to, where they are its own
        (``scored``), and of the others where ``rollout.save_trainer_logprobs`` asks."""
        sequences = [sequence for update in updates for sequence in update]
        known = [sequence.old_logprobs if scored else None for sequence in sequences]
        rollout = self.config.rollout
        unknown = [place for place, values in enumerate(known) if values is None]
        if unknown and rollout.save_trainer_logprobs and rollout.save_samples:
            for place, values in zip(unknown, self.policy.logprobs([sequences[place] for place in unknown])):
                known[place] = values
        return known if any(values is not None for values in known) else None

    def updates(self, prepared: PreparedRollout) -> Iterator[list[TrainSequence]]:
        """The step's sequences, ``policy.train_global_batch_size`` at a time."""
        for update in prepared.updates:
            if loss_entry(self.loss.type).by_group:
                self._apply_target_po(update)
            yield update

    def metrics(self, prepared: PreparedRollout, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Loss, rewards and advantages by component, rollouts, staleness; parity where the rollout is on-policy."""
        rollout = prepared.rollout
        diagnostics = prepared.advantages.diagnostics
        on_policy = all(t.policy_version == version for t in rollout.trajectories)
        return {
            **update_metrics(results, on_policy and old_logprobs_source(self.config) == "trainer"),
            **diagnostics.metrics(),
            "reward/total/mean": _weighted_mean(diagnostics, self.config.gdpo.rewards),
            **rollout_metrics(rollout.trajectories, version),
            "rollout/dropped_groups": float(rollout.dropped_groups),
            **rollout.measured,
            "time/rollout": rollout.generation_s,
            "time/verify": rollout.verify_s,
            **prepared.measured,
        }

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """The row, its samples, and which components train nothing."""
        rollout = prepared.rollout
        found = prepared.advantages
        terms = dict(zip(found.names, found.components.numpy().T))
        by_turn = found.by_turn if isinstance(found, TurnAdvantages) else None
        self.log.step(
            row, rollout.groups, found.values.numpy(), prepared.trainer_logprobs, terms=terms, turn_advantages=by_turn
        )
        self.component_alerts.update(prepared.advantages.diagnostics.alerts, [t.rewards for t in rollout.trajectories])

    def _kl(self, rollout: Rollout) -> np.ndarray | None:
        """``log_ratios`` of the rollout to the starting model, where ``gdpo.kl_in_reward`` is set."""
        if not kl_in_reward(self.config):
            return None
        sequences = [
            TrainSequence(t.prompt.token_ids, t.completion_ids, t.logprobs, loss_mask=t.loss_mask)
            for t in rollout.trajectories
        ]
        return log_ratios(sequences, self.policy.logprobs(sequences, reference=True))

    def _apply_target_po(self, update: list[TrainSequence]) -> None:
        """TargetPO: turn scores into the coefficients whose linear loss has its gradient at the current weights."""
        from gdpo_nemo.algorithms import target_po_coefficients

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


def _weighted_mean(diagnostics: Any, weights: Mapping[str, float]) -> float:
    """Weighted sum of the components' means: what GRPO would call the reward."""
    means = dict(zip(diagnostics.names, diagnostics.mean))
    return float(np.nansum([weight * means.get(name, np.nan) for name, weight in weights.items()]))
