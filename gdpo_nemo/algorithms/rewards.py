"""Reward shaping: transformations of reward components by name, before any normalisation.

Each rule of `gdpo.shaping` names one component and one transformation:

    shaping:
      - {component: correctness, clip: [-1, 1]}
      - {component: correctness, scale: {by: 2.0, offset: 1.0}}
      - {component: correctness, linear: {from: [-3, 3], to: [0, 1]}}
      - {component: length, length: {full: 200, zero: 400, thinking: false}}
      - {component: length, condition: {on: correctness, ge: 1.0, else: 0.0}}
      - {component: overlong, overlong: {buffer: 64, penalty: 1.0}}
      - {component: correctness, truncated: {value: 0.0}}
      - {component: brevity, shortest: {on: correctness, ge: 1.0}}
      - {component: length, mine.py:cosine: {low: 0.5}}

A rule is a function (values, options, context) -> values [sequences], and `SHAPING_RULES` contains it by name. A custom
function is named by its import path and called as (values, context, **options).

Rules for the same component are applied in the order of the list. A condition reads the other component after all rules
for it, regardless of their position in the list, and so does `shortest`. Cyclic conditions are an error. `length`,
`overlong`, `shortest` and custom rules create their component, with zeros, if no environment provides it. Otherwise
`overlong` adds to the component, and `length` and `shortest` replace it. A missing reward stays missing, and a
condition on a missing reward gives a missing reward. KL to the reference is not a component: see `compute_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.loss_selection import Functions, check_options, custom_options, is_import_path
from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.algorithms.table import nearest, with_array_hint

COMPARISONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "eq": np.equal,
}


@dataclass(frozen=True)
class ShapingContext:
    """Inputs of a shaping rule in addition to the component that it changes."""

    columns: Mapping[str, np.ndarray]
    """Components that are already shaped, float64 [sequences]."""
    lengths: np.ndarray | None
    """Number of completion tokens, float64 [sequences]."""
    max_length: int | None
    """Maximum completion length in tokens."""
    truncated: np.ndarray | None
    """True for samples that reached the length limit, bool [sequences]."""
    thinking: np.ndarray | None = None
    """Number of completion tokens that are reasoning, float64 [sequences]."""
    groups: np.ndarray | None = None
    """Group of each sequence, int64 [sequences]. The samples of a prompt form a group."""

    def counted_lengths(self, thinking: bool) -> np.ndarray:
        """Return the lengths, without reasoning if ``thinking`` is false. Raises ValueError if one is missing."""
        lengths: np.ndarray = self.need("lengths")
        return lengths if thinking else np.asarray(lengths - self.need("thinking"))

    def need(self, name: str) -> Any:
        """Return an optional field that a rule requires.

        Raises:
            ValueError: if the field is None.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"requires {name}, which was not given")
        return value


def _clip(values: np.ndarray, limits: Sequence[float], context: ShapingContext) -> np.ndarray:
    low, high = limits
    if not low < high:
        raise ValueError(f"limits must be ascending, got {list(limits)}")
    return np.clip(values, low, high)


def _scale(values: np.ndarray, by: float | Mapping[str, float], context: ShapingContext) -> np.ndarray:
    """Return values x by + offset."""
    options = _options({"by": by} if isinstance(by, (int, float)) else by, {"by": 1.0, "offset": 0.0})
    return np.asarray(values * options["by"] + options["offset"])


def _linear(values: np.ndarray, ranges: Mapping[str, Sequence[float]], context: ShapingContext) -> np.ndarray:
    """Clip values to the range `from`, and map this range linearly to `to`."""
    options = _options(ranges, {"from": (0.0, 1.0), "to": (0.0, 1.0)})
    (low, high) = options["from"]
    (start, end) = options["to"]
    if not low < high:
        raise ValueError(f"`from` must be ascending, got {list(options['from'])}")
    return np.asarray(start + (np.clip(values, low, high) - low) * (end - start) / (high - low))


def _condition(values: np.ndarray, rule: Mapping[str, Any], context: ShapingContext) -> np.ndarray:
    """Keep the reward if another component passes a threshold (GDPO paper equation 8), otherwise replace it with
    `else`."""
    other, operator, threshold = parse_condition(rule)
    gate = context.columns[other]
    result = np.where(COMPARISONS[operator](gate, threshold), values, rule.get("else", 0.0))
    return np.where(np.isnan(gate) | np.isnan(values), np.nan, result)


