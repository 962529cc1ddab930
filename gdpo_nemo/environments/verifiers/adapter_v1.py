"""Adapter for packages of verifiers 0.4: a task set, and optionally a harness or an environment of several agents.

The worker loads this file, so it imports only the standard library and verifiers with its dependencies. The library
sends each call of the policy through its interception server to ``PolicyClient``, which records the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import httpx
import verifiers
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.errors import HarnessError, ProviderError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server as interception
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.task import Task
from verifiers.v1.types import SamplingConfig, content_text
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

if TYPE_CHECKING:
    from gdpo_nemo.environments.verifiers.worker import API_KEY, NO_BUDGET, NO_ROOM, Policy, one_line, run_module, score
else:
    from gdpo_nemo_worker import API_KEY, NO_BUDGET, NO_ROOM, Policy, one_line, run_module, score

__all__ = ["ChatHarness"]

_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_OVERFLOW = "maximum context length"
"""Words by which the harnesses of verifiers recognize a full context, which they end or shorten."""
_UNSCORED = ("setup_timeout", "finalize_timeout", "scoring_timeout")
"""Stop conditions of traces that have no error, but are not scored."""


@dataclass
class Record:
    """Observations about one trace, which is the part of an episode that one agent plays."""

    trace: Any
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Token fields of the policy's replies, in order."""
    failure: str = ""
    """Failure of the latest model call."""
    is_full: bool = False
    """True if the prompt of the latest model call was too long."""


_records: dict[str, Record] = {}
"""Records of the episodes in flight, by the id of the trace."""
_problems: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("problems")
"""Problems of the reward functions of the current episode, by name."""


class ChatHarness(Harness[HarnessConfig]):
    """Chat with the tools of the task, in this process.

    The built-in harnesses start a script for each episode, and download the packages that it requires.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, *connection: Any) -> ProgramResult:
        """Play until the policy writes a message without tool calls, or the episode is stopped."""
        endpoint, secret, mcp_urls, data = connection
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages += given
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None, verify=False))
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if trace.stop_condition is not None:
                    break
                if _OVERFLOW in reply.text and reply.status_code == 400:
                    break
                if reply.status_code != 200:
                    raise HarnessError(f"the model call failed: {reply.text[:200]}")
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    content = await _call_tool(call["function"], dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                if not message.get("tool_calls"):
                    break
        return ProgramResult(0, "", "")


async def _call_tool(function: Mapping[str, str], dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Return the result of a tool call, or a message to the policy about its mistake."""
    name = function["name"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError as error:
        return f"error: the arguments are not valid JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    return await call_mcp(connections, dispatch, name, arguments)


class PolicyClient(EvalClient):
    """Client of the run's endpoint, which records the tokens of each reply."""

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str | None = None, **other: Any
    ) -> Any:
        """Return the endpoint's reply without its token fields, which harnesses would send back in every turn."""
        record = _records.get(session_id or "")
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        try:
            response = await super().get_response(dialect, body, sampling, session_id, **other)
        except ProviderError as error:
            if record is None:
                raise
            if NO_ROOM in str(error):
                record.is_full = True
                raise ProviderError(f"{_OVERFLOW}: {error}", status_code=error.status_code) from error
            if NO_BUDGET in str(error):
                record.trace.stop("max_total_tokens")  # as for a limit of verifiers: the episode is scored
            else:
                record.failure = str(error)
            raise
        if record is not None:
            record.failure = ""
            record.is_full = False
            record.turns += _take_tokens(response.raw)
        return response


