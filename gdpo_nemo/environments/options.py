"""Options of an environment, read strictly: an option without a reader is an error, not a comment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Mapping

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.errors import ConfigError

_LARGEST = 10**15


def read_options(environment: str, options: Mapping[str, Any] | None, **defaults: Any) -> SimpleNamespace:
    """The defaults overridden by ``options``.

    Raises ConfigError for an option without a default here, and for a boolean, number or string in the place of
    another (a default of None takes anything).
    """
    values = dict(defaults)
    for key, value in (options or {}).items():
        if key not in defaults:
            raise ConfigError(f"environment {environment}: unknown option {key!r}{nearest(key, defaults)}")
        if not _same_kind(value, defaults[key]):
            expected = type(defaults[key]).__name__
            raise ConfigError(f"environment {environment}: option {key} must be of type {expected}, not {value!r}")
        if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:  # not a number, above all
            raise ConfigError(
                f"environment {environment}: option {key} must be at most {_LARGEST:,}, not {value!r:.40}"
            )
        values[key] = value
    return SimpleNamespace(**values)


def _same_kind(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, (list, tuple)):
        return isinstance(value, (list, tuple))
    return isinstance(value, type(default))
