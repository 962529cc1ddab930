"""Environment ``tool_class``, like TRL's ``environment_factory``: the policy calls the methods of an object as tools.

Each trajectory uses one object. Reward functions score the objects at the end of the episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.data.replies import Reply, message_of
from gdpo_nemo.environments.base import Environment, Failure, read_options, reward_value
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.http_client import LoopThread
from gdpo_nemo.environments.images import filled, with_pictures
from gdpo_nemo.environments.tasks.reward_functions import Value, component_values, prompt_in_trl_format
from gdpo_nemo.environments.tasks.tools import (
    MALFORMED,
    Content,
    check_no_tools,
    clean,
    content_of,
    error_message,
    error_text,
    tool_messages,
    tool_schemas,
)
from gdpo_nemo.utils import user_loop
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.exits import exits_contained
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.waits import in_daemon_thread

_THREADS = 512
"""Maximum number of concurrent calls. A call that never returns keeps its thread until the process ends."""
_NOT_TOOLS = ("reset", "get_reward")


@dataclass
class _EpisodeState:
    """An episode in progress."""

    player: Any
    prompt: Prompt
    turns_left: int | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of the policy and the tools so far, in TRL's format."""


class ToolClass(Environment):
    """Environment in which the policy calls the public methods of a user-defined object as tools, as in TRL.

    Options:
        make: class (``file.py:Class``), or function without arguments that returns an object. The object's
            ``reset(**columns)`` begins an episode and returns text to append to the prompt, or None. Every other public
            method is a tool, except ``get_reward``. Each tool must have type hints and a docstring.
        functions: reward functions by component (``file.py:function``). The functions receive the objects as the
            argument ``environments``.
        time_limit_s (60): time limit in seconds of a reset, or of all calls of one turn. If the limit is exceeded,
            the trajectory is masked.
        max_tool_calling_iterations: maximum number of turns whose calls are executed; null for the limit of
            rollout.turns.

    The objects are used in threads of the driver, because they may hold connections. Each object is reset and reused.
    ``reset``, tools and reward functions may be async, and share one event loop (``user_loop``). If a call raises, the
    model gets the error message as the result. If a reset raises, the trajectory is masked.
    """

    remote = True
    offers_tools = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "tool_class", options, make=None, functions={}, time_limit_s=60.0, max_tool_calling_iterations=None
        )
        if not isinstance(chosen.make, str) or not ImportPath.matches(chosen.make):
            raise ConfigError(f"make: expected a class such as file.py:Class ({chosen.make!r})")
        if not isinstance(chosen.functions, Mapping) or not chosen.functions:
            raise ConfigError(f"functions: expected reward functions by component ({chosen.functions!r})")
        if not chosen.time_limit_s > 0:
            raise ConfigError(f"time_limit_s: must be greater than 0 ({chosen.time_limit_s})")
        self._make: Callable[[], Any] = ImportPath(chosen.make).load()
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, place in chosen.functions.items():
            self._functions[str(name)] = _function(str(name), place)
        self._limit_s = float(chosen.time_limit_s)
        self._rounds: int | None = chosen.max_tool_calling_iterations
        self.reward_names = tuple(self._functions)
        self._unscored: dict[str, None] = {name: None for name in self._functions if not is_family(name)}
        self._schemas: list[dict[str, Any]] | None = None
        self._loop = LoopThread("tool_class")
        self._slots = asyncio.Semaphore(_THREADS)
        self._free: list[Any] = []
        self._played: dict[bytes, _EpisodeState] = {}

    @property
    def has_turns(self) -> bool:
        """Always True, because ``start_step`` runs the steps of multi-turn episodes."""
        return True

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the tool schemas to a row as the column ``tools``. Raises ConfigError if the row has this column."""
        check_no_tools(row)
        if self._schemas is None:
            player = object.__new__(self._make) if isinstance(self._make, type) else self._make()
            self._schemas = tool_schemas(_tools(player))
        return {**row, "tools": self._schemas}

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Create an object and reset it with the first row. Raises RunError if the reset fails."""
        for prompt in prompts[:1]:
            reply = self.start_step(EpisodeStep(prompt, 0, 0)).result()
            if reply.outcome is not Outcome.OK:
                raise RunError(reply.detail)
            self.abandon(reply.state)

    def start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        """Start a reset, step or cut of an episode, and return a future. ``state`` of a reply identifies the
        episode."""
        return self._loop.start(self._answer(step))

    def abandon(self, state: bytes) -> None:
        """Make the object of a finished episode available for another episode."""
        if (played := self._played.pop(state, None)) is not None:
            self._free.append(played.player)

    def close(self) -> None:
        """End all episodes."""
        self._loop.close(_no_cleanup())

    async def _answer(self, step: EpisodeStep) -> EpisodeReply:
        try:
            if step.state is None:
                return await self._begin(step.prompt)
            if step.message is None:
                return await self._end(step.state)
            return await self._step(step.state, step.message["reply"])
        except TimeoutError:
            self._played.pop(step.state or b"", None)  # do not reuse the object, because a thread may still use it
            return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=f"no answer within {self._limit_s:g} s")
        except asyncio.CancelledError:
            self._played.pop(step.state or b"", None)
            raise

    async def _begin(self, prompt: Prompt) -> EpisodeReply:
        try:
            player, reset_text = await self._run_in_thread(lambda: self._reset(prompt))
        except _ResetFailed as error:
            return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=str(error))
        state = secrets.token_bytes(16)
        self._played[state] = _EpisodeState(player, prompt, self._rounds)
        return EpisodeReply(state, _prompt(prompt, reset_text), self._unscored)

    async def _step(self, state: bytes, reply: Reply) -> EpisodeReply:
        played = self._played[state]
        answers = (
            [] if played.turns_left == 0 else await self._run_in_thread(lambda: _turn(played, reply, self._limit_s))
        )
        played.messages += [message_of(reply), *map(dict, answers)]
        if not answers:
            return await self._end(state)
        if played.turns_left is not None:
            played.turns_left -= 1
        return EpisodeReply(state, answers, self._unscored)

    async def _run_in_thread[T](self, call: Callable[[], T]) -> T:
        """Run a call in a thread and return its result. Raises TimeoutError after the time limit."""
        async with asyncio.timeout(self._limit_s), self._slots:
            return await asyncio.wrap_future(in_daemon_thread(call, "tool_class"))

    def _reset(self, prompt: Prompt) -> tuple[Any, Any]:
        """Reset an object. Return the object and the result of the reset. Raises _ResetFailed."""
        columns = {key: value for key, value in prompt.fields.items() if key != "tools"}
        columns["prompt"] = prompt_in_trl_format(prompt)
        try:
            with exits_contained():
                player = self._take_free_object() or self._make()
                found = player.reset(**(with_pictures(columns, {}) if prompt.images else columns))
                return player, _awaited(found, self._limit_s)
        except Exception as error:
            raise _ResetFailed(f"reset raised {first_line(error)}") from error

    def _take_free_object(self) -> Any:
        """Take an unused object from the pool. Return None if the pool is empty."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    async def _end(self, state: bytes) -> EpisodeReply:
        """Compute the rewards of an episode. Raises RunError if a function raises or returns an invalid value."""
        played = self._played[state]
        values = await self._run_in_thread(lambda: self._score(played))
        self.abandon(state)
        for name, value in values.items():
            if isinstance(value, Failure):
                return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=f"{name}: {value.detail}")
        rewards = {name: reward_value(value, f"reward {name!r}") for name, value in values.items()}
        return EpisodeReply(rewards=rewards, done=True)

    def _score(self, played: _EpisodeState) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, function in self._functions.items():
            found |= _rewards(name, function, played, self._limit_s)
        return found


class _ResetFailed(Exception):
    """Raised if the reset of an episode fails."""


async def _no_cleanup() -> None:
    """Do nothing. The event loop needs no cleanup."""


def _function(name: str, place: Any) -> Callable[..., Any]:
    if not isinstance(place, str) or not ImportPath.matches(place):
        raise ConfigError(f"functions.{name}: expected a function such as file.py:function ({place!r})")
    call: Callable[..., Any] = ImportPath(place).load()
    return call


def _tools(player: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an object by name: its public methods except ``reset`` and ``get_reward``."""
    members = inspect.getmembers(type(player), predicate=inspect.isfunction)
    return {name: getattr(player, name) for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS}


