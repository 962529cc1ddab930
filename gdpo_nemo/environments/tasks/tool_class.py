"""TRL's ``environment_factory`` as an environment: the methods of an object are the policy's tools, one object for each
trajectory, and reward functions judge the objects at the end."""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Mapping, Sequence, TypeVar

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objects import is_reference, load_object
from gdpo_nemo.data.completions import has_call_block, split_calls
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.loop_thread import LoopThread
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.tool_functions import error_text, tool_schemas
from gdpo_nemo.environments.tasks.tools import MALFORMED, with_calls
from gdpo_nemo.environments.verdicts import reward_value
from gdpo_nemo.errors import ConfigError, RunError

_THREADS = 512
"""Calls of objects that run at once; one that never returns keeps its thread."""
_NOT_TOOLS = ("reset", "get_reward")
_T = TypeVar("_T")


@dataclass
class _Played:
    """An episode in progress."""

    player: Any
    prompt: Prompt
    left: int | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of the policy and of the tools, in TRL's form."""


class ToolClass(Environment):
    """Episodes in which the policy calls the public methods of an object of a class, as in TRL.

    Options:
        make: the class (``file.py:Class``), or a function without arguments that returns an object. The object's
            ``reset(**columns)`` begins an episode, and returns text that is put behind the prompt, or None. Every other
            public method is a tool, with type hints and a docstring.
        functions: reward functions by component (``file.py:function``), which get ``environments``, the objects.
        time_limit_s (60): seconds for the calls of one turn, or for a reset. The trajectory is masked after that.
        max_tool_calling_iterations: turns whose calls are executed; null: as rollout.turns allows.

    Objects live in threads of the driver, because they may hold connections. They are reset and used again. A call that
    raises is answered with its error, which is text for the model; a reset that raises masks the trajectory.
    """

    remote = True
    offers_tools = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "tool_class", options, make=None, functions={}, time_limit_s=60.0, max_tool_calling_iterations=None
        )
        if not isinstance(chosen.make, str) or not is_reference(chosen.make):
            raise ConfigError(f"make: expected a class such as file.py:Class ({chosen.make!r})")
        if not isinstance(chosen.functions, Mapping) or not chosen.functions:
            raise ConfigError(f"functions: expected reward functions by component ({chosen.functions!r})")
        if not chosen.time_limit_s > 0:
            raise ConfigError(f"time_limit_s: must be greater than 0 ({chosen.time_limit_s})")
        self._make: Callable[[], Any] = load_object(chosen.make)
        self._functions: dict[str, Callable[..., Any]] = {
            str(name): _function(str(name), place) for name, place in chosen.functions.items()
        }
        self._limit_s = float(chosen.time_limit_s)
        self._rounds: int | None = chosen.max_tool_calling_iterations
        self.reward_names = tuple(self._functions)
        self._schemas: list[dict[str, Any]] | None = None
        self._loop = LoopThread("tool_class")
        self._threads = ThreadPoolExecutor(_THREADS, "tool_class")
        self._free: list[Any] = []
        self._played: dict[bytes, _Played] = {}

    @property
    def has_turns(self) -> bool:
        """Its episodes are stepped by ``start_step``."""
        return True

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the schemas of the tools to a row. Raises ConfigError if it has tools already."""
        if row.get("tools"):
            raise ConfigError("has a column tools, which the environment fills; list it in remove_columns of the split")
        if self._schemas is None:
            player = object.__new__(self._make) if isinstance(self._make, type) else self._make()
            self._schemas = tool_schemas(_tools(player))
        return {**row, "tools": self._schemas}

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Make an object and reset it with the first row. Raises RunError if that fails."""
        for prompt in prompts[:1]:
            reply = self.start_step(EpisodeStep(prompt, 0, 0)).result()
            if reply.outcome is not Outcome.OK:
                raise RunError(reply.detail)
            self.abandon(reply.state)

    def start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        """Begin to reset, step or cut an episode. ``state`` of a reply is the number of the episode."""
        return self._loop.start(self._answer(step))

    def abandon(self, state: bytes) -> None:
        """Reuse the object of an episode that is over."""
        if (played := self._played.pop(state, None)) is not None:
            self._free.append(played.player)

    def close(self) -> None:
        """End all episodes."""
        self._loop.close(_nothing())
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, step: EpisodeStep) -> EpisodeReply:
        try:
            if step.state is None:
                return await self._begin(step.prompt)
            if step.message is None:
                return await self._end(step.state)
            return await self._step(step.state, str(step.message["content"]))
        except TimeoutError:
            self._played.pop(step.state or b"", None)  # its thread still has the object
            return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=f"no answer within {self._limit_s:g} s")
        except asyncio.CancelledError:
            self._played.pop(step.state or b"", None)
            raise

    async def _begin(self, prompt: Prompt) -> EpisodeReply:
        try:
            player, told = await self._timed(lambda: self._reset(prompt))
        except _ResetFailed as error:
            return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=str(error))
        state = secrets.token_bytes(16)
        self._played[state] = _Played(player, prompt, self._rounds)
        return EpisodeReply(state, _prompt(prompt, told), dict.fromkeys(self.reward_names))

    async def _step(self, state: bytes, text: str) -> EpisodeReply:
        played = self._played[state]
        answers = [] if played.left == 0 else await self._timed(lambda: _turn(played.player, text))
        played.messages += [with_calls(text), *(dict(answer) for answer in answers)]
        if not answers:
            return await self._end(state)
        if played.left is not None:
            played.left -= 1
        return EpisodeReply(state, answers, dict.fromkeys(self.reward_names))

    async def _timed(self, call: Callable[[], _T]) -> _T:
        """The value of a call in a thread. Raises TimeoutError."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await asyncio.wait_for(work, self._limit_s)

    def _reset(self, prompt: Prompt) -> tuple[Any, Any]:
        """An object, and what its reset returns. Raises _ResetFailed."""
        columns = {key: value for key, value in prompt.fields.items() if key != "tools"}
        try:
            player = self._taken() or self._make()
            return player, player.reset(**{**columns, "prompt": prompt.messages or prompt.text})
        except Exception as error:
            raise _ResetFailed(f"reset raised {first_line(error)}") from error

    def _taken(self) -> Any:
        """An object that no episode has; None if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    async def _end(self, state: bytes) -> EpisodeReply:
        """The rewards of an episode. Raises RunError: a function raised, or returned no reward."""
        played = self._played[state]
        rewards = await self._timed(lambda: {name: _reward(name, f, played) for name, f in self._functions.items()})
        self.abandon(state)
        return EpisodeReply(rewards=rewards, done=True)


