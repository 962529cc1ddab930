"""Options of the ``openenv`` environment, validated without contacting a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gdpo_nemo.environments.base import number_option, read_options
from gdpo_nemo.environments.http_client import base_url
from gdpo_nemo.utils.errors import ConfigError, nearest

ANSWER = "{text}"
"""Placeholder for the policy's text in ``action``."""
_WEBSOCKETS = {"ws://": "http://", "wss://": "https://"}


class FirstPrompt(StrEnum):
    """Content of the first prompt of an episode."""

    ROW = "row"
    """The first prompt is the row's prompt."""
    OBSERVATION = "observation"
    """The first prompt is the observation of the reset, after the row's system message."""
    BOTH = "both"
    """The first prompt is the row's prompt, followed by the observation of the reset."""


class ActionFormat(StrEnum):
    """Conversion of the policy's text to an action."""

    TEXT = "text"
    """The text becomes the value of an action field."""
    JSON = "json"
    """The text is the whole action as a JSON object."""


@dataclass(frozen=True)
class Limits:
    """Limits on time and message size."""

    timeout_s: float
    """Time limit in seconds of one step, or of a reset with its connection and all retries."""
    retries: int
    """Maximum number of retries of a reset, each on a new connection. A step is never retried: a failed step ends the
    episode."""
    idle_timeout_s: float
    """Seconds without a step after which the connection of an episode is closed."""
    max_reply_bytes: int
    """Maximum size of a message from the server in bytes."""


@dataclass(frozen=True)
class Settings:
    """Validated options of the ``openenv`` environment."""

    url: str
    """Base URL of the server, with the scheme http or https."""
    action: Mapping[str, Any]
    """Action with the placeholder ``ANSWER``. With the action format JSON, the fixed fields to add to the policy's
    action."""
    action_format: ActionFormat
    observation: str | tuple[str, ...] | None
    """Field to show to the policy, a template with {fields}, several fields, or None for the whole observation."""
    reward: str
    """Name of the reward component."""
    invalid_action_reward: float
    """Reward of a step without a valid action."""
    reset: Mapping[str, Any]
    """Keyword arguments of the environment's reset. A value ``{"column": name}`` is replaced by a column of the row."""
    first_prompt: FirstPrompt
    prompt: str | None
    """Prompt of generated rows, or None if the prompts come from a dataset."""
    api_key_env: str | None
    limits: Limits


def read_settings(options: Mapping[str, Any] | None) -> Settings:
    """Validate the options and add defaults. Raises ConfigError if an option is invalid."""
    chosen = read_options(
        "openenv",
        options,
        url=None,
        action=None,
        action_format="text",
        observation=None,
        reward="reward",
        invalid_action_reward=0.0,
        reset={},
        first_prompt="both",
        prompt=None,
        api_key_env=None,
        timeout_s=60.0,
        retries=5,
        idle_timeout_s=1800.0,
        max_reply_bytes=8 * 2**20,
    )
    action_format = _choice("action_format", chosen.action_format, ActionFormat)
    return Settings(
        _url(chosen.url),
        _action(chosen.action, action_format),
        action_format,
        _observation(chosen.observation),
        _text("reward", chosen.reward),
        number_option("invalid_action_reward", chosen.invalid_action_reward, float("-inf")),
        _reset(chosen.reset),
        _choice("first_prompt", chosen.first_prompt, FirstPrompt),
        None if chosen.prompt is None else _text("prompt", chosen.prompt),
        None if chosen.api_key_env is None else _text("api_key_env", chosen.api_key_env),
        Limits(
            number_option("timeout_s", chosen.timeout_s, 0.001),
            int(number_option("retries", chosen.retries, 0)),
            number_option("idle_timeout_s", chosen.idle_timeout_s, 0.001),
            int(number_option("max_reply_bytes", chosen.max_reply_bytes, 1)),
        ),
    )


def _url(value: Any) -> str:
    """Return the base URL with the scheme http(s). The schemes ws(s) are also accepted, as in OpenEnv's client."""
    if isinstance(value, str):
        for scheme, http_scheme in _WEBSOCKETS.items():
            value = http_scheme + value.removeprefix(scheme) if value.startswith(scheme) else value
    return base_url("url", value)


def _action(value: Any, action_format: ActionFormat) -> dict[str, Any]:
    if action_format is ActionFormat.JSON:
        if value is not None and not (_is_object(value) and _count_placeholders(value) == 0):
            raise ConfigError(
                "action: must contain only fixed fields with action_format json, because the policy writes all other "
                f"fields, got {value!r}"
            )
        return dict(value or {})
    if isinstance(value, str) and value:
        return {value: ANSWER}
    if not _is_object(value) or not _count_placeholders(value):
        raise ConfigError(
            f"action: must be the field for the policy's text, or an action that contains {ANSWER!r}, not {value!r}"
        )
    return dict(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _count_placeholders(value: Any) -> int:
    """Count the placeholders for the policy's text in an action."""
    if isinstance(value, Mapping):
        return sum(map(_count_placeholders, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_count_placeholders, value))
    return int(isinstance(value, str) and value == ANSWER)


def _observation(value: Any) -> str | tuple[str, ...] | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(path, str) and path for path in value):
        return tuple(value)
    raise ConfigError(f"observation: must be a field, a list of fields or a text with {{fields}}, not {value!r}")


def _reset(value: Any) -> dict[str, Any]:
    if not _is_object(value):
        raise ConfigError(f"reset: must be keyword arguments, {{name: value}}, not {value!r}")
    for name, argument in value.items():
        if isinstance(argument, Mapping) and not (
            list(argument) == ["column"] and isinstance(argument["column"], str) and argument["column"]
        ):
            raise ConfigError(
                f"reset.{name}: must be a value, or {{column: name}} for a column of the row, not {argument!r}"
            )
    return dict(value)


def _choice(key: str, value: Any, enum_class: type[StrEnum]) -> Any:
    if value not in list(enum_class):
        names = list(map(str, enum_class))
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(names)}{nearest(str(value), names)}")
    return enum_class(value)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: must be a text, not {value!r}")
    return value
