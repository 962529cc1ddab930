"""Credit by token: where the rewards of a trajectory stand, and what a value head makes of them.

The reward of a trajectory is the weighted sum of its components, as shaped, at the last token that the policy wrote.
With ``gdpo.credit: turn`` a component that the environment gives by turn stands at the last token of the turn that
earned it (``turn_credit.earned``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from gdpo_nemo.algorithms.gae import discounted_sums, explained_variance, gae, whitened
from gdpo_nemo.algorithms.ppo_settings import PPOSettings
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Trajectory
from gdpo_nemo.rollouts.learning import is_trained, reward_columns
from gdpo_nemo.rollouts.turn_credit import earned


@dataclass(frozen=True)
class TokenCredit:
    """What the actions of a batch are trained with; every list has an entry for each trajectory, float64 [actions], in
    which the actions are the tokens that the policy wrote. None: the trajectory has no reward."""

    advantages: list[np.ndarray | None]
    returns: list[np.ndarray | None]
    """What the values are to become."""
    explained_variance: float
    """Of the discounted rewards from each action on, by the values; NaN where they do not vary."""
    mean_return: float
    """NaN: no trajectory has a reward, as of the next one."""
    mean_to_come: float
    """Of the discounted rewards from each action on."""


def action_rewards(trajectories: Sequence[Trajectory], config: Config) -> list[np.ndarray | None]:
    """Return the reward at each action: float64 [actions] for each trajectory. None if a trajectory is not trained
    (``learning.is_trained``) or has no weighted component: an unknown reward is not a reward of 0."""
    weights = {name: weight for name, weight in config.gdpo.rewards.items() if weight}
    by_turn = config.gdpo.credit == "turn"
    columns = {} if by_turn else reward_columns(trajectories, config)
    found: list[np.ndarray | None] = []
    for place, t in enumerate(trajectories):
        if not is_trained(t, config.loss_fn) or not t.num_policy_tokens:
            found.append(None)
        elif by_turn:
            found.append(_of_turns(t, weights))
        else:
            found.append(_at_the_end(t, {name: (columns[name][place], weights[name]) for name in weights}))
    return found


def _at_the_end(trajectory: Trajectory, given: dict[str, tuple[float, float]]) -> np.ndarray | None:
    """``given``: value and weight by component."""
    values = [value * weight for value, weight in given.values() if not np.isnan(value)]
    if not values:
        return None
    rewards = np.zeros(trajectory.num_policy_tokens)
    rewards[-1] = sum(values)
    return rewards


def _of_turns(trajectory: Trajectory, weights: dict[str, float]) -> np.ndarray | None:
    tokens = np.array(trajectory.turn_tokens or (trajectory.num_policy_tokens,), np.int64)
    known = [name for name in weights if trajectory.rewards.get(name) is not None]
    if not known:
        return None
    rewards = np.zeros(trajectory.num_policy_tokens)
    ends = np.maximum(tokens.cumsum() - 1, 0)
    for name in known:
        # A turn in which nothing was written ends where the one before it does: several may share an action.
        np.add.at(rewards, ends, weights[name] * earned(trajectory, name, len(tokens)))
    return rewards


def token_credit(
    rewards: Sequence[np.ndarray | None], values: Sequence[np.ndarray], settings: PPOSettings
) -> TokenCredit:
    """Advantages and returns of a step's actions.

    Args:
        rewards: of ``action_rewards``.
        values: float [actions] of each trajectory, of the state before each.
    """
    known = [(place, given) for place, given in enumerate(rewards) if given is not None]
    pairs = [gae(given, values[place], settings.gamma, settings.lam) for place, given in known]
    parts = [advantages for advantages, _ in pairs]
    if settings.whiten_advantages:
        parts = whitened(parts)
    advantages: list[np.ndarray | None] = [None] * len(rewards)
    returns: list[np.ndarray | None] = [None] * len(rewards)
    for (place, _), part, (_, of_one) in zip(known, parts, pairs):
        advantages[place], returns[place] = part, of_one
    if not known:
        return TokenCredit(advantages, returns, *[float("nan")] * 3)
    said = np.concatenate([np.asarray(values[place], np.float64) for place, _ in known])
    came = rewards_to_come(rewards, settings.gamma)
    mean = float(np.concatenate([of_one for _, of_one in pairs]).mean())
    return TokenCredit(advantages, returns, explained_variance(said, came), mean, float(came.mean()))


def rewards_to_come(rewards: Sequence[np.ndarray | None], gamma: float) -> np.ndarray:
    """float64 [actions of all trajectories that have a reward]: the discounted rewards from each action on."""
    parts = [discounted_sums(given, gamma) for given in rewards if given is not None]
    return np.concatenate(parts) if parts else np.zeros(0)
