"""A completion's text as output items of the Responses API: reasoning, message, function calls."""

from __future__ import annotations

import json
import re
from typing import Any

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,200})"\s*,\s*"arguments"\s*:')
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def output_items(text: str, tool_parser: str = "none", split_reasoning: bool = False) -> list[dict[str, Any]]:
    """The items of ``text``, in the order reasoning, message, calls. There is always at least one.

    Args:
        tool_parser: ``hermes`` turns ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, Hermes) into
            calls; text around them becomes a message. A block whose arguments are no JSON is still a call, with the
            arguments as they are written: judging them is the verifier's business.
        split_reasoning: take ``<think>...</think>`` at the beginning out of the message.
    """
    items = []
    if split_reasoning and _THINK.match(text):
        thought, text = split_thought(text)
        items.append({"id": "rs_0", "type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]})
    calls: list[tuple[str, str]] = []
    if tool_parser == "hermes":
        text, calls = split_calls(text)
    if text or not (items or calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [part]})
    for number, (name, arguments) in enumerate(calls):
        ids = {"id": f"fc_{number}", "call_id": f"call_{number}"}
        items.append({**ids, "type": "function_call", "status": "completed", "name": name, "arguments": arguments})
    return items


def split_thought(text: str) -> tuple[str, str]:
    """Split text into the content of a leading ``<think>...</think>``, or an empty string, and the rest."""
    thought = _THINK.match(text)
    return (thought[1].strip(), text[thought.end() :]) if thought else ("", text)


def split_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split text into itself without its calls, and the calls as (name, arguments in JSON).

    Text without calls, and a block that is not a call, stays as it is.
    """
    calls = []
    rest = []
    end = 0
    # Not a regular expression: on openings without an end it would search the rest of the text once for each.
    start = text.find(_OPEN)
    while start >= 0 and (close := text.find(_CLOSE, start)) >= 0:
        call = _read_call(text[start + len(_OPEN) : close])
        if call is not None:
            calls.append(call)
            rest.append(text[end:start])
            end = close + len(_CLOSE)
        start = text.find(_OPEN, close)
    if not calls:
        return text, []
    return "".join([*rest, text[end:]]).strip(), calls


def has_call_block(text: str) -> bool:
    """Return whether text contains a complete ``<tool_call>`` block, readable as a call or not."""
    start = text.find(_OPEN)
    return start >= 0 and text.find(_CLOSE, start) >= 0


def _read_call(block: str) -> tuple[str, str] | None:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        head = _CALL_HEAD.match(block)
        return (head[1], block[head.end() :].strip().removesuffix("}").rstrip()) if head else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
