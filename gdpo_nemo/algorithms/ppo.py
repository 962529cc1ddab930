"""PPO with a value head: the config section `ppo`, and generalized advantage estimation (arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.ranges import Range, check_numbers


@dataclass
class PPOSettings:
    """Advantage estimation and value loss for `algorithm.type` ppo. Names and defaults are those of TRL's
    PPOTrainer."""

    gamma: Annotated[float, Range(0, 1)] = 1.0
    """Discount factor per token, from 0 to 1; 1 does not discount."""
    lam: Annotated[float, Range(0, 1)] = 0.95
    """Lambda of generalized advantage estimation, from 0 to 1. 0 uses only the value estimates; 1 uses only the rewards
    (arXiv 1506.02438)."""
    vf_coef: Annotated[float, Range(0)] = 0.1
    """Coefficient of the value loss, which is added to the loss of loss_fn."""
    head_lr_mult: Annotated[float, Range(above=0)] = 10.0
    """Learning-rate multiplier of the value head, relative to the policy's learning rate (Megatron's name). The head is
    initialized to 0. verl's recipes use 10."""
    cliprange_value: Annotated[float | None, Range(above=0)] = 0.2
    """Clip range of the value loss: an update does not move the value of a token by more than this from the value
    before the step. Null: no clipping."""
    whiten_advantages: bool = True
    """Normalize the advantages over all trained tokens of a step to mean 0 and standard deviation 1."""

    def check(self) -> None:
        """Raise ValueError if a value is invalid.

        Raises:
            ValueError: if a value is invalid. The message begins with the key.
        """
        check_numbers(self)


@dataclass
class ActorCriticSettings(LossSettings):
    """Loss settings of a policy with a value head: ``LossSettings`` plus the value loss."""

    vf_coef: float = PPOSettings.vf_coef
    """See ``PPOSettings``."""
    cliprange_value: float | None = PPOSettings.cliprange_value
    """See ``PPOSettings``."""

    @classmethod
    def of(cls, loss: LossSettings, ppo: PPOSettings) -> ActorCriticSettings:
        """Combine the sections `loss_fn` and `ppo`."""
        values: dict[str, Any] = {field.name: getattr(loss, field.name) for field in fields(LossSettings)}
        return cls(**values, vf_coef=ppo.vf_coef, cliprange_value=ppo.cliprange_value)

    @property
    def reads_every_sequence(self) -> str:
        """Reason why sequences with advantage 0 must not be skipped. See ``LossSettings``."""
        return "the value head learns from every sequence"


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute advantages A_t = delta_t + gamma lam A_(t+1) and returns A_t + V_t (equation 16).

    delta_t = r_t + gamma V_(t+1) - V_t. The returns are the training targets of the values.

    Args:
        rewards, values: float [actions] of one sequence: the reward of each action, and the value of the state before
            it.

    Returns:
        advantages and returns, both float64 [actions].
    """
    values = np.asarray(values, np.float64)
    next_values = np.append(values[1:], 0.0) if len(values) else values
    errors = np.asarray(rewards, np.float64) + gamma * next_values - values
    advantages = discounted_sums(errors, gamma * lam)
    return advantages, advantages + values


def discounted_sums(values: np.ndarray, factor: float) -> np.ndarray:
    """Return the discounted suffix sums x_t = v_t + factor * x_(t+1): float64 [actions]."""
    sums = np.array(values, np.float64)
    for index in range(len(sums) - 2, -1, -1):
        sums[index] += factor * sums[index + 1]
    return sums


def whitened(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Normalize the values of all arrays jointly to mean 0 and standard deviation 1.

    Computes (x - mean) / sqrt(var + 1e-8) with the unbiased variance, as TRL and verl do (``masked_whiten``). A single
    value is returned unchanged.
    """
    joined = np.concatenate(parts) if parts else np.zeros(0)
    if len(joined) < 2:
        return list(parts)
    mean = joined.mean()
    scale = 1.0 / np.sqrt(joined.var(ddof=1) + 1e-8)
    return [(part - mean) * scale for part in parts]


def explained_variance(values: np.ndarray, targets: np.ndarray) -> float:
    """Return 1 - Var(targets - values) / Var(targets).

    1 means a perfect prediction. 0 means that the values predict as well as a constant, and a negative value means
    worse. NaN if the targets do not vary.
    """
    spread = np.var(targets) if len(targets) else 0.0
    return float(1.0 - np.var(targets - values) / spread) if spread > 0 else float("nan")
