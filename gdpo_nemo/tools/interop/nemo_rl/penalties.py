"""Translation of NeMo-RL's penalties for NeMo Gym's samples: ``grpo.length_penalty`` and ``reward_penalties``.

NeMo-RL changes the reward of a sample, which is the sum of its components. Here, the length penalty of a group is a
separate component (`shortest` of ``gdpo.shaping``) with the coefficient as its weight. With an estimator of the sum,
such as grpo, the advantages are the same. With gdpo, NeMo-RL's length penalty has no effect on the components. A reward
penalty sets the reward to 0 on the condition of the component ``well_formed`` of the environment ``nemo_gym_agent``.
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


_LENGTH_PENALTY = expanded([
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
], f"{_SECTION}.") + [(_SECTION, idle("the section is empty"))]  # fmt: skip


_FLAGS = {
    "penalize_duplicated_reasoning": "repeated_reasoning",
    "penalize_empty_final_answer": "empty_answer",
    "penalize_unwanted_tokens": "unwanted_tokens",
    "penalize_malformed_think_tag": "think_tokens",
}
"""Keys of ``reward_penalties``, and the checks of the environment ``nemo_gym_agent``."""
_TOKENS = "reward_penalties.token_ids"


def _zeroes_rewards(recipe: Recipe) -> bool:
    return uses_gym(recipe) and recipe.get("grpo.adv_estimator.name", "grpo") != "gdpo"


_REWARD_PENALTIES = expanded([
    (" ".join(_FLAGS), where(
        _zeroes_rewards, required("gdpo.shaping"),
        missing("NeMo-RL sets the sum of the rewards to 0, and refuses a sample with several components; add the "
                "component well_formed of nemo_gym_agent"))),
    ("token_ids*", idle("applies only to the reward penalties, which are reported separately")),
    ("*", missing("this penalty is not supported; define a reward component")),
], "reward_penalties.") + [("reward_penalties", idle("the section is empty"))]  # fmt: skip


PENALTIES = [*_LENGTH_PENALTY, *_REWARD_PENALTIES]


def _checks(recipe: Recipe, findings: Findings) -> dict[str, Any]:
    """Return the option ``well_formed`` of the environment, which is empty without penalties."""
    found: dict[str, Any] = {}
    for flag, check in _FLAGS.items():
        if _zeroes_rewards(recipe) and recipe.get(f"reward_penalties.{flag}"):
            found[check] = True
    if "unwanted_tokens" in found:
        found["unwanted_tokens"] = recipe.get(f"{_TOKENS}.unwanted") or []
    if "think_tokens" in found:
        key = "reward_penalties.penalize_malformed_think_tag"
        found["think_tokens"] = [recipe.get(f"{_TOKENS}.think_{side}") for side in ("open", "close")]
        if None in found["think_tokens"]:
            findings.differs(key, f"set {_TOKENS}.think_open and think_close; NeMo-RL finds them with the tokenizer")
            del found["think_tokens"]
        else:
            findings.differs(key, "tags that are spelled with several tokens are not penalized")
    return found


def penalties(
    recipe: Recipe, findings: Findings, options: dict[str, Any], rules: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the shaping rules and the weights of additional components, including those of the penalties.

    Args:
        options: options of the environment, to which the checks of the penalties are added.
        rules: other shaping rules of the recipe.
    """
    checks = _checks(recipe, findings)
    if checks:
        options["well_formed"] = checks
        rules = [{"component": "reward", "condition": {"on": "well_formed", "ge": 1.0}}, *rules]
    found = _coefficients(recipe) if _is_active(recipe) else {}
    if rules and found:
        findings.differs(_SECTION, "lengths are compared after other changes of the reward")
    weights = {}
    for name, coefficient in found.items():
        component, changes = _SUPPORTED[name]
        rules = [*rules, {"component": component, "shortest": {**_CORRECT, **changes}}]
        weights[component] = coefficient
    if any(name.endswith("bonus") for name in found):
        findings.differs(_SECTION, "samples of equal length share the bonus; NeMo-RL gives it to the first")
    if sum(found.values()) > 1:
        findings.differs(_SECTION, "the sum of reward and penalties may be negative; NeMo-RL replaces it with 0")
    return rules, weights
