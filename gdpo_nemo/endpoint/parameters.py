"""Requests as they come over the wire, and what of them is refused. Clients are not trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping

from gdpo_nemo.config.reading import parse_json
from gdpo_nemo.data.replies import depth_exceeds
from gdpo_nemo.generation.requests import Sampling

MAX_BODY_BYTES = 64 * 2**20
_MAX_DEPTH = 100
_MAX_MESSAGES = 10_000
_MAX_TOKENS = 2**20
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "stop": ([], ""),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "structured_outputs": (),
    "seed": (),
    "best_of": (1,),
    "echo": (False,),
}
"""Keys that would change what is sampled, and the values that do not. The engines sample as the trainer believes."""


class Refused(Exception):
    """A request that is answered with an error: an HTTP status and a sentence."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


class NoRoom(Refused):
    """The conversation has used up a budget or the context, status 400."""

    def __init__(self, message: str):
        super().__init__(400, message)


@dataclass(frozen=True)
class ChatRequest:
    """What of a request counts."""

    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None
    max_tokens: int | None
    wants_logprobs: bool
    session: str


def read_chat(body: bytes, sampling: Sampling, session: str) -> ChatRequest:
    """A request to /v1/chat/completions or /tokenize. Raises Refused, status 400."""
    return read_request(read_object(body), sampling, session)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a request is. Raises Refused, status 400."""
    if depth_exceeds(body, _MAX_DEPTH):
        raise Refused(400, f"the request is not valid JSON: it is nested more than {_MAX_DEPTH} levels deep")
    try:
        request = parse_json(body)
    except ValueError as error:
        raise Refused(400, f"the request is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise Refused(400, "the request must be a JSON object")
    return request


def read_request(request: Mapping[str, Any], sampling: Sampling, session: str) -> ChatRequest:
    """What of a chat request counts. Raises Refused, status 400."""
    _check_sampling(request, sampling)
    limits = [value for key in ("max_tokens", "max_completion_tokens") if (value := request.get(key)) is not None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in limits):
        raise Refused(400, "max_tokens must be a whole number of at least 1")
    user = request.get("user")
    return ChatRequest(
        _messages(request.get("messages")),
        _tools(request.get("tools")),
        min(limits, default=None),
        bool(request.get("logprobs")),
        user if isinstance(user, str) and not session else session,
    )


def _check_sampling(request: Mapping[str, Any], sampling: Sampling) -> None:
    for key in ("temperature", "top_p", "top_k"):
        value = request.get(key)
        used = getattr(sampling, key)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isclose(value, used, rel_tol=1e-6)
        ):
            raise Refused(400, f"{key} {value!r} is not what the policy is sampled with ({used}); leave it out")
    for key, neutral in _NEUTRAL.items():
        if request.get(key) is not None and request[key] not in neutral:
            raise Refused(400, f"{key} {str(request[key])[:40]} is not supported: it would change what is sampled")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or len(messages) > _MAX_MESSAGES:
        raise Refused(400, f"messages must be a list of 1 to {_MAX_MESSAGES} messages")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, f"messages[{place}] is no object with a role")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise Refused(400, f"messages[{place}].content holds a part that is no text")
        elif content is not None and not isinstance(content, str):
            raise Refused(400, f"messages[{place}].content must be text")
        _check_calls(place, message.get("tool_calls"))
        for key in ("prompt_token_ids", "generation_token_ids"):
            _check_ids(f"messages[{place}].{key}", message.get(key))
    return messages


def _check_calls(place: int, calls: Any) -> None:
    good = calls is None or isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    if not good or not all(isinstance(call.get("function"), dict) for call in calls or ()):
        raise Refused(400, f"messages[{place}].tool_calls must be a list of function calls")


def _check_ids(what: str, ids: Any) -> None:
    if ids is None:
        return
    good = isinstance(ids, list) and len(ids) <= _MAX_TOKENS
    if not good or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise Refused(400, f"{what} must be a list of token ids")


def _tools(tools: Any) -> list[Mapping[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "tools must be a list of objects")
    return tools
