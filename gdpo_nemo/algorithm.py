"""What the loop asks for: an algorithm turns the batch of a step into optimizer updates, and says what it measured.

``Trainer`` has the only loop. It gets a batch, lets the algorithm ``prepare`` it, trains each of its ``updates`` and
records its ``metrics``. ``GDPO`` is the built-in one; ``examples/custom_sft.py`` is another, which does not sample.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.algorithms.adaptive_entropy import AdaptiveEntropy
from gdpo_nemo.algorithms.own_functions import loss_entry
from gdpo_nemo.config.algorithm_choice import ALGORITHMS, old_logprobs_source, resolved_loss, samples
from gdpo_nemo.config.layout import updates_per_step
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.objects import absolute_place, load_object
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence, with_gradient
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.errors import ConfigError, GdpoError, UserCodeFailed
from gdpo_nemo.observe.component_alerts import ComponentAlerts
from gdpo_nemo.rollouts.learning import (
    advantages_of,
    choose_by_covariance,
    log_ratios,
    updates_of,
)
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
    "policy/entropy_coefficient": (
        "",
        "Weight of the entropy in the next update, if the entropy is low then (loss_fn.use_adaptive_entropy)",
    ),
    "policy/covariance_tokens": ("share", "Tokens of the step's last update that the loss clip_cov or kl_cov chose"),
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
        self.loss: LossSettings = with_absolute_places(resolved_loss(config))
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

    def observe(self, result: UpdateResult) -> None:
        """Called behind every update with what it measured."""
        return

    def state(self) -> dict[str, Any]:
        """What of the algorithm's own a checkpoint has to keep, as JSON takes it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned; empty where a checkpoint has none."""
        return

    def count_tokens(self, update: Sequence[TrainSequence]) -> int:
        """Tokens of an update that ``throughput/tokens_per_second`` counts."""
        return sum(sequence.num_policy_tokens for sequence in update)

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
    off_policy = replace(loss.off_policy, mode=absolute_place(loss.off_policy.correction))
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
    entropies: list[np.ndarray | None] | None = None
    """Likewise, of the policy's distribution at each token, in nats."""


