"""Entropy control: Clip-Cov and KL-Cov (arXiv 2505.22617), adaptive entropy bonus (arXiv 2505.22312, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gdpo_nemo.algorithms.loss_settings import LossSettings


def covariances(logprobs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Return each token's contribution to the covariance of log-probs and advantages (equation 9): float64 [tokens]."""
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
    """Select the tokens that get no gradient (equation 10): bool [tokens].

    Samples a fraction ``ratio`` of all tokens, at least one, from the tokens whose covariance is between the bounds.

    Args:
        logprobs: [tokens], log-probs under the weights that the update starts from.
        clipped: bool [tokens], tokens without a gradient because their ratio is clipped. These tokens are not selected.
        bounds: lower and upper bound of the covariance, both exclusive.
    """
    found = covariances(logprobs, advantages)
    candidates = np.flatnonzero((found > bounds[0]) & (found < bounds[1]) & ~clipped)
    count = min(max(1, int(ratio * len(found))), len(candidates))
    chosen = np.zeros(len(found), bool)
    chosen[draw.choice(candidates, count, replace=False)] = True
    return chosen


def kl_cov(logprobs: np.ndarray, advantages: np.ndarray, *, ratio: float) -> np.ndarray:
    """Select the tokens that get a KL penalty to the old policy (equation 12): bool [tokens].

    The fraction ``ratio`` of all tokens with the largest covariances is selected, but at least one token. If
    covariances are equal, the earlier token is selected.
    """
    found = covariances(logprobs, advantages)
    chosen = np.zeros(len(found), bool)
    chosen[np.argsort(-found, kind="stable")[: max(1, int(ratio * len(found)))]] = True
    return chosen


@dataclass
class AdaptiveEntropy:
    """State of the adaptive entropy bonus, as plain numbers that a checkpoint can store."""

    coefficient: float
    entropy: float | None = None
    """Entropy of the previous update, in nats per token. None before the first update."""

    def applied(self, settings: LossSettings) -> float:
        """Return the entropy coefficient for the next update: 0 if the last entropy is above the target or unknown."""
        low = self.entropy is not None and self.entropy <= settings.entropy_target
        return self.coefficient if low else 0.0

    def update(self, entropy: float, settings: LossSettings) -> None:
        """Adapt the coefficient to the mean entropy of an update's tokens. NaN is ignored."""
        if entropy != entropy:
            return
        step = settings.entropy_coef_delta
        if entropy <= settings.entropy_target:
            self.coefficient = min(self.coefficient + step, settings.entropy_coef_max)
        else:
            self.coefficient = max(self.coefficient - step, settings.entropy_coef_min)
        self.entropy = entropy
