"""Environment ``functions``: TRL-style reward functions, one per component."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from gdpo_nemo.algorithms.rubrics import criteria_of, family_of, is_family, member
from gdpo_nemo.data.images import Image
from gdpo_nemo.data.records import Outcome, Prompt, TrainerState, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, Failure, SpanReward, read_options, reward_value
from gdpo_nemo.environments.images import data_url, filled, with_pictures
from gdpo_nemo.utils import user_loop
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line, nearest
from gdpo_nemo.utils.exits import exits_contained
from gdpo_nemo.utils.import_path import ImportPath

BUILT_IN = {
    "regex": "gdpo_nemo.environments.tasks.answers:regex",
    "json_schema": "gdpo_nemo.environments.tasks.answers:json_schema",
    "length": "gdpo_nemo.environments.tasks.answers:length",
    "length_band": "gdpo_nemo.environments.tasks.answers:length_band",
    "distinct": "gdpo_nemo.environments.tasks.answers:distinct",
    "llm_judge": "gdpo_nemo.environments.tasks.judge:LlmJudge",
    "http": "gdpo_nemo.environments.tasks.http_reward:HttpReward",
    "reward_model": "gdpo_nemo.environments.tasks.reward_model:Scorer",
}
"""Import paths of the built-in reward functions, by name."""


type Value = float | Failure | SpanReward | None
"""Value that a reward function returns for one component of a completion."""


@dataclass(frozen=True)
class _RewardFunction:
    name: str
    reference: str
    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Arguments from the config. Arguments from the config take precedence over dataset columns of the same name."""
    is_async: bool
    parameters: frozenset[str] | None
    """Names of the accepted parameters, or None if the function has ``**kwargs``."""

    def keyword_arguments(self, batch: _Batch) -> dict[str, Any]:
        """Return the keyword arguments of one call. Columns are copied, so that functions cannot modify each other's
        inputs."""
        arguments = {**batch.columns, **batch.log.arguments(str(self), batch.state), **self.arguments}
        if self.parameters is None:
            arguments.pop("completion", None)  # TRL does not pass this column to reward functions
        elif "id" in self.parameters:
            arguments.setdefault("id", batch.ids)
        found = {}
        opened: dict[str, Any] = {}
        opens = batch.has_images and not getattr(self.call, "encoded_images", False)
        for name, value in arguments.items():
            if self.parameters is None or name in self.parameters:
                is_shared = name in ("log_extra", "log_metric", "trainer_state")
                copied = value if is_shared else copy.deepcopy(value)
                found[name] = with_pictures(copied, opened) if opens and not is_shared else copied
        return found

    def __str__(self) -> str:
        return f"reward function {self.name!r} ({self.reference})"


@dataclass(frozen=True)
class _Batch:
    """Inputs of the reward functions for one batch of trajectories."""

    columns: Mapping[str, Any]
    ids: list[str]
    """Prompt ids, for functions with a parameter ``id``."""
    state: TrainerState | None
    log: CallLog
    has_images: bool = False


