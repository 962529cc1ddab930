"""Between the policy's words and OpenEnv's messages: text to action, observation to text, reply to reward."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any, Mapping

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.data.failures import Failure, FailureKind, printable
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.replies import parse_json, validation_errors
from gdpo_nemo.environments.episodes import MAX_OBSERVATION_CHARACTERS, Observation
from gdpo_nemo.environments.openenv.openenv_settings import ANSWER, ActionFormat, FirstPrompt, Settings
from gdpo_nemo.errors import ConfigError

MAX_JSON_DEPTH = 100
_NOT_SHOWN = ("metadata", "done", "reward")
"""Fields of every observation, which are not about the environment's state."""
_FIELD = re.compile(r"\{([^{}]+)\}")


class InvalidAction(Exception):
    """What the policy wrote is no action. The text is what it is told."""


@dataclass(frozen=True)
class StepResult:
    """One observation message of a server, checked."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


def action_of(settings: Settings, text: str) -> dict[str, Any]:
    """The action that the policy's text stands for. Raises InvalidAction."""
    if settings.action_format is ActionFormat.TEXT:
        filled: dict[str, Any] = _filled(settings.action, text)
        return filled
    try:
        action = parse_json(text.encode("utf-8", "replace"), MAX_JSON_DEPTH)
    except Failure:
        raise InvalidAction("Invalid action: it must be a JSON object.") from None
    if not isinstance(action, dict):
        raise InvalidAction("Invalid action: it must be a JSON object.")
    return {**action, **settings.action}


def _filled(part: Any, text: str) -> Any:
    """An action with the policy's text put in."""
    if isinstance(part, Mapping):
        return {key: _filled(value, text) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_filled(value, text) for value in part]
    return text if isinstance(part, str) and part == ANSWER else part


def reset_arguments(settings: Settings, prompt: Prompt) -> dict[str, Any]:
    """Keyword arguments of reset for a row.

    All samples of a row have one ``seed``, which comes from the row's id: a group answers one question, in every epoch
    and after a resume. An environment whose reset takes no seed is given none by its server.

    Raises:
        ConfigError: the row lacks a column.
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
    """What an answer to reset or step says. Raises Failure(BAD_REPLY)."""
    data = reply.get("data")
    if reply.get("type") != "observation" or not isinstance(data, Mapping):
        raise _bad(f"the server sent {printable(repr(reply.get('type')), 40)} where an observation should be")
    observation = data.get("observation", {})
    if not isinstance(observation, Mapping):
        raise _bad(f"the observation is a {type(observation).__name__}, not an object")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise _bad(f"done is {printable(repr(done), 40)}, neither true nor false")
    return StepResult(observation, _reward(data.get("reward")), done)


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise _bad(f"the reward is a {type(value).__name__}, not a number")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise _bad("the reward is not finite")
    return reward


def observation_text(settings: Settings, observation: Mapping[str, Any], complete: bool = True) -> str:
    """What the policy is shown of an observation.

    Args:
        complete: whether a field that is not there is a failure; it is empty text otherwise.

    Raises:
        Failure: BAD_REPLY for a missing field, TOO_LARGE.
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
            FailureKind.TOO_LARGE, f"an observation of {len(text)} characters, over {MAX_OBSERVATION_CHARACTERS}"
        )
    # JSON may hold halves of characters, which no tokenizer takes.
    return text.encode("utf-8", "replace").decode()


def first_prompt(settings: Settings, prompt: Prompt, observation: Mapping[str, Any]) -> Observation | None:
    """The prompt of an episode that begins with this observation; None: the row's own.

    Raises:
        Failure: as ``observation_text``.
    """
    if settings.first_prompt is FirstPrompt.ROW:
        return None
    # The observation of reset often has fewer fields than those of steps.
    text = observation_text(settings, observation, complete=False)
    if settings.first_prompt is FirstPrompt.OBSERVATION:
        told = [dict(m) for m in prompt.messages or () if m.get("role") == "system"]
        return [*told, {"role": "user", "content": text}] if told else text or "\n"
    if not text:
        return None
    if prompt.messages is None:
        return f"{prompt.text}\n\n{text}"
    *before, last = (dict(message) for message in prompt.messages)
    if last.get("role") == "user":
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*before, last, {"role": "user", "content": text}]


