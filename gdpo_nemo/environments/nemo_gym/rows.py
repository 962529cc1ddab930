"""NeMo Gym's JSONL rows: conversion to prompts and to server requests, and the choice of a server for each row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import yaml

from gdpo_nemo.data.conversation import output_items
from gdpo_nemo.data.messages import image_in, is_image
from gdpo_nemo.data.records import Trajectory
from gdpo_nemo.data.replies import Reply, parsed_arguments
from gdpo_nemo.environments.base import character_spans
from gdpo_nemo.environments.http_client import HttpClient, base_url
from gdpo_nemo.environments.nemo_gym.settings import Settings
from gdpo_nemo.environments.server_replies import Failure, FailureKind, printable
from gdpo_nemo.utils.errors import ConfigError, RunError, nearest
from gdpo_nemo.utils.files import parse_yaml

ROW = "nemo_gym_row"
"""Column of ``Prompt.fields`` that contains the unchanged NeMo Gym row."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = {"developer": "system"}
"""Roles of the Responses API that chat templates do not support, and their replacements."""


def read_row(row: Mapping[str, Any], agent: bool = False) -> dict[str, Any]:
    """Convert a NeMo Gym row to the columns ``messages``, ``tools`` (in chat format) and ``ROW`` (the unchanged row).

    Args:
        agent: True if an agent plays the row. If the row has no messages, because the agent or its server writes the
            prompt, ``messages`` is an empty user message.

    Images become content parts ``{"type": "image", "image": ...}`` of the messages.

    Raises ConfigError if the row is not in NeMo Gym's format or contains other content than text and images.
    """
    parameters = row.get("responses_create_params")
    if not isinstance(parameters, Mapping):
        raise ConfigError("has no responses_create_params, so it is not a row of NeMo Gym")
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot be sent as JSON: {error}") from None
    written_later = agent and parameters.get("input") == []
    shown = {**parameters, "input": ""} if written_later else parameters
    columns: dict[str, Any] = {"messages": _messages(shown), ROW: row}
    if tools := list(map(_chat_tool, parameters.get("tools") or [])):
        columns["tools"] = tools
    return columns


def agent_of(row: Mapping[str, Any]) -> str | None:
    """Return the agent name in the row's ``agent_ref``, or None if the row has no agent name."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return name if isinstance(name, str) else None


def choose_server(row: Mapping[str, Any], servers: Iterable[str], agents: Mapping[str, str] | None = None) -> str:
    """Return the name of the server for a row: the server of its ``agent_ref``, or the only server.

    Args:
        servers: names of the available servers.
        agents: server names by agent name.

    Raises:
        ConfigError: if no server matches. The error message continues a sentence that begins with "row N".
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
        raise ConfigError(f"has no agent_ref, which is required to choose between {', '.join(sorted(names))}")
    raise ConfigError(f"names the unknown agent {agent!r}{nearest(agent, [*names, *known])}")


def request_body(trajectory: Trajectory, split_reasoning: bool) -> bytes:
    """Return the request body for /verify: the row, and the completion in the format of the Responses API."""
    row = trajectory.prompt.fields[ROW]
    # The server rejects null for optional keys.
    parameters = {key: value for key, value in row["responses_create_params"].items() if value is not None}
    tools = parameters.get("tools") or []
    response = {
        "id": f"resp_{trajectory.sample_index}",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": output_items(trajectory.reply or Reply(trajectory.text), split_reasoning),
        "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
        "tool_choice": parameters.get("tool_choice", "auto"),
        "tools": tools,
    }
    if trajectory.finish_reason == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    return json.dumps({**row, "responses_create_params": parameters, "response": response}).encode()


