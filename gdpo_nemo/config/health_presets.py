"""Thresholds that others publish, as checks: ``health.preset``."""

from __future__ import annotations

from typing import Any, Sequence

from gdpo_nemo.config.health_checks import Check, read_checks

_AXOLOTL: tuple[dict[str, Any], ...] = (
    {"metric": "reward/NAME/mean", "at": 20, "min": 0.15},
    {"metric": "advantage/dead_groups", "at": "every", "max": 0.999},
    {"metric": "policy/entropy", "at": "every", "min": 0.01},
    {"metric": "grad_norm", "at": "every", "max": 10.0},
    {"metric": "policy/entropy", "at": "end", "min": 0.05, "max": 0.5, "advisory": True},
    {"metric": "grad_norm", "at": "end", "min": 0.001, "max": 1.0, "advisory": True},
)
"""Axolotl's notes on GRPO (docs/grpo.qmd and its agent reference): rewards above 0.15 within 20 steps, a standard
deviation of the rewards on most steps, entropy 0.05 to 0.5 (below 0.01: collapsed), gradient norm 0.001 to 1 (above 10:
unstable). The first means rewards of 0 to 1."""
PRESETS = {"axolotl": _AXOLOTL}
_WINDOW = 5


def preset_checks(name: str, rewards: Sequence[str]) -> list[Check]:
    """The checks of a preset, those of ``reward/NAME/...`` for each reward."""
    items = [
        {**item, "metric": item["metric"].replace("NAME", reward)}
        for item in PRESETS[name]
        for reward in (rewards if "NAME" in item["metric"] else [""])
    ]
    return read_checks(items, _WINDOW, f"health.preset: {name}")