class Functions(Environment):
    """Environment that computes each reward component with a reward function.

    Options:
        functions: reward functions by component, each specified in one of the formats below.
        system_prompt: system prompt for the prompts of this environment.

    A function is specified by one of

    * an import path (``file.py:name``, ``package.module.name``),
    * a built-in name (regex, json_schema, length, length_band, distinct, llm_judge, http, reward_model),
    * the URL of a reward server (``HttpReward``),
    * or ``{function: ..., <argument>: <value>, ...}``.

    A class is instantiated once per process with these arguments, and the instance is called. If the instance has a
    method ``load``, this method is called when the process starts.

    As in TRL, a function is called with ``prompts``, ``completions``, ``completion_ids`` and every other column of the
    dataset. Each argument is a list with one entry per completion. The function also gets ``trainer_state``,
    ``log_extra(column, values)`` and ``log_metric(name, value)``. Prompts and completions are lists of messages if the
    row contains chat messages, and text otherwise. Functions without ``**kwargs`` get only the arguments that they
    declare. Async functions run concurrently, in one event loop for all calls (``user_loop``).

    Images are PIL images, in their columns and in the messages. The contents of messages with images are lists of
    parts, as in TRL. A class with ``encoded_images = True`` gets ``data.images.Image`` in place of PIL images.

    A function may return a ``Failure`` instead of a reward, which masks the sample, or a ``SpanReward`` with the
    characters that the reward is about. Each call receives some of the step's completions, and always all samples of a
    prompt. However, the samples of a failed call are retried individually.

    A function of a family such as ``rubric/*`` returns a mapping from the ids of criteria to rewards for each
    completion. A criterion without an entry has no reward. The row's column ``rubric`` may contain the weights
    (``algorithms.rubrics``). A sample is masked if the function returns a criterion that this column does not have.
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options("functions", options, functions={}, system_prompt=None)
        if not chosen.functions:
            raise ConfigError(
                "functions: must name at least one reward function; write functions: {component: file.py:name}"
            )
        self._functions = [_load(name, entry) for name, entry in chosen.functions.items()]
        self.reward_names = tuple(chosen.functions)
        self.system_prompt = chosen.system_prompt

    def prepare(self) -> None:
        """Call the method ``load`` of every reward function that defines this method."""
        for function in self._functions:
            if callable(load := getattr(function.call, "load", None)) and inspect.isawaitable(loading := load()):
                user_loop.run(loading)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory.

        Raises RunError if a function raises or returns an invalid value. The message names the function.
        """
        log = CallLog(len(trajectories))
        ids = [trajectory.prompt.id for trajectory in trajectories]
        state = trajectories[0].trainer_state if trajectories else None
        batch = _Batch(_columns(trajectories), ids, state, log, any(t.prompt.images or t.images for t in trajectories))
        returned = {f.name: _call(f, batch) for f in self._functions if not f.is_async}
        if asynchronous := [f for f in self._functions if f.is_async]:
            returned.update(user_loop.run(_call_all(asynchronous, batch)))
        rewards = [_values(f, returned[f.name], trajectories) for f in self._functions]
        metrics = log.metrics()
        verdicts = []
        for row in range(len(trajectories)):
            values: dict[str, Value] = {}
            for of_function in rewards:
                values |= of_function[row]
            verdicts.append(self._verdict(values, log.extra(row), metrics))
        return verdicts

    def _verdict(self, rewards: Mapping[str, Value], extra: Mapping[str, Any], metrics: Mapping[str, float]) -> Verdict:
        failed = []
        spans = {}
        given: dict[str, float | None] = {}
        for name, value in rewards.items():
            if isinstance(value, Failure):
                failed.append(f"{name}: {' '.join(str(value.detail).split())[:300]}")
            elif isinstance(value, SpanReward):
                spans[name] = value.spans
                given[name] = value.value
            else:
                given[name] = value
        if failed:
            return Verdict({}, Outcome.ENV_FAILED, "; ".join(failed), extra, metrics)
        return Verdict(given, extra=extra, metrics=metrics, reward_spans=spans)


def _load(name: str, entry: Any) -> _RewardFunction:
    arguments = dict(entry) if isinstance(entry, Mapping) else {"function": entry}
    if is_url(arguments.get("function")):
        arguments = {**arguments, "function": "http", "url": arguments["function"]}
    reference = arguments.pop("function", None)
    if not isinstance(reference, str):
        raise ConfigError(f"functions.{name}: must be a function such as file.py:name, not {entry!r}")
    if ":" not in reference and "." not in reference and reference not in BUILT_IN:
        raise ConfigError(f"functions.{name}: unknown reward function {reference!r}{nearest(reference, BUILT_IN)}")
    call = ImportPath(BUILT_IN.get(reference, reference)).load()
    if not callable(call):
        raise ConfigError(f"functions.{name}: {reference} is not callable")
    if inspect.isclass(call):
        _check_arguments(name, reference, arguments, parameters_of(call))
        if reference == "http":
            arguments["criteria"] = is_family(name)
        call = _instantiate(name, reference, call, arguments)
        arguments = {}
    known = parameters_of(call)
    _check_arguments(name, reference, arguments, known)
    check_required_arguments(name, reference, call, arguments)
    return _RewardFunction(name, reference, call, arguments, is_async(call), known)


