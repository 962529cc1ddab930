"""Tools in place of an environment: the policy calls Python functions over several turns, reward functions judge the
conversation."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, Mapping, Sequence

from gdpo_nemo.data.completions import has_call_block, split_calls
from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.environments.tasks.tool_functions import Tool, call_tools, error_text, is_error, load_tools, tool_schemas
from gdpo_nemo.errors import ConfigError

Message = Mapping[str, Any]
MALFORMED = error_text("A tool call must be a JSON object with name and arguments between <tool_call> tags.")
"""Answer to a block that does not hold a call."""


class Tools(Environment):
    """Episodes in which the policy calls functions, rewarded by reward functions.

    Options:
        tools: functions by import path (``file.py:function``, ``package.module.function``), sync or async, with type
            hints and a docstring that describes every argument. The chat template shows the model their schemas.
        functions: reward functions by component, as of the environment ``functions``.
        system_prompt: put before the prompts.
        time_limit_s (10): seconds for all calls of one turn; keep it below rollout.env_timeout_s.
        max_tool_calling_iterations: turns whose calls are executed, as in TRL; null: as rollout.turns allows.

    A turn with calls, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` as Hermes and Qwen write them, is
    answered with a message of the role tool for each call. A turn without calls ends the episode. A call that fails is
    answered with its error, which is text for the model and never a reward.

    A reward function gets the conversation behind the prompt as its completion, in TRL's form: messages of the
    assistant, with ``tool_calls`` where it made some, and of the tools. Tools run in a worker process, each turn in any
    that is free, so they must not depend on state in Python that an earlier call left.
    """

    offers_tools = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "tools",
            options,
            tools=[],
            functions={},
            system_prompt=None,
            time_limit_s=10.0,
            max_tool_calling_iterations=None,
        )
        if not chosen.time_limit_s > 0:
            raise ConfigError(f"time_limit_s: must be greater than 0 ({chosen.time_limit_s})")
        self._tools = load_tools(chosen.tools)
        self._references: list[str] = list(chosen.tools)
        self._limit_s = float(chosen.time_limit_s)
        self._rounds = _rounds(chosen.max_tool_calling_iterations)
        self._functions = Functions({"functions": chosen.functions})
        self._schemas: list[dict[str, Any]] | None = None
        self.reward_names = self._functions.reward_names
        self.system_prompt = chosen.system_prompt

    def prepare(self) -> None:
        """Let reward functions load models before the first time limit."""
        self._functions.prepare()

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the schemas of the tools to a row. Raises ConfigError if it has tools already."""
        if row.get("tools"):
            raise ConfigError("has a column tools, which the environment fills; list it in remove_columns of the split")
        if self._schemas is None:
            self._schemas = tool_schemas(self._tools)
        return {**row, "tools": self._schemas}

    def episode(self) -> ToolEpisode:
        """Return a new episode."""
        return ToolEpisode(self._references, self._limit_s, self._rounds)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return the reward functions' rewards of whole conversations. Raises RunError as ``Functions.verify``."""
        spoken = [conversation(trajectory) for trajectory in trajectories]
        judged = [replace(t, messages=tuple(messages)) for t, messages in zip(trajectories, spoken)]
        results = [message for messages in spoken for message in messages if message["role"] == "tool"]
        failed = sum(is_error(message["content"]) for message in results)
        counted = {
            "tools/call_frequency": len(results) / max(1, len(spoken)),
            "tools/failure_frequency": failed / max(1, len(results)),
        }
        verdicts = self._functions.verify(judged)
        return [replace(verdict, metrics={**verdict.metrics, **counted}) for verdict in verdicts]


class ToolEpisode:
    """One conversation. Pickled between turns with the import paths of its tools, not with the functions.

    Args:
        references: import paths of the tools.
        limit_s: seconds for all calls of one turn.
        rounds: turns whose calls are executed; None: no limit.
    """

    def __init__(self, references: Sequence[str], limit_s: float, rounds: int | None):
        self._references = tuple(references)
        self._limit_s = limit_s
        self._left = rounds

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin with the row's own prompt."""

    def step(self, message: Message) -> tuple[list[dict[str, str]] | None, None, bool]:
        """Answer the calls in the policy's message. Without calls the episode is done."""
        if self._left == 0:
            return None, None, True
        said, calls = split_calls(message["content"])
        answers = call_tools(_loaded(self._references), calls, self._limit_s)
        if has_call_block(said):
            answers.append({"role": "tool", "name": "unknown", "content": MALFORMED})
        if self._left is not None:
            self._left -= 1
        return answers or None, None, not answers


@lru_cache(maxsize=8)
def _loaded(references: tuple[str, ...]) -> dict[str, Tool]:
    return load_tools(references)


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the messages behind the prompt, calls of the assistant as ``tool_calls``."""
    return [
        with_calls(message["content"]) if message["role"] == "assistant" else dict(message)
        for message in trajectory.messages or ({"role": "assistant", "content": trajectory.text},)
    ]


def with_calls(text: str) -> dict[str, Any]:
    """Return what the policy wrote as a message of the assistant, with its calls as ``tool_calls``."""
    said, calls = split_calls(text)
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if calls:
        functions = [{"name": name, "arguments": _arguments(arguments)} for name, arguments in calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def _arguments(text: str) -> Any:
    """The arguments as values; as the policy wrote them if that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _rounds(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"max_tool_calling_iterations: must be a positive integer or null ({value!r})")
    return value
