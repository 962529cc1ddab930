"""The Responses API in terms of chat: a request's items become messages, an answer's message becomes items.

Sampling, histories and budgets know chat requests only, so both routes refuse, splice and count alike. One thing
differs: a conversation without room is not refused here but answered with an empty, incomplete response. That is what
NeMo Gym's model server makes of the refusal; it lets an agent end its episode and keep the turns before.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from gdpo_nemo.data.completions import output_items
from gdpo_nemo.endpoint.conversations import Turn
from gdpo_nemo.endpoint.parameters import ChatRequest, Refused, read_object, read_request
from gdpo_nemo.generation.requests import Sampling

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_NEUTRAL = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
}
"""Keys of this API that would change the prompt, the answer or its form, and the values that do not."""
_TEXT_PARTS = ("input_text", "output_text", "summary_text", "text")


def read_responses(body: bytes, sampling: Sampling, session: str) -> tuple[ChatRequest, Mapping[str, Any]]:
    """A request to /v1/responses as a chat request, and as it came. Raises Refused, status 400."""
    request = read_object(body)
    for key, neutral in _NEUTRAL.items():
        if request.get(key) is not None and request[key] not in neutral:
            raise Refused(
                400, f"{key} {str(request[key])[:40]} is not supported: input must hold the whole conversation"
            )
    _check_metadata(request.get("metadata"))
    chat = {
        key: value for key, value in request.items() if key not in ("messages", "input", "instructions", "logprobs")
    }
    chat["messages"] = [*_instructions(request.get("instructions")), *_messages(request.get("input"))]
    chat["max_tokens"] = request.get("max_output_tokens")
    chat["tools"] = [_chat_tool(place, tool) for place, tool in enumerate(_list("tools", request.get("tools") or []))]
    return read_request(chat, sampling, session), request


def _check_metadata(metadata: Any) -> None:
    """NeMo Gym's agents hide settings of the chat template in it, as JSON, which the engines' prompts would not
    follow."""
    if isinstance(metadata, Mapping) and metadata.get("chat_template_kwargs") not in (None, "", "{}", {}):
        what = str(metadata["chat_template_kwargs"])[:40]
        raise Refused(
            400, f"metadata.chat_template_kwargs {what} is not supported: every prompt is rendered as in training"
        )


def response_of(turn: Turn, message: Mapping[str, Any], request: Mapping[str, Any], number: str) -> dict[str, Any]:
    """The reply for one turn. Its last item carries the token fields, as of NeMo Gym's model server.

    Args:
        message: the assistant's, as in a chat.
        request: as it came.
        number: what tells this turn from others, in ids.
    """
    completion = turn.completion
    items = _items(message, number)
    values = (turn.prompt_ids.tolist(), completion.token_ids.tolist(), completion.logprobs.tolist())
    items[-1].update(zip(TOKEN_FIELDS, values))
    read = len(turn.prompt_ids)
    written = len(completion.token_ids)
    return _response(items, request, number, completion.finish_reason == "length", read, written)


def response_without_room(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply where the conversation may not go on: nothing was said and nothing was sampled."""
    return _response(_items({"content": ""}, "none"), request, "none", True, 0, 0)


# -- items to messages ----------------------------------------------------------------------------------------------


def _instructions(text: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _messages(items: Any) -> list[dict[str, Any]]:
    """The chat that the items stand for. What the assistant said, thought and called without others between is one
    message; an item with token ids ends it, for it is the last of its turn."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for place, item in enumerate(_list("input", items)):
        where = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise Refused(400, f"{where} is no object")
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            turn = None
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(where, item.get("output"))}
            )
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append({"role": item.get("role"), "content": _text(where, item.get("content"))})
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(where, kind, item, turn)
            if item.get("prompt_token_ids") is not None:
                turn |= {key: item[key] for key in TOKEN_FIELDS if key in item}
                turn = None
    return messages


def _add(where: str, kind: str, item: Mapping[str, Any], turn: dict[str, Any]) -> None:
    """Put what the assistant said, thought or called into its message."""
    if kind == "message":
        turn["content"] += _text(where, item.get("content"))
    elif kind == "reasoning":
        parts = [_text(where, [part]) for part in _list(f"{where}.summary", item.get("summary") or [])]
        turn["content"] += "".join(f"<think>{part}</think>" for part in parts if part)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    else:
        raise Refused(400, f"{where} is of type {str(kind)[:40]!r}, which has no place in a chat")


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} holds no text")
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in _TEXT_PARTS
            or not isinstance(part.get("text"), str)
        ):
            raise Refused(400, f"{where} holds a part that is no text")
    return "".join(part["text"] for part in content)


def _chat_tool(place: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise Refused(400, f"tools[{place}] is no function")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
    }


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(400, f"{what} must be a list")
    return value


# -- a message to items ---------------------------------------------------------------------------------------------


def _items(message: Mapping[str, Any], number: str) -> list[dict[str, Any]]:
    """Reasoning, what was said, and calls; at least one item."""
    calls = message.get("tool_calls") or ()
    items = list(_spoken(message.get("content") or "", number)) if message.get("content") or not calls else []
    for place, call in enumerate(calls):
        ids = {"id": f"fc_{number}_{place}", "call_id": call["id"]}
        items.append({**ids, "type": "function_call", "status": "completed", **call["function"]})
    return items


def _spoken(text: str, number: str) -> Iterator[dict[str, Any]]:
    for item in output_items(text, split_reasoning=True):
        yield {**item, "id": f"{item['id'].partition('_')[0]}_{number}"}


def _response(items, request: Mapping[str, Any], number: str, cut: bool, read: int, written: int) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": request.get("model") or "policy",
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "tool_choice": "auto",
        "tools": request.get("tools") or [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
    }
