"""Reward shaping: named components in, named components out, before any normalisation.

Each rule of `gdpo.shaping` names one component and one transformation:

    shaping:
      - {component: correctness, clip: [-1, 1]}
      - {component: correctness, scale: {by: 2.0, offset: 1.0}}
      - {component: correctness, linear: {from: [-3, 3], to: [0, 1]}}
      - {component: length, length: {full: 200, zero: 400}}
      - {component: length, condition: {on: correctness, ge: 1.0, else: 0.0}}
      - {component: overlong, overlong: {buffer: 64, penalty: 1.0}}
      - {component: correctness, truncated: {value: 0.0}}
      - {component: length, mine.py:cosine: {low: 0.5}}

A rule is a function (values, options, context) -> values [sequences], with its name in `SHAPING_RULES`. One of the
user's own is named by its place and called as (values, context, **options).

The rules of one component act in the order of the list. A condition sees the other component after all rules of that
one, wherever they stand in the list; components that wait for each other in a circle are refused. `length`, `overlong`
and rules of the user's own create their component, as zeros, when no environment gives it; otherwise `overlong` adds to
it and `length` replaces it. Missing rewards stay missing, also where the condition's reward is missing. KL to the
reference is no component: see `compute_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

import numpy as np

from gdpo_nemo.algorithms.own_functions import Functions, check_options, is_place, own_options
from gdpo_nemo.algorithms.table import nearest

T = TypeVar("T")

COMPARISONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "eq": np.equal,
}


@dataclass(frozen=True)
class Context:
    """What the rules may look at besides the component they change."""

    columns: Mapping[str, np.ndarray]
    """Components that are finished, float64 [sequences]."""
    lengths: np.ndarray | None
    """float64 [sequences], completion tokens."""
    max_length: int | None
    """Longest completion allowed, in tokens."""
    truncated: np.ndarray | None
    """bool [sequences], samples that hit the length limit."""

    def need(self, name: str) -> Any:
        """An optional field that a rule depends on.

        Raises:
            ValueError: it was not given.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"needs {name}, which was not given")
        return value


def _clip(values: np.ndarray, limits: Sequence[float], context: Context) -> np.ndarray:
    low, high = limits
    if not low < high:
        raise ValueError(f"limits must ascend, got {list(limits)}")
    return np.clip(values, low, high)


def _scale(values: np.ndarray, by: float | Mapping[str, float], context: Context) -> np.ndarray:
    """values x by + offset."""
    options = _options({"by": by} if isinstance(by, (int, float)) else by, {"by": 1.0, "offset": 0.0})
    return np.asarray(values * options["by"] + options["offset"])


def _linear(values: np.ndarray, ranges: Mapping[str, Sequence[float]], context: Context) -> np.ndarray:
    """Clip to the range `from`, then map it onto `to`."""
    options = _options(ranges, {"from": (0.0, 1.0), "to": (0.0, 1.0)})
    (low, high) = options["from"]
    (start, end) = options["to"]
    if not low < high:
        raise ValueError(f"`from` must ascend, got {list(options['from'])}")
    return np.asarray(start + (np.clip(values, low, high) - low) * (end - start) / (high - low))


def _condition(values: np.ndarray, rule: Mapping[str, Any], context: Context) -> np.ndarray:
    """The reward counts only where another one passes a threshold (GDPO paper eq. 8); elsewhere it is `else`."""
    other, operator, threshold = parse_condition(rule)
    gate = context.columns[other]
    result = np.where(COMPARISONS[operator](gate, threshold), values, rule.get("else", 0.0))
    return np.where(np.isnan(gate) | np.isnan(values), np.nan, result)


def _length(values: np.ndarray, rule: Mapping[str, float], context: Context) -> np.ndarray:
    """1 up to `full` tokens, 0 from `zero` tokens on, linear between; without `zero` a step at `full`."""
    options = _options(rule, {"full": None, "zero": None})
    full = options["full"]
    zero = options["zero"]
    lengths: np.ndarray = context.need("lengths")
    if full is None or (zero is not None and zero <= full):
        raise ValueError("needs `full`, and `zero` above it")
    if zero is None:
        return np.asarray(lengths <= full, np.float64)
    return np.asarray(np.clip((zero - lengths) / (zero - full), 0.0, 1.0))