def is_url(place: Any) -> bool:
    """Return whether a reward function is specified by the URL of a reward server."""
    return isinstance(place, str) and place.startswith(("http://", "https://"))


def _check_arguments(name: str, reference: str, arguments: Mapping[str, Any], known: frozenset[str] | None) -> None:
    for argument in arguments:
        if known is not None and argument not in known:
            raise ConfigError(
                f"functions.{name}: {reference} does not accept the argument {argument!r}{nearest(argument, known)}"
            )


def _instantiate(name: str, reference: str, make: type, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    try:
        with exits_contained():
            function: object = make(**arguments)
    except ConfigError as error:
        raise ConfigError(f"functions.{name}.{error}") from error
    except Exception as error:  # the constructor is user code
        raise ConfigError(f"functions.{name}: {reference} could not be built: {first_line(error)}") from error
    if not callable(function):
        raise ConfigError(f"functions.{name}: instances of {reference} are not callable")
    return function


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the arguments that TRL passes to a reward function, by name. If a row lacks a column, the entry of this
    row is None."""
    rows = [trajectory.prompt.fields for trajectory in trajectories]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        columns[name] = [row.get(name) for row in rows]
    columns["prompts"] = [prompt_in_trl_format(trajectory.prompt) for trajectory in trajectories]
    columns["completions"] = list(map(_completion, trajectories))
    columns["completion_ids"] = [list(map(int, trajectory.completion_ids)) for trajectory in trajectories]
    return columns


def prompt_in_trl_format(prompt: Prompt) -> Any:
    """Return a prompt in TRL's format: text, or messages. Messages with images contain encoded images."""
    if prompt.messages is None:
        return prompt.text
    return filled(prompt.messages, prompt.images) if prompt.images else list(map(dict, prompt.messages))


def _completion(trajectory: Trajectory) -> Any:
    if trajectory.messages is not None:
        found = list(map(dict, trajectory.messages))
        return filled(found, trajectory.images) if trajectory.images else found
    if trajectory.prompt.messages is None:
        return trajectory.text
    return [{"role": "assistant", "content": trajectory.text}]


def _call(function: _RewardFunction, batch: _Batch) -> Any:
    try:
        user_loop.provide_loop()
        found = function.call(**function.keyword_arguments(batch))
        return user_loop.run(found) if inspect.isawaitable(found) else found
    except RunError:  # raised by log_extra or log_metric; it names the function
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{function} raised {first_line(error)}") from error


async def _call_all(functions: Sequence[_RewardFunction], batch: _Batch) -> dict[str, Any]:
    async def call_one(function: _RewardFunction) -> Any:
        try:
            return await function.call(**function.keyword_arguments(batch))
        except RunError:
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"{function} raised {first_line(error)}") from error

    returned = await asyncio.gather(*(call_one(function) for function in functions))
    return {function.name: value for function, value in zip(functions, returned)}


def _values(function: _RewardFunction, returned: Any, trajectories: Sequence[Trajectory]) -> list[dict[str, Value]]:
    try:
        values = list(returned)
    except Exception:
        raise RunError(f"{function} must return a list of rewards, not {type(returned).__name__}") from None
    if len(values) != len(trajectories):
        raise RunError(f"{function} returned {len(values)} rewards for {len(trajectories)} completions")
    found = []
    for value, t in zip(values, trajectories):
        subject = f"the value of {function} for sample {t.sample_index} of prompt {t.prompt.id}"
        found.append(component_values(function.name, value, subject, t.prompt.fields))
    return found


