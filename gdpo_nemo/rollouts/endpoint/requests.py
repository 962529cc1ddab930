"""Validation of requests from untrusted clients, and conversion between the Responses API and chat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_nemo.data.conversation import output_items
from gdpo_nemo.data.replies import Reply
from gdpo_nemo.environments.server_replies import depth_exceeds
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.endpoint.conversations import TOKEN_FIELDS, Turn, part_of
from gdpo_nemo.rollouts.endpoint.images import RequestImages, is_image
from gdpo_nemo.utils.files import parse_json

MAX_BODY_BYTES = 64 * 2**20
_MAX_DEPTH = 100
_MAX_MESSAGES = 10_000
_MAX_TOKENS = 2**20
_MAX_CHOICES = 8
_MAX_STOPS = 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "structured_outputs": (),
    "seed": (),
    "best_of": (1,),
    "echo": (False,),
}
"""Request keys that would change the sampling, with the values that have no effect.

All other values are rejected, because training relies on the sampling settings of the run.
"""


class Refused(Exception):
    """Raised to answer a request with an HTTP error status and a message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


class NoRoom(Refused):
    """Raised with status 400 if the conversation has reached a limit on turns or tokens."""

    def __init__(self, message: str):
        super().__init__(400, message)


@dataclass(frozen=True)
class ChatRequest:
    """Fields of a chat request that the endpoint uses."""

    messages: list[dict[str, Any]]
    """Messages whose image parts are ``{"type": "image", "image": Image}``."""
    tools: list[Mapping[str, Any]] | None
    max_tokens: int | None
    wants_logprobs: bool
    session: str
    choices: int = 1
    """Number of completions."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion. They are not part of the reply's text."""
    stream: bool = False
    parses_calls: bool = True
    """False if ``tool_choice`` is none: calls remain in the text."""


def read_chat(body: bytes, sampling: Sampling, session: str, images: RequestImages | None = None) -> ChatRequest:
    """Parse a request to /v1/chat/completions or /tokenize.

    Args:
        images: reader of images, or None if the policy reads only text.

    Raises:
        Refused: with status 400 if the request is invalid.
    """
    return read_request(read_object(body), sampling, session, images)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a request body that must be a JSON object.

    Raises:
        Refused: with status 400 if the body is invalid.
    """
    if depth_exceeds(body, _MAX_DEPTH):
        raise Refused(400, f"the request is not valid JSON: it is nested more than {_MAX_DEPTH} levels deep")
    try:
        request = parse_json(body)
    except ValueError as error:
        raise Refused(400, f"the request is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise Refused(400, "the request must be a JSON object")
    return request


def read_request(
    request: Mapping[str, Any], sampling: Sampling, session: str, images: RequestImages | None = None
) -> ChatRequest:
    """Validate the fields of a chat request that the endpoint uses, and return them.

    Raises:
        Refused: with status 400 if a field is invalid or not supported.
    """
    _check_sampling(request, sampling)
    limits = [n for n in (request.get("max_tokens"), request.get("max_completion_tokens")) if n is not None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in limits):
        raise Refused(400, "max_tokens must be an integer of at least 1")
    user = request.get("user")
    return ChatRequest(
        _messages(request.get("messages"), images),
        _tools(request.get("tools")),
        min(limits, default=None),
        bool(request.get("logprobs")),
        user if isinstance(user, str) and not session else session,
        _choices(request.get("n")),
        _stop(request.get("stop")),
        _flag("stream", request.get("stream")),
        _parses_calls(request.get("tool_choice")),
    )


def _choices(value: Any) -> int:
    if value is None:
        return 1
    if type(value) is not int or not 1 <= value <= _MAX_CHOICES:
        raise Refused(400, f"n must be an integer from 1 to {_MAX_CHOICES}")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) and value else value or []
    if not isinstance(strings, list) or len(strings) > _MAX_STOPS or not all(isinstance(s, str) and s for s in strings):
        raise Refused(400, f"stop must be a string or a list of at most {_MAX_STOPS} strings")
    return tuple(strings)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name} must be true or false")
    return bool(value)


def _parses_calls(value: Any) -> bool:
    if value in (None, "auto"):
        return True
    if value == "none":
        return False
    raise Refused(
        400,
        f"tool_choice {str(value)[:40]} is not supported, because a forced call would change the sampling; use auto "
        "or none",
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
            raise Refused(400, f"{key} {value!r} conflicts with the policy's sampling ({used}); remove it")
    refuse_others(request, _NEUTRAL, WOULD_CHANGE)


WOULD_CHANGE = "it would change the sampling"


def refuse_others(request: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], reason: str) -> None:
    """Check that each key in ``neutral`` is missing, null or has one of its values that have no effect.

    Raises:
        Refused: with status 400 and the reason.
    """
    for key, values in neutral.items():
        if request.get(key) is not None and request[key] not in values:
            raise Refused(400, f"{key} {str(request[key])[:40]} is not supported: {reason}")


def _messages(messages: Any, images: RequestImages | None) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or len(messages) > _MAX_MESSAGES:
        raise Refused(400, f"messages must be a list of 1 to {_MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, f"messages[{index}] must be an object with a role")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(f"messages[{index}].content", content, message["role"])
        elif content is not None and not isinstance(content, str):
            raise Refused(400, f"messages[{index}].content must be text")
        _check_calls(index, message.get("tool_calls"))
        for key in ("prompt_token_ids", "generation_token_ids"):
            if message.get(key) is not None and not are_token_ids(message[key], _MAX_TOKENS):
                raise Refused(400, f"messages[{index}].{key} must be a list of token ids")
    _read_images(messages, images)
    return messages


def _check_parts(where: str, content: Sequence[Any], role: str) -> None:
    for part in content:
        if not isinstance(part, dict) or not (isinstance(part.get("text"), str) or is_image(part)):
            raise Refused(400, f"{where} contains a part that is neither text nor an image")
        if is_image(part) and role == "assistant":
            raise Refused(400, f"{where} contains an image, but the policy writes only text")


def _read_images(messages: Sequence[dict[str, Any]], images: RequestImages | None) -> None:
    """Replace each image part by ``{"type": "image", "image": Image}``.

    Raises:
        NoRoom: if the conversation has too many images.
        Refused: with status 400 if an image is invalid, or the policy reads only text.
    """
    contents: list[Any] = [message.get("content") for message in messages]
    count = sum(len(_image_places(content)) for content in contents)
    if images is not None and count > images.limit:
        raise NoRoom(
            f"the conversation exceeds the context length, because it has {count} images, and the limit is "
            f"{images.limit} (data.images.max_per_prompt)"
        )
    for index, content in enumerate(contents):
        for place in _image_places(content):
            where = f"messages[{index}].content[{place}]"
            if images is None:
                raise Refused(400, f"{where} is an image, but the policy reads only text")
            try:
                content[place] = {"type": "image", "image": images.read(content[place])}
            except ValueError as error:
                raise Refused(400, f"{where} {error}") from None


def _image_places(content: Any) -> list[int]:
    """Return the indices of the image parts of a message's content."""
    return [place for place, part in enumerate(content) if is_image(part)] if isinstance(content, list) else []