def _length(values: np.ndarray, rule: Mapping[str, float], context: ShapingContext) -> np.ndarray:
    """Return 1 for up to `full` tokens, 0 from `zero` tokens, and linear values between them. Without `zero`, return 0
    above `full`. With `thinking: false`, tokens of reasoning do not count."""
    options = _options(rule, {"full": None, "zero": None, "thinking": True})
    full = options["full"]
    zero = options["zero"]
    lengths = context.counted_lengths(options["thinking"])
    if full is None or (zero is not None and zero <= full):
        raise ValueError("requires `full`, and `zero` above it")
    if zero is None:
        return np.asarray(lengths <= full, np.float64)
    return np.asarray(np.clip((zero - lengths) / (zero - full), 0.0, 1.0))


def _overlong(values: np.ndarray, rule: Mapping[str, float], context: ShapingContext) -> np.ndarray:
    """Subtract DAPO's soft overlong penalty (arXiv 2503.14476, equation 13): 0 up to max_length - buffer tokens, then
    linear up to `penalty` at max_length. With `thinking: false`, tokens of reasoning do not count."""
    options = _options(rule, {"buffer": None, "penalty": 1.0, "max_length": context.max_length, "thinking": True})
    if not options["buffer"] or options["buffer"] <= 0:
        raise ValueError("requires a positive `buffer` in tokens")
    if options["max_length"] is None:
        raise ValueError("requires max_length, which was not given")
    excess = context.counted_lengths(options["thinking"]) - (options["max_length"] - options["buffer"])
    return np.asarray(values - options["penalty"] * np.clip(excess / options["buffer"], 0.0, 1.0))


def _truncated(values: np.ndarray, rule: Mapping[str, float], context: ShapingContext) -> np.ndarray:
    """Replace the reward of samples that reached the length limit with `value`."""
    value = _options(rule, {"value": 0.0})["value"]
    return np.where(context.need("truncated") & ~np.isnan(values), value, values)


def _shortest(values: np.ndarray, rule: Mapping[str, Any], context: ShapingContext) -> np.ndarray:
    """Compare the lengths of the group's samples that pass a threshold in another component.

    With `score: linear`, the reward is 1 - (length - shortest) / (longest - shortest), minus its mean over these
    samples. This is the group length penalty of NeMo-RL (`grpo.length_penalty`). With `score: best`, the reward is 1
    for the shortest samples and 0 for the others. The reward of samples that do not pass is missing, and also that of a
    group's only sample that passes. With `thinking: false`, tokens of reasoning do not count.
    """
    options, (other, operator, threshold) = _split_shortest(rule)
    if options["score"] not in ("linear", "best"):
        raise ValueError(f"`score` must be linear or best, got {options['score']!r}")
    lengths = context.counted_lengths(options["thinking"])
    passing = COMPARISONS[operator](context.columns[other], threshold)
    groups = context.need("groups")
    result = np.full(len(values), np.nan)
    for group in np.unique(groups[passing]):
        rows = passing & (groups == group)
        if rows.sum() < 2:  # nothing to compare
            continue
        excess = lengths[rows] - lengths[rows].min()
        if options["score"] == "best":
            result[rows] = excess == 0
        else:
            scores = 1.0 - excess / max(excess.max(), 1)
            result[rows] = scores - scores.mean()
    return result


def _split_shortest(rule: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, str, float]]:
    """Return the options of `shortest`, and its condition."""
    options = {"score": "linear", "thinking": True}
    condition = {key: value for key, value in _with_on(rule).items() if key not in options}
    known = ("on", *COMPARISONS)
    for key in condition:
        if key not in known:
            raise ValueError(f"unknown option {key!r}; {nearest(str(key), (*known, *options))}")
    return options | {key: value for key, value in rule.items() if key in options}, parse_condition(condition)


@dataclass(frozen=True)
class ShapingRule:
    """Registry entry of a shaping rule."""

    function: Callable[[np.ndarray, Any, ShapingContext], np.ndarray]
    creates: bool = False
    """True if the rule creates its component if no environment provides it."""


SHAPING_RULES: dict[str, ShapingRule] = {
    "clip": ShapingRule(_clip),
    "scale": ShapingRule(_scale),
    "linear": ShapingRule(_linear),
    "condition": ShapingRule(_condition),
    "length": ShapingRule(_length, creates=True),
    "overlong": ShapingRule(_overlong, creates=True),
    "truncated": ShapingRule(_truncated),
    "shortest": ShapingRule(_shortest, creates=True),
}


