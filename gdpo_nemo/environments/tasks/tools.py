"""Environment ``tools``: the policy calls Python functions as tools.

Names and formats are the same as in TRL 1.16 (``GRPOTrainer`` with ``tools=``). Schemas come from ``get_json_schema``
of transformers. The text of a result is ``str(result)``, and the text of an error is ``str({"error": message})``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

from gdpo_nemo.data.messages import is_image, texts_in
from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.data.replies import Reply, message_of
from gdpo_nemo.environments.base import Environment, count_option, read_options
from gdpo_nemo.environments.images import encoded, is_picture
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.utils import user_loop
from gdpo_nemo.utils.errors import ConfigError, first_line
from gdpo_nemo.utils.import_path import ImportPath

MAX_RESULT_CHARACTERS = 2**16
"""Maximum total length in characters of the results of one turn. A result that exceeds this limit is replaced by an
error message."""
_ERROR = "{'error': "
"""Prefix of the result text of a failed call."""

Tool = Callable[..., Any]
Content = str | list[dict[str, Any]]
"""Content of a message with the role tool: text, or a list of parts if it contains images."""


class _TimeLimitReached(BaseException):
    """Raised in a tool call at the time limit. This is a BaseException, so that ``except Exception`` does not catch
    it."""


def load_tools(references: Any) -> dict[str, Tool]:
    """Import functions by their import paths and return a mapping from name to function.

    Raises:
        ConfigError: if the list is empty, an object cannot be imported or is not a function, or two functions have the
            same name.
    """
    if not isinstance(references, (list, tuple)) or not references:
        raise ConfigError(f"tools: expected a list of functions such as [file.py:function], got {references!r}")
    tools: dict[str, Tool] = {}
    for index, reference in enumerate(references):
        tool = _load(f"tools[{index}]", reference)
        name = tool.__name__
        if name in tools:
            raise ConfigError(f"tools[{index}]: the name {name!r} is already in use ({reference}); rename the function")
        tools[name] = tool
    return tools


def _load(key: str, reference: Any) -> Tool:
    if not isinstance(reference, str) or not ImportPath.matches(reference):
        raise ConfigError(f"{key}: expected a function such as file.py:function, got {reference!r}")
    try:
        tool: Tool = ImportPath(reference).load()
    except ConfigError as error:
        raise error.within(key) from error
    if isinstance(tool, type) or not callable(tool) or not hasattr(tool, "__name__"):
        raise ConfigError(f"{key}: must be a function ({reference})")
    return tool


def tool_schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """Generate the JSON schemas of functions from their signatures and docstrings, in the format for chat templates.

    Raises:
        ConfigError: if a function lacks a type hint, a docstring, or the description of an argument.
    """
    # Import transformers only here, because worker processes do not need schemas.
    from transformers.utils import get_json_schema

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # evaluating type hints may raise any exception
            raise ConfigError(
                f"tools: the schema of {name} cannot be generated ({first_line(error)}); write type hints and a "
                "docstring with Args"
            ) from error
    return schemas


def check_no_tools(row: Mapping[str, Any]) -> None:
    """Raise ConfigError if a row has a column ``tools``, which the environment would replace."""
    if row.get("tools"):
        raise ConfigError(
            "has a column tools, which conflicts with the environment's tools; list it in remove_columns of the split"
        )


def is_error(content: Content) -> bool:
    """Return whether the content of a tool message reports a failed call."""
    return isinstance(content, str) and content.startswith(_ERROR)


def error_text(message: str) -> str:
    """Format an error message as the result text of a tool call."""
    return str({"error": message})


def content_of(result: Any) -> Content:
    """Return the result of a tool as content of a message: text, or a list of parts if it contains images.

    Args:
        result: a PIL image, a list of parts of which at least one is an image, or any other value, which becomes text.

    Raises:
        ValueError: if an image is invalid.
    """
    if is_picture(result):
        result = [{"type": "image", "image": result}]
    if not isinstance(result, list) or not any(map(is_image, result)):
        return clean(str(result))
    parts = [part if is_image(part) else {"type": "text", "text": clean(str(part.get("text")))} for part in result]
    (message,) = encoded([{"content": parts}])
    content: Content = message["content"]
    return content


def call_tools(tools: Mapping[str, Tool], calls: Sequence[tuple[str, str]], limit_s: float) -> list[dict[str, Any]]:
    """Execute the tool calls of one turn in order. Return a message with the role tool for each call.

    If a call fails, its message contains the error. A call fails if the tool is unknown, the arguments are invalid, the
    tool raises, the result is too long, or the time limit is exceeded. Requires the main thread.

    Args:
        tools: functions by name.
        calls: function name and JSON text of the arguments of each call.
        limit_s: total time limit in seconds of all calls.
    """
    deadline = time.monotonic() + limit_s
    return tool_messages(calls, lambda name, arguments: _answer(tools, name, arguments, deadline, limit_s))


def tool_messages(calls: Sequence[tuple[str, str]], answer: Callable[[str, str], Content]) -> list[dict[str, Any]]:
    """Return a message with the role tool for each call of one turn. The total length of the results is limited.

    Args:
        calls: function name and JSON text of the arguments of each call.
        answer: function that executes a call and returns the content of its message.
    """
    characters_left = MAX_RESULT_CHARACTERS
    messages = []
    for name, arguments in calls:
        content = answer(name, arguments)
        length = sum(map(len, texts_in(content)))
        if length > characters_left:
            content = error_text(f"The result has {length} characters, of which at most {characters_left} are shown.")
        characters_left -= min(characters_left, length)
        messages.append({"role": "tool", "name": name, "content": content})
    return messages


def _answer(tools: Mapping[str, Tool], name: str, arguments: str, deadline: float, limit_s: float) -> Content:
    if name not in tools:
        return error_text(f"Tool {name} not found.")
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return error_text(f"The arguments of {name} must be a JSON object.")
    try:
        with _alarm(deadline - time.monotonic()):
            return content_of(_result(tools[name], values))
    except _TimeLimitReached:
        return error_text(f"{name} exceeded the time limit of {limit_s:g} s.")
    except BaseException as error:  # code of the policy that a tool executes may raise any exception
        return clean(error_text(error_message(error)))


def _result(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    found = tool(**arguments)
    return user_loop.run(found) if inspect.isawaitable(found) else found


def error_message(error: BaseException) -> str:
    """Return the message of an exception, or the name of its class if the message is empty."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # __str__ may be user code
        return type(error).__name__


