"""Translation of NeMo-RL's penalties for NeMo Gym's samples: ``grpo.length_penalty`` and ``reward_penalties``.

NeMo-RL changes the reward of a sample, which is the sum of its components. Here, the length penalty of a group is a
component of its own (`shortest` of ``gdpo.shaping``) with the coefficient as its weight. With an estimator of the sum,
such as grpo, the advantages are the same. With gdpo, NeMo-RL's penalties have no effect on the components.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gdpo_nemo.tools.interop.nemo_rl.gym import uses_gym
from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.tools.interop.translation import Act, Findings, expanded, fixed, idle, missing, required, where

_SECTION = "grpo.length_penalty"
_DEFAULT = f"{_SECTION}.default"


class _Shortest(NamedTuple):
    """Component for a key of the length penalty."""

    component: str
    options: dict[str, Any]


_SUPPORTED = {
    "group_total_length_penalty_coeff": _Shortest("brevity", {}),
    "group_answer_length_penalty_coeff": _Shortest("answer_brevity", {"thinking": False}),
    "total_bonus": _Shortest("shortest", {"score": "best"}),
    "answer_bonus": _Shortest("shortest_answer", {"score": "best", "thinking": False}),
}
"""Keys of the length penalty that are translated."""
_CORRECT = {"on": "reward", "gt": 0.0}


def _is_active(recipe: Recipe) -> bool:
    """Return whether the length penalty changes rewards."""
    enabled = any(key.startswith(f"{_SECTION}.") for key in recipe.flat) and recipe.get(f"{_DEFAULT}.enabled", True)
    return bool(enabled and uses_gym(recipe) and recipe.get("grpo.adv_estimator.name", "grpo") != "gdpo")


def _active(act: Act) -> Act:
    why = "no effect: disabled, or the samples have several reward components or are not from NeMo Gym"
    return where(_is_active, act, idle(why))


def _coefficients(recipe: Recipe) -> dict[str, float]:
    """Return the coefficients of the translated keys, without those that are 0."""
    found = {name: float(recipe.get(f"{_DEFAULT}.{name}") or 0.0) for name in _SUPPORTED}
    return {name: value for name, value in found.items() if value}


LENGTH_PENALTY = expanded([
    (" ".join(f"default.{name}" for name in _SUPPORTED), _active(where(
        _coefficients, required("gdpo.shaping"), idle("no effect: all coefficients are 0")))),
    ("default.enabled", _active(where(
        _coefficients, required("gdpo.shaping"), idle("the other keys of the section are reported separately")))),
    ("default.length_type", _active(fixed("tokens", "lengths are numbers of sampled tokens"))),
    ("default.top_percentile", _active(idle("no effect: the penalty requires rewards of 0 and 1"))),
    ("default.profiled_length_n_std default.profiled_length_min_samples "
     "default.group_length_penalty_profile_gate_*", _active(idle("applies only with profiles, which are reported"))),
    ("verbose", idle("affects only logs")),
    ("default.reasoning_bonus default.group_reasoning_length_penalty_coeff",
     _active(missing("lengths of reasoning alone are not supported", 0, 0.0))),
    ("default.*", _active(missing("this length penalty is not supported; define one in gdpo.shaping", 0, 0.0))),
    ("agent_overrides*", _active(missing("settings of single agents are not supported"))),
    ("profile_band*", _active(missing("a band multiplies rewards; use the reward function length_band"))),
    ("*", _active(missing("length penalties are not supported; define one in gdpo.shaping"))),
], f"{_SECTION}.")  # fmt: skip


def length_components(
    recipe: Recipe, findings: Findings, shaped: bool
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the shaping rules and the weights of the components for the length penalty.

    Args:
        shaped: True if the recipe has other shaping rules.
    """
    found = _coefficients(recipe) if _is_active(recipe) else {}
    rules = []
    weights = {}
    for name, coefficient in found.items():
        component, options = _SUPPORTED[name]
        rules.append({"component": component, "shortest": {**_CORRECT, **options}})
        weights[component] = coefficient
    if rules and shaped:
        findings.differs(_SECTION, "lengths are compared after reward_scaling and reward_shaping")
    if any(name.endswith("bonus") for name in found):
        findings.differs(_SECTION, "samples of equal length share the bonus; NeMo-RL gives it to the first")
    if sum(found.values()) > 1:
        findings.differs(_SECTION, "the sum of reward and penalties may be negative; NeMo-RL replaces it with 0")
    return rules, weights
