"""Registry lookup for the losses and corrections named in `loss_fn`, and checks that their settings fit together.

A name may be the import path of a custom function, also in a rule of `gdpo.shaping`. This module does not import torch,
so that a config can be checked quickly.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from gdpo_nemo.algorithms.loss_settings import (
    KL_GRADIENTS,
    OLD_LOGPROBS,
    LossByPart,
    LossSettings,
    OffPolicySettings,
    TermLoss,
)
from gdpo_nemo.algorithms.losses import AGGREGATIONS, KL_KINDS, LOSSES, Loss
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS, LEVELS, Correction
from gdpo_nemo.algorithms.ppo import ActorCriticSettings
from gdpo_nemo.algorithms.preference_objectives import PreferenceUpdate
from gdpo_nemo.algorithms.ranges import check_numbers
from gdpo_nemo.algorithms.table import nearest

Objective = LossSettings | PreferenceUpdate | ActorCriticSettings | TermLoss | LossByPart
"""Settings of an update's loss, which every rank receives. `OBJECTIVES` in `policy_loss.py` maps the types of settings
to loss functions."""
Functions = Mapping[str, Callable[..., Any]]
"""Custom functions by their import paths (file.py:name) in the settings. Callers must load these functions, because
this package does not load them."""


def is_import_path(name: str) -> bool:
    """Return True if a name is the import path of a function: file.py:name or package.module:name."""
    return ":" in name


def custom_options(function: Callable[..., Any], leading: str) -> tuple[str, ...]:
    """Return the names of a custom function's options, which are the parameters after the ``leading`` ones.

    Args:
        leading: names of the required parameters, separated by ", ".

    Raises:
        ValueError: if ``function`` is not callable, or its signature does not match.
    """
    if not callable(function):
        raise ValueError(f"must be a function ({leading}), not {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    first = leading.split(", ")
    if len(parameters) < len(first) or any(p.default is p.empty for p in parameters[len(first) :]):
        raise ValueError(f"must be a function ({leading}), then options with defaults")
    return tuple(p.name for p in parameters[len(first) :])


def loss_entry(name: str, functions: Functions | None = None) -> Loss:
    """Return the registry entry of a loss, or create an entry for a custom function. A custom function may read all
    keys.

    Args:
        functions: custom functions by import path. None: the entry of a custom function is a placeholder that must not
            be called.

    Raises:
        ValueError: if the signature of a custom function does not match.
    """
    if name in LOSSES:
        return LOSSES[name]
    template = Loss(_not_loaded, reads=LOSSES["clipped_pg"].reads, reads_staleness=True)
    if functions is None:
        return template
    function = functions[name]
    return _custom_entry(template, function, "logprobs, fields, settings")


def correction_entry(name: str, functions: Functions | None = None) -> Correction:
    """Return the registry entry of an off-policy correction. Arguments and errors are those of `loss_entry`."""
    if name in CORRECTIONS:
        return CORRECTIONS[name]
    template = Correction(_not_loaded, reads=CORRECTIONS["mask"].reads, reads_staleness=True)
    if functions is None:
        return template
    function = functions[name]
    return _custom_entry(template, function, "log_gap, fields, settings")


def _custom_entry[Entry: (Loss, Correction)](template: Entry, function: Callable[..., Any], leading: str) -> Entry:
    skips = getattr(function, "skips_zero_advantage", False) is True
    return replace(template, function=function, options=custom_options(function, leading), skips_zero_advantage=skips)


def _not_loaded(*arguments: Any) -> Any:
    raise ValueError("`functions` does not contain the import path of this custom function")


def check_options(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Check that a function supports the given options.

    Args:
        given: options from the config.
        known: names of the function's options.
        what: name of the function, for messages.

    Raises:
        ValueError: if an option is unknown.
    """
    for name in given:
        if name not in known:
            hint = nearest(name, known) if known else "no options are known"
            raise ValueError(f"unknown option {name!r} of {what}; {hint}")


# -- combinations of loss and correction ----------------------------------------------------------------------------


def check_loss(settings: LossSettings, functions: Functions | None = None) -> None:
    """Check the settings of the loss and their combination.

    Args:
        functions: custom functions by import path; None: do not check custom functions.

    Raises:
        ValueError: if a setting is invalid. The message begins with the key.
    """
    _check_entry("type", settings.type, LOSSES)
    if functions is not None or not is_import_path(settings.type):
        with _named("type", settings.type):
            known = loss_entry(settings.type, functions).options
        with _named("options"):
            check_options(settings.options, known, settings.type)
    _among("aggregation", settings.aggregation, AGGREGATIONS)
    _among("reference_policy_kl_type", settings.reference_policy_kl_type, KL_KINDS)
    _among("reference_policy_kl_gradient", settings.reference_policy_kl_gradient, KL_GRADIENTS)
    _among("old_logprobs", settings.old_logprobs, (None, *OLD_LOGPROBS))
    check_numbers(settings)
    _check_entropy(settings)
    if not settings.clip_cov_lb < settings.clip_cov_ub:
        raise ValueError(
            f"clip_cov_lb: must be below clip_cov_ub, got {settings.clip_cov_lb} and {settings.clip_cov_ub}"
        )
    _check_correction(settings.off_policy, functions)
    _check_together(settings)


