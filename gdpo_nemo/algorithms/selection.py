"""From names to an estimator: which one, with which settings, and whether the options make sense for it.

What a configuration says is checked with this before there is any reward, so nothing here imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.estimators import ESTIMATORS, Estimator, Terms
from gdpo_nemo.algorithms.settings import PRESETS, SETTING_NAMES, Settings
from gdpo_nemo.algorithms.table import RewardTable, build_table, nearest

DEFAULT_EPSILON = 1e-6

_BATCH_SETTINGS = ("batch_epsilon", "batch_epsilon_inside", "batch_unit", "batch_rows", "residue")
_SUMMING = ("grpo", "dr_grpo", "rloo", "gpg", "reinforce_plus_plus", "corr_grpo")
"""Estimators that normalise the sum of the rewards, not each of them."""


def entry_of(estimator: str | Callable[..., Terms]) -> Estimator:
    """The registry's entry of a name; one made for a function of one's own.

    Such a function takes (RewardTable, Settings) and has its options as further parameters with defaults. The sum of
    its terms is standardised over the batch, as GDPO's is, unless ``batch_norm`` says otherwise.

    Raises:
        ValueError: an unknown name, with the nearest one, or a function that cannot be called so.
    """
    if isinstance(estimator, str):
        if estimator not in ESTIMATORS:
            raise ValueError(f"unknown estimator {estimator!r}; {nearest(estimator, tuple(ESTIMATORS))}")
        return ESTIMATORS[estimator]
    if not callable(estimator):
        raise ValueError(f"an estimator is a name or a function (table, settings) -> Terms, not {estimator!r}")
    parameters = list(inspect.signature(estimator).parameters.values())
    if len(parameters) < 2 or any(p.default is p.empty for p in parameters[2:]):
        raise ValueError(f"estimator {_name(estimator)} must take (table, settings), then options with defaults")
    return Estimator(estimator, batch_norm=True, options=tuple(p.name for p in parameters[2:]))


def _name(estimator: str | Callable[..., Terms]) -> str:
    return estimator if isinstance(estimator, str) else getattr(estimator, "__name__", repr(estimator))


def select(
    estimator: str | Callable[..., Terms],
    preset: str | None,
    batch_norm: bool | None,
    epsilon: float,
    options: Mapping[str, Any],
) -> tuple[Estimator, Settings, dict[str, Any]]:
    """The estimator, its settings and its own options.

    Args: as those of `compute_advantages`.

    Raises:
        ValueError: an unknown name (with the nearest one), or a preset of another estimator.
    """
    entry = entry_of(estimator)
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; {nearest(preset, tuple(PRESETS))}")
    if preset is not None and estimator != "gdpo":
        raise ValueError(
            f"preset {preset!r} is a variant of gdpo and has no meaning for estimator {_name(estimator)!r}"
        )
    base = PRESETS[preset] if preset else Settings(batch_norm=entry.batch_norm)
    own = {name: value for name, value in options.items() if name in entry.options}
    shared = {name: value for name, value in options.items() if name not in own}
    for name in shared:
        if name not in SETTING_NAMES:
            raise ValueError(
                f"unknown option {name!r} of {_name(estimator)}; {nearest(name, entry.options + SETTING_NAMES)}"
            )
    if batch_norm is not None:
        shared["batch_norm"] = batch_norm
    if preset is None or epsilon != DEFAULT_EPSILON:
        shared["epsilon"] = epsilon
    return entry, replace(base, **shared), own


def check_selection(
    estimator: str | Callable[..., Terms],
    preset: str | None,
    batch_norm: bool | None,
    epsilon: float,
    options: Mapping[str, Any],
    weights: Mapping[str, float],
) -> None:
    """Refuse, before any reward exists, what `compute_advantages` would refuse or silently ignore.

    Args:
        weights: of the components, by name.

    Raises:
        ValueError: as `select`; also an option of the wrong type, or one that does nothing here.
    """
    entry = entry_of(estimator)
    for name, value in options.items():
        default = _default(entry, name)
        if default is not None and not _same_kind(value, default):
            raise ValueError(f"option {name!r} must be like {default!r}, got {value!r}")
    entry, settings, own = select(estimator, preset, batch_norm, epsilon, options)
    for name in options:
        reason = _idle(name, estimator, entry, settings)
        if reason:
            raise ValueError(f"option {name!r} has no effect {reason}")
    # The estimator itself judges the rest: it sees a group in which every component takes both ends of its range, one
    # in which none varies, and one with a single sample.
    bounds = own.get("bounds") or {}
    try:
        ends = {name: bounds.get(name, (0.0, 1.0)) for name in weights}
        columns = {name: [low, high, low, low, high] for name, (low, high) in ends.items()}
        table = build_table(columns, [0, 0, 1, 1, 2], dict(weights), lengths=[3, 5, 4, 4, 2])
        run_estimator(entry, table, settings, own, estimator)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"options of {_name(estimator)}: {error}") from None


def run_estimator(
    entry: Estimator,
    table: RewardTable,
    settings: Settings,
    own: Mapping[str, Any],
    estimator: str | Callable[..., Terms],
) -> Terms:
    """What the estimator makes of the table, checked by `check_terms`. Raises ValueError, and whatever the estimator
    raises."""
    # What is not finite is reported with its group, which says more than NumPy's warning.
    with np.errstate(all="ignore"):
        terms = entry.function(table, settings, **own)
    return check_terms(terms, table, estimator)


def check_terms(terms: Any, table: RewardTable, estimator: str | Callable[..., Terms]) -> Terms:
    """What an estimator returned, if it is what it has to be. Raises ValueError."""
    rows = len(table.valid)
    if not isinstance(terms, Terms):
        raise ValueError(f"estimator {_name(estimator)} returned {type(terms).__name__}, not Terms")
    shapes = np.shape(terms.components), np.shape(terms.has_signal)
    if shapes != ((len(table.names), rows), (rows,)):
        raise ValueError(
            f"estimator {_name(estimator)} returned components {shapes[0]} and has_signal {shapes[1]} for "
            f"{len(table.names)} components of {rows} sequences"
        )
    if terms.total is not None and np.shape(terms.total) != (rows,):
        raise ValueError(f"estimator {_name(estimator)} returned total {np.shape(terms.total)} for {rows} sequences")
    _refuse_not_finite(terms, table, _name(estimator))
    return terms


def _refuse_not_finite(terms: Terms, table: RewardTable, name: str) -> None:
    """NaN would mask its row, and a batch of them would train nothing without a word."""
    groups = table.groups.rows(table.groups.ids)
    component, row = np.nonzero(~np.isfinite(terms.components))
    if len(row):
        k = component[0]
        i = row[0]
        raise ValueError(
            f"estimator {name} returned {terms.components[k, i]} for component {table.names[k]!r} of group "
            f"{groups[i]}, whose reward is {table.columns[k, i]:g} ({len(row)} values are not finite)"
        )
    (row,) = np.nonzero(~np.isfinite(terms.values))
    if len(row):
        raise ValueError(
            f"estimator {name} returned terms with the sum {terms.values[row[0]]} in group {groups[row[0]]} "
            f"({len(row)} sums are not finite)"
        )


def _default(entry: Estimator, name: str) -> Any:
    """Default of an estimator's own option or of a shared setting; None where there is none to compare with."""
    if name in entry.options:
        return inspect.signature(entry.function).parameters[name].default
    return getattr(Settings(), name, None) if name in SETTING_NAMES else None


def _same_kind(value: Any, default: Any) -> bool:
    numbers = (int, float)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, numbers):
        return isinstance(value, numbers)
    return isinstance(value, type(default))


def _idle(name: str, estimator: str | Callable[..., Terms], entry: Estimator, settings: Settings) -> str | None:
    """Why an option does nothing, or None."""

    def among(names: Iterable[str]) -> bool:
        return name in names and name not in entry.options

    if among(_BATCH_SETTINGS) and not settings.batch_norm:
        return "without the batch norm"
    if among(("singleton",)) and estimator in _SUMMING or among(("leave_one_out",)) and estimator in _SUMMING[1:]:
        return f"with {estimator}, which normalises the sum of the rewards"
    if among(("scale_rewards",)) and (estimator in _SUMMING[1:] or settings.leave_one_out):
        because = _name(estimator) if estimator in _SUMMING[1:] else "leave_one_out"
        return f"with {because}, which has a scale of its own"
    if among(("single_reward",)) and estimator not in ("gdpo", "gd2po"):
        return f"with {_name(estimator)}"
    return None
