"""Reward vectors to updates: advantages, losses, off-policy corrections, diagnostics. Tensor code and nothing else.

The names below are imported when first asked for, because those that check a configuration (estimators, settings,
reward shaping) need no torch and are wanted without its import. The function ``policy_loss`` is in the module of that
name.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "advantages": ("Advantages", "compute_advantages"),
    "diagnostics": ("Diagnostics", "GroupSignal", "groups_with_signal"),
    "estimators": ("ESTIMATORS", "Terms", "weighted_terms", "z_scores"),
    "losses": ("LOSSES", "importance_ratio", "token_weights"),
    "loss_settings": ("LossSettings", "OffPolicySettings"),
    "offpolicy": ("CORRECTIONS", "level_ratio"),
    "policy_loss": ("LossMetrics",),
    "rewards": ("SHAPING_RULES", "apply_shaping", "check_shaping"),
    "selection": ("check_selection",),
    "settings": ("PRESETS", "Settings"),
    "table": ("RewardTable",),
    "token_fields": ("TokenFields",),
    "target_po": ("target_po_coefficients",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
