"""Reward vectors to updates: advantages, losses, off-policy corrections, diagnostics. Tensor code and nothing else."""

from gdpo_nemo.algorithms.advantages import Advantages, compute_advantages
from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.algorithms.losses import token_weights
from gdpo_nemo.algorithms.offpolicy import OffPolicySettings
from gdpo_nemo.algorithms.policy_loss import LossMetrics, LossSettings, TokenFields, policy_loss
from gdpo_nemo.algorithms.settings import PRESETS, Settings

__all__ = [
    "ESTIMATORS",
    "PRESETS",
    "Advantages",
    "LossMetrics",
    "LossSettings",
    "OffPolicySettings",
    "Settings",
    "TokenFields",
    "compute_advantages",
    "policy_loss",
    "token_weights",
]
