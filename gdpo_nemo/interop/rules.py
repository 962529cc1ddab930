"""The kinds of rule for one key of another program's recipe, and what they answer.

A rule sees the key's value and the recipe, of which it asks ``get(key)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Protocol


class Recipe(Protocol):
    """What the rules need of a recipe."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value at ``key``."""
        ...


@dataclass
class RuleResult:
    """A rule's answer: values for our keys, or why there are none."""

    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    same: bool = False
    """Done here without being written."""
    matters: bool = False
    """Not done here, and the result is another."""
    elsewhere: tuple[str, ...] = ()
    """Our keys that it makes together with other keys."""
    needed: bool = False
    """True if one of ``elsewhere`` must be written; the key counts as different where none is."""


Act = Callable[[Any, Any], RuleResult]
"""(value, recipe) -> what becomes of the key. Each translator has a recipe of its own kind."""


def is_off(value: Any, *off: Any) -> bool:
    """Whether a value says that a feature is not used."""
    return value is None or value is False or value in ({}, [], "") or any(value == other for other in off)


def to(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Act:
    """Our ``key`` means the same. Null means: not set, so ours is not set either."""

    def act(value: Any, recipe: Recipe) -> RuleResult:
        if value is None:
            return RuleResult(text=f"not set there, and the default of {key} here", same=True)
        return RuleResult({key: convert(value)}, note)

    return act


def combined(*keys: str) -> Act:
    """Works on ours together with other keys; the lines under "added" have the result."""
    return lambda value, recipe: RuleResult(elsewhere=keys)


def taken_over(*keys: str) -> Act:
    """Like ``combined``, for keys that change results: a value that is not written is a difference."""
    return lambda value, recipe: RuleResult(elsewhere=keys, needed=True)


def fixed(wanted: Any, why: str) -> Act:
    """We always do what ``wanted`` says (a value, or a function of the recipe); another value matters."""

    def act(value: Any, recipe: Recipe) -> RuleResult:
        expected = wanted(recipe) if callable(wanted) else wanted
        same = value is None or value == expected
        return RuleResult(text=why, same=same, matters=not same)

    return act


def idle(why: str) -> Act:
    """The result does not depend on it: speed, memory, logs, or how a thing is done rather than what."""
    return lambda value, recipe: RuleResult(text=why)


def missing(why: str, *off: Any) -> Act:
    """No such feature here, and it would change the result; ``off`` and the usual empty values switch it off."""

    def act(value: Any, recipe: Recipe) -> RuleResult:
        unused = is_off(value, *off)
        return RuleResult(text=f"{why}{', and not used there' if unused else ''}", same=unused, matters=not unused)

    return act


def where(condition: Callable[[Any], Any], act: Act, otherwise: Act) -> Act:
    """``act`` where the recipe meets ``condition``."""
    return lambda value, recipe: (act if condition(recipe) else otherwise)(value, recipe)


def gated(switch: str, act: Act) -> Act:
    """``act`` where the recipe's key ``switch`` is on; else the key does nothing there."""
    return where(lambda recipe: recipe.get(switch), act, idle(f"does nothing there: {switch} is off"))
