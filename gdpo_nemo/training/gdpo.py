"""GDPO, the sampling algorithm: rewards by component, advantages from an estimator, and a policy-gradient loss."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms.component_weights import ComponentWeights
from gdpo_nemo.algorithms.entropy import AdaptiveEntropy
from gdpo_nemo.algorithms.loss_selection import loss_entry
from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.algorithms.weighting import StepGradients
from gdpo_nemo.config.algorithm_choice import old_logprobs_source, spec_of
from gdpo_nemo.config.layout import updates_per_step
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.contexts import by_trajectory, to_score
from gdpo_nemo.data.packing import TrainSequence, with_gradient
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.rollouts.credit import (
    TurnAdvantages,
    advantages_of,
    by_span,
    choose_by_covariance,
    log_ratios,
    reward_columns,
    trajectory_groups,
    updates_of,
    with_weights,
)
from gdpo_nemo.rollouts.families import criterion_terms, weigh_criteria
from gdpo_nemo.rollouts.metrics import check_failures, rollout_metrics, update_metrics
from gdpo_nemo.rollouts.user_functions import CustomFunctions
from gdpo_nemo.training.algorithm import Algorithm
from gdpo_nemo.training.component_gradients import ComponentGradients

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import Advantages, Diagnostics, LossSettings
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.batches import Rollout

METRICS = {
    "reward/total/mean": (
        "reward",
        "Sum of the components' means with the weights of the step, which is the reward in GRPO",
    ),
    "rollout/dropped_groups": ("groups", "Groups that gdpo.dynamic_sampling sampled and dropped from the step"),
    "rollout/reference_kl": (
        "nats",
        "KL to the initial model that gdpo.kl_in_reward subtracts from the advantages, mean over trajectories",
    ),
    "policy/entropy_coefficient": (
        "",
        "Weight of the entropy in the next update if the entropy is below its target (loss_fn.use_adaptive_entropy)",
    ),
    "policy/covariance_tokens": ("share", "Tokens of the step's last update selected by the loss clip_cov or kl_cov"),
    "time/rollout": (
        "s",
        "Time spent sampling the step's batch, which overlaps with earlier training if max_staleness is above 0",
    ),
    "time/verify": ("s", "Time spent waiting for the environments to score the batch"),
    "time/advantages": ("s", "Time spent computing advantages on the driver, part of time/train"),
}
PATIENCE = 3
"""Number of consecutive steps in which a component must be constant or ignored before the run reports it."""


@dataclass
class PreparedRollout:
    """A rollout with its advantages and the sequences of its updates."""

    rollout: Rollout
    advantages: Advantages | TurnAdvantages
    updates: list[list[TrainSequence]]
    measured: dict[str, float]
    trainer_logprobs: list[np.ndarray | None] | None = None
    """Trainer's log-probs per trajectory, [completion tokens]; None for a trajectory without log-probs, or None if no
    trajectory has log-probs."""
    entropies: list[np.ndarray | None] | None = None
    """Entropy of the policy's distribution at each token in nats, per trajectory, [completion tokens]; None in the same
    cases as ``trainer_logprobs``."""


class TokenScores:
    """Scores that the trainer computes for a step's tokens before training: log-probs, and if configured, entropies and
    values.

    Each sequence is scored only once. With ``values=True``, the value head also estimates the value of each state.
    """

    def __init__(self, policy: PolicyGroup, config: Config, values: bool = False):
        self._policy = policy
        self._with_values = values
        rollout = config.rollout
        self._entropies = rollout.save_entropies and rollout.save_samples
        self._all = self._entropies or (rollout.save_trainer_logprobs and rollout.save_samples)

    def logprobs(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """Return the log-probs with the current weights: float32 [completion tokens] for each sequence."""
        return self._column(sequences, 0)

    def values(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """Return the value head's estimate of the state before each token: float32 [completion tokens] for each
        sequence."""
        return self._column(sequences, -1)

    def _column(self, sequences: list[TrainSequence], index: int) -> list[np.ndarray]:
        return [np.ascontiguousarray(scores[:, index]) for scores in self._scores(sequences)]

    def _scores(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """Return ``TrainSequence.scores`` of each sequence. Missing scores are computed and set."""
        unknown = [sequence for sequence in sequences if sequence.scores is None]
        if unknown:
            for sequence, found in zip(unknown, self._compute(unknown), strict=True):
                sequence.scores = found
        return [sequence.scores for sequence in sequences if sequence.scores is not None]

    def _compute(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        if self._with_values:
            return self._policy.logprobs_and_values(sequences, self._entropies)
        if self._entropies:
            return self._policy.logprobs_and_entropies(sequences)
        return [found[:, None] for found in self._policy.logprobs(sequences)]

    def recorded(
        self, sequences: list[TrainSequence]
    ) -> tuple[list[np.ndarray | None] | None, list[np.ndarray | None] | None]:
        """Return log-probs and entropies to save with the samples, for each sequence; None for a sequence without
        scores.

        If ``rollout.save_trainer_logprobs`` or ``rollout.save_entropies`` is set, missing values are computed.
        """
        if self._all:
            self._scores(sequences)
        if all(sequence.scores is None for sequence in sequences):
            return None, None

        def column(index: int) -> list[np.ndarray | None]:
            return [None if s.scores is None else s.scores[:, index] for s in sequences]

        return column(0), column(1) if self._entropies else None


class GDPO(Algorithm["Rollout", PreparedRollout]):
    """Policy gradients on groups of samples, with advantages that an estimator computes from reward components.

    Estimators and losses are in the package ``algorithms``. GRPO, RLOO, GSPO and others are also variants of this
    algorithm.
    """

    loss: LossSettings

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.component_alerts = ComponentAlerts(log)
        adapts = config.loss_fn.use_adaptive_entropy
        self.entropy = AdaptiveEntropy(config.loss_fn.entropy_bonus) if adapts else None
        gdpo = config.gdpo
        self.functions = CustomFunctions(gdpo)
        rule = self.functions.weighting
        changes = gdpo.constraints or gdpo.schedules or rule
        self.weights = ComponentWeights(gdpo.rewards, gdpo.constraints, gdpo.schedules, rule) if changes else None
        self._result: UpdateResult | None = None
        """Result of the last update."""

    @classmethod
    def needs_reference(cls, config: Config) -> bool:
        """Return True if there is a KL penalty in the loss or in the reward."""
        return super().needs_reference(config) or kl_in_reward(config.gdpo)

    def prepare(self, batch: Rollout) -> PreparedRollout:
        """Compute the advantages of all trajectories, and the log-probs that the updates require.

        Raises:
            RunError: if too many verifications failed, or no trajectory has a reward.
        """
        check_failures(batch.trajectories, self.config.rollout.max_env_failure_share)
        return self.prepare_part(batch)

    def prepare_part(self, batch: Rollout) -> PreparedRollout:
        """Prepare a batch that may be a part of a step. Failed verifications are not counted (``prepare``)."""
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
        """Add old and reference log-probs to the sequences of each update that needs these log-probs."""
        trained = updates_per_step(self.config, spec_of(self.config))
        several = trained > 1 and old_logprobs_source(self.config) == "trainer"
        # TargetPO's coefficients need the whole group, and a covariance needs the whole update.
        skips = self.config.policy.skip_zero_advantage and not self._depends_on_weights
        for update in updates:
            # Later updates of a step start from other weights, so the old log-probs must be computed now.
            if several:
                scored = with_gradient(update) if skips else update
                for sequence, values in zip(scored, scores.logprobs(scored)):
                    sequence.old_logprobs = values
            if self.loss.reference_policy_kl_penalty:
                self._set_reference_logprobs(update)
        sequences = list(chain.from_iterable(updates))
        known = []
        for column in scores.recorded(sequences):
            found = None if column is None else by_trajectory(sequences, column, batch.trajectories)
            known.append(None if found is None else [found.get(number) for number in range(len(batch.trajectories))])
        return PreparedRollout(batch, advantages, updates, measured, *known)

    @property
    def _depends_on_weights(self) -> bool:
        """True if the advantages of an update depend on the weights before that update."""
        entry = loss_entry(self.loss.type)
        return entry.by_group or entry.by_covariance

    def _credit(
        self, batch: Rollout
    ) -> tuple[Advantages | TurnAdvantages, np.ndarray | Sequence[float | np.ndarray], dict[str, float]]:
        """Return the advantages, the value of ``TrainSequence.advantage`` for each trajectory, and metrics."""
        divergence = self._kl(batch)
        start = time.time()
        advantages = advantages_of(batch.groups, self._weighted(batch), divergence, self.functions)
        measured = {"time/advantages": time.time() - start}
        if divergence is not None and not np.isnan(divergence).all():
            measured["rollout/reference_kl"] = float(np.nanmean(divergence))
        self._observe_advantages(batch, advantages)
        if isinstance(advantages, TurnAdvantages):
            return advantages, advantages.of_sequences(batch.trajectories), measured
        if self.config.gdpo.credit == "span":
            return advantages, by_span(advantages, batch.trajectories, self.config.gdpo.group_by), measured
        return advantages, advantages.values.numpy(), measured

    def _weighted(self, batch: Rollout) -> Config:
        """Return the config with the step's weights in ``gdpo.rewards``, after constraints, schedules and the rule.

        Call this method once per step, because it moves the weights of the constraints and the state of the rule.
        """
        rule = None if self.weights is None else self.weights.rule
        weigh_criteria(batch.groups, rule, 1 + (batch.version or 0))
        if self.weights is None:
            return self.config
        trained = [t for t in batch.trajectories if t.trains]
        groups = trajectory_groups(batch.groups, self.config.gdpo.group_by)[_trains(batch)]
        columns = reward_columns(trained, self.config) if trained else {}
        self.weights.update(1 + (batch.version or 0), columns, groups)
        batch.weights = self.weights.changed
        return self._with_weights(batch)

    def _observe_advantages(self, batch: Rollout, advantages: Advantages | TurnAdvantages) -> None:
        """Pass the advantages of the samples of ``_weighted`` to the rule of ``gdpo.weighting``."""
        if self.weights is None or self.weights.rule is None:
            return
        trained = _trains(batch)
        terms = dict(zip(advantages.names, advantages.components.numpy()[trained].T))
        self.weights.rule.observe(advantages.values.numpy()[trained], terms)

    def _observe_gradients(self, gradients: ComponentGradients, weights: Mapping[str, float]) -> None:
        """Pass the gradients of terms of weight 1 or -1 to the rule of ``gdpo.weighting``."""
        if self.weights is None or self.weights.rule is None or gradients.products is None:
            return
        names, products = gradients.products
        sizes = np.abs([weights[name] for name in names])
        self.weights.rule.observe_gradients(StepGradients(names, products / np.outer(sizes, sizes)))

    def _with_weights(self, batch: Rollout) -> Config:
        """Return the config with the weights of a prepared batch in ``gdpo.rewards``."""
        return with_weights(self.config, batch.weights)

    @property
    def _directions(self) -> dict[str, int]:
        """Result of ``component_weights.directions`` for the weights of the last step."""
        return super()._directions if self.weights is None else self.weights.directions

    def updates(self, prepared: PreparedRollout) -> Iterator[list[TrainSequence]]:
        """Yield the sequences of each update: ``policy.train_global_batch_size`` at a time, repeated
        ``gdpo.num_iterations`` times."""
        entry = loss_entry(self.loss.type)
        # Copies keep the original advantages for the next iteration. The copied sequences share their arrays.
        for number in range(self.config.gdpo.num_iterations * len(prepared.updates)):
            update = prepared.updates[number % len(prepared.updates)]
            if self._depends_on_weights:
                update = [replace(sequence) for sequence in update]
            if entry.by_group:
                self._apply_target_po(update)
            if entry.by_covariance:
                self._choose_by_covariance(update, prepared, number)
            if self.entropy is not None:
                self.loss = replace(self.loss, entropy_bonus=self.entropy.applied(self.loss))
            gradients = self._component_gradients(update, prepared) if number == 0 else None
            yield update
            if gradients is not None and self._result is not None:
                prepared.measured |= gradients.metrics(self._result)
                self._observe_gradients(gradients, self._with_weights(prepared.rollout).gdpo.rewards)

    def _component_gradients(self, update: list[TrainSequence], prepared: PreparedRollout) -> ComponentGradients | None:
        """Compute the gradients by component if they are due (``gdpo.component_gradient_period``)."""
        period = self.config.gdpo.component_gradient_period
        rollout = prepared.rollout
        if not period or rollout.version is None or rollout.version % period:
            return None
        config = self._with_weights(rollout)
        return ComponentGradients(self.policy, config, update, rollout.groups, prepared.advantages, self.loss)

    def observe(self, result: UpdateResult) -> None:
        """Adapt the entropy coefficient after an update, if this is enabled."""
        self._result = result
        if self.entropy is not None and result.sums.get("tokens"):
            self.entropy.update(result.sums["entropy"] / result.sums["tokens"], self.loss)

    def state(self) -> dict[str, Any]:
        """Return the state of the adaptive entropy coefficient, constraints, weighting rule and custom functions."""
        entropy = {} if self.entropy is None else {"entropy": asdict(self.entropy)}
        functions = self.functions.state()
        custom = {"functions": functions} if functions else {}
        rule = self.functions.weighting
        weighting = {"weighting": {"rule": rule.name, "state": rule.state()}} if rule and rule.state() else {}
        weights = {} if self.weights is None else {"weights": self.weights.state()}
        return entropy | custom | weighting | weights

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state`` returned. A custom function that it does not contain starts anew."""
        if self.entropy is not None and "entropy" in state:
            self.entropy = AdaptiveEntropy(**state["entropy"])
        if self.weights is not None:
            self.weights.load_state(state.get("weights", {}))
        self._load_rule(state.get("weighting", {}))
        missing = self.functions.load_state(state.get("functions", {}))
        for name in missing if "functions" in state else ():
            self.log.note(f"{name}: the checkpoint does not contain its state, so its state starts anew")

    def _load_rule(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a built-in weighting rule. The state of another rule does not fit."""
        rule = self.functions.weighting
        if rule is None or not saved:
            return
        if saved["rule"] == rule.name:
            rule.load_state(saved["state"])
        else:
            self.log.note(
                f"gdpo.weighting: {rule.name} starts anew, because the checkpoint has the state of {saved['rule']}"
            )

    def metrics(self, prepared: PreparedRollout, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return the metrics of loss, rewards, advantages, rollouts and staleness.

        Parity of trainer and sampler is included if the rollout is on-policy.
        """
        rollout = prepared.rollout
        diagnostics = prepared.advantages.diagnostics
        on_policy = all(t.policy_version == version for t in rollout.trajectories)
        return {
            **update_metrics(results, on_policy and old_logprobs_source(self.config) == "trainer"),
            **diagnostics.metrics(),
            "reward/total/mean": _weighted_mean(diagnostics),
            **({} if self.weights is None else self.weights.metrics),
            **rollout_metrics(rollout.trajectories, version),
            "rollout/dropped_groups": float(rollout.dropped_groups),
            **rollout.measured,
            "time/rollout": rollout.generation_s,
            "time/verify": rollout.verify_s,
            **prepared.measured,
            **({} if self.entropy is None else {"policy/entropy_coefficient": self.entropy.coefficient}),
        }

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """Log the metrics and samples of a step, and report reward components that train nothing."""
        self.log.step(row, prepared.rollout.groups, self.sample_values(prepared))
        self.component_alerts.update(prepared.advantages.diagnostics)

    def sample_values(self, prepared: PreparedRollout) -> SampleValues:
        """Return the values to save with the samples of a step."""
        found = prepared.advantages
        terms = dict(zip(found.names, found.components.numpy().T))
        by_turn = found.by_turn if isinstance(found, TurnAdvantages) else None
        of_criteria = None
        if self.config.rollout.save_samples and any(map(is_family, found.names)):
            of_criteria = criterion_terms(found.criteria, prepared.rollout.trajectories, self.config.gdpo.group_by)
        return SampleValues(
            found.values.numpy(), prepared.trainer_logprobs, terms, of_criteria, by_turn, prepared.entropies
        )

    def _mean_advantages(self, prepared: PreparedRollout) -> np.ndarray:
        """Return the mean advantage over the policy tokens of each trajectory. Shape: float64 [trajectories]."""
        sequences = list(chain.from_iterable(prepared.updates))
        numbers = [s.trajectory for s in sequences]
        sums = [float(s.where_written(s.token_advantages()).sum(dtype=np.float64)) for s in sequences]
        tokens = np.bincount(numbers, [s.num_policy_tokens for s in sequences])
        means: np.ndarray = np.bincount(numbers, sums) / np.maximum(tokens, 1)
        return means

    def _kl(self, rollout: Rollout) -> np.ndarray | None:
        """Return each trajectory's log-ratio to the initial model (``log_ratios``), or None without
        ``gdpo.kl_in_reward``."""
        if not kl_in_reward(self.config.gdpo):
            return None
        trajectories = rollout.trajectories
        sequences = to_score(trajectories)
        reference = by_trajectory(sequences, self.policy.logprobs(sequences, reference=True), trajectories)
        return log_ratios(trajectories, [reference[number] for number in range(len(trajectories))])

    def _apply_target_po(self, update: list[TrainSequence]) -> None:
        """Replace the advantages by TargetPO's coefficients, with which the linear loss has TargetPO's gradient at the
        current weights."""
        from gdpo_nemo.algorithms import target_po_coefficients

        now = self.policy.logprobs(update)
        old = [s.sampler_logprobs if s.old_logprobs is None else s.old_logprobs for s in update]
        size = self.config.gdpo.num_generations_per_prompt
        # A trajectory may have several sequences, which have the same advantage and weight.
        numbers, first, member = np.unique([s.trajectory for s in update], return_index=True, return_inverse=True)

        def totals(values: Iterable[float]) -> np.ndarray:
            return np.bincount(member, np.fromiter(values, np.float64, len(update)))

        coefficients = target_po_coefficients(
            totals(s.where_written(values).sum() for s, values in zip(update, now)),
            totals(s.where_written(values).sum() for s, values in zip(update, old)),
            [update[index].advantage for index in first],
            np.arange(len(numbers)) // size,
            valid=[update[index].weight > 0 for index in first],
            lengths=totals(s.num_policy_tokens for s in update),
            temperature=self.loss.target_temperature,
            length_normalize=self.loss.target_length_normalize,
            weights=[update[index].weight for index in first],
        )
        for sequence, value in zip(update, coefficients.numpy()[member].tolist()):
            sequence.advantage = value

    def _choose_by_covariance(self, update: list[TrainSequence], prepared: PreparedRollout, number: int) -> None:
        """Select tokens of an update for Clip-Cov or KL-Cov, by their covariance under the weights before the update.

        Args:
            number: index of the update in its step. The log-probs of the first update may already be known; later
                updates need a forward pass.
        """
        known = number == 0 and old_logprobs_source(self.config) == "trainer"
        if known and all(s.old_logprobs is not None for s in update):
            now = [s.old_logprobs for s in update if s.old_logprobs is not None]
        else:
            now = self.policy.logprobs(update)
        prepared.measured["policy/covariance_tokens"] = choose_by_covariance(
            update, now, self.loss, (self.config.run.seed, prepared.rollout.next_position, number)
        )


def _trains(batch: Rollout) -> np.ndarray:
    """Return `Trajectory.trains` of each trajectory: bool [trajectories]."""
    return np.array([t.trains for t in batch.trajectories], bool)


def _weighted_mean(diagnostics: Diagnostics) -> float:
    """Return the sum of the components' mean rewards with the step's weights, which is the mean reward in GRPO."""
    return float(np.nansum(diagnostics.weight * diagnostics.mean))


class ComponentAlerts:
    """Reports reward components that train nothing for several steps.

    The report is an alert, or a note if the component is solved. An alert is repeated only after a step in which its
    cause was absent.
    """

    def __init__(self, log: RunLog, environment: str = ""):
        self._log = log
        self._where = f" in {environment}" if environment else ""
        self._steps: dict[str, int] = {}
        self._extremes: dict[str, tuple[float, float]] = {}
        """Smallest and largest reward of a sample so far, by component."""
        self._noted: set[str] = set()

    def update(self, diagnostics: Diagnostics) -> None:
        """Process the diagnostics of a step."""
        for name, low, high in zip(diagnostics.names, diagnostics.low.tolist(), diagnostics.high.tolist()):
            if not np.isnan(low):
                before = self._extremes.get(name, (low, high))
                self._extremes[name] = min(low, before[0]), max(high, before[1])
        # The text before the first number identifies the component and its problem.
        current = {re.split(r"[(:]", line)[0]: line for line in diagnostics.alerts}
        self._steps = {key: self._steps.get(key, 0) + 1 for key in current}
        for key, steps in self._steps.items():
            if steps == PATIENCE:
                self._report(current[key])

    def _report(self, line: str) -> None:
        constant = re.match(r"component (['\"])(.+)\1 is constant", line)
        name = constant[2] if constant else None
        if name is None or not self._log.history.solved(name, PATIENCE, self._extremes.get(name, ())):
            self._log.alert(f"for {PATIENCE} steps{self._where}, {line}")
        elif name not in self._noted:
            self._noted.add(name)
            self._log.note(
                f"component {name!r}{self._where} is solved: for {PATIENCE} steps every sample has had the best value "
                "so far"
            )
