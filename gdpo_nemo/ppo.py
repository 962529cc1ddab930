"""PPO: policy gradients whose advantages come from a value head on the policy (``algorithm.type: ppo``).

The value head shares the policy's trunk, so that one forward pass gives log-probs and values in every layout, and
checkpoints, optimizer and schedule stay those of one model; a critic of its own would double the memory. Loop, engines,
losses and layouts are GDPO's.

A value is a running mean of the rewards to come plus the output of the head, so that the head, which starts at 0,
learns only differences between states. The mean is a shift of the targets: unlike PopArt (arXiv 1602.07714) it neither
rescales them nor rewrites the head when the mean moves. The ranks know only the head: the mean is subtracted from the
old values and returns that they get.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithm import GDPO, PreparedRollout, TokenScores
from gdpo_nemo.algorithms.ppo_settings import ActorCriticSettings
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.rollouts.learning import advantages_of, updates_of
from gdpo_nemo.rollouts.step_metrics import check_failures
from gdpo_nemo.rollouts.token_credit import action_rewards, rewards_to_come, token_credit

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.rollout_batch import Rollout

METRICS = {
    "value/loss": ("", "Value loss of ppo without ppo.vf_coef, mean over the trained tokens"),
    "value/mean": ("reward", "What the value head says of the state before a trained token, mean"),
    "value/return": ("reward", "What it is to say, by GAE, mean"),
    "value/clip_fraction": ("share", "Trained tokens whose value ppo.cliprange_value keeps from learning"),
    "value/explained_variance": (
        "",
        "Share of the variance of the rewards to come that the values before the step know; 0: as a constant does",
    ),
}
_OF_UPDATES = {
    "policy/value_loss": "value/loss",
    "policy/value_clipped": "value/clip_fraction",
}
_PACE = 0.5
"""Share of the newest step in the running mean: rewards that rise are followed within a step or two."""
_OF_GROUPS = ("/dead_groups", "/effective_weight", "/conflicts")
"""Of metrics of reward components: what they mean to advantages that groups give."""


class PPO(GDPO):
    """Samples, rewards, and advantages of tokens by generalized advantage estimation."""

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Any, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.loss = ActorCriticSettings.of(self.loss, config.ppo)
        self.centre: float | None = None
        """Running mean of the rewards to come; None before the first step."""

    def prepare(self, batch: Rollout) -> PreparedRollout:
        """Values and log-probs of all tokens under the weights before the step, and the advantages they give.

        Raises:
            RunError: as ``GDPO.prepare``.
        """
        check_failures(batch.trajectories, self.config.rollout.max_env_failure_share)
        # Of the components the diagnosis alone.
        diagnosed = replace(self.config, gdpo=replace(self.config.gdpo, kl_in_reward=None))
        rewards_by_component = advantages_of(batch.groups, diagnosed)
        rewards = action_rewards(batch.trajectories, self.config)
        none_yet = np.zeros(len(batch.trajectories))
        trained = [given is not None for given in rewards]
        updates = updates_of(batch.trajectories, none_yet, self.config, batch.version, trained)
        scores = TokenScores(self.policy, self.config, values=True)
        measured = self._credit_tokens(rewards, [s for update in updates for s in update], scores)
        return self._scored(batch, rewards_by_component, updates, measured, scores)

    def _credit_tokens(
        self, rewards: list[np.ndarray | None], sequences: list[TrainSequence], scores: TokenScores
    ) -> dict[str, float]:
        """Give the sequences advantages, values and returns; returns what was measured on the way.

        Args:
            rewards: ``action_rewards``; the sequences without any have weight 0.
        """
        values = scores.values(sequences)
        measured = {}
        if kl_in_reward(self.config):
            measured["rollout/reference_kl"] = self._subtract_kl(rewards, sequences, scores)
        centre = self._centre(rewards)
        whole = [s.where_written(of_one).astype(np.float64) + centre for s, of_one in zip(sequences, values)]
        credit = token_credit(rewards, whole, self.config.ppo)
        for s, of_one, advantages, returns in zip(sequences, values, credit.advantages, credit.returns, strict=True):
            s.old_values = of_one
            s.returns = of_one
            if advantages is not None and returns is not None:
                s.advantage = _placed(s, advantages)
                s.returns = _placed(s, returns - centre)
        if np.isfinite(credit.mean_to_come):
            self.centre = centre + _PACE * (credit.mean_to_come - centre)
        measured["value/mean"] = centre  # the rest of it is measured by the updates
        known = {"value/explained_variance": credit.explained_variance, "value/return": credit.mean_return}
        return measured | {name: value for name, value in known.items() if np.isfinite(value)}

    def _centre(self, rewards: Sequence[np.ndarray | None]) -> float:
        """The mean of the steps before; of this one, if it is the first."""
        if self.centre is not None:
            return self.centre
        come = rewards_to_come(rewards, self.config.ppo.gamma)
        return float(come.mean()) if len(come) else 0.0

    def state(self) -> dict[str, Any]:
        """As of GDPO, and the running mean."""
        return super().state() | ({} if self.centre is None else {"value_centre": self.centre})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        super().load_state(state)
        self.centre = state.get("value_centre")

    def _subtract_kl(
        self, rewards: list[np.ndarray | None], sequences: list[TrainSequence], scores: TokenScores
    ) -> float:
        """Take ``gdpo.kl_in_reward`` times log policy - log start from the reward of every action, as TRL's estimator
        k1; returns the mean over trajectories of its sum, in nats."""
        beta = self.config.gdpo.kl_in_reward or 0.0
        sums = []
        for place, (s, now, start) in enumerate(
            zip(sequences, scores.logprobs(sequences), self.policy.logprobs(sequences, reference=True))
        ):
            given = rewards[place]
            if given is not None:
                gap = s.where_written(now - start).astype(np.float64)
                rewards[place] = given - beta * gap
                sums.append(gap.sum())
        return float(np.mean(sums)) if sums else 0.0

    def metrics(self, prepared: PreparedRollout, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """As GDPO's, without what it says of groups' advantages, and with those of the values."""
        row = super().metrics(prepared, results, version)
        row["value/mean"] += row.pop("policy/value", 0.0)
        return {
            _OF_UPDATES.get(name, name): value
            for name, value in row.items()
            if not name.startswith("advantage/") and not (name.startswith("reward/") and name.endswith(_OF_GROUPS))
        }

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """The row and its samples; the advantage of a sample is the mean over its tokens."""
        sequences = [s for update in prepared.updates for s in update]
        means = np.array([s.where_written(s.token_advantages()).sum() / max(s.num_policy_tokens, 1) for s in sequences])
        self.log.step(row, prepared.rollout.groups, means, prepared.trainer_logprobs, entropies=prepared.entropies)


def _placed(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """Values of the actions at their tokens: float32 [completion tokens], 0 where the policy did not write."""
    if sequence.loss_mask is None:
        return values.astype(np.float32)
    placed = np.zeros(len(sequence.completion_ids), np.float32)
    placed[sequence.loss_mask] = values
    return placed
