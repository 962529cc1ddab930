"""The options of the ``openenv`` environment, checked without asking any server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Mapping

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.environments.http_client import base_url
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.errors import ConfigError

ANSWER = "{text}"
"""In ``action``: what the policy wrote."""
_WEBSOCKETS = {"ws://": "http://", "wss://": "https://"}


class FirstPrompt(StrEnum):
    """What the policy is shown first."""

    ROW = "row"
    OBSERVATION = "observation"
    """That of reset, behind the row's system message."""
    BOTH = "both"
    """The row's prompt, and at its end the observation of reset."""


class ActionFormat(StrEnum):
    """What the policy writes."""

    TEXT = "text"
    JSON = "json"
    """The action itself, as a JSON object."""


@dataclass(frozen=True)
class Limits:
    """What a server may cost."""

    timeout_s: float
    """Seconds for one step, or for a reset with its connection and all further attempts."""
    retries: int
    """Further attempts at a reset, on a new connection. A step is never tried again: its episode ends with it."""
    idle_timeout_s: float
    """Seconds after which the connection of an episode that nobody steps is closed."""
    max_reply_bytes: int


@dataclass(frozen=True)
class Settings:
    """The options, read."""

    url: str
    """Base URL, http(s)."""
    action: Mapping[str, Any]
    """The action with ``ANSWER`` in the place of what the policy wrote; for JSON the fixed fields beside it."""
    action_format: ActionFormat
    observation: str | tuple[str, ...] | None
    """A path, a template with {paths}, several paths, or None: the whole observation as JSON."""
    reward: str
    """Name of the component."""
    invalid_action_reward: float
    """Reward of a step whose action is none."""
    reset: Mapping[str, Any]
    """Keyword arguments of reset; ``{"column": name}`` is a column of the row."""
    first_prompt: FirstPrompt
    prompt: str | None
    """Prompt of the rows that it makes itself."""
    api_key_env: str | None
    limits: Limits


def read_settings(options: Mapping[str, Any] | None) -> Settings:
    """The options with their defaults. Raises ConfigError."""
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
    action_format = _one_of("action_format", chosen.action_format, ActionFormat)
    return Settings(
        _url(chosen.url),
        _action(chosen.action, action_format),
        action_format,
        _observation(chosen.observation),
        _text("reward", chosen.reward),
        _number("invalid_action_reward", chosen.invalid_action_reward, float("-inf")),
        _reset(chosen.reset),
        _one_of("first_prompt", chosen.first_prompt, FirstPrompt),
        None if chosen.prompt is None else _text("prompt", chosen.prompt),
        None if chosen.api_key_env is None else _text("api_key_env", chosen.api_key_env),
        Limits(
            _number("timeout_s", chosen.timeout_s, 0.001),
            int(_number("retries", chosen.retries, 0)),
            _number("idle_timeout_s", chosen.idle_timeout_s, 0.001),
            int(_number("max_reply_bytes", chosen.max_reply_bytes, 1)),
        ),
    )


def _url(value: Any) -> str:
    """OpenEnv's own client takes both kinds of scheme, so both are what people have at hand."""
    if isinstance(value, str):
        for scheme, other in _WEBSOCKETS.items():
            value = other + value.removeprefix(scheme) if value.startswith(scheme) else value
    return base_url("url", value)


def _action(value: Any, action_format: ActionFormat) -> dict[str, Any]:
    if action_format is ActionFormat.JSON:
        if value is not None and not (_named(value) and _answers(value) == 0):
            raise ConfigError(
                "action: with action_format json the policy writes the action, and this holds the fixed fields beside "
                f"it, not {value!r}"
            )
        return dict(value or {})
    if isinstance(value, str) and value:
        return {value: ANSWER}
    if not _named(value) or not _answers(value):
        raise ConfigError(
            "action: name the field of the action that gets the policy's text, or give the action with "
            f'"{ANSWER}" in its place, not {value!r}'
        )
    return dict(value)


def _named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _answers(value: Any) -> int:
    """How often the policy's text is in an action."""
    if isinstance(value, Mapping):
        return sum(_answers(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_answers(part) for part in value)
    return int(isinstance(value, str) and value == ANSWER)


def _observation(value: Any) -> str | tuple[str, ...] | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(path, str) and path for path in value):
        return tuple(value)
    raise ConfigError(f"observation: must be a field, a list of fields or a text with {{fields}} in it, not {value!r}")


def _reset(value: Any) -> dict[str, Any]:
    if not _named(value):
        raise ConfigError(f"reset: must be keyword arguments, {{name: value}}, not {value!r}")
    for name, argument in value.items():
        if isinstance(argument, Mapping) and not (
            list(argument) == ["column"] and isinstance(argument["column"], str) and argument["column"]
        ):
            raise ConfigError(
                f"reset.{name}: must be a value, or {{column: name}} for one of the row, not {argument!r}"
            )
    return dict(value)


def _one_of(key: str, value: Any, kind: type[StrEnum]) -> Any:
    if value not in list(kind):
        names = [str(one) for one in kind]
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(names)}{nearest(str(value), names)}")
    return kind(value)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: must be a text, not {value!r}")
    return value


def _number(key: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise ConfigError(f"{key}: must be a number{'' if least < 0 else f' of at least {least:g}'}, not {value!r}")
    return value
