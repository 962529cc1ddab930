"""Conversions between the policy's text and OpenEnv messages: text to action, and reply to observation and reward."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gdpo_nemo.data.records import Prompt
from gdpo_nemo.environments.episodes import MAX_OBSERVATION_CHARACTERS, Observation
from gdpo_nemo.environments.openenv.settings import ANSWER, ActionFormat, FirstPrompt, Settings
from gdpo_nemo.environments.server_replies import (
    Failure,
    FailureKind,
    error_text,
    finite_number,
    parse_json,
    printable,
)
from gdpo_nemo.utils.errors import ConfigError, nearest

MAX_JSON_DEPTH = 100
_NOT_SHOWN = ("metadata", "done", "reward")
"""Fields that any observation may contain. These fields are not shown to the policy."""
_FIELD = re.compile(r"\{([^{}]+)\}")


class InvalidAction(Exception):
    """Raised if the policy's text is not a valid action. The message is shown to the policy."""


@dataclass(frozen=True)
class StepResult:
    """Validated reply of a server to a reset or step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


def action_of(settings: Settings, text: str) -> dict[str, Any]:
    """Convert the policy's text to an action. Raises InvalidAction."""
    if settings.action_format is ActionFormat.TEXT:
        filled: dict[str, Any] = _with_text(settings.action, text)
        return filled
    try:
        action = parse_json(text.encode("utf-8", "replace"), MAX_JSON_DEPTH)
    except Failure:
        raise InvalidAction("Invalid action: it must be a JSON object.") from None
    if not isinstance(action, dict):
        raise InvalidAction("Invalid action: it must be a JSON object.")
    return {**action, **settings.action}


def _with_text(part: Any, text: str) -> Any:
    """Return an action with the policy's text inserted."""
    if isinstance(part, Mapping):
        return {key: _with_text(value, text) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_with_text(value, text) for value in part]
    return text if isinstance(part, str) and part == ANSWER else part


def reset_arguments(settings: Settings, prompt: Prompt) -> dict[str, Any]:
    """Return the keyword arguments of the reset for a row.

    The argument ``seed`` is derived from the row's id. All samples of a group therefore get the same question in every
    epoch, even after a resume. The server ignores the seed if the environment's reset does not accept it.

    Raises:
        ConfigError: if the row lacks a column that the option ``reset`` uses.
    """
    arguments: dict[str, Any] = {"seed": int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:4]) >> 1}
    for name, value in settings.reset.items():
        if isinstance(value, Mapping):
            column = value["column"]
            if column not in prompt.fields:
                known = nearest(column, prompt.fields)
                raise ConfigError(f"reset.{name}: row {prompt.id} has no column {column!r}{known}")
            value = prompt.fields[column]
        arguments[name] = value
    return arguments


def result_of(reply: Mapping[str, Any]) -> StepResult:
    """Validate the reply to a reset or step and return its content. Raises Failure(BAD_REPLY) if the reply is
    invalid."""
    data = reply.get("data")
    if reply.get("type") != "observation" or not isinstance(data, Mapping):
        raise _bad(f"expected an observation from the server, got {printable(repr(reply.get('type')), 40)}")
    observation = data.get("observation", {})
    if not isinstance(observation, Mapping):
        raise _bad(f"expected an object as the observation, got {type(observation).__name__}")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise _bad(f"done must be true or false, not {printable(repr(done), 40)}")
    reward = data.get("reward")
    return StepResult(observation, None if reward is None else finite_number(reward, "the reward"), done)


def observation_text(settings: Settings, observation: Mapping[str, Any], complete: bool = True) -> str:
    """Format an observation as text for the policy.

    Args:
        complete: True to raise for missing fields, False to replace missing fields with empty text.

    Raises:
        Failure: BAD_REPLY for a missing field; TOO_LARGE if the text exceeds ``MAX_OBSERVATION_CHARACTERS``.
    """
    chosen = settings.observation
    if chosen is None:
        shown = {key: value for key, value in observation.items() if key not in _NOT_SHOWN and value is not None}
        text = _as_text(shown) if shown else ""
    elif isinstance(chosen, tuple):
        text = "\n".join(f"{path}: {_at(observation, path, complete)}" for path in chosen)
    elif _FIELD.search(chosen):
        text = _FIELD.sub(lambda match: _at(observation, match[1], complete), chosen)
    else:
        text = _at(observation, chosen, complete)
    if len(text) > MAX_OBSERVATION_CHARACTERS:
        raise Failure(
            FailureKind.TOO_LARGE,
            f"an observation has {len(text)} characters, more than the limit of {MAX_OBSERVATION_CHARACTERS}",
        )
    # JSON may contain lone surrogates, which no tokenizer accepts.
    return text.encode("utf-8", "replace").decode()


