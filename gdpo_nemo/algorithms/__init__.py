"""Reward vectors to updates: advantages, losses, off-policy corrections, diagnostics. Tensor code and nothing else."""

from gdpo_nemo.algorithms.advantages import Advantages, compute_advantages
from gdpo_nemo.algorithms.diagnostics import Diagnostics, GroupSignal, groups_with_signal
from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.algorithms.losses import token_weights
from gdpo_nemo.algorithms.offpolicy import OffPolicySettings
from gdpo_nemo.algorithms.policy_loss import LossMetrics, LossSettings, TokenFields, policy_loss
from gdpo_nemo.algorithms.rewards import apply_shaping, check_shaping
from gdpo_nemo.algorithms.settings import PRESETS, Settings
from gdpo_nemo.algorithms.target_po import target_po_coefficients

__all__ = [
    "ESTIMATORS",
    "PRESETS",
    "Advantages",
    "Diagnostics",
    "GroupSignal",
    "LossMetrics",
    "LossSettings",
    "OffPolicySettings",
    "Settings",
    "TokenFields",
    "apply_shaping",
    "check_shaping",
    "compute_advantages",
    "groups_with_signal",
    "policy_loss",
    "target_po_coefficients",
    "token_weights",
]