def _overlong(values: np.ndarray, rule: Mapping[str, float], context: Context) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476 eq. 13): from 0 at max_length - buffer down to -penalty."""
    options = _options(rule, {"buffer": None, "penalty": 1.0, "max_length": context.max_length})
    if not options["buffer"] or options["buffer"] <= 0:
        raise ValueError("needs a positive `buffer` in tokens")
    if options["max_length"] is None:
        raise ValueError("needs max_length, which was not given")
    excess = context.need("lengths") - (options["max_length"] - options["buffer"])
    return np.asarray(values - options["penalty"] * np.clip(excess / options["buffer"], 0.0, 1.0))


def _truncated(values: np.ndarray, rule: Mapping[str, float], context: Context) -> np.ndarray:
    """The reward of samples that hit the length limit is `value`."""
    value = _options(rule, {"value": 0.0})["value"]
    return np.where(context.need("truncated") & ~np.isnan(values), value, values)


@dataclass(frozen=True)
class ShapingRule:
    """An entry of the registry."""

    function: Callable[[np.ndarray, Any, Context], np.ndarray]
    creates: bool = False
    """Whether it makes its component where no environment gives it."""


SHAPING_RULES: dict[str, ShapingRule] = {
    "clip": ShapingRule(_clip),
    "scale": ShapingRule(_scale),
    "linear": ShapingRule(_linear),
    "condition": ShapingRule(_condition),
    "length": ShapingRule(_length, creates=True),
    "overlong": ShapingRule(_overlong, creates=True),
    "truncated": ShapingRule(_truncated),
}


def creates(rule: Mapping[str, Any]) -> bool:
    """Whether a rule makes its component where no environment gives it. Raises ValueError: see `rule_name`."""
    name = rule_name(rule)
    return is_place(name) or SHAPING_RULES[name].creates


def apply_shaping(
    columns: Mapping[str, Any],
    rules: Sequence[Mapping[str, Any]],
    *,
    lengths: Any = None,
    max_length: int | None = None,
    truncated: Any = None,
    functions: Functions | None = None,
) -> dict[str, np.ndarray]:
    """Components after shaping, in the order given, created ones last.

    Args:
        columns: name to float [sequences], NaN for "not applicable".
        rules: see the head of this file.
        lengths: completion tokens [sequences].
        max_length: longest completion in tokens, for `overlong`.
        truncated: bool [sequences].
        functions: the user's own, by the places that rules name them by; without them those rules change nothing.

    Raises:
        ValueError: an unknown component, transformation or option (with the nearest name), a circle of conditions, a
            bad argument, a function of the user's own that gives what is no finite reward; the message names the rule.
    """
    order = _order(rules, list(columns))
    given = {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}
    count = len(next(iter(given.values()), lengths if lengths is not None else ()))
    done: dict[str, np.ndarray] = {}
    context = Context(done, _array(lengths, float), max_length, _array(truncated, bool))
    for name in order:
        column = given.get(name, np.zeros(count))
        for rule in rules:
            if rule["component"] == name:
                column = _apply(column, rule, context, functions)
        done[name] = column
    return {name: done[name] for name in (*given, *(name for name in order if name not in given))}


def _array(values: Any, dtype: type) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=dtype)


def check_shaping(
    rules: Sequence[Mapping[str, Any]], components: Sequence[str], functions: Functions | None = None
) -> list[str]:
    """Validate the rules against the names the environments give, before there is any reward.

    Args: as `apply_shaping`.

    Returns:
        All component names after shaping.

    Raises:
        ValueError: as `apply_shaping`.
    """
    probe = {name: np.array([0.0, 1.0, np.nan]) for name in components}
    lengths = [1, 4, 2]
    truncated = [False, True, False]
    return list(apply_shaping(probe, rules, lengths=lengths, max_length=4, truncated=truncated, functions=functions))


def _order(rules: Sequence[Mapping[str, Any]], components: Sequence[str]) -> list[str]:
    """Component names after shaping, every one behind those its conditions look at."""
    created = {str(rule.get("component")) for rule in rules if creates(rule)}
    known = [*components, *sorted(created - set(components))]
    graph: dict[str, set[str]] = {name: set() for name in known}
    for rule in rules:
        name = rule["component"]
        if name not in graph:
            raise ValueError(f"shaping rule {dict(rule)}: unknown component {name!r}; {nearest(name, known)}")
        if "condition" in rule:
            other = _labelled(rule, partial(parse_condition, rule["condition"]))[0]
            if other not in graph:
                raise ValueError(f"shaping rule {dict(rule)}: unknown component {other!r}; {nearest(other, known)}")
            graph[name].add(other)
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise ValueError(f"shaping: conditions form a circle: {' -> '.join(error.args[1])}") from None


def rule_name(rule: Mapping[str, Any]) -> str:
    """The one transformation a rule names: one of `SHAPING_RULES`, or a place.

    Raises:
        ValueError: no component, no transformation, several, or an unknown one.
    """
    keys = [key for key in rule if key != "component"]
    if "component" not in rule or len(keys) != 1:
        raise ValueError(f"shaping rule {dict(rule)}: write `component: name` and exactly one transformation")
    if keys[0] == "kl":
        raise ValueError(
            f"shaping rule {dict(rule)}: normalised like a reward, KL would lose its coefficient; it is no component "
            "but the key kl_in_reward (or reference_policy_kl_penalty of the loss)"
        )
    if keys[0] not in SHAPING_RULES and not is_place(str(keys[0])):
        raise ValueError(
            f"shaping rule {dict(rule)}: unknown key {keys[0]!r}; {nearest(keys[0], tuple(SHAPING_RULES))}, or a "
            "function of your own: file.py:name"
        )
    return keys[0]


def _apply(column: np.ndarray, rule: Mapping[str, Any], context: Context, functions: Functions | None) -> np.ndarray:
    name = rule_name(rule)
    if is_place(name):
        return column if functions is None else _labelled(rule, lambda: _own(column, rule, context, functions[name]))
    return _labelled(rule, lambda: SHAPING_RULES[name].function(column, rule[name], context))


def _own(column: np.ndarray, rule: Mapping[str, Any], context: Context, function: Callable[..., Any]) -> np.ndarray:
    """What a function of the user's own makes of a component; missing rewards stay missing. Raises ValueError."""
    name = rule_name(rule)
    options = rule[name] or {}
    check_options(options, own_options(function, "values, context"), name)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused below, in a sentence
            shaped = np.asarray(function(column.copy(), context, **options), dtype=np.float64)
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    if shaped.shape != column.shape:
        raise ValueError(f"{name} returned shape {shaped.shape} for {len(column)} sequences")
    missing = np.isnan(column)
    wrong = ~np.isfinite(shaped) & ~missing
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{name} returned {shaped[row]} for the reward {column[row]:g} ({wrong.sum()} are not finite)")
    return np.where(missing, np.nan, shaped)


def _labelled(rule: Mapping[str, Any], action: Callable[[], T]) -> T:
    """Run the action; what goes wrong is reported with the rule it happened in."""
    try:
        return action()
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"shaping rule {dict(rule)}: {error}") from None


def _options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults overridden by what the rule gives; unknown keys are refused."""
    for key in given:
        if key not in defaults:
            raise ValueError(f"unknown option {key!r}; {nearest(key, tuple(defaults))}")
    return {**defaults, **given}


def parse_condition(rule: Mapping[Any, Any]) -> tuple[str, str, float]:
    """Other component, comparison, threshold.

    Raises:
        ValueError: one of them is missing, or something else is there.
    """
    # YAML 1.1 reads the bare word `on` as true.
    rule = {"on" if key is True else key: value for key, value in rule.items()}
    operators = [key for key in rule if key in COMPARISONS]
    unknown = [key for key in rule if key not in (*COMPARISONS, "on", "else")]
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; {nearest(unknown[0], ('on', 'else', *COMPARISONS))}")
    if "on" not in rule or len(operators) != 1:
        raise ValueError(f"a condition needs `on` and one of {', '.join(COMPARISONS)}")
    return rule["on"], operators[0], rule[operators[0]]
