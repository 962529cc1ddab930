"""Python functions as tools of a model: their schemas, and calls that always answer with text.

Names and texts follow TRL 1.16 (``GRPOTrainer`` with ``tools=``): the schema is ``get_json_schema`` of transformers, a
result is ``str(result)``, an error ``str({"error": message})``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import Any, Callable, Iterator, Mapping, NoReturn, Sequence

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objects import is_reference, load_object
from gdpo_nemo.environments.tasks.function_calls import is_async
from gdpo_nemo.errors import ConfigError

MAX_RESULT_CHARACTERS = 2**16
"""Characters of the results of one turn; the call whose result exceeds them gets an error in its place."""
_ERROR = "{'error': "
"""First characters of every text that stands for a failed call."""

Tool = Callable[..., Any]


class _TimeLimitReached(BaseException):
    """The alarm of a call. No ``Exception``, so that a tool's own ``except Exception`` does not swallow it."""


def load_tools(references: Any) -> dict[str, Tool]:
    """Return the functions at these import paths, by name.

    Raises:
        ConfigError: if there is none, one cannot be imported or called, or two have one name.
    """
    if not isinstance(references, (list, tuple)) or not references:
        raise ConfigError(f"tools: expected a list of functions such as [file.py:function], got {references!r}")
    tools: dict[str, Tool] = {}
    for index, reference in enumerate(references):
        tool = _load(f"tools[{index}]", reference)
        name = tool.__name__
        if name in tools:
            raise ConfigError(f"tools[{index}]: the name {name!r} is taken ({reference}); rename the function")
        tools[name] = tool
    return tools


def _load(key: str, reference: Any) -> Tool:
    if not isinstance(reference, str) or not is_reference(reference):
        raise ConfigError(f"{key}: expected a function such as file.py:function, got {reference!r}")
    try:
        tool: Tool = load_object(reference)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if isinstance(tool, type) or not callable(tool) or not hasattr(tool, "__name__"):
        raise ConfigError(f"{key}: must be a function ({reference})")
    return tool


def tool_schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """Return the JSON schema of every function, from its signature and docstring, as chat templates take them.

    Raises:
        ConfigError: if a function lacks a type hint, a docstring, or the description of an argument.
    """
    # Imported here: worker processes execute tools and need no schema.
    from transformers.utils import get_json_schema

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # of two classes of transformers, and what evaluating the hints raises
            raise ConfigError(
                f"tools: no schema of {name}: {first_line(error)}; write type hints and a docstring with Args"
            ) from error
    return schemas


def is_error(text: str) -> bool:
    """Return whether the text of a tool message stands for a failed call."""
    return text.startswith(_ERROR)


def error_text(message: str) -> str:
    """Return the text that the model reads in place of a result."""
    return str({"error": message})


def call_tools(tools: Mapping[str, Tool], calls: Sequence[tuple[str, str]], limit_s: float) -> list[dict[str, str]]:
    """Execute the calls of one turn, in order, and return a tool message for each.

    Args:
        tools: functions by name.
        calls: (name, arguments as JSON text) of each.
        limit_s: seconds that all of them may take together.

    Whatever goes wrong in a call is its text: an unknown tool, arguments that do not fit, an exception, a result that
    is too long, the time limit. A process without the interpreter's main thread cannot set the limit.
    """
    deadline = time.monotonic() + limit_s
    room = MAX_RESULT_CHARACTERS
    messages = []
    for name, arguments in calls:
        text = _answer(tools, name, arguments, deadline, limit_s)
        if len(text) > room:
            text = error_text(f"The result has {len(text)} characters, at most {room} are shown.")
        room -= min(room, len(text))
        messages.append({"role": "tool", "name": name, "content": text})
    return messages


def _answer(tools: Mapping[str, Tool], name: str, arguments: str, deadline: float, limit_s: float) -> str:
    if name not in tools:
        return error_text(f"Tool {name} not found.")
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return error_text(f"The arguments of {name} must be a JSON object.")
    try:
        with _alarm(deadline - time.monotonic()):
            return _clean(str(_result(tools[name], given)))
    except _TimeLimitReached:
        return error_text(f"{name} exceeded the time limit of {limit_s:g} s.")
    except (Exception, SystemExit) as error:
        return _clean(error_text(_said(error)))


def _result(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    return asyncio.run(tool(**arguments)) if is_async(tool) else tool(**arguments)


def _said(error: BaseException) -> str:
    """The message of an exception, or its class's name if there is none."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # __str__ is the tool author's code as well
        return type(error).__name__


def _clean(text: str) -> str:
    """The text without lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise ``_TimeLimitReached`` in the block after so many seconds, even while it sleeps or waits for a socket."""

    def ring(*_: object) -> NoReturn:
        raise _TimeLimitReached

    if seconds <= 0:
        raise _TimeLimitReached
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
