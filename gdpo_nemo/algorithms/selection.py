"""Selection of an estimator and its settings by name, and checks that the options have an effect.

A config is checked with this module before any reward exists, so the module does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.estimators import ESTIMATORS, Estimator, Terms
from gdpo_nemo.algorithms.noise import error_rates
from gdpo_nemo.algorithms.settings import PRESETS, SETTING_NAMES, Settings
from gdpo_nemo.algorithms.table import RewardTable, build_table, nearest

DEFAULT_EPSILON = 1e-6

_BATCH_SETTINGS = ("batch_epsilon", "batch_epsilon_inside", "batch_unit", "batch_rows", "residue")


def entry_of(estimator: str | Callable[..., Terms]) -> Estimator:
    """Return the registry entry of an estimator name, or create an entry for a custom function.

    A custom function takes (RewardTable, Settings), followed by options with defaults. As for GDPO, the sum of its
    terms is standardised over the batch unless ``batch_norm`` is False.

    Raises:
        ValueError: if the name is unknown (the message suggests the nearest one), or the function has the wrong
            signature.
    """
    if isinstance(estimator, str):
        if estimator not in ESTIMATORS:
            raise ValueError(f"unknown estimator {estimator!r}; {nearest(estimator, tuple(ESTIMATORS))}")
        return ESTIMATORS[estimator]
    if not callable(estimator):
        raise ValueError(f"an estimator must be a name or a function (table, settings) -> Terms, got {estimator!r}")
    parameters = list(inspect.signature(estimator).parameters.values())
    if len(parameters) < 2 or any(p.default is p.empty for p in parameters[2:]):
        raise ValueError(f"estimator {_name(estimator)} must take (table, settings), then options with defaults")
    # A custom function may drop rows: its terms are unknown until it runs.
    return Estimator(estimator, batch_norm=True, options=tuple(p.name for p in parameters[2:]), drops_rows=True)


def _name(estimator: str | Callable[..., Terms]) -> str:
    return estimator if isinstance(estimator, str) else getattr(estimator, "__name__", repr(estimator))


def select(
    estimator: str | Callable[..., Terms],
    preset: str | None,
    batch_norm: bool | None,
    epsilon: float,
    options: Mapping[str, Any],
) -> tuple[Estimator, Settings, dict[str, Any]]:
    """Return the estimator's entry, the settings, and the options that only this estimator has.

    Args: see `compute_advantages`.

    Raises:
        ValueError: if a name is unknown (the message suggests the nearest one), the preset belongs to another
            estimator, or an option has no effect.
    """
    entry = entry_of(estimator)
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; {nearest(preset, tuple(PRESETS))}")
    if preset is not None and not entry.has_presets:
        raise ValueError(f"preset {preset!r} is a variant of gdpo and conflicts with estimator {_name(estimator)!r}")
    base = PRESETS[preset] if preset else Settings(batch_norm=entry.batch_norm)
    estimator_options = {name: value for name, value in options.items() if name in entry.options}
    shared = {name: value for name, value in options.items() if name not in estimator_options}
    for name in shared:
        if name not in SETTING_NAMES:
            raise ValueError(
                f"unknown option {name!r} of {_name(estimator)}; {nearest(name, entry.options + SETTING_NAMES)}"
            )
    if batch_norm is not None:
        shared["batch_norm"] = batch_norm
    if preset is None or epsilon != DEFAULT_EPSILON:
        shared["epsilon"] = epsilon
    settings = replace(base, **shared)
    for name in options:
        reason = _idle(name, estimator, entry, settings)
        if reason:
            raise ValueError(f"option {name!r} has no effect {reason}")
    return entry, settings, estimator_options


def check_selection(
    estimator: str | Callable[..., Terms],
    preset: str | None,
    batch_norm: bool | None,
    epsilon: float,
    options: Mapping[str, Any],
    weights: Mapping[str, float],
) -> None:
    """Check, before any reward exists, that `compute_advantages` supports the settings and that the options have an
    effect.

    Args:
        weights: weight of each component, by name. For the other arguments see `compute_advantages`.

    Raises:
        ValueError: if `select` or the estimator refuses an option, or it has the wrong type.
    """
    entry = entry_of(estimator)
    for name, value in options.items():
        default = _default(entry, name)
        if default is not None and not _same_kind(value, default):
            raise ValueError(f"option {name!r} must be like {default!r}, got {value!r}")
    entry, settings, estimator_options = select(estimator, preset, batch_norm, epsilon, options)
    # The estimator itself checks the remaining options on three groups: one in which every component takes both ends of
    # its range, one without variation, and one with a single sample.
    bounds = estimator_options.get("bounds") or {}
    try:
        ends = {name: bounds.get(name, (0.0, 1.0)) for name in weights}
        columns = {name: [low, high, low, low, high] for name, (low, high) in ends.items()}
        table = build_table(columns, [0, 0, 1, 1, 2], dict(weights), lengths=[3, 5, 4, 4, 2])
        run_estimator(entry, table, settings, estimator_options, estimator)
    except (TypeError, AttributeError) as error:
        if callable(estimator):
            raise
        raise ValueError(f"options of {estimator}: {error}") from None


def run_estimator(
    entry: Estimator,
    table: RewardTable,
    settings: Settings,
    estimator_options: Mapping[str, Any],
    estimator: str | Callable[..., Terms],
) -> Terms:
    """Run the estimator on the table and check its result.

    Raises:
        ValueError: if the result is invalid. Exceptions of the estimator are not caught.
    """
    # Non-finite values are reported with their group, which is more helpful than NumPy's warning.
    with np.errstate(all="ignore"):
        terms = entry.function(table, settings, **estimator_options)
    return check_terms(terms, table, estimator)


def check_terms(terms: Any, table: RewardTable, estimator: str | Callable[..., Terms]) -> Terms:
    """Check the result of an estimator and return it.

    Raises:
        ValueError: if it has the wrong type or shape, or a value is not finite.
    """
    rows = len(table.valid)
    if not isinstance(terms, Terms):
        raise ValueError(f"estimator {_name(estimator)} must return Terms, got {type(terms).__name__}")
    for field in ("components", "has_signal", "total", "dropped"):
        value = getattr(terms, field)
        if not isinstance(value, np.ndarray | None):
            raise ValueError(
                f"estimator {_name(estimator)} returned a {type(value).__name__} in Terms.{field}; use NumPy arrays"
            )
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
    """Raise ValueError for non-finite values. Otherwise NaN would mask its row, and a batch of NaN would silently train
    nothing."""
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
    """Return the default of an option. An option's value must have the type of its default. None if the option has no
    default."""
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
    """Return the reason why an option has no effect, or None if it has an effect."""
    if name in entry.options:
        return None
    has_fixed_scale = entry.scale != "settings"
    if name in _BATCH_SETTINGS and not settings.batch_norm:
        return "without the batch norm"
    if name == "batch_rows" and settings.batch_rows == "kept" and not entry.drops_rows:
        return f"as kept with {_name(estimator)}, which drops no samples; use scored"
    if (name == "singleton" and entry.sums_rewards) or (name == "leave_one_out" and has_fixed_scale):
        return f"with {_name(estimator)}, which normalises the sum of the rewards"
    if name == "noise" and entry.sums_rewards and len(error_rates(settings.noise)) < len(settings.noise):
        return f"as a standard deviation with {_name(estimator)}, which normalises the sum of the rewards"
    if name == "scale_rewards" and has_fixed_scale:
        return f"with {_name(estimator)}, which sets its own scale"
    if name == "equal_peers" and not (settings.leave_one_out and settings.scale_rewards == "group"):
        return "without leave_one_out, or without the division by standard deviations"
    if name == "single_reward" and not entry.reads_single_reward:
        return f"with {_name(estimator)}"
    return None