def clean(text: str) -> str:
    """Return the text without lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise ``_TimeLimitReached`` in the block after ``seconds``, even while the block sleeps or waits for a socket."""

    def raise_time_limit(*_: object) -> NoReturn:
        raise _TimeLimitReached

    if seconds <= 0:
        raise _TimeLimitReached
    previous_handler = signal.signal(signal.SIGALRM, raise_time_limit)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


Message = Mapping[str, Any]
MALFORMED = error_text("The tool call has no valid name and JSON arguments.")
"""Reply to a turn that begins a tool call but contains none that can be parsed."""


class Tools(Environment):
    """Environment in which the policy calls Python functions as tools. Reward functions score the conversations.

    Options:
        tools: functions by import path (``file.py:function``, ``package.module.function``), sync or async, with type
            hints and a docstring that describes every argument. The chat template shows the schemas of the functions to
            the model.
        functions: reward functions by component, as in the environment ``functions``.
        system_prompt: system prompt for the prompts of this environment.
        time_limit_s (10): time limit in seconds of all calls of one turn. The limit should be below
            rollout.env_timeout_s.
        max_tool_calling_iterations: maximum number of turns whose calls are executed, as in TRL; null for the limit of
            rollout.turns.

    ``policy.generation.tool_call_parser`` reads the calls. For each call the environment adds a message with the role
    tool. A turn without calls ends the episode. If a call fails, the message contains the error. A failed call does not
    affect the reward by itself.

    As in TRL, the completion that a reward function receives is the conversation after the prompt: messages of the
    assistant with their ``tool_calls``, and messages of the tools. Tools run in any free worker process, which may
    differ between turns. A tool must not depend on Python state from earlier calls.
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
        self._rounds = count_option("max_tool_calling_iterations", chosen.max_tool_calling_iterations)
        self._functions = Functions({"functions": chosen.functions})
        self._schemas: list[dict[str, Any]] | None = None
        self.reward_names = self._functions.reward_names
        self.system_prompt = chosen.system_prompt

    def prepare(self) -> None:
        """Load the models of reward functions before the first time limit starts."""
        self._functions.prepare()

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the tool schemas to a row as the column ``tools``. Raises ConfigError if the row has this column."""
        check_no_tools(row)
        if self._schemas is None:
            self._schemas = tool_schemas(self._tools)
        return {**row, "tools": self._schemas}

    def episode(self) -> ToolEpisode:
        """Return a new episode."""
        return ToolEpisode(self._references, self._limit_s, self._rounds)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Score whole conversations with the reward functions. Raises RunError in the same cases as
        ``Functions.verify``."""
        conversations = list(map(conversation, trajectories))
        with_messages = [replace(t, messages=tuple(messages)) for t, messages in zip(trajectories, conversations)]
        results = [message for message in chain.from_iterable(conversations) if message["role"] == "tool"]
        failed = sum(is_error(message["content"]) for message in results)
        tool_metrics = {
            "tools/call_frequency": len(results) / max(1, len(conversations)),
            "tools/failure_frequency": failed / max(1, len(results)),
        }
        verdicts = self._functions.verify(with_messages)
        return [replace(verdict, metrics={**verdict.metrics, **tool_metrics}) for verdict in verdicts]


class ToolEpisode:
    """One conversation with tools. The pickled episode contains the import paths of the tools, not the functions.

    Args:
        references: import paths of the tools.
        limit_s: time limit in seconds of all calls of one turn.
        rounds: maximum number of turns whose calls are executed, or None for no limit.
    """

    def __init__(self, references: Sequence[str], limit_s: float, rounds: int | None):
        self._references = tuple(references)
        self._limit_s = limit_s
        self._turns_left = rounds

    def reset(self, row: Mapping[str, Any]) -> None:
        """Use the row's prompt as the first prompt."""

    def step(self, message: Message) -> tuple[list[dict[str, Any]] | None, None, bool]:
        """Execute the calls in the policy's message and return their results. Without calls, the episode is done."""
        if self._turns_left == 0:
            return None, None, True
        reply: Reply = message["reply"]
        answers = call_tools(_loaded(self._references), reply.calls, self._limit_s)
        if reply.is_malformed:
            answers.append({"role": "tool", "name": "unknown", "content": MALFORMED})
        if self._turns_left is not None:
            self._turns_left -= 1
        return answers or None, None, not answers


@lru_cache(maxsize=8)
def _loaded(references: tuple[str, ...]) -> dict[str, Tool]:
    return load_tools(references)


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the messages after the prompt in TRL's format, with parsed ``tool_calls``."""
    if trajectory.messages is None:
        return [message_of(trajectory.reply or Reply(trajectory.text))]
    return list(map(dict, trajectory.messages))