def component_values(name: str, value: Any, subject: str, fields: Mapping[str, Any]) -> dict[str, Value]:
    """Check the value that a reward function returned for a completion, and return its values by component.

    A value of a family is a mapping from the ids of criteria to values, or None. If the row's rubric does not have one
    of these criteria, the value is a ``Failure``.

    Args:
        name: component, or family of components.
        subject: description of the value, for error messages.
        fields: columns of the row.

    Raises:
        RunError: if the value is invalid. The message begins with ``subject``.
    """
    if isinstance(value, Failure) or not is_family(name):
        return {name: _value(value, subject)}
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RunError(f"{subject} must be a mapping from the ids of criteria to rewards, not {type(value).__name__}")
    found: dict[str, Value] = {}
    for key, given in value.items():
        component = member(name, str(key))
        if family_of(component, (name,)) is None:
            raise RunError(f"{subject} has the invalid id {str(key)!r:.40}")
        found[component] = _value(given, f"{subject}, criterion {str(key)!r:.40},")
    try:
        criteria_of(fields, found)
    except ConfigError as error:
        return {name: Failure(str(error))}
    return found


def _value(value: Any, subject: str) -> Value:
    if isinstance(value, SpanReward):
        return replace(value, value=reward_value(value.value, subject))
    return value if isinstance(value, Failure) else reward_value(value, subject)


REFUSED = {
    "environments": "TRL's instances of environment_factory are available in the environment tool_class "
    "(docs/turns.md)",
}
"""Arguments of TRL's reward functions that are not supported, with a replacement for each."""


@dataclass
class CallLog:
    """Extra columns and metrics that the reward functions log for one batch.

    Args:
        samples: number of completions in the batch.
    """

    samples: int
    _columns: dict[str, list[Any]] = field(default_factory=dict)
    _values: dict[str, list[float]] = field(default_factory=dict)

    def arguments(self, function: str, state: TrainerState | None) -> dict[str, Any]:
        """Return the arguments ``trainer_state``, ``log_extra`` and ``log_metric`` for one function.

        Args:
            function: description of the function, for error messages.
        """
        return {
            "trainer_state": state or TrainerState(),
            "log_extra": functools.partial(self._log_extra, function),
            "log_metric": functools.partial(self._log_metric, function),
        }

    def extra(self, row: int) -> dict[str, Any]:
        """Return the values of the extra columns for one completion."""
        return {column: values[row] for column, values in self._columns.items()}

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over its logged values."""
        return {name: math.fsum(values) / len(values) for name, values in self._values.items()}

    def _log_extra(self, function: str, column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != self.samples:
            raise RunError(f"{function}: log_extra({column!r}) got {len(values)} values for {self.samples} completions")
        if column in self._columns:
            raise RunError(f"{function}: log_extra({column!r}) was already called for these completions")
        self._columns[str(column)] = list(map(plain, values))

    def _log_metric(self, function: str, name: str, value: float) -> None:
        number = reward_value(value, f"{function}: the value of log_metric({name!r})")
        if number is not None:
            self._values.setdefault(str(name), []).append(number)


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine. Supports functions, partials, and objects with an async
    ``__call__``."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def parameters_of(call: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the accepted arguments. Return None if all names are accepted or the signature is unknown."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # builtins in C
        return None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else frozenset(parameter.name for parameter in parameters)


def check_required_arguments(name: str, reference: str, call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a function requires an argument of TRL that is not supported (``REFUSED``)."""
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:
        return
    for argument, replacement in REFUSED.items():
        parameter = parameters.get(argument)
        if parameter is not None and parameter.default is parameter.empty and argument not in given:
            raise ConfigError(
                f"functions.{name}: {reference} requires the argument {argument}, which is not supported: {replacement}"
            )


def plain(value: Any) -> Any:
    """Convert a value to JSON types. Arrays become lists, NaN and infinity become None, images become data URLs, and
    other types become text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Image):
        return data_url(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return str(value)