def creates(rule: Mapping[str, Any]) -> bool:
    """Return True if a rule creates its component if no environment provides it.

    Raises:
        ValueError: if the rule is invalid (see `rule_name`).
    """
    name = rule_name(rule)
    return is_import_path(name) or SHAPING_RULES[name].creates


def apply_shaping(
    columns: Mapping[str, Any],
    rules: Sequence[Mapping[str, Any]],
    *,
    lengths: Any = None,
    max_length: int | None = None,
    truncated: Any = None,
    thinking: Any = None,
    groups: Any = None,
    functions: Functions | None = None,
) -> dict[str, np.ndarray]:
    """Apply the shaping rules and return all components. New components come last.

    Args:
        columns: components by name, float [sequences], NaN for a missing reward. A family of criteria is float
            [criteria, sequences], and each criterion is shaped.
        rules: list of rules, see the module docstring.
        lengths: number of completion tokens [sequences].
        max_length: maximum completion length in tokens, for `overlong`.
        truncated: bool [sequences], True for samples that reached the length limit.
        thinking: number of completion tokens that are reasoning [sequences], for rules with `thinking: false`.
        groups: group of each sequence, integers [sequences], for `shortest`.
        functions: custom functions by their import paths in the rules. None: custom rules have no effect.

    Raises:
        ValueError: if a component, transformation or option is unknown, an argument is invalid, conditions are cyclic,
            or a custom function returns a non-finite reward. The message contains the rule, and the nearest existing
            name.
    """
    order = _order(rules, list(columns))
    inputs = {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}
    first = next(iter(inputs.values()), np.asarray(lengths if lengths is not None else ()))
    count = first.shape[-1]
    done: dict[str, np.ndarray] = {}
    context = ShapingContext(
        done, _array(lengths, float), max_length, _array(truncated, bool), _array(thinking, float), _array(groups, int)
    )
    for name in order:
        column = inputs.get(name, np.zeros(count))
        for rule in rules:
            if rule["component"] == name and column.ndim == 2:
                column = np.stack([_apply(row, rule, context, functions) for row in column])
            elif rule["component"] == name:
                column = _apply(column, rule, context, functions)
        done[name] = column
    return {name: done[name] for name in dict.fromkeys((*inputs, *order))}


def _array(values: Any, dtype: type) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=dtype)


def check_shaping(
    rules: Sequence[Mapping[str, Any]], components: Sequence[str], functions: Functions | None = None
) -> list[str]:
    """Check the rules for the given component names, before any reward exists.

    Args:
        components: names of the components that the environments return. For the other arguments see `apply_shaping`.

    Returns:
        Names of all components after shaping.

    Raises:
        ValueError: if a rule is invalid (see `apply_shaping`).
    """
    probe = {name: np.array([0.0, 1.0, np.nan]) for name in components}
    lengths = [1, 4, 2]
    truncated = [False, True, False]
    shaped = apply_shaping(
        probe, rules, lengths=lengths, max_length=4, truncated=truncated, thinking=[0, 2, 1], groups=[0, 0, 0],
        functions=functions,
    )  # fmt: skip
    return list(shaped)


def _order(rules: Sequence[Mapping[str, Any]], components: Sequence[str]) -> list[str]:
    """Return all component names after shaping, sorted so that each follows the components that its conditions read."""
    created = {str(rule.get("component")) for rule in rules if creates(rule)}
    known = [*components, *sorted(created - set(components))]
    graph: dict[str, set[str]] = {name: set() for name in known}
    for rule in rules:
        name = rule["component"]
        if name not in graph:
            raise ValueError(f"shaping rule {dict(rule)}: unknown component {name!r}; {nearest(name, known)}")
        if is_family(str(name)) and not is_import_path(rule_name(rule)) and creates(rule):
            raise ValueError(f"shaping rule {dict(rule)}: {rule_name(rule)} is not supported for a family")
        other = _labelled(rule, partial(component_read_by, rule))
        if other is not None:
            if is_family(str(other)):
                raise ValueError(
                    f"shaping rule {dict(rule)}: {other!r} is not a single reward; for conditions within a rubric use "
                    "`required: true` in the rubric"
                )
            if other not in graph:
                raise ValueError(f"shaping rule {dict(rule)}: unknown component {other!r}; {nearest(other, known)}")
            graph[name].add(other)
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise ValueError(f"shaping: conditions form a cycle: {' -> '.join(error.args[1])}") from None


