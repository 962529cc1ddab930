"""NeMo Gym's JSONL rows: what the model reads of them, and what a server is sent.

A row is kept as it is. Servers drop what they do not declare, so nothing is ever read back from a reply but its
verdict.
"""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.data.completions import output_items
from gdpo_nemo.data.records import Trajectory
from gdpo_nemo.errors import ConfigError

ROW = "nemo_gym_row"
"""Column of a prompt's fields that holds the untouched row."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = {"developer": "system"}
"""Roles of the Responses API that chat templates do not know, and what they read instead."""


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as prompts are made of: ``messages``, ``tools`` in chat form, and the untouched row under ``ROW``.

    Raises ConfigError, in a few words, for a row that is none of NeMo Gym's or that holds more than text.
    """
    parameters = row.get("responses_create_params")
    if not isinstance(parameters, Mapping):
        raise ConfigError("has no responses_create_params, so it is no row of NeMo Gym")
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot be sent as JSON: {error}") from None
    read: dict[str, Any] = {"messages": _messages(parameters), ROW: row}
    if tools := [_chat_tool(tool) for tool in parameters.get("tools") or []]:
        read["tools"] = tools
    return read


def agent_of(row: Mapping[str, Any]) -> str | None:
    """The name in the row's ``agent_ref``."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return name if isinstance(name, str) else None


def choose_server(row: Mapping[str, Any], servers: Iterable[str], agents: Mapping[str, str] | None = None) -> str:
    """Return the server of a row: the one that its ``agent_ref`` names, or the only one.

    Args:
        agents: server names by the agent names that rows may have.

    Raises:
        ConfigError: if no server can be chosen. The message follows "row N".
    """
    names = list(servers)
    known = agents or {}
    agent = agent_of(row)
    name = known.get(agent or "", agent)
    if name is not None and name in names:
        return name
    if len(names) == 1:
        return names[0]
    if agent is None:
        raise ConfigError(f"has no agent_ref, which is needed to choose between {', '.join(sorted(names))}")
    raise ConfigError(f"names the agent {agent!r}, which is not known{nearest(agent, [*names, *known])}")


def request_body(trajectory: Trajectory, tool_parser: str, split_reasoning: bool) -> bytes:
    """What /verify is sent: the row, with the completion as a response of the Responses API."""
    row = trajectory.prompt.fields[ROW]
    # A null is refused where its key may be absent.
    parameters = {key: value for key, value in row["responses_create_params"].items() if value is not None}
    tools = parameters.get("tools") or []
    response = {
        "id": f"resp_{trajectory.sample_index}",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": output_items(trajectory.text, tool_parser if tools else "none", split_reasoning),
        "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
        "tool_choice": parameters.get("tool_choice", "auto"),
        "tools": tools,
    }
    if trajectory.finish_reason == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    return json.dumps({**row, "responses_create_params": parameters, "response": response}).encode()


def seed_body(row: Mapping[str, Any]) -> bytes:
    """What /seed_session is sent: the row's own fields."""
    return json.dumps({key: value for key, value in row.items() if key != "responses_create_params"}).encode()


def _messages(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = parameters.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ConfigError("responses_create_params.input must be text or a list of items")
    messages = []
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    for item in given:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    """Append one input item; calls of one assistant turn go into one message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message" and isinstance(item.get("role"), str):
        role = _ROLES.get(item["role"], item["role"])
        messages.append({"role": role, "content": _text(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": _arguments(item.get("arguments"))}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
    elif kind != "reasoning":  # earlier thoughts are not shown again, as templates have it
        raise ConfigError(f"responses_create_params.input holds an item of type {kind!r}, which has no place in a chat")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    named = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
    texts = [text for text in named if isinstance(text, str)]
    if len(texts) != len(parts):
        raise ConfigError("responses_create_params.input holds something that is no text")
    return "".join(texts)


def _arguments(arguments: Any) -> Any:
    """Arguments as templates want them, an object; text that is no JSON stays text."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ConfigError("responses_create_params.tools holds a tool that is no function")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
    }