class _ResetFailed(Exception):
    """An episode could not begin."""


async def _nothing() -> None:
    """The loop has nothing to do at its end."""


def _function(name: str, place: Any) -> Callable[..., Any]:
    if not isinstance(place, str) or not is_reference(place):
        raise ConfigError(f"functions.{name}: expected a function such as file.py:function ({place!r})")
    call: Callable[..., Any] = load_object(place)
    return call


def _tools(player: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an object, by name."""
    members = inspect.getmembers(type(player), predicate=inspect.isfunction)
    return {name: getattr(player, name) for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS}


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


def _turn(player: Any, text: str) -> list[Mapping[str, Any]]:
    """Execute the calls in what the policy wrote; a message of the role tool for each."""
    said, calls = split_calls(text)
    tools = _tools(player)
    answers: list[Mapping[str, Any]] = [
        {"role": "tool", "name": name, "content": _called(tools, name, given)} for name, given in calls
    ]
    if has_call_block(said):
        answers.append({"role": "tool", "name": "unknown", "content": MALFORMED})
    return answers


def _called(tools: Mapping[str, Callable[..., Any]], name: str, arguments: str) -> str:
    if name not in tools:
        return error_text(f"Tool {name} not found.")
    try:
        found = tools[name](**json.loads(arguments))
        text = str(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)
    except Exception as error:  # text for the model, as in TRL
        text = error_text(str(error) or type(error).__name__)
    return text.encode("utf-8", "replace").decode()


def _prompt(prompt: Prompt, told: Any) -> Any:
    """The prompt with what reset returned behind it; None: the row's own."""
    if not told:
        return None
    if prompt.messages is None:
        return f"{prompt.text}{told}"
    *before, last = (dict(message) for message in prompt.messages)
    return [*before, {**last, "content": f"{last['content']}{told}"}]


def _reward(name: str, function: Callable[..., Any], played: _Played) -> float | None:
    prompt = played.prompt
    given: dict[str, Any] = {key: [value] for key, value in prompt.fields.items() if key != "tools"}
    asked = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
    given |= {"prompts": [asked], "completions": [played.messages], "environments": [played.player]}
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    try:
        found = function(**given)
        [value] = asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found
    except Exception as error:
        raise RunError(f"reward function {name!r} raised {first_line(error)}") from error
    return reward_value(value, f"the value of reward function {name!r} for prompt {prompt.id}")