def _check_calls(index: int, calls: Any) -> None:
    is_valid = calls is None or isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    if not is_valid or not all(isinstance(call.get("function"), dict) for call in calls or ()):
        raise Refused(400, f"messages[{index}].tool_calls must be a list of function calls")


def are_token_ids(value: Any, most: int) -> bool:
    """Return whether a value from a client is a list of at most ``most`` numbers of ``client_ids``."""
    is_short_list = isinstance(value, list) and len(value) <= most
    return is_short_list and all(type(token) is int and 0 <= token < 2**53 for token in value)


def _tools(tools: Any) -> list[Mapping[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "tools must be a list of objects")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools[{index}] must have a function with a name")
        if not isinstance(function.get("parameters"), (dict, type(None))):
            raise Refused(400, f"tools[{index}].function.parameters must be a JSON schema")
    return tools


_NEUTRAL_RESPONSES = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
}
"""Keys of the Responses API that would change the prompt, the answer or its format, with the values that have no
effect. All other values are rejected.
"""
_TEXT_PARTS = ("input_text", "output_text", "summary_text", "text")


def read_responses(
    body: bytes, sampling: Sampling, session: str, images: RequestImages | None = None
) -> tuple[ChatRequest, Mapping[str, Any]]:
    """Parse a request to /v1/responses. Return the chat request and the original request.

    Args:
        images: reader of images, or None if the policy reads only text.

    Raises:
        Refused: with status 400 if the request is invalid.
    """
    request = read_object(body)
    refuse_others(request, _NEUTRAL_RESPONSES, "input must contain the whole conversation")
    _check_metadata(request.get("metadata"))
    chat = dict(request)
    chat.pop("logprobs", None)  # the field of a chat request, which has another meaning
    instructions = request.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = system + _response_messages(request.get("input"))
    chat["max_tokens"] = request.get("max_output_tokens")
    chat["tools"] = [_chat_tool(index, tool) for index, tool in enumerate(_list("tools", request.get("tools") or []))]
    found = read_request(chat, sampling, session, images)
    if found.choices != 1:
        raise Refused(400, "n is not supported, because a response has one choice")
    return found, request


