"""Computation of updates from reward vectors: advantages, losses, off-policy corrections and diagnostics.

Public names are imported on first access. The modules that check a config (estimators, settings, reward shaping) must
be usable without importing torch. The function ``policy_loss`` is not listed here, because a module has the same name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_nemo.algorithms.advantages import Advantages as Advantages, compute_advantages as compute_advantages
    from gdpo_nemo.algorithms.diagnostics import Diagnostics as Diagnostics
    from gdpo_nemo.algorithms.estimators import (
        ESTIMATORS as ESTIMATORS,
        Terms as Terms,
        weighted_terms as weighted_terms,
        z_scores as z_scores,
    )
    from gdpo_nemo.algorithms.loss_settings import LossSettings as LossSettings, OffPolicySettings as OffPolicySettings
    from gdpo_nemo.algorithms.losses import (
        LOSSES as LOSSES,
        TokenFields as TokenFields,
        token_weights as token_weights,
    )
    from gdpo_nemo.algorithms.offpolicy import CORRECTIONS as CORRECTIONS
    from gdpo_nemo.algorithms.rewards import apply_shaping as apply_shaping, check_shaping as check_shaping
    from gdpo_nemo.algorithms.settings import PRESETS as PRESETS, Settings as Settings
    from gdpo_nemo.algorithms.table import RewardTable as RewardTable
    from gdpo_nemo.algorithms.target_po import target_po_coefficients as target_po_coefficients

_HOME = {
    "Advantages": "advantages",
    "compute_advantages": "advantages",
    "Diagnostics": "diagnostics",
    "ESTIMATORS": "estimators",
    "Terms": "estimators",
    "weighted_terms": "estimators",
    "z_scores": "estimators",
    "LossSettings": "loss_settings",
    "OffPolicySettings": "loss_settings",
    "LOSSES": "losses",
    "TokenFields": "losses",
    "token_weights": "losses",
    "CORRECTIONS": "offpolicy",
    "apply_shaping": "rewards",
    "check_shaping": "rewards",
    "PRESETS": "settings",
    "Settings": "settings",
    "RewardTable": "table",
    "target_po_coefficients": "target_po",
}
"""Module of each public name."""

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # A type checker would give every unknown name the type Any.

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