def _at(observation: Any, path: str, complete: bool) -> str:
    place = observation
    for part in path.split("."):
        if not isinstance(place, Mapping) or part not in place:
            if not complete:
                return ""
            has = printable(", ".join(map(str, observation)), 160)
            raise _bad(f"observation.{path} is not in the reply; it has {has or 'no field'}")
        place = place[part]
    return _as_text(place)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_error(settings: Settings, reply: Mapping[str, Any]) -> None:
    """Raise what an error message stands for.

    Raises:
        InvalidAction: the server's check of the action found fault with the policy's part alone.
        Failure: RATE_LIMITED where no session is free, REJECTED for an action that the config made, BAD_REPLY for a
            message that the server did not understand, SERVER_ERROR for the rest, such as what the environment raised.
    """
    if reply.get("type") != "error":
        return
    data = reply.get("data")
    data = data if isinstance(data, Mapping) else {}
    code = str(data.get("code"))
    said = f"{printable(code, 40)}: {printable(str(data.get('message')), 200)}"
    if code == "VALIDATION_ERROR":
        faults = [entry for entry in data.get("errors") or () if isinstance(entry, Mapping)]
        words = printable(validation_errors({"detail": faults}), 300)
        if faults and all(_by_policy(settings, entry) for entry in faults):
            raise InvalidAction(f"Invalid action: {words}")
        raise Failure(FailureKind.REJECTED, f"{said}: {words}" if faults else said)
    if code == "CAPACITY_REACHED":
        raise Failure(FailureKind.RATE_LIMITED, f"{said} (max_concurrent_envs of the server)")
    if code in ("INVALID_JSON", "UNKNOWN_TYPE"):
        raise _bad(said)
    raise Failure(FailureKind.SERVER_ERROR, said)


def _by_policy(settings: Settings, fault: Mapping[str, Any]) -> bool:
    """Whether a fault of an action is in what the policy wrote, and not in what the config says."""
    place = fault.get("loc")
    field = place[0] if isinstance(place, (list, tuple)) and place else None
    if settings.action_format is ActionFormat.JSON:
        return field not in settings.action
    # A field that the action has not is one that the config has named.
    return field in policy_fields(settings.action) and fault.get("type") != "extra_forbidden"


def policy_fields(action: Mapping[str, Any]) -> set[str]:
    """Fields of the action that the policy's text is in."""
    return {key for key, part in action.items() if _filled(part, "") != _filled(part, "x")}


def check_schema(settings: Settings, schema: Any) -> None:
    """Compare the options with the schemas of actions and observations that a server publishes.

    Raises:
        ConfigError: an action has no such field or lacks one that it must have; an observation has no such field.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    if "type" in settings.action:  # a call of a tool, which servers take besides the actions that they publish
        return
    known, required = _fields(schema.get("action"))
    for field in settings.action:
        if known and field not in known:
            raise ConfigError(f"action: the server's actions have no field {field!r}{nearest(field, known)}")
    absent = [field for field in required if field not in settings.action]
    if absent and settings.action_format is ActionFormat.TEXT:
        raise ConfigError(f"action: the server's actions need the field {absent[0]!r}, too")
    known, _ = _fields(schema.get("observation"))
    chosen = settings.observation
    paths = chosen if isinstance(chosen, tuple) else _FIELD.findall(chosen or "") or [chosen] * (chosen is not None)
    for path in paths:
        field = str(path).partition(".")[0]
        if known and field not in known:
            raise ConfigError(f"observation: the server's observations have no field {field!r}{nearest(field, known)}")


def _fields(schema: Any) -> tuple[list[str], list[str]]:
    """(fields, fields that must be there) of a JSON schema; none where it allows others besides."""
    if not isinstance(schema, Mapping) or schema.get("additionalProperties") is not False:
        return [], []
    properties = schema.get("properties")
    required = schema.get("required")
    return (
        [str(name) for name in properties] if isinstance(properties, Mapping) else [],
        [str(name) for name in required] if isinstance(required, list) else [],
    )


def _bad(detail: str) -> Failure:
    return Failure(FailureKind.BAD_REPLY, detail)