def first_prompt(settings: Settings, prompt: Prompt, observation: Mapping[str, Any]) -> Observation | None:
    """Return the first prompt of an episode, or None to use the row's prompt.

    Args:
        observation: observation of the reset.

    Raises:
        Failure: same as in ``observation_text``.
    """
    if settings.first_prompt is FirstPrompt.ROW:
        return None
    # The observation of a reset often lacks fields that the observations of steps have.
    text = observation_text(settings, observation, complete=False)
    if settings.first_prompt is FirstPrompt.OBSERVATION:
        system_messages = [dict(m) for m in prompt.messages or () if m.get("role") == "system"]
        return [*system_messages, {"role": "user", "content": text}] if system_messages else text or "\n"
    if not text:
        return None
    if prompt.messages is None:
        return f"{prompt.text}\n\n{text}"
    *before, last = map(dict, prompt.messages)
    if last.get("role") == "user":
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*before, last, {"role": "user", "content": text}]


def _at(observation: Any, path: str, complete: bool) -> str:
    value = observation
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            if not complete:
                return ""
            has = printable(", ".join(map(str, observation)), 160)
            raise _bad(f"observation.{path} is not in the reply; the reply has {has or 'no field'}")
        value = value[part]
    return _as_text(value)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_error(settings: Settings, reply: Mapping[str, Any]) -> None:
    """Raise an exception if the reply is an error message.

    Raises:
        InvalidAction: if the validation errors concern only fields that the policy wrote.
        Failure: RATE_LIMITED if no session is free, REJECTED if the configured action is invalid, BAD_REPLY if the
            server could not parse the request, SERVER_ERROR in all other cases, for example if the environment raised.
    """
    if reply.get("type") != "error":
        return
    data = reply.get("data")
    data = data if isinstance(data, Mapping) else {}
    code = str(data.get("code"))
    description = f"{printable(code, 40)}: {printable(str(data.get('message')), 200)}"
    if code == "VALIDATION_ERROR":
        validation_faults = [entry for entry in data.get("errors") or () if isinstance(entry, Mapping)]
        details = printable(error_text({"detail": validation_faults}), 300)
        if validation_faults and all(_caused_by_policy(settings, entry) for entry in validation_faults):
            raise InvalidAction(f"Invalid action: {details}")
        raise Failure(FailureKind.REJECTED, f"{description}: {details}" if validation_faults else description)
    if code == "CAPACITY_REACHED":
        raise Failure(FailureKind.RATE_LIMITED, f"{description} (limit max_concurrent_envs of the server)")
    if code in ("INVALID_JSON", "UNKNOWN_TYPE"):
        raise _bad(description)
    raise Failure(FailureKind.SERVER_ERROR, description)


def _caused_by_policy(settings: Settings, fault: Mapping[str, Any]) -> bool:
    """Return whether the policy's text, and not the config, caused a validation error."""
    location = fault.get("loc")
    field = location[0] if isinstance(location, (list, tuple)) and location else None
    if settings.action_format is ActionFormat.JSON:
        return field not in settings.action
    # An error of type extra_forbidden means that the config contains an unknown field.
    return field in policy_fields(settings.action) and fault.get("type") != "extra_forbidden"


def policy_fields(action: Mapping[str, Any]) -> set[str]:
    """Return the names of the top-level action fields that contain the policy's text."""
    return {key for key, part in action.items() if _with_text(part, "") != _with_text(part, "x")}


def check_schema(settings: Settings, schema: Any) -> None:
    """Check the options ``action`` and ``observation`` against the JSON schemas that a server publishes.

    Raises:
        ConfigError: if a field is not in the schema, or a required field of the action is not set.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    if "type" in settings.action:  # servers accept tool calls in addition to the published actions
        return
    known, required = _fields(schema.get("action"))
    for field in settings.action:
        if known and field not in known:
            raise ConfigError(f"action: the server's actions have no field {field!r}{nearest(field, known)}")
    absent = [field for field in required if field not in settings.action]
    if absent and settings.action_format is ActionFormat.TEXT:
        raise ConfigError(f"action: the server's actions also require the field {absent[0]!r}")
    known, _ = _fields(schema.get("observation"))
    chosen = settings.observation
    paths = chosen if isinstance(chosen, tuple) else _FIELD.findall(chosen or "") or [chosen] * (chosen is not None)
    for path in paths:
        field = str(path).partition(".")[0]
        if known and field not in known:
            raise ConfigError(f"observation: the server's observations have no field {field!r}{nearest(field, known)}")


def _fields(schema: Any) -> tuple[list[str], list[str]]:
    """Return (fields, required fields) of a JSON schema. Both sets are empty if the schema allows additional fields."""
    if not isinstance(schema, Mapping) or schema.get("additionalProperties") is not False:
        return [], []
    properties = schema.get("properties")
    required = schema.get("required")
    return (
        list(map(str, properties)) if isinstance(properties, Mapping) else [],
        list(map(str, required)) if isinstance(required, list) else [],
    )


def _bad(detail: str) -> Failure:
    return Failure(FailureKind.BAD_REPLY, detail)