def _check_metadata(metadata: Any) -> None:
    """Check that the metadata has no chat template settings, which NeMo Gym's agents store there as JSON.

    Requests with template settings are refused, because every prompt is rendered with the settings of the run.
    """
    if isinstance(metadata, Mapping) and metadata.get("chat_template_kwargs") not in (None, "", "{}", {}):
        value = str(metadata["chat_template_kwargs"])[:40]
        raise Refused(
            400, f"metadata.chat_template_kwargs {value} is not supported: every prompt is rendered as in training"
        )


def response_of(turn: Turn, message: Mapping[str, Any], request: Mapping[str, Any], number: str) -> dict[str, Any]:
    """Return the reply to a Responses API request. The last item of the reply has the token fields of NeMo Gym's model
    server.

    Args:
        message: the assistant's message, in chat format.
        request: request in its original format.
        number: identifier of the turn, used in all ids of the reply.
    """
    completion = turn.completion
    items = _items(message, number)
    items[-1] |= turn.token_fields
    return _response(
        items,
        request,
        number,
        incomplete=completion.finish_reason == "length",
        input_tokens=len(turn.prompt_ids),
        output_tokens=len(completion.token_ids),
    )


def response_without_room(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply for a conversation that has reached a limit: an empty text, marked as incomplete."""
    return _response(_items({"content": ""}, "none"), request, "none", incomplete=True, input_tokens=0, output_tokens=0)


# -- items to messages -----------------------------------------------------------------------------------------


def _response_messages(items: Any) -> list[dict[str, Any]]:
    """Convert response items to chat messages.

    Consecutive text, reasoning and tool calls of the assistant become one message. An item with token ids ends the
    message, because only the last item of a turn has token ids.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for index, item in enumerate(_list("input", items)):
        where = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise Refused(400, f"{where} must be an object")
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            turn = None
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(where, item.get("output"))}
            )
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append({"role": item.get("role"), "content": _content(where, item.get("content"))})
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _append_item(where, kind, item, turn)
            if item.get("prompt_token_ids") is not None:
                turn |= part_of(item, TOKEN_FIELDS)
                turn = None
    return messages


def _append_item(where: str, kind: str, item: Mapping[str, Any], turn: dict[str, Any]) -> None:
    """Append an assistant item (text, reasoning or tool call) to the assistant's message ``turn``."""
    if kind == "message":
        turn["content"] += _text(where, item.get("content"))
    elif kind == "reasoning":
        parts = [_text(where, [part]) for part in _list(f"{where}.summary", item.get("summary") or [])]
        turn["content"] += "".join(f"<think>{part}</think>" for part in parts if part)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    else:
        raise Refused(400, f"{where} is of type {str(kind)[:40]!r}, which is not supported in a chat")


def _content(where: str, content: Any) -> str | list[dict[str, Any]]:
    """Return the text of an item, or a list of parts if it contains images."""
    if not _image_places(content):
        return _text(where, content)
    return [dict(part) if is_image(part) else {"type": "text", "text": _text(where, [part])} for part in content]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} contains no text")
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in _TEXT_PARTS
            or not isinstance(part.get("text"), str)
        ):
            raise Refused(400, f"{where} contains a part that is not text")
    return "".join(part["text"] for part in content)


def _chat_tool(index: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise Refused(400, f"tools[{index}] is not a function")
    return {"type": "function", "function": part_of(tool, ("name", "description", "parameters"))}


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(400, f"{name} must be a list")
    return value


# -- messages to items -----------------------------------------------------------------------------------------


def _items(message: Mapping[str, Any], number: str) -> list[dict[str, Any]]:
    """Convert the assistant's message to items: reasoning, text and tool calls. The result contains at least one
    item."""
    calls = message.get("tool_calls") or ()
    reply = Reply(message.get("content") or "", message.get("reasoning_content") or "")
    items = list(_text_items(reply, number)) if reply.content or reply.reasoning or not calls else []
    for index, call in enumerate(calls):
        ids = {"id": f"fc_{number}_{index}", "call_id": call["id"]}
        items.append({**ids, "type": "function_call", "status": "completed", **call["function"]})
    return items


def _text_items(reply: Reply, number: str) -> Iterator[dict[str, Any]]:
    for item in output_items(reply, split_reasoning=True):
        yield {**item, "id": f"{item['id'].partition('_')[0]}_{number}"}


def _response(
    items: Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    number: str,
    *,
    incomplete: bool,
    input_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": request.get("model") or "policy",
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "output": items,
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "tool_choice": "auto",
        "tools": request.get("tools") or [],
        "usage": {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        },
    }
