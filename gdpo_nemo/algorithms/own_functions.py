"""Functions of the user's own in place of a loss, a correction or a shaping rule: how they are called and judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gdpo_nemo.algorithms.losses import LOSSES, Loss
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS, Correction
from gdpo_nemo.algorithms.table import nearest

Entry = TypeVar("Entry", Loss, Correction)
Functions = Mapping[str, Callable[..., Any]]
"""The user's functions by the places (file.py:name) that the settings name them by. This package loads nothing."""


def is_place(name: str) -> bool:
    """Whether a choice names a function by its place, file.py:name or package.module:name."""
    return ":" in name


def own_options(function: Callable[..., Any], leading: str) -> tuple[str, ...]:
    """Names of a function's options: its parameters behind the ``leading`` ones, each with a default.

    Raises:
        ValueError: it cannot be called so.
    """
    if not callable(function):
        raise ValueError(f"must be a function ({leading}), not {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    first = leading.split(", ")
    if len(parameters) < len(first) or any(p.default is p.empty for p in parameters[len(first) :]):
        raise ValueError(f"must be a function ({leading}), then options with defaults")
    return tuple(p.name for p in parameters[len(first) :])


def loss_entry(name: str, functions: Functions | None = None) -> Loss:
    """The registry's entry of a loss; for a place, one of the function there: it may read every key.

    Without ``functions`` that of a place cannot be called. Raises ValueError: see `own_options`.
    """
    if name in LOSSES:
        return LOSSES[name]
    template = Loss(_not_loaded, reads=LOSSES["clipped_pg"].reads, reads_staleness=True)
    if functions is None:
        return template
    function = functions[name]
    return _of_own(template, function, "logprobs, fields, settings")


def correction_entry(name: str, functions: Functions | None = None) -> Correction:
    """As `loss_entry`, of a correction."""
    if name in CORRECTIONS:
        return CORRECTIONS[name]
    template = Correction(_not_loaded, reads=CORRECTIONS["mask"].reads, reads_staleness=True)
    if functions is None:
        return template
    function = functions[name]
    return _of_own(template, function, "log_gap, fields, settings")


def _of_own(template: Entry, function: Callable[..., Any], leading: str) -> Entry:
    skips = getattr(function, "skips_zero_advantage", False) is True
    return replace(template, function=function, options=own_options(function, leading), skips_zero_advantage=skips)


def _not_loaded(*arguments: Any) -> Any:
    raise ValueError("a function of one's own is called by its place, which `functions` does not have")


def check_options(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Refuse options that a function does not have. Raises ValueError."""
    for name in given:
        if name not in known:
            hint = nearest(name, known) if known else "it has none"
            raise ValueError(f"unknown option {name!r} of {what}; {hint}")
