"""PPO with a value head (``algorithm.type: ppo``): rewards, values and advantages per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms.ppo import (
    ActorCriticSettings,
    PPOSettings,
    discounted_sums,
    explained_variance,
    gae,
    whitened,
)
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.contexts import by_trajectory
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Trajectory, UpdateResult
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.rollouts.credit import advantages_of, earned, is_trained, reward_columns, updates_of
from gdpo_nemo.rollouts.metrics import check_failures
from gdpo_nemo.training.gdpo import GDPO, PreparedRollout, TokenScores

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.batches import Rollout


METRICS = {
    "value/loss": ("", "Value loss before multiplication by ppo.vf_coef, mean over the trained tokens"),
    "value/mean": ("reward", "Mean value estimate of the state before each trained token"),
    "value/return": ("reward", "Mean training target of the value head (return from GAE)"),
    "value/clip_fraction": ("share", "Trained tokens whose value loss has no gradient because of ppo.cliprange_value"),
    "value/explained_variance": (
        "",
        "Share of the variance of the discounted rewards that the value head explains (0: a constant fits as well)",
    ),
}
_RENAMED = {
    "policy/value_loss": "value/loss",
    "policy/value_clipped": "value/clip_fraction",
}
_NEWEST_WEIGHT = 0.5
"""Weight of the newest step in the running mean. The mean follows rising rewards within one or two steps."""
_GROUP_METRICS = ("/dead_groups", "/effective_weight", "/conflicts")
"""Suffixes of component metrics that are only meaningful for group-based advantages."""


class PPO(GDPO):
    """PPO: like GDPO, but with token-level advantages from generalized advantage estimation."""

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.loss = ActorCriticSettings.of(self.loss, config.ppo)
        self.centre: float | None = None
        """Running mean of the discounted rewards-to-go. None before the first step."""

    def prepare(self, batch: Rollout) -> PreparedRollout:
        """Compute the log-probs and values of all tokens with the weights before the step, and then the advantages.

        Raises:
            RunError: if too many verifications failed, or no trajectory has a reward.
        """
        check_failures(batch.trajectories, self.config.rollout.max_env_failure_share)
        # Components are used for diagnostics only.
        config = self._weighted(batch)
        diagnosed = replace(config, gdpo=replace(config.gdpo, kl_in_reward=None))
        rewards_by_component = advantages_of(batch.groups, diagnosed, functions=self.functions)
        rewards = action_rewards(batch.trajectories, config)
        no_advantages = np.zeros(len(batch.trajectories))
        trained = [reward is not None for reward in rewards]
        updates = updates_of(batch.trajectories, no_advantages, self.config, batch.version, trained)
        scores = TokenScores(self.policy, self.config, values=True)
        sequences = list(chain.from_iterable(updates))
        measured = self._credit_tokens(rewards, batch.trajectories, sequences, scores)
        return self._scored(batch, rewards_by_component, updates, measured, scores)

    def _credit_tokens(
        self,
        rewards: list[np.ndarray | None],
        trajectories: Sequence[Trajectory],
        sequences: list[TrainSequence],
        scores: TokenScores,
    ) -> dict[str, float]:
        """Set advantages, old values and returns of the sequences, and return metrics.

        The actions of a trajectory are credited in the order in which they were sampled, also if they belong to several
        sequences.

        Args:
            rewards: result of ``action_rewards``. A trajectory without rewards has weight 0.
        """
        values = scores.values(sequences)
        measured = {}
        if kl_in_reward(self.config.gdpo):
            measured["rollout/reference_kl"] = self._subtract_kl(rewards, trajectories, sequences, scores)
        centre = self._centre(rewards)
        known = by_trajectory(sequences, values, trajectories)
        uncentred = []
        for number, t in enumerate(trajectories):
            uncentred.append(t.where_written(known[number]).astype(np.float64) + centre)
        credit = token_credit(rewards, uncentred, self.config.ppo)
        for s, old in zip(sequences, values, strict=True):
            advantages, returns = credit.advantages[s.trajectory], credit.returns[s.trajectory]
            s.old_values = old
            s.returns = old
            if advantages is not None and returns is not None:
                t = trajectories[s.trajectory]
                s.advantage = _at_policy_tokens(t, advantages)[s.indices]
                s.returns = _at_policy_tokens(t, returns - centre)[s.indices]
        if np.isfinite(credit.mean_reward_to_go):
            self.centre = centre + _NEWEST_WEIGHT * (credit.mean_reward_to_go - centre)
        measured["value/mean"] = centre  # ``metrics`` adds the mean output of the value head.
        means = {"value/explained_variance": credit.explained_variance, "value/return": credit.mean_return}
        return measured | {name: value for name, value in means.items() if np.isfinite(value)}

    def _centre(self, rewards: Sequence[np.ndarray | None]) -> float:
        """Return the running mean of the earlier steps. In the first step, return the mean of this step."""
        if self.centre is not None:
            return self.centre
        to_go = rewards_to_go(rewards, self.config.ppo.gamma)
        return float(to_go.mean()) if len(to_go) else 0.0

    def state(self) -> dict[str, Any]:
        """Return GDPO's state and the running mean for a checkpoint."""
        return super().state() | ({} if self.centre is None else {"value_centre": self.centre})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        super().load_state(state)
        self.centre = state.get("value_centre")

    def _subtract_kl(
        self,
        rewards: list[np.ndarray | None],
        trajectories: Sequence[Trajectory],
        sequences: list[TrainSequence],
        scores: TokenScores,
    ) -> float:
        """Subtract beta (log policy - log initial model) from the reward of every action, in place (TRL's estimator
        k1).

        beta is ``gdpo.kl_in_reward``.

        Returns:
            Mean over the trajectories of the summed log-ratio, in nats.
        """
        beta = self.config.gdpo.kl_in_reward or 0.0
        now, start = scores.logprobs(sequences), self.policy.logprobs(sequences, reference=True)
        gaps = by_trajectory(sequences, [a - b for a, b in zip(now, start, strict=True)], trajectories)
        sums = []
        for index, t in enumerate(trajectories):
            reward = rewards[index]
            if reward is not None:
                gap = t.where_written(gaps[index]).astype(np.float64)
                rewards[index] = reward - beta * gap
                sums.append(gap.sum())
        return float(np.mean(sums)) if sums else 0.0

    def metrics(self, prepared: PreparedRollout, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return GDPO's metrics, with metrics of the values instead of those of group-based advantages."""
        row = super().metrics(prepared, results, version)
        row["value/mean"] += row.pop("policy/value", 0.0)
        return {
            _RENAMED.get(name, name): value
            for name, value in row.items()
            if not name.startswith("advantage/") and not (name.startswith("reward/") and name.endswith(_GROUP_METRICS))
        }

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """Log the metrics and samples of a step. The advantage of a sample is the mean over its tokens."""
        means = self._mean_advantages(prepared)
        values = SampleValues(means, prepared.trainer_logprobs, entropies=prepared.entropies)
        self.log.step(row, prepared.rollout.groups, values)


def _at_policy_tokens(trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
    """Expand action values to all completion tokens: float32 [completion tokens], 0 for tokens that the policy did not
    generate."""
    if trajectory.loss_mask is None:
        return values.astype(np.float32)
    placed = np.zeros(len(trajectory.completion_ids), np.float32)
    placed[trajectory.loss_mask] = values
    return placed


@dataclass(frozen=True)
class TokenCredit:
    """Training targets for the actions of a batch, which are the tokens that the policy generated.

    Each list has one entry per trajectory: float64 [actions], or None if the trajectory has no reward.
    """

    advantages: list[np.ndarray | None]
    returns: list[np.ndarray | None]
    """Training targets of the value head."""
    explained_variance: float
    """Fraction of the variance of the discounted rewards-to-go that the values explain. NaN if the rewards-to-go do not
    vary."""
    mean_return: float
    """Mean of the returns. NaN if no trajectory has a reward."""
    mean_reward_to_go: float
    """Mean of the discounted rewards-to-go of all actions. NaN if no trajectory has a reward."""


def action_rewards(trajectories: Sequence[Trajectory], config: Config) -> list[np.ndarray | None]:
    """Return the reward of each action: float64 [actions] per trajectory.

    None for a trajectory that is not trained (``credit.is_trained``) or has no weighted component, because an unknown
    reward must not be treated as 0.
    """
    weights = {name: weight for name, weight in config.gdpo.rewards.items() if weight}
    by_turn = config.gdpo.credit == "turn"
    columns = {} if by_turn else reward_columns(trajectories, config)
    found: list[np.ndarray | None] = []
    for index, t in enumerate(trajectories):
        if not is_trained(t, config.loss_fn) or not t.num_policy_tokens:
            found.append(None)
        elif by_turn:
            found.append(_rewards_by_turn(t, weights))
        else:
            found.append(_reward_at_the_end(t, {name: (columns[name][index], weights[name]) for name in weights}))
    return found


def _reward_at_the_end(trajectory: Trajectory, rewards: dict[str, tuple[float, float]]) -> np.ndarray | None:
    """Assign the weighted sum of a trajectory's rewards to its last action: float64 [actions].

    Args:
        rewards: (value, weight) by component; a NaN value is missing.

    Returns:
        None if all values are missing.
    """
    values = [value * weight for value, weight in rewards.values() if not np.isnan(value)]
    if not values:
        return None
    rewards_of_actions = np.zeros(trajectory.num_policy_tokens)
    rewards_of_actions[-1] = sum(values)
    return rewards_of_actions


def _rewards_by_turn(trajectory: Trajectory, weights: dict[str, float]) -> np.ndarray | None:
    tokens = np.array(trajectory.turn_tokens or (trajectory.num_policy_tokens,), np.int64)
    known = [name for name in weights if trajectory.rewards.get(name) is not None]
    if not known:
        return None
    rewards = np.zeros(trajectory.num_policy_tokens)
    ends = np.maximum(tokens.cumsum() - 1, 0)
    for name in known:
        # A turn without policy tokens ends at the end of the previous turn, so several turns may share an action.
        np.add.at(rewards, ends, weights[name] * earned(trajectory, name, len(tokens)))
    return rewards


def token_credit(
    rewards: Sequence[np.ndarray | None], values: Sequence[np.ndarray], settings: PPOSettings
) -> TokenCredit:
    """Compute the advantages and returns of a step's actions.

    Args:
        rewards: result of ``action_rewards``.
        values: float [actions] per trajectory: estimated value of the state before each action.
    """
    known = [(index, reward) for index, reward in enumerate(rewards) if reward is not None]
    pairs = [gae(reward, values[index], settings.gamma, settings.lam) for index, reward in known]
    parts = [advantages for advantages, _ in pairs]
    if settings.whiten_advantages:
        parts = whitened(parts)
    advantages: list[np.ndarray | None] = [None] * len(rewards)
    returns: list[np.ndarray | None] = [None] * len(rewards)
    for (index, _), part, (_, targets) in zip(known, parts, pairs):
        advantages[index], returns[index] = part, targets
    if not known:
        return TokenCredit(advantages, returns, *[float("nan")] * 3)
    predicted = np.concatenate([np.asarray(values[index], np.float64) for index, _ in known])
    to_go = rewards_to_go(rewards, settings.gamma)
    mean = float(np.concatenate([targets for _, targets in pairs]).mean())
    return TokenCredit(advantages, returns, explained_variance(predicted, to_go), mean, float(to_go.mean()))


def rewards_to_go(rewards: Sequence[np.ndarray | None], gamma: float) -> np.ndarray:
    """Return the discounted reward-to-go of each action: float64 [actions of all trajectories with a reward]."""
    parts = [discounted_sums(reward, gamma) for reward in rewards if reward is not None]
    return np.concatenate(parts) if parts else np.zeros(0)
