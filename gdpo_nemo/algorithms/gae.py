"""Generalized advantage estimation (arXiv 1506.02438) over the tokens of a sequence, and how good the values are.

An action is a token that the policy wrote, and the state before it is all tokens before it; tokens that an environment
wrote are part of the next state and no step of time. Behind the last action the value is 0: a sample that was cut by
the limit of length ends there like any other, as in TRL and verl. float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """A_t = delta_t + gamma lam A_(t+1) with delta_t = r_t + gamma V_(t+1) - V_t, and the returns A_t + V_t that the
    values are to become (eq. 16).

    Args:
        rewards, values: float [actions] of one sequence, of each action and of the state before it.

    Returns:
        float64 [actions] twice: advantages and returns.
    """
    values = np.asarray(values, np.float64)
    following = np.append(values[1:], 0.0) if len(values) else values
    errors = np.asarray(rewards, np.float64) + gamma * following - values
    advantages = discounted_sums(errors, gamma * lam)
    return advantages, advantages + values


def discounted_sums(values: np.ndarray, factor: float) -> np.ndarray:
    """float64 [actions]: each value plus ``factor`` times what stands behind it."""
    found = np.array(values, np.float64)
    for place in range(len(found) - 2, -1, -1):
        found[place] += factor * found[place + 1]
    return found


def whitened(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of all parts together at mean 0 and standard deviation 1: (x - mean) / sqrt(var + 1e-8) with the
    unbiased variance, as TRL and verl have it (``masked_whiten``). A single value stays as it is."""
    together = np.concatenate(parts) if parts else np.zeros(0)
    if len(together) < 2:
        return list(parts)
    mean = together.mean()
    scale = 1.0 / np.sqrt(together.var(ddof=1) + 1e-8)
    return [(part - mean) * scale for part in parts]


def explained_variance(values: np.ndarray, targets: np.ndarray) -> float:
    """1 - Var(targets - values) / Var(targets): 1 where the values say all, 0 where a constant would say as much, below
    0 where it would say more. NaN where the targets do not vary."""
    spread = np.var(targets) if len(targets) else 0.0
    return float(1.0 - np.var(targets - values) / spread) if spread > 0 else float("nan")
