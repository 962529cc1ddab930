"""Tokens whose log-prob and advantage vary together most: Clip-Cov and KL-Cov (arXiv 2505.22617).

The covariance of a token is (log p - mean) (A - mean), means over all trained tokens of the update; those of large
covariance are what takes the entropy down. Computed on the driver, in float64: a rank has a share of the tokens only.
"""

from __future__ import annotations

import numpy as np


def covariances(logprobs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Of every token, float64 [tokens] (eq. 9)."""
    values = np.asarray(logprobs, np.float64)
    credit = np.asarray(advantages, np.float64)
    if not len(values):
        return values
    found: np.ndarray = (values - values.mean()) * (credit - credit.mean())
    return found


def clip_cov(
    logprobs: np.ndarray,
    advantages: np.ndarray,
    clipped: np.ndarray,
    *,
    ratio: float,
    bounds: tuple[float, float],
    draw: np.random.Generator,
) -> np.ndarray:
    """Tokens that get no gradient (eq. 10): bool [tokens].

    ``ratio`` of all tokens, at least one, drawn from those whose covariance is between the bounds.

    Args:
        logprobs: [tokens], of the weights that the update starts from.
        clipped: bool [tokens]: those that the clip of the ratio gives none already, which are not drawn.
    """
    found = covariances(logprobs, advantages)
    candidates = np.flatnonzero((found > bounds[0]) & (found < bounds[1]) & ~clipped)
    count = min(max(1, int(ratio * len(found))), len(candidates))
    chosen = np.zeros(len(found), bool)
    chosen[draw.choice(candidates, count, replace=False)] = True
    return chosen


def kl_cov(logprobs: np.ndarray, advantages: np.ndarray, *, ratio: float) -> np.ndarray:
    """Tokens that are held near the old policy (eq. 12): bool [tokens], ``ratio`` of all of them, at least one, those
    of the largest covariance; of equal ones the first."""
    found = covariances(logprobs, advantages)
    chosen = np.zeros(len(found), bool)
    chosen[np.argsort(-found, kind="stable")[: max(1, int(ratio * len(found)))]] = True
    return chosen
