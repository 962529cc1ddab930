"""Adapter for packages with the earlier API of verifiers (0.1.14 to 0.3): ``load_environment`` returns an environment
with a dataset and a rubric.

The worker loads this file, so it imports only the standard library and verifiers with its dependencies. The library
catches exceptions of reward functions and scores them as 0, so each function is wrapped to record its value or problem.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.rubrics.rubric import Rubric
from verifiers.utils.env_utils import load_environment

if TYPE_CHECKING:
    from gdpo_nemo.environments.verifiers.worker import NO_BUDGET, NO_ROOM, Policy, one_line, score
else:
    from gdpo_nemo_worker import NO_BUDGET, NO_ROOM, Policy, one_line, score

_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids")
_LIMITS = ("max_tokens", "max_completion_tokens", "stop")
"""Sampling settings of a package that apply. The run sets the others."""
_TOTAL = "reward"
"""Component of rubrics that set the total reward without reward functions."""
_SELECT = ("include", "exclude", "shuffle", "seed", "skip", "limit")
_UNFINISHED = "did not return before the time limit of the episode"


class PolicyClient(OpenAIChatCompletionsClient):
    """Client of the run's endpoint, which stores the tokens of each reply in the attribute ``turn`` of the response."""

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """Return the endpoint's reply. Raises OverlongPromptError, which ends the episode, if a limit is reached."""
        try:
            return await super().get_native_response(*args, **kwargs)
        except BadRequestError as error:
            if NO_BUDGET in str(error) or NO_ROOM in str(error):
                raise OverlongPromptError from error
            raise

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept empty replies, which the library refuses. The policy wrote them, so they are scored."""

    async def from_native_response(self, response: Any) -> Any:
        """Convert a reply of the endpoint to a response of the library."""
        converted = await super().from_native_response(response)
        message = response.choices[0].message
        if converted.message.content is None and not converted.message.tool_calls:
            converted.message.content = ""
        converted.turn = {name: getattr(message, name) for name in _TOKEN_FIELDS}
        return converted


@dataclass
class Scores:
    """Values and problems of the reward functions for one episode, by component."""

    rewards: dict[str, float | None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> float:
        """Record the value of a function. Return the number for the rubric, which is 0 without a reward."""
        try:
            self.rewards[name] = number = score(value)
            self.problems.pop(name, None)
        except ValueError as error:
            self.problems[name] = f"returned {error}"
            number = None
        return 0.0 if number is None else number


@dataclass
class Rollout:
    """One played episode, which is not scored yet."""

    state: Any = None
    """State of the library, or None if the package raised an exception."""
    turns: list[dict[str, Any] | None] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


class Adapter:
    """A package's environment.

    Args:
        package: name of the package.
        args: arguments of its function ``load_environment``.
    """

    def __init__(self, package: str, args: dict[str, Any]):
        try:
            self._env: Any = load_environment(package.rpartition("/")[2].partition("@")[0].lower(), **args)
        except Exception as error:
            raise error.__cause__ or error from None  # the library wraps the exceptions of packages
        self._scores: dict[int, Scores] = {}
        """Scores of the episodes that are being scored, by the id of their state."""
        self._functions: dict[str, dict[str, Any]] = {}
        self._watch_functions()
        self._lock = threading.Lock()
        self._http: Any = None

    def describe(self) -> dict[str, Any]:
        """Return the components, metrics and tools."""
        dataset = self._env.dataset
        return {
            "version": importlib.metadata.version("verifiers"),
            "api": "legacy",
            "functions": list(self._functions.values()),
            "metrics": [],
            "tasks": None if dataset is None else len(dataset),
            "tools": any(getattr(env, "tool_defs", None) for env in _environments(self._env)),
        }

    def rows(self, split: str, size: int | None, seed: int, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """Return rows of the package's dataset, or of its evaluation dataset unless the split is train.

        Args:
            choice: ``include`` and ``exclude`` (values by column, see ``_matching``), ``shuffle`` (with ``seed``),
                ``skip`` and ``limit``, which apply in this order, as in verifiers 0.4.

        Raises:
            ValueError: if the package has no such dataset, or ``choice`` has an unknown key or column.
        """
        chosen = {"shuffle": False, "seed": seed, "skip": 0, "limit": size, "include": {}, "exclude": {}} | choice
        if unknown := sorted(chosen.keys() - set(_SELECT)):
            raise ValueError(f"select has no key {unknown[0]!r}; use {', '.join(_SELECT)}")
        source, dataset = self._dataset(split)
        indices = list(range(len(dataset)))
        for keep, columns in ((True, chosen["include"]), (False, chosen["exclude"])):
            for column, values in columns.items():
                matching = _matching(dataset, column, values)
                indices = [index for index in indices if (index in matching) is keep]
        if chosen["shuffle"]:
            random.Random(chosen["seed"]).shuffle(indices)
        indices = indices[chosen["skip"] :][: chosen["limit"]]
        return [_row(source, index, dataset[index]) for index in indices]

    async def play(self, tasks: list[dict[str, Any]], policy: Policy) -> list[dict[str, Any]]:
        """Play one episode for each task of a group, then score the episodes together."""
        rows = await asyncio.to_thread(lambda: [self._checked_row(**task) for task in tasks])
        if self._http is None:
            self._http = DefaultAsyncHttpxClient(timeout=policy.deadline_s)
        rollouts = await asyncio.gather(*(self._rollout(row, policy) for row in rows))
        return await self._score(rollouts, policy)

    async def close(self) -> None:
        """Release the resources of the package."""
        for env in _environments(self._env):
            await env._teardown()
        if self._http is not None:
            await self._http.aclose()

    def _dataset(self, split: str) -> tuple[str, Any]:
        """Return the name and the rows of a dataset. A package without an evaluation dataset has one for all splits."""
        with self._lock:
            dataset = None if split == "train" else self._env.build_eval_dataset()
            return ("train", self._env.get_dataset()) if dataset is None else ("eval", dataset)

    def _checked_row(self, source: str, index: int, sha256: str) -> dict[str, Any]:
        _, dataset = self._dataset(source)
        row = dataset[index] if index < len(dataset) else {}
        if _digest(row) != sha256:
            raise ValueError(
                f"row {index} of its dataset ({source}) has changed since the run read it; the rows must be the same "
                "each time that the package is loaded"
            )
        return dict(row)

    async def _rollout(self, row: dict[str, Any], policy: Policy) -> Rollout:
        """Play an episode. The package may raise any exception, for which only this episode fails."""
        limits = {name: value for name, value in self._env.sampling_args.items() if name in _LIMITS}
        sampling = {**limits, "temperature": policy.temperature, "top_p": policy.top_p}
        client = AsyncOpenAI(
            base_url=policy.url,
            api_key=policy.api_key,
            default_headers={"x-session-id": uuid.uuid4().hex},
            max_retries=0,
            http_client=self._http,
        )
        rollout = Rollout()
        try:
            async with policy.episode():
                begin = time.monotonic()
                rollout.state = await self._env.rollout(row, PolicyClient(client), policy.model, sampling)
            rollout.seconds = time.monotonic() - begin
            rollout.error = _error_of(rollout.state)
            rollout.turns = [getattr(step["response"], "turn", None) for step in rollout.state["trajectory"]]
            if None in rollout.turns:
                rollout.error = "a turn was not sampled through the client that the package got"
        except Exception as error:
            rollout.error = one_line(error)
        return rollout

    async def _score(self, rollouts: Sequence[Rollout], policy: Policy) -> list[dict[str, Any]]:
        """Score the episodes that did not fail, and return the results of all. The time limit of the slowest episode
        includes the time of the scoring."""
        played = [rollout for rollout in rollouts if rollout.error is None]
        self._scores |= {id(rollout.state): Scores() for rollout in played}
        failure = None
        try:
            async with asyncio.timeout(policy.deadline_s - max((rollout.seconds for rollout in played), default=0.0)):
                await self._use_rubric([rollout.state for rollout in played])
        except TimeoutError:
            failure = f"the episode exceeded {policy.deadline_s:g} s while it was scored"
        except Exception as error:  # of the rubric, because functions do not raise
            failure = f"the rubric raised {one_line(error)}"
        results = []
        for rollout in rollouts:
            scores = self._scores.pop(id(rollout.state), Scores())
            results.append(self._result(rollout, scores, rollout.error or failure))
        return results

    async def _use_rubric(self, states: list[Any]) -> None:
        rubric = self._env.rubric
        try:
            if states:
                await rubric.score_group(states)
        finally:
            for state in states:
                await rubric.cleanup(state)

    def _result(self, rollout: Rollout, scores: Scores, error: str | None) -> dict[str, Any]:
        """Return the result of an episode, in the format of the worker."""
        result = {"turns": rollout.turns, "rewards": {}, "problems": scores.problems, "metrics": {}, "error": error}
        if error:
            return {**result, "incomplete": False}
        state = rollout.state
        if _TOTAL in self._functions and not any(self._functions[name]["weight"] for name in scores.rewards):
            scores.add(_TOTAL, state["reward"])
        last = state["trajectory"][-1:]
        return {
            **result,
            # A function that was not called belongs to another environment of a group.
            "rewards": dict.fromkeys(self._functions) | scores.rewards,
            "incomplete": bool(state.get("prompt_too_long") or any(step["is_truncated"] for step in last)),
        }

    def _watch_functions(self) -> None:
        """Wrap the reward functions, and name their components.

        A function has the same component in all environments of a group. A further function with this name in the
        same environment, or with another weight, gets a number.

        Raises:
            ValueError: if the rubric has no reward functions.
        """
        watched: set[int] = set()
        for env in _environments(self._env):
            names: set[str] = set()
            for rubric in _leaves(env.rubric):
                if id(rubric) in watched or hasattr(rubric, "env_map"):
                    continue  # the rubric of a group of environments uses those of its members
                watched.add(id(rubric))
                functions = []
                for function, weight in zip(rubric.funcs, rubric.weights):
                    is_group = rubric._is_group_func(function)
                    name = self._name(getattr(function, "__name__", type(function).__name__), weight, names)
                    names.add(name)
                    self._functions[name] = {"name": name, "weight": weight, "group": is_group}
                    functions.append(self._watched(function, name, is_group))
                rubric.funcs = functions
                if type(rubric).score_group is not Rubric.score_group and not any(rubric.weights):
                    self._functions[_TOTAL] = {"name": _TOTAL, "weight": 1.0, "group": False}
        if not any(function["weight"] for function in self._functions.values()):
            raise ValueError("the rubric has no reward functions with a weight")

    def _name(self, function: str, weight: float, used: set[str]) -> str:
        for number in itertools.count(1):
            name = function if number == 1 else f"{function}_{number}"
            known = self._functions.get(name)
            if name not in used and (known is None or known["weight"] == weight):
                return name
        raise AssertionError

    def _watched(self, function: Callable[..., Any], name: str, is_group: bool) -> Callable[..., Any]:
        """Wrap a reward function. The wrapper records its values, and returns numbers for the rubric.

        The rubric passes the arguments that the signature names, so the wrapper's signature also names the states.
        """
        states_key = "states" if is_group else "state"
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        takes_states = takes_any or states_key in signature.parameters

        @functools.wraps(function)
        async def watched(**arguments: Any) -> Any:
            states = arguments[states_key] if is_group else [arguments[states_key]]
            scores = [self._scores[id(state)] for state in states]
            for each in scores:
                each.problems[name] = _UNFINISHED
            if not takes_states:
                del arguments[states_key]
            try:
                value = function(**arguments)
                value = await value if inspect.isawaitable(value) else value
                values = _listed(value, len(states)) if is_group else [value]
            except Exception as error:
                problem = str(error) if isinstance(error, WrongList) else f"raised {one_line(error)}"
                for each in scores:
                    each.problems[name] = problem
                values = []
            numbers = [each.add(name, value) for each, value in zip(scores, values)] or [0.0] * len(states)
            return numbers if is_group else numbers[0]

        watched.__name__ = name
        if not takes_states:
            added = inspect.Parameter(states_key, inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*parameters, added])
        watched.__signature__ = signature  # type: ignore[attr-defined]
        return watched


class WrongList(Exception):
    """A group function did not return one value per sample. The message completes "reward function NAME"."""


def _listed(value: Any, samples: int) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or len(value) != samples:
        raise WrongList(f"returned {str(value)[:40]!r}, which is not a list of {samples} rewards")
    return list(value)


def _environments(env: Any) -> Iterator[Any]:
    """Yield the environments of a group, also in groups of groups, and the environment itself."""
    members = getattr(env, "envs", None)
    for member in members if isinstance(members, list) else ():
        yield from _environments(member)
    yield env


def _leaves(rubric: Any) -> Iterator[Any]:
    """Yield the rubrics of a group of rubrics, also in groups of groups, or the rubric itself."""
    members = getattr(rubric, "rubrics", None)
    if members is None:
        yield rubric
        return
    for member in members:
        yield from _leaves(member)


def _matching(dataset: Any, column: str, values: Any) -> set[int]:
    """Return the positions of the rows that have one of the values in a column.

    Args:
        column: name of a column, ``column.key`` of an object, or ``idx``, the row's position. Positions may be slices
            such as "0:100".

    Raises:
        ValueError: if the dataset does not have the column.
    """
    wanted = values if isinstance(values, list) else [values]
    if column == "idx":
        return set(itertools.chain.from_iterable(_positions(value, len(dataset)) for value in wanted))
    name, _, key = column.partition(".")
    if name not in dataset.column_names:
        raise ValueError(f"the dataset has no column {name!r}; its columns are {', '.join(dataset.column_names)}")
    cells = dataset[name]
    if key:
        cells = [(json.loads(cell) if isinstance(cell, str) else cell or {}).get(key) for cell in cells]
    return {index for index, cell in enumerate(cells) if cell in wanted}


def _positions(value: Any, rows: int) -> Iterable[int]:
    parts = [int(part) if part else None for part in str(value).split(":")]
    return range(rows)[slice(*parts)] if len(parts) > 1 else [int(value)]


def _row(source: str, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    shown = [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]
    task = {"source": source, "index": index, "sha256": _digest(row)}
    return {"id": f"{source}/{index}", "prompt": shown, "task": task}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def _digest(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, sort_keys=True, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()


def _error_of(state: Any) -> str | None:
    """Return the reason if an episode must not be trained, with the original error of the library's."""
    error = state.get("error")
    if error is None:
        return "the episode exceeded timeout_seconds of the package" if state.get("timed_out") else None
    if not isinstance(error, BaseException):
        return str(error)[:300]
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    return one_line(error) if root is error else f"{type(error).__name__}: {one_line(root)}"