def _awaited(found: Any, limit_s: float) -> Any:
    """Return a result of user code, which is awaited if it is awaitable. Raises TimeoutError after the time limit."""
    return user_loop.run(found, limit_s) if inspect.isawaitable(found) else found


def _turn(played: _EpisodeState, reply: Reply, limit_s: float) -> list[Mapping[str, Any]]:
    """Execute the policy's calls. Return a message with the role tool for each call."""
    tools = _tools(played.player)
    answers: list[Mapping[str, Any]] = [
        *tool_messages(reply.calls, lambda name, arguments: _call_tool(tools, name, arguments, limit_s))
    ]
    if reply.is_malformed:
        answers.append({"role": "tool", "name": "unknown", "content": MALFORMED})
    return answers


def _call_tool(tools: Mapping[str, Callable[..., Any]], name: str, arguments: str, limit_s: float) -> Content:
    if name not in tools:
        return error_text(f"Tool {name} not found.")
    try:
        with exits_contained():
            return content_of(_awaited(tools[name](**json.loads(arguments)), limit_s))
    except Exception as error:  # the model gets the error as text, as in TRL
        return clean(error_text(error_message(error)))


def _prompt(prompt: Prompt, reset_text: Any) -> Any:
    """Append the text from the reset, or parts with images, to the prompt. Return None, for the row's prompt, if the
    text is empty."""
    if not reset_text:
        return None
    if prompt.messages is None:
        return f"{prompt.text}{reset_text}"
    *before, last = filled(prompt.messages, prompt.images) if prompt.images else map(dict, prompt.messages)
    added = content_of(reset_text)
    if isinstance(last["content"], str) and isinstance(added, str):
        return [*before, {**last, "content": f"{last['content']}{added}"}]
    parts: list[Any] = []
    for content in (last["content"], added):
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*before, {**last, "content": parts}]


def _rewards(name: str, function: Callable[..., Any], played: _EpisodeState, limit_s: float) -> dict[str, Value]:
    """Return the rewards of one function by component: one, or one for each criterion of a family."""
    prompt = played.prompt
    arguments: dict[str, Any] = {key: [value] for key, value in prompt.fields.items() if key != "tools"}
    arguments |= {"prompts": [prompt_in_trl_format(prompt)], "completions": [played.messages]}
    arguments = {**with_pictures(arguments, {}), "environments": [played.player]}
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    try:
        with exits_contained():
            [value] = _awaited(function(**arguments), limit_s)
    except Exception as error:
        raise RunError(f"reward function {name!r} raised {first_line(error)}") from error
    subject = f"the value of reward function {name!r} for prompt {prompt.id}"
    return component_values(name, value, subject, prompt.fields)