def component_read_by(rule: Mapping[str, Any]) -> str | None:
    """Return the other component that a rule reads, or None.

    Raises:
        ValueError: if the condition of the rule is invalid.
    """
    if "condition" in rule:
        return parse_condition(rule["condition"])[0]
    return _split_shortest(rule["shortest"])[1][0] if "shortest" in rule else None


def named_components(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the components that must exist for the rules: those that a rule changes or reads, without those that a
    rule creates.

    Raises:
        ValueError: if a rule is invalid.
    """
    named = {str(rule["component"]) for rule in rules if not creates(rule)}
    read = {other for other in map(component_read_by, rules) if other is not None}
    return sorted(named | read)


def rule_name(rule: Mapping[str, Any]) -> str:
    """Return the transformation of a rule: a name in `SHAPING_RULES` or an import path.

    Raises:
        ValueError: if the rule has no component, or does not have exactly one known transformation.
    """
    keys = [key for key in rule if key != "component"]
    if "component" not in rule or len(keys) != 1:
        raise ValueError(f"shaping rule {dict(rule)}: write `component: name` and exactly one transformation")
    if keys[0] == "kl":
        raise ValueError(
            f"shaping rule {dict(rule)}: KL is not a component, because normalisation would remove its coefficient; "
            "use kl_in_reward (or reference_policy_kl_penalty of the loss)"
        )
    if keys[0] not in SHAPING_RULES and not is_import_path(str(keys[0])):
        raise ValueError(
            f"shaping rule {dict(rule)}: unknown key {keys[0]!r}; {nearest(keys[0], tuple(SHAPING_RULES))}, or a "
            "custom function: file.py:name"
        )
    return keys[0]


def _apply(
    column: np.ndarray, rule: Mapping[str, Any], context: ShapingContext, functions: Functions | None
) -> np.ndarray:
    name = rule_name(rule)
    if is_import_path(name):
        if functions is None:
            return column
        return _labelled(rule, lambda: _apply_custom(column, rule, context, functions[name]))
    return _labelled(rule, lambda: SHAPING_RULES[name].function(column, rule[name], context))


def _apply_custom(
    column: np.ndarray, rule: Mapping[str, Any], context: ShapingContext, function: Callable[..., Any]
) -> np.ndarray:
    """Apply a custom function to a component. Missing rewards stay missing.

    Raises:
        ValueError: if the function fails or returns invalid values.
    """
    name = rule_name(rule)
    options = rule[name] or {}
    check_options(options, custom_options(function, "values, context"), name)
    try:
        with np.errstate(all="ignore"):  # Non-finite values are refused below, with a clear message.
            shaped = np.asarray(function(column.copy(), context, **options), dtype=np.float64)
    except Exception as error:
        raise ValueError(f"{name} raised {with_array_hint(error)}") from error
    if shaped.shape != column.shape:
        raise ValueError(f"{name} returned shape {shaped.shape} for {len(column)} sequences")
    missing = np.isnan(column)
    wrong = ~np.isfinite(shaped) & ~missing
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{name} returned {shaped[row]} for the reward {column[row]:g} ({wrong.sum()} are not finite)")
    return np.where(missing, np.nan, shaped)


def _labelled[T](rule: Mapping[str, Any], action: Callable[[], T]) -> T:
    """Call ``action``, and prefix its error messages with the rule."""
    try:
        return action()
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"shaping rule {dict(rule)}: {error}") from None


def _options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``defaults`` updated by the options of a rule. Raises ValueError for an unknown option."""
    for key in given:
        if key not in defaults:
            raise ValueError(f"unknown option {key!r}; {nearest(key, tuple(defaults))}")
    return {**defaults, **given}


def parse_condition(rule: Mapping[Any, Any]) -> tuple[str, str, float]:
    """Return the other component, the comparison and the threshold of a condition.

    Raises:
        ValueError: if one of these three is missing, or an option is unknown.
    """
    rule = _with_on(rule)
    operators = [key for key in rule if key in COMPARISONS]
    unknown = [key for key in rule if key not in (*COMPARISONS, "on", "else")]
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; {nearest(unknown[0], ('on', 'else', *COMPARISONS))}")
    if "on" not in rule or len(operators) != 1:
        raise ValueError(f"a condition requires `on` and one of {', '.join(COMPARISONS)}")
    return rule["on"], operators[0], rule[operators[0]]


def _with_on(rule: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the options of a rule with the key `on`, because YAML 1.1 reads this bare word as true."""
    return {"on" if key is True else key: value for key, value in rule.items()}
