"""Anthropic's Messages API: conversion of requests to chat, and of turns to messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_nemo.data.replies import parsed_arguments, split_thought
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.endpoint.conversations import TOKEN_FIELDS, Turn, part_of
from gdpo_nemo.rollouts.endpoint.requests import (
    WOULD_CHANGE,
    ChatRequest,
    Refused,
    read_object,
    read_request,
    refuse_others,
)

_SAME = ("temperature", "top_p", "top_k", "stream", "max_tokens")
"""Keys with the same meaning in both APIs."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
    "output_config": ({},),
    "output_format": (),
}
"""Keys that would change the prompt or the sampling, with the values that have no effect."""
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


def read_messages(body: bytes, sampling: Sampling, session: str) -> tuple[ChatRequest, Mapping[str, Any]]:
    """Parse a request to /v1/messages. Return the chat request and the original request.

    Raises:
        Refused: with status 400 if the request is invalid or not supported.
    """
    request = read_object(body)
    refuse_others(request, _UNSUPPORTED, WOULD_CHANGE)
    messages = request.get("messages")
    if not isinstance(messages, list):
        raise Refused(400, "messages must be a list")
    chat = part_of(request, _SAME)
    system = request.get("system")
    chat["messages"] = [{"role": "system", "content": _text("system", system)}] if system else []
    for index, message in enumerate(messages):
        chat["messages"] += _chat_messages(f"messages[{index}]", message)
    tools = request.get("tools") or []
    if not isinstance(tools, list):
        raise Refused(400, "tools must be a list")
    chat["tools"] = [_chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    chat["stop"] = request.get("stop_sequences")
    choice = request.get("tool_choice")
    if choice is not None:
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        chat["tool_choice"] = _CHOICES.get(str(kind), kind)
    metadata = request.get("metadata")
    if isinstance(metadata, Mapping):
        chat["user"] = metadata.get("user_id")
    return read_request(chat, sampling, session), request


def message_reply(turn: Turn, message: Mapping[str, Any], request: Mapping[str, Any], number: str) -> dict[str, Any]:
    """Return the reply to a request. The reply has the token fields of NeMo Gym's model server.

    Args:
        message: the assistant's message, in chat format.
        request: request in its original format.
        number: identifier of the reply.
    """
    completion = turn.completion
    reason = "tool_use" if message.get("tool_calls") else "end_turn"
    return {
        "id": number,
        "type": "message",
        "role": "assistant",
        "model": request.get("model") or "policy",
        "content": _blocks(message),
        "stop_reason": "max_tokens" if completion.finish_reason == "length" else reason,
        "stop_sequence": None,
        "usage": {"input_tokens": len(turn.prompt_ids), "output_tokens": len(completion.token_ids)},
        **turn.token_fields,
    }


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the assistant's message to content blocks: thinking, text and calls."""
    thought, text = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
    if not thought:
        thought, text = split_thought(text)
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    if text:
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        given = parsed_arguments(call["function"]["arguments"])
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        blocks.append({**block, "input": given if isinstance(given, dict) else {"arguments": given}})
    return blocks


def _chat_messages(where: str, message: Any) -> list[dict[str, Any]]:  # noqa: C901
    """Convert a message. The results of tools in a user's message become messages of their own."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise Refused(400, f"{where} must be an object with the role user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{**part_of(message, TOKEN_FIELDS), "role": message["role"], "content": content}]
    if not isinstance(content, list):
        raise Refused(400, f"{where}.content must be text or a list of blocks")
    texts, thoughts, calls, results = [], [], [], []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_text(f"{where}.content[{index}]", [block]))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and message["role"] == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and message["role"] == "user":
            text = _text(f"{where}.content[{index}]", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            raise Refused(
                400, f"{where}.content[{index}] is of type {str(kind)[:40]!r}, which is not supported in a chat"
            )
    if results and not texts:
        return results
    said: dict[str, Any] = {**part_of(message, TOKEN_FIELDS), "role": message["role"], "content": "".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return [*results, said]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        raise Refused(400, f"{where} contains a part that is not text")
    return "".join(part["text"] for part in parts)


def _chat_tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        raise Refused(400, f"{where} is not a tool of the client")
    function = part_of(tool, ("name", "description"))
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}
