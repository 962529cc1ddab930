"""Reward functions as TRL users write them, one per component: ``f(prompts, completions, completion_ids, trainer_state,
log_extra, log_metric, **columns) -> list[float | None]``."""

from __future__ import annotations

import asyncio
import copy
import inspect
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.config.objects import load_object
from gdpo_nemo.data.records import Outcome, TrainerState, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, Failure
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.function_calls import CallLog, check_demands, is_async, parameters_of
from gdpo_nemo.environments.verdicts import reward_value
from gdpo_nemo.errors import ConfigError, RunError

BUILT_IN = {
    "regex": "gdpo_nemo.environments.tasks.formats:regex",
    "json_schema": "gdpo_nemo.environments.tasks.formats:json_schema",
    "length": "gdpo_nemo.environments.tasks.formats:length",
    "llm_judge": "gdpo_nemo.environments.tasks.judge:LlmJudge",
    "http": "gdpo_nemo.environments.tasks.http_reward:HttpReward",
    "reward_model": "gdpo_nemo.environments.tasks.reward_model:Scorer",
}
"""Functions that may be named without their place."""


@dataclass(frozen=True)
class _RewardFunction:
    name: str
    reference: str
    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Arguments fixed in the config, which win over columns of the same name."""
    is_async: bool
    parameters: frozenset[str] | None
    """Parameters it takes; None: any (it has ``**kwargs``)."""

    def bound(self, batch: _Batch) -> dict[str, Any]:
        """The arguments of one call; lists are copies, so that a function cannot alter what the next one sees."""
        arguments = {**batch.columns, **batch.log.arguments(str(self), batch.state), **self.arguments}
        if self.parameters is None:
            arguments.pop("completion", None)  # a column that TRL keeps to itself
        elif "id" in self.parameters:
            arguments.setdefault("id", batch.ids)
        if self.parameters is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.parameters}
        shared = ("log_extra", "log_metric", "trainer_state")
        return {name: value if name in shared else copy.deepcopy(value) for name, value in arguments.items()}

    def __str__(self) -> str:
        return f"reward function {self.name!r} ({self.reference})"


@dataclass(frozen=True)
class _Batch:
    """What one call of the functions is about."""

    columns: Mapping[str, Any]
    ids: list[str]
    """Of the rows, for functions that name the argument ``id``."""
    state: TrainerState | None
    log: CallLog


class Functions(Environment):
    """An environment made of reward functions.

    Options:
        functions: component name to function, given by its place (``file.py:name``, ``package.module.name``), by a
            built-in name (regex, json_schema, length, llm_judge, http, reward_model), by the URL of a server that
            rewards (``HttpReward``), or as ``{function: ..., <argument>: <value>, ...}``. A class is built once in each
            process, with these arguments, and its object called; a method ``prepare`` of it is called before.
        system_prompt: put before the prompts.

    As in TRL a function is called with ``prompts``, ``completions``, ``completion_ids`` and every further column of the
    dataset, each a list with one entry per completion, and with ``trainer_state``, ``log_extra(column, values)`` and
    ``log_metric(name, value)``. For rows that hold chat messages, prompts and completions are message lists, otherwise
    text. Functions without ``**kwargs`` get only what they ask for. Async functions run concurrently. A ``Failure`` in
    the place of a reward masks the sample. The completions of one call are some of the step's, but always all samples
    of a prompt (except when a call that had failed is repeated for one sample at a time).
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options("functions", options, functions={}, system_prompt=None)
        if not chosen.functions:
            raise ConfigError("functions: names no reward function; write functions: {component: file.py:name}")
        self._functions = [_load(name, entry) for name, entry in chosen.functions.items()]
        self.reward_names = tuple(chosen.functions)
        self.system_prompt = chosen.system_prompt

    def prepare(self) -> None:
        """Let the objects among the functions load what takes long."""
        for function in self._functions:
            if callable(load := getattr(function.call, "load", None)):
                load()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory. Raises RunError naming the function that raised or returned nonsense."""
        log = CallLog(len(trajectories))
        ids = [trajectory.prompt.id for trajectory in trajectories]
        batch = _Batch(_columns(trajectories), ids, trajectories[0].trainer_state if trajectories else None, log)
        returned = {f.name: _call(f, batch) for f in self._functions if not f.is_async}
        returned.update(asyncio.run(_call_all([f for f in self._functions if f.is_async], batch)))
        rewards = {f.name: _values(f, returned[f.name], trajectories) for f in self._functions}
        metrics = log.metrics()
        return [
            self._verdict({name: rewards[name][row] for name in self.reward_names}, log.extra(row), metrics)
            for row in range(len(trajectories))
        ]

    def _verdict(
        self, rewards: Mapping[str, float | Failure | None], extra: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Verdict:
        failures = {name: value for name, value in rewards.items() if isinstance(value, Failure)}
        failed = [f"{name}: {' '.join(str(value.detail).split())[:300]}" for name, value in failures.items()]
        if failed:
            return Verdict({}, Outcome.ENV_FAILED, "; ".join(failed), extra, metrics)
        given = {name: value for name, value in rewards.items() if not isinstance(value, Failure)}
        return Verdict(given, extra=extra, metrics=metrics)


def _load(name: str, entry: Any) -> _RewardFunction:
    arguments = dict(entry) if isinstance(entry, Mapping) else {"function": entry}
    if is_url(arguments.get("function")):
        arguments = {**arguments, "function": "http", "url": arguments["function"]}
    reference = arguments.pop("function", None)
    if not isinstance(reference, str):
        raise ConfigError(f"functions.{name}: must name a function, such as file.py:name, not {entry!r}")
    if ":" not in reference and "." not in reference and reference not in BUILT_IN:
        raise ConfigError(f"functions.{name}: no reward function is called {reference!r}{nearest(reference, BUILT_IN)}")
    call = load_object(BUILT_IN.get(reference, reference))
    if not callable(call):
        raise ConfigError(f"functions.{name}: {reference} is not callable")
    if inspect.isclass(call):
        _check_arguments(name, reference, arguments, parameters_of(call))
        call = _built(name, reference, call, arguments)
        arguments = {}
    known = parameters_of(call)
    _check_arguments(name, reference, arguments, known)
    check_demands(name, reference, call, arguments)
    return _RewardFunction(name, reference, call, arguments, is_async(call), known)


def is_url(place: Any) -> bool:
    """Whether a function is named by the address of a server that rewards."""
    return isinstance(place, str) and place.startswith(("http://", "https://"))


def _check_arguments(name: str, reference: str, arguments: Mapping[str, Any], known: frozenset[str] | None) -> None:
    for argument in arguments:
        if known is not None and argument not in known:
            raise ConfigError(f"functions.{name}: {reference} takes no argument {argument!r}{nearest(argument, known)}")


def _built(name: str, reference: str, make: type, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    try:
        function = make(**arguments)
    except ConfigError as error:
        raise ConfigError(f"functions.{name}.{error}") from error
    except Exception as error:  # the constructor is the user's
        raise ConfigError(f"functions.{name}: {reference} could not be built: {first_line(error)}") from error
    if not callable(function):
        raise ConfigError(f"functions.{name}: objects of {reference} are not callable")
    return function


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """The arguments TRL passes, by name. A column that a row lacks is None there."""
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.prompt.fields)
    columns = {name: [trajectory.prompt.fields.get(name) for trajectory in trajectories] for name in names}
    columns["prompts"] = [_prompt(trajectory) for trajectory in trajectories]
    columns["completions"] = [_completion(trajectory) for trajectory in trajectories]
    columns["completion_ids"] = [[int(token) for token in trajectory.completion_ids] for trajectory in trajectories]
    return columns


def _prompt(trajectory: Trajectory) -> Any:
    messages = trajectory.prompt.messages
    return trajectory.prompt.text if messages is None else [dict(message) for message in messages]


def _completion(trajectory: Trajectory) -> Any:
    if trajectory.messages is not None:
        return [dict(message) for message in trajectory.messages]
    if trajectory.prompt.messages is None:
        return trajectory.text
    return [{"role": "assistant", "content": trajectory.text}]


def _call(function: _RewardFunction, batch: _Batch) -> Any:
    try:
        return function.call(**function.bound(batch))
    except RunError:  # a logger's refusal, which names the function
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{function} raised {first_line(error)}") from error


async def _call_all(functions: Sequence[_RewardFunction], batch: _Batch) -> dict[str, Any]:
    async def one(function: _RewardFunction) -> Any:
        try:
            return await function.call(**function.bound(batch))
        except RunError:
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"{function} raised {first_line(error)}") from error

    returned = await asyncio.gather(*(one(function) for function in functions))
    return {function.name: value for function, value in zip(functions, returned)}


def _values(
    function: _RewardFunction, returned: Any, trajectories: Sequence[Trajectory]
) -> list[float | Failure | None]:
    try:
        values = list(returned)
    except Exception:
        raise RunError(f"{function} must return a list of rewards, not {type(returned).__name__}") from None
    if len(values) != len(trajectories):
        raise RunError(f"{function} returned {len(values)} rewards for {len(trajectories)} completions")
    return [
        value
        if isinstance(value, Failure)
        else reward_value(value, f"the value of {function} for sample {t.sample_index} of prompt {t.prompt.id}")
        for value, t in zip(values, trajectories)
    ]