def _take_tokens(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Remove the token fields from a reply in any of the endpoint's formats, and return those of each turn."""
    choices = [choice["message"] for choice in reply.get("choices") or ()]
    for part in [reply, *choices, *(reply.get("output") or ())]:
        tokens = {name: part.pop(name) for name in _TOKEN_FIELDS if name in part}
        if tokens:
            yield {name: tokens[name] for name in _TOKEN_FIELDS[:2]}


_resolve_client = interception.resolve_client


def _client_of(config: Any) -> Any:
    """Return the client for an endpoint. Judges and agents with another model have endpoints of their own."""
    return PolicyClient(config) if config.api_key_var == API_KEY else _resolve_client(config)


_hooks = Task.hooks


def _watched_hooks(task: Any, kind: str) -> list[Callable[..., Any]]:
    """Return the functions of a task, as ``Task.hooks``. Reward functions never raise.

    The library drops all rewards of a trace if one function raises, and converts text and booleans to numbers.
    """
    functions: list[Callable[..., Any]] = _hooks(task, kind)
    return list(map(_watched, functions)) if kind == "reward" else functions


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        name = function.__name__
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:
            _problems.get()[name] = f"raised {one_line(error)}"
            return math.nan
        if isinstance(value, Mapping):
            return {str(key): _number(str(key), part) for key, part in value.items()}
        return _number(name, value)

    return watched


def _number(name: str, value: Any) -> float:
    try:
        number = score(value)
    except ValueError as error:
        _problems.get()[name] = f"returned {error}"
        number = None
    return math.nan if number is None else number


_run_background = SubprocessRuntime.run_background
_forks = multiprocessing.get_context("forkserver")


class ForkedProgram:
    """Process of a tool server, with the part of the interface of ``asyncio.subprocess.Process`` that is used."""

    def __init__(self, process: Any):
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while the process runs."""
        return self._process.exitcode

    async def wait(self) -> int | None:
        """Wait for the end of the process and return its exit status."""
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode


async def _start_forked(runtime: Any, command: list[str], env: dict[str, str], log: str) -> None:
    """Start a tool server in ``runtime``, as ``SubprocessRuntime.run_background``.

    The process is forked from one that has imported the library, because the import takes seconds for each episode.
    """
    if command[:2] != [sys.executable, "-m"]:
        await _run_background(runtime, command, env, log)
        return
    visible = {name: value for name, value in os.environ.items() if "API_KEY" not in name.upper()}
    mine, theirs = _forks.Pipe(duplex=False)
    arguments = (command[2], {**visible, **runtime.process_env(env)}, str(runtime.workdir), log, theirs)
    process = _forks.Process(target=run_module, args=arguments)
    await asyncio.to_thread(process.start)
    try:
        theirs.close()
        await asyncio.to_thread(mine.recv)
    except BaseException:
        process.kill()
        raise
    runtime._background.append(ForkedProgram(process))


interception.resolve_client = _client_of
Task.hooks = _watched_hooks
SubprocessRuntime.run_background = _start_forked


class Adapter:
    """A package's environment.

    Args:
        package: name of the package.
        args: the environment's section ``env`` of verifiers, such as ``{taskset: {...}, agent: {...}}``.
    """

    def __init__(self, package: str, args: dict[str, Any]):
        taskset = {**(args.get("taskset") or {}), "id": package}
        _forks.set_forkserver_preload(["verifiers.v1", "mcp.server.mcpserver", "uvicorn"])
        self._env: Any = load_environment(_with_defaults(resolve_env_config({**args, "taskset": taskset}), package))
        self._tasks: list[Any] = []
        self._remaining = iter(self._env.taskset)
        self._serving: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._closed = asyncio.Event()

    def describe(self) -> dict[str, Any]:
        """Return the components, metrics and tools of the first task.

        Raises ValueError if the task set is empty.
        """
        env, task = self._env, self._task(0)
        rewards = _hooks(task, "reward")
        functions = [(f.__name__, getattr(f, "_vf_weight", 1.0)) for f in rewards if not _is_keyed(f)]
        functions += [(judge.reward_name, judge.config.weight) for judge in task.plugged_judges()]
        tools = task.toolsets(task.config)
        if tools:
            forkserver.ensure_running()  # it imports the library meanwhile
        return {
            "version": verifiers.__version__,
            "api": "v1",
            "functions": [{"name": name, "weight": weight, "group": False} for name, weight in functions],
            "open": any(map(_is_keyed, rewards)) or type(env).finalize is not Env.finalize,
            "metrics": [f.__name__ for f in task.hooks("metric")],
            "tasks": None,
            "tools": bool([*tools, *env.taskset.toolsets(env.taskset.config)]),
        }

    def rows(self, split: str, size: int | None, seed: int, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """Return tasks as rows. ``choice`` is a ``SelectConfig`` of verifiers, which has no splits."""
        limit = {} if size is None else {"limit": size}
        view = self._env.taskset.select(SelectConfig.model_validate({"seed": seed, **choice, **limit}))
        if not view.bounded:
            raise ValueError(f"the task set is infinite; set data.{split}.size")
        return [_row(task) for task in view]

    async def play(self, tasks: list[dict[str, Any]], policy: Policy) -> list[dict[str, Any]]:
        """Play one episode for each task and return the results."""
        async with self._lock:
            await self._start()
        # With this class, the interception server makes streams from complete replies.
        client = TrainClientConfig(base_url=policy.url, api_key_var=API_KEY)
        sampling = SamplingConfig(temperature=policy.temperature, top_p=policy.top_p)
        context = ModelContext(policy.model, client, sampling)
        found = [self._checked_task(**task) for task in tasks]
        return await asyncio.gather(*(self._episode(task, context, policy) for task in found))

    async def close(self) -> None:
        """Stop the servers of the environment."""
        self._closed.set()
        if self._serving is not None:
            await self._serving

    async def _start(self) -> None:
        """Start the shared tool servers and the interception server. One task starts and stops them."""
        if self._serving is not None:
            return
        ready = asyncio.Event()

        async def serve() -> None:
            async with self._env.serving():
                ready.set()
                await self._closed.wait()

        self._serving = asyncio.create_task(serve())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            await self._serving

    def _task(self, index: int) -> Any:
        missing = index + 1 - len(self._tasks)
        self._tasks += itertools.islice(self._remaining, max(0, missing))
        if len(self._tasks) <= index:
            raise ValueError(f"the task set has no task {index}, only {len(self._tasks)} tasks")
        return self._tasks[index]

    def _checked_task(self, idx: int, hash: str) -> Any:  # noqa: A002 - names of verifiers
        task = self._task(idx)
        if task.hash != hash:
            raise ValueError(f"task {idx} has changed since the run read it; its task set must be deterministic")
        return task

    async def _episode(self, task: Any, context: ModelContext, policy: Policy) -> dict[str, Any]:
        problems: dict[str, str] = {}
        _problems.set(problems)  # Each episode has a separate context, because gather wraps it in a task.
        records: list[Record] = []

        def begin(trace: Any) -> None:
            records.append(Record(trace))
            _records[trace.id] = records[-1]

        try:
            async with policy.episode():
                [slot] = self._env.slots(task)
                episode = await self._env.run_slot(slot, context, on_trace=begin)
            return {**_result(episode), "problems": problems}
        except TimeoutError as error:
            return {"turns": [], "rewards": {}, "problems": problems, "metrics": {}, "error": str(error)}
        finally:
            for record in records:
                _records.pop(record.trace.id, None)


def _with_defaults(config: Any, package: str) -> Any:
    """Return the config, in which agents without a harness or runtime use the chat harness and this machine.

    The run's sampling settings replace those of agents that use the run's policy.
    """
    has_harness = default_harness_id(package) == package
    agents = {}
    for name, agent in agent_config_fields(config).items():
        update: dict[str, Any] = {}
        if agent.harness is None and not has_harness:
            update["harness"] = HarnessConfig(id=__name__)
        if "runtime" not in agent.model_fields_set:
            update["runtime"] = SubprocessConfig()
        if agent.sampling is not None and agent.client is None:
            kept = agent.sampling.model_dump(exclude_unset=True, exclude={"temperature", "top_p"})
            update["sampling"] = SamplingConfig(**kept)
        agents[name] = agent.model_copy(update=update)
    return config.model_copy(update=agents)


def _is_keyed(function: Callable[..., Any]) -> bool:
    """Return whether a reward function is annotated to return rewards by name."""
    annotation = str(inspect.signature(function).return_annotation)
    return "dict" in annotation.lower() or "Mapping" in annotation


def _row(task: Any) -> dict[str, Any]:
    data = task.data
    prompt = data.prompt
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(prompt, str) or not prompt:
        # A task without a prompt is opened by a simulated user.
        messages.append({"role": "user", "content": prompt or data.name or f"task {data.idx}"})
    else:
        messages += [{"role": message.role, "content": content_text(message.content)} for message in prompt]
    return {"id": str(data.idx), "prompt": messages, "task": {"idx": data.idx, "hash": task.hash}}


def _result(episode: Any) -> dict[str, Any]:
    """Return the result of a finished episode, in the format of the worker."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    result: dict[str, Any] = {"turns": [], "rewards": {}, "metrics": {}, "error": None, "incomplete": False}
    if episode.errors and not episode.ok:
        return {**result, "error": episode.errors[-1].message}
    if len(trained) != 1:
        return {**result, "error": f"{len(trained)} agents train in the episode; only one is supported"}
    [trace] = trained
    record = _records[trace.id]
    return {
        "turns": record.turns,
        "rewards": {name: _none_if_nan(reward) for name, reward in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "error": _error_of(trace, record),
        "incomplete": trace.is_truncated or record.is_full or trace.stop_condition == "agent_timeout",
    }


def _none_if_nan(reward: Any) -> float | None:
    return None if reward is None or math.isnan(reward.score) else reward.score


def _error_of(trace: Any, record: Record) -> str | None:
    """Return the reason if an episode must not be trained. A missing reward would otherwise be trained as a value."""
    if not trace.ok and trace.errors:
        return f"{trace.last_error.type}: {trace.last_error.message}"
    if record.failure:
        return f"a model call failed: {record.failure}"
    if trace.stop_condition in _UNSCORED:
        return trace.stop_condition
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    return f"{', '.join(unscored)} was not scored" if unscored else None