class TokenScores:
    """What the trainer says of a step's tokens before it trains them: log-probs, and entropies where they are recorded.
    Each sequence is scored once. With ``values`` the policy's value head says what each state is worth, too."""

    def __init__(self, policy: PolicyGroup, config: Config, values: bool = False):
        self._policy = policy
        self._with_values = values
        rollout = config.rollout
        self._entropies = rollout.save_entropies and rollout.save_samples
        self._all = self._entropies or (rollout.save_trainer_logprobs and rollout.save_samples)
        self._found: dict[int, np.ndarray] = {}
        """By sequence (its ``id``), [completion tokens, 1 to 3]: log-prob, entropy, value."""

    def logprobs(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """float32 [completion tokens] for each sequence under the current weights."""
        return self._column(sequences, 0)

    def values(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """float32 [completion tokens] for each sequence: what the value head says of the state before each token."""
        return self._column(sequences, -1)

    def _column(self, sequences: list[TrainSequence], place: int) -> list[np.ndarray]:
        unknown = [sequence for sequence in sequences if id(sequence) not in self._found]
        if unknown:
            self._found |= {id(sequence): found for sequence, found in zip(unknown, self._ask(unknown), strict=True)}
        return [np.ascontiguousarray(self._found[id(sequence)][:, place]) for sequence in sequences]

    def _ask(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        if self._with_values:
            return self._policy.logprobs_and_values(sequences, self._entropies)
        if self._entropies:
            return self._policy.logprobs_and_entropies(sequences)
        return [found[:, None] for found in self._policy.logprobs(sequences)]

    def recorded(
        self, sequences: list[TrainSequence]
    ) -> tuple[list[np.ndarray | None] | None, list[np.ndarray | None] | None]:
        """Log-probs and entropies by sequence, None for what is not known; those not scored yet are where
        ``rollout.save_trainer_logprobs`` or ``save_entropies`` asks for it."""
        unknown = [sequence for sequence in sequences if id(sequence) not in self._found]
        if unknown and self._all:
            self.logprobs(unknown)
        if not self._found:
            return None, None
        found = [self._found.get(id(sequence)) for sequence in sequences]

        def column(place: int) -> list[np.ndarray | None]:
            return [None if values is None else values[:, place] for values in found]

        return column(0), column(1) if self._entropies else None


class GDPO(Algorithm):
    """Groups of samples, rewards by component, an estimator's advantages, a policy-gradient loss.

    Which estimator and loss is the business of ``algorithms``: GRPO, RLOO, GSPO, ... are this algorithm, too.
    """

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Any, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.component_alerts = ComponentAlerts(log)
        adapts = config.loss_fn.use_adaptive_entropy
        self.entropy = AdaptiveEntropy(config.loss_fn.entropy_bonus) if adapts else None

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
        advantages, of_sequences, measured = self._credit(batch)
        updates = updates_of(batch.trajectories, of_sequences, self.config, batch.version)
        return self._scored(batch, advantages, updates, measured, TokenScores(self.policy, self.config))

    def _scored(
        self,
        batch: Rollout,
        advantages: Advantages | TurnAdvantages,
        updates: list[list[TrainSequence]],
        measured: dict[str, float],
        scores: TokenScores,
    ) -> PreparedRollout:
        """The updates with the log-probs that they start from: ``scores``, and those of the starting weights."""
        several = updates_per_step(self.config) > 1 and old_logprobs_source(self.config) == "trainer"
        # TargetPO's coefficients, which are yet to come, need the whole group, and a covariance the whole update.
        skips = self.config.policy.skip_zero_advantage and not self._rewrites
        for update in updates:
            # Later updates of a step start from other weights; their ratios refer to the weights that sampled.
            if several:
                scored = with_gradient(update) if skips else update
                for sequence, values in zip(scored, scores.logprobs(scored)):
                    sequence.old_logprobs = values
            if self.loss.reference_policy_kl_penalty:
                for sequence, values in zip(update, self.policy.logprobs(update, reference=True)):
                    sequence.reference_logprobs = values
        known = scores.recorded([sequence for update in updates for sequence in update])
        return PreparedRollout(batch, advantages, updates, measured, *known)

    @property
    def _rewrites(self) -> bool:
        """Whether the advantages that an update is sent with depend on the weights that it starts from."""
        entry = loss_entry(self.loss.type)
        return entry.by_group or entry.by_covariance

    def _credit(
        self, batch: Rollout
    ) -> tuple[Advantages | TurnAdvantages, np.ndarray | Sequence[float | np.ndarray], dict[str, float]]:
        """Advantages from the rewards, what each trajectory is trained with (``TrainSequence.advantage``), and what was
        measured on the way."""
        divergence = self._kl(batch)
        start = time.time()
        advantages = advantages_of(batch.groups, self.config, divergence)
        measured = {"time/advantages": time.time() - start}
        if divergence is not None and not np.isnan(divergence).all():
            measured["rollout/reference_kl"] = float(np.nanmean(divergence))
        if isinstance(advantages, TurnAdvantages):
            return advantages, advantages.of_sequences(batch.trajectories), measured
        return advantages, advantages.values.numpy(), measured

    def updates(self, prepared: PreparedRollout) -> Iterator[list[TrainSequence]]:
        """The step's sequences, ``policy.train_global_batch_size`` at a time, ``gdpo.num_iterations`` times over."""
        entry = loss_entry(self.loss.type)
        # Copies share their arrays; what an update rewrites, the next iteration has as it was.
        for number in range(self.config.gdpo.num_iterations * len(prepared.updates)):
            update = prepared.updates[number % len(prepared.updates)]
            if self._rewrites:
                update = [replace(sequence) for sequence in update]
            if entry.by_group:
                self._apply_target_po(update)
            if entry.by_covariance:
                self._choose_by_covariance(update, prepared, number)
            if self.entropy is not None:
                self.loss = replace(self.loss, entropy_bonus=self.entropy.applied(self.loss))
            yield update

    def observe(self, result: UpdateResult) -> None:
        """Move the weight of the entropy, where that adapts."""
        if self.entropy is not None and result.sums.get("tokens"):
            self.entropy.update(result.sums["entropy"] / result.sums["tokens"], self.loss)

    def state(self) -> dict[str, Any]:
        """Weight and last entropy, where the weight adapts."""
        return {} if self.entropy is None else {"entropy": asdict(self.entropy)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the weight of the entropy that a checkpoint has."""
        if self.entropy is not None and "entropy" in state:
            self.entropy = AdaptiveEntropy(**state["entropy"])

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
            **({} if self.entropy is None else {"policy/entropy_coefficient": self.entropy.coefficient}),
        }

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """The row, its samples, and which components train nothing."""
        rollout = prepared.rollout
        found = prepared.advantages
        terms = dict(zip(found.names, found.components.numpy().T))
        by_turn = found.by_turn if isinstance(found, TurnAdvantages) else None
        self.log.step(
            row,
            rollout.groups,
            found.values.numpy(),
            prepared.trainer_logprobs,
            terms=terms,
            turn_advantages=by_turn,
            entropies=prepared.entropies,
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

    def _choose_by_covariance(self, update: list[TrainSequence], prepared: PreparedRollout, number: int) -> None:
        """Clip-Cov and KL-Cov: mark tokens of an update, the ``number``-th of its step, by their covariance under the
        weights that it starts from.

        Log-probs of the first update are those that the step began with; of the others they cost a forward pass.
        """
        known = number == 0 and old_logprobs_source(self.config) == "trainer"
        if known and all(s.old_logprobs is not None for s in update):
            now = [s.old_logprobs for s in update if s.old_logprobs is not None]
        else:
            now = self.policy.logprobs(update)
        prepared.measured["policy/covariance_tokens"] = choose_by_covariance(
            update, now, self.loss, (self.config.run.seed, prepared.rollout.next_position, number)
        )


def _weighted_mean(diagnostics: Any, weights: Mapping[str, float]) -> float:
    """Weighted sum of the components' means: what GRPO would call the reward."""
    means = dict(zip(diagnostics.names, diagnostics.mean))
    return float(np.nansum([weight * means.get(name, np.nan) for name, weight in weights.items()]))
