"""The weight of the entropy bonus, moved towards a target entropy (Skywork-OR1, arXiv 2505.22312 section 4.3; TRL's
``use_adaptive_entropy``)."""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_nemo.algorithms.loss_settings import LossSettings


@dataclass
class AdaptiveEntropy:
    """The controller's state: plain numbers, which a checkpoint keeps."""

    coefficient: float
    entropy: float | None = None
    """Of the update before, nats per token; None before the first."""

    def applied(self, settings: LossSettings) -> float:
        """The bonus of the next update: the coefficient where the entropy is at the target or below, else 0."""
        low = self.entropy is not None and self.entropy <= settings.entropy_target
        return self.coefficient if low else 0.0

    def update(self, entropy: float, settings: LossSettings) -> None:
        """Take note of the mean entropy of an update's tokens. One that is not a number changes nothing."""
        if entropy != entropy:
            return
        step = settings.entropy_coef_delta
        if entropy <= settings.entropy_target:
            self.coefficient = min(self.coefficient + step, settings.entropy_coef_max)
        else:
            self.coefficient = max(self.coefficient - step, settings.entropy_coef_min)
        self.entropy = entropy
