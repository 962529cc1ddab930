"""Streams of server-sent events for the three APIs.

A turn is streamed when it is complete, because its tool calls are parsed from the whole text. A request that is refused
therefore gets a status and no stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from gdpo_nemo.rollouts.endpoint.conversations import TOKEN_FIELDS, part_of

Reply = Mapping[str, Any]


def chat_events(reply: Reply, request: Reply) -> Iterator[str]:
    """Yield the events of a reply to /v1/chat/completions. The last chunk of each choice has the token fields."""
    options = request.get("stream_options")
    include_usage = isinstance(options, Mapping) and options.get("include_usage") is True
    head = {**part_of(reply, ("id", "created", "model")), "object": "chat.completion.chunk"}
    usage = {"usage": None} if include_usage else {}

    def chunk(choice: Mapping[str, Any], delta: Mapping[str, Any], **fields: Any) -> str:
        part = {"index": choice["index"], "delta": delta, "finish_reason": None, **fields}
        return _event({**head, "choices": [part], **usage})

    for choice in reply["choices"]:
        message = choice["message"]
        yield chunk(choice, {"role": "assistant", "content": ""})
        if message.get("reasoning_content"):
            yield chunk(choice, {"reasoning_content": message["reasoning_content"]})
        if message.get("content"):
            logprobs = {"logprobs": choice["logprobs"]} if "logprobs" in choice else {}
            yield chunk(choice, {"content": message["content"]}, **logprobs)
        for index, call in enumerate(message.get("tool_calls") or ()):
            yield chunk(choice, {"tool_calls": [{"index": index, **call}]})
        yield chunk(choice, part_of(message, TOKEN_FIELDS), finish_reason=choice["finish_reason"])
    if include_usage:
        yield _event({**head, "choices": [], "usage": reply["usage"]})
    yield "data: [DONE]\n\n"


def response_events(reply: Reply, request: Reply) -> Iterator[str]:
    """Yield the events of a reply to /v1/responses."""
    numbers = count()

    def event(kind: str, **fields: Any) -> str:
        return _event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields}, named=True)

    begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(reply["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        yield event("output_item.added", output_index=index, item={**item, **_EMPTY[item["type"]]})
        if item["type"] == "message":
            yield from _text_events(event, item, place)
        elif item["type"] == "reasoning":
            part = item["summary"][0]
            at = {**place, "summary_index": 0}
            yield event("reasoning_summary_part.added", **at, part={**part, "text": ""})
            yield event("reasoning_summary_text.delta", **at, delta=part["text"])
            yield event("reasoning_summary_text.done", **at, text=part["text"])
            yield event("reasoning_summary_part.done", **at, part=part)
        else:
            yield event("function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        yield event("output_item.done", output_index=index, item=item)
    yield event(reply["status"], response=reply)


_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": [], "status": "in_progress"},
    "reasoning": {"summary": []},
    "function_call": {"arguments": "", "status": "in_progress"},
}
"""Fields of an item before its content is streamed, by type."""


def _text_events(event: Any, item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[str]:
    for index, part in enumerate(item["content"]):
        at = {**place, "content_index": index}
        yield event("content_part.added", **at, part={**part, "text": ""})
        yield event("output_text.delta", **at, delta=part["text"], logprobs=[])
        yield event("output_text.done", **at, text=part["text"], logprobs=[])
        yield event("content_part.done", **at, part=part)


def message_events(reply: Reply, request: Reply) -> Iterator[str]:
    """Yield the events of a reply to /v1/messages. The event message_delta has the token fields."""
    begun = {key: value for key, value in reply.items() if key not in TOKEN_FIELDS}
    usage = {**reply["usage"], "output_tokens": 0}
    begun |= {"content": [], "stop_reason": None, "usage": usage}
    yield _event({"type": "message_start", "message": begun}, named=True)
    for index, block in enumerate(reply["content"]):
        empty, delta = _block_delta(block)
        yield _event({"type": "content_block_start", "index": index, "content_block": empty}, named=True)
        yield _event({"type": "content_block_delta", "index": index, "delta": delta}, named=True)
        yield _event({"type": "content_block_stop", "index": index}, named=True)
    end = {"delta": part_of(reply, ("stop_reason", "stop_sequence")), "usage": reply["usage"]}
    yield _event({"type": "message_delta", **end, **part_of(reply, TOKEN_FIELDS)}, named=True)
    yield _event({"type": "message_stop"}, named=True)


def _block_delta(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a content block without its content, and its content as a delta."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _event(content: Mapping[str, Any], named: bool = False) -> str:
    name = f"event: {content['type']}\n" if named else ""
    return f"{name}data: {json.dumps(content)}\n\n"