def reward_spans_of(
    reply: Mapping[str, Any], trajectory: Trajectory, rewards: Mapping[str, Any], split_reasoning: bool
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return ``reward_spans`` of a reply: lists of [start, end) by component, in characters of the output message.

    The result counts from the beginning of ``Trajectory.text``, which also contains reasoning. Spans of components that
    are not in ``rewards`` are ignored.

    Raises:
        Failure: BAD_REPLY if the spans are invalid.
    """
    every = reply.get("reward_spans") or {}
    if not isinstance(every, Mapping):
        raise Failure(
            FailureKind.BAD_REPLY, f"expected an object of components as reward_spans, got {type(every).__name__}"
        )
    items = output_items(trajectory.reply or Reply(trajectory.text), split_reasoning)
    text = next((item["content"][0]["text"] for item in items if item["type"] == "message"), "")
    offset = trajectory.text.rfind(text)
    named = {name: every[name] for name in rewards if name in every}
    if named and offset < 0:
        raise Failure(FailureKind.BAD_REPLY, "reward_spans: the output message is not part of the completion")
    found = {}
    for name, given in named.items():
        try:
            spans = character_spans(given, len(text), "reward_spans")
        except RunError as error:
            raise Failure(FailureKind.BAD_REPLY, str(error)) from None
        found[name] = tuple((a + offset, b + offset) for a, b in spans)
    return found


def seed_body(row: Mapping[str, Any]) -> bytes:
    """Return the request body for /seed_session: the row without ``responses_create_params``."""
    return json.dumps({key: value for key, value in row.items() if key != "responses_create_params"}).encode()


def _messages(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = parameters.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ConfigError("responses_create_params.input must be text or a list of items")
    messages = []
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    for item in items:
        _append_item(messages, item)
    return messages


def _append_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Append an input item of the Responses API to chat messages. Consecutive tool calls become one message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message" and isinstance(item.get("role"), str):
        role = _ROLES.get(item["role"], item["role"])
        messages.append({"role": role, "content": _content(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": parsed_arguments(item.get("arguments"))}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))})
    elif kind != "reasoning":  # the reasoning of earlier turns is dropped, as in chat templates
        raise ConfigError(
            f"responses_create_params.input contains an item of type {kind!r}, which is not supported in a chat"
        )


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return the text of an item, or a list of parts if it contains images."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return _text(content)
    parts = []
    for part in content:
        has_image = is_image(part)
        parts.append({"type": "image", "image": image_in(part)} if has_image else {"type": "text", "text": _text(part)})
    return parts


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    text_values = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
    texts = [text for text in text_values if isinstance(text, str)]
    if len(texts) != len(parts):
        raise ConfigError("responses_create_params.input contains content other than text and images")
    return "".join(texts)


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ConfigError("responses_create_params.tools contains a tool that is not a function")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
    }


@dataclass(frozen=True)
class Routes:
    """Mapping from the agent names in rows to server URLs."""

    servers: Mapping[str, str]
    """Base URLs by server name."""
    agents: Mapping[str, str]
    """Server names by agent name."""

    def server_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of the server that verifies ``row``. Raises ConfigError if no server matches."""
        try:
            return choose_server(row, self.servers, self.agents)
        except ConfigError as error:
            raise ConfigError(f"a row {error}") from None


async def find_routes(settings: Settings, client: HttpClient) -> Routes:
    """Return the routes from the options, or request them from the head server.

    Raises:
        Failure: if the head server does not respond, or its reply is not a valid configuration.
    """
    if settings.head_server is None:
        return Routes(settings.servers, settings.agents)
    text = await client.get(f"{settings.head_server}/global_config_dict_yaml", settings.limits.request_timeout_s)
    return routes_of(text, settings)


def routes_of(text: Any, settings: Settings) -> Routes:
    """Parse the configuration of a head server, which is YAML text. Raises Failure(BAD_REPLY) if the configuration is
    invalid."""
    try:
        config = parse_yaml(text) if isinstance(text, str) else None
    except (yaml.YAMLError, RecursionError) as error:
        raise Failure(
            FailureKind.BAD_REPLY, f"the head server's configuration is not valid YAML: {printable(str(error), 80)}"
        ) from None
    if not isinstance(config, Mapping):
        raise Failure(FailureKind.BAD_REPLY, "the head server's reply is not a configuration")
    head = urlsplit(settings.head_server).hostname if settings.head_server else None
    servers = {}
    agents = dict(settings.agents)
    for name, section in config.items():
        for kind, entry in _entries(section):
            if kind == "resources_servers" and entry.get("port") is not None:
                servers[str(name)] = _url(str(name), entry, head)
            elif kind == "responses_api_agents" and isinstance(entry.get("resources_server"), Mapping):
                agents.setdefault(str(name), str(entry["resources_server"].get("name")))
    if not servers:
        raise Failure(FailureKind.BAD_REPLY, "the head server's configuration lists no resources server")
    return Routes(servers, agents)


def _entries(section: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (server type, settings) of each server in a section of the head server's configuration."""
    for kind, implementations in section.items() if isinstance(section, Mapping) else ():
        for entry in implementations.values() if isinstance(implementations, Mapping) else ():
            if isinstance(entry, Mapping):
                yield kind, entry


def _url(name: str, entry: Mapping[str, Any], head: str | None) -> str:
    host = entry.get("host") or head
    host = head if host in ("0.0.0.0", "::") else host
    try:
        return base_url(f"server {name}", f"http://{host}:{entry['port']}")
    except ConfigError as error:
        raise Failure(FailureKind.BAD_REPLY, f"head server: {error}") from None