def _check_correction(settings: OffPolicySettings, functions: Functions | None) -> None:
    name = settings.correction
    _check_entry("off_policy.mode", name, CORRECTIONS)
    _among("off_policy.level", settings.level, LEVELS)
    if functions is not None or not is_import_path(name):
        with _named("off_policy.mode", name):
            known = correction_entry(name, functions).options
        with _named("off_policy.options"):
            check_options(settings.options, known, name)
    check_numbers(settings, "off_policy.")
    if not settings.ratio_min < settings.ratio_max:
        raise ValueError(
            "off_policy.ratio_min: must be below off_policy.ratio_max, got "
            f"{settings.ratio_min} and {settings.ratio_max}"
        )


def _check_entropy(settings: LossSettings) -> None:
    low = settings.entropy_coef_min
    high = settings.entropy_coef_max
    if not low <= high:
        raise ValueError(f"entropy_coef_min: must be at most entropy_coef_max, got {low} and {high}")
    if settings.use_adaptive_entropy and not low <= settings.entropy_bonus <= high:
        raise ValueError(
            "entropy_bonus: must be between entropy_coef_min and entropy_coef_max with use_adaptive_entropy, "
            f"got {settings.entropy_bonus}"
        )


def _check_together(settings: LossSettings) -> None:
    """Check that loss, old log-probs and off-policy correction can be combined.

    Raises:
        ValueError: if they conflict.
    """
    entry = loss_entry(settings.type)
    if settings.old_logprobs == "sampler" and not entry.has_ratio:
        raise ValueError(
            f"old_logprobs: sampler has no effect with type {settings.type}, which has no ratio; use trainer, or null"
        )
    if settings.old_logprobs == "sampler" and settings.off_policy.correction != "none":
        raise ValueError(
            "off_policy.mode: has no effect with old_logprobs: sampler, whose ratio is already this correction"
        )
    if entry.by_sequence and corrects_by_token(settings.off_policy):
        raise ValueError(
            "off_policy: per-token weights (mode icepop or level token) conflict with the sequence-level "
            f"loss {settings.type}; use level sequence or geometric with mode truncate or mask, or mode none"
        )


def corrects_by_token(settings: OffPolicySettings) -> bool:
    """Return True if the correction may give tokens of one sequence different weights."""
    name = settings.correction
    return correction_entry(name).by_token or (name != "none" and settings.level == "token")


def reads_staleness(settings: LossSettings) -> bool:
    """Return True if the loss or the correction may read the staleness of each token."""
    return loss_entry(settings.type).reads_staleness or correction_entry(settings.off_policy.correction).reads_staleness


def reads_whole_sequences(settings: Objective) -> bool:
    """Return True if the loss or the correction may combine the tokens of a sequence. Custom functions may."""
    if isinstance(settings, TermLoss):
        settings = settings.loss
    if isinstance(settings, LossByPart):
        return any(map(reads_whole_sequences, settings.parts))
    if not isinstance(settings, LossSettings):
        return True
    correction = settings.off_policy.correction
    return (
        bool(loss_import_paths(settings))
        or loss_entry(settings.type).by_sequence
        or (correction != "none" and settings.off_policy.level != "token")
        or settings.off_policy.sequence_mask_threshold is not None
    )


def loss_import_paths(settings: Objective) -> tuple[str, ...]:
    """Return the import paths of all custom functions in the settings."""
    if isinstance(settings, TermLoss):
        settings = settings.loss
    if isinstance(settings, LossByPart):
        return tuple(dict.fromkeys(chain.from_iterable(map(loss_import_paths, settings.parts))))
    if not isinstance(settings, LossSettings):
        return ()
    return tuple(name for name in (settings.type, settings.off_policy.correction) if is_import_path(name))


def why_all_sequences(settings: Objective, functions: Functions | None = None) -> str | None:
    """Return the reason why sequences with advantage 0 must not be skipped, or None if they do not affect the
    gradient."""
    if isinstance(settings, LossByPart):
        return next(filter(None, (why_all_sequences(part, functions) for part in settings.parts)), None)
    if not isinstance(settings, LossSettings) or settings.reads_every_sequence is not None:
        return settings.reads_every_sequence
    correction = settings.off_policy.correction
    entries: dict[str, Loss | Correction] = {
        f"type {settings.type}": loss_entry(settings.type, functions),
        f"off_policy.mode {correction}": correction_entry(correction, functions),
    }
    for name, entry in entries.items():
        if not entry.skips_zero_advantage:
            return (
                f"loss_fn.{name} may read every sequence; a custom function that ignores sequences with advantage 0 "
                "must set FUNCTION.skips_zero_advantage = True"
            )
    return None


def _check_entry(key: str, name: str, registry: Iterable[str]) -> None:
    if not is_import_path(name):
        _among(key, name, registry)


@contextlib.contextmanager
def _named(*words: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the given words, usually a key and its value."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{': '.join(words)}: {error}") from None


def _among(key: str, value: Any, known: Iterable[Any]) -> None:
    if value not in known:
        raise ValueError(f"{key}: unknown {value!r}; known: {', '.join(map(str, known))}")
