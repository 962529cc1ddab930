"""The ``nemo_gym`` environment: rows of NeMo Gym, verdicts of its resource servers, named rewards."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any, Coroutine, Mapping, Sequence, TypeVar

from gdpo_nemo.data.failures import Failure
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.http_client import HttpClient, api_key
from gdpo_nemo.environments.nemo_gym.episode import Verifier
from gdpo_nemo.environments.nemo_gym.gym_rows import ROW, agent_of, choose_server, read_row
from gdpo_nemo.environments.nemo_gym.preflight import preflight
from gdpo_nemo.environments.nemo_gym.routing import find_routes
from gdpo_nemo.environments.nemo_gym.server_settings import read_settings
from gdpo_nemo.errors import RunError

_T = TypeVar("_T")
_CLOSE_S = 10.0


class NemoGym(Environment):
    """Verdicts of one or many NeMo Gym resource servers (nemo-gym 0.4 to 0.7), by /seed_session and /verify.

    Options:
        servers: base URLs by name, or instead of them
        head_server: URL of the head server that knows them.
        agents: server by the agent name in a row's ``agent_ref``; the head server knows these, too. Not needed where
            there is one server, or where rows name the server itself.
        rewards: list of ``{name, path, weight, missing: error|mask|zero, servers}``; the path (default
            ``reward_components.<name>``) is dotted text or a list. Without it the components of ``reward_components``
            and the scalar ``reward`` are found by themselves.
        check_sum: refuse replies whose components do not add up to ``reward`` (false).
        seed_session: begin every trajectory with /seed_session, for servers with state (true).
        tool_parser: hermes (rows with tools: ``<tool_call>`` blocks are calls) or none.
        split_reasoning: send ``<think>...</think>`` as a reasoning item (false).
        api_key_env: environment variable with a bearer token.
        concurrency (256), deadline_s (60), request_timeout_s (30), retries (5), max_reply_bytes (8 MiB),
        max_json_depth (100), min_valid (null), straggler_grace_s (5), group_deadline_s (null): see
            ``settings.Limits``.
    """

    instant = True

    remote = True
    by_sample = True
    """Verdicts come from other processes, in bounded time and size: no worker process is needed around this one."""

    def __init__(self, options: Mapping[str, Any] | None = None):
        self.settings = read_settings(options)
        self.open_rewards = not self.settings.rules
        """Whether the components are those of the replies; ``reward_names`` then says nothing before ``preflight``."""
        self.reward_names: tuple[str, ...] = tuple(rule.name for rule in self.settings.rules) or ("reward",)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._client: HttpClient | None = None
        self._verifier: asyncio.Task[Verifier] | None = None

    def read_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of NeMo Gym's JSONL as prompts are made of. Raises ConfigError, also if none of the options' servers
        verifies it."""
        read = read_row(row)
        if self.settings.servers:  # those of a head server are known once it is asked
            choose_server(row, self.settings.servers, self.settings.agents)
        return read

    def server_of(self, row: Mapping[str, Any]) -> str | None:
        """The server that verifies a row of ``read_row``; if the head server knows it, the agent that names it."""
        if self.settings.servers:
            return choose_server(row[ROW], self.settings.servers, self.settings.agents)
        return agent_of(row[ROW])

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order; all are in flight at once as far as ``concurrency`` allows.

        May be called from several threads. Raises ConfigError for a row that no server verifies, RunError when the
        environment is closed meanwhile or its head server cannot be reached.
        """
        return self._run(self._verify(trajectories))

    def preflight(self, prompts: Sequence[Prompt]) -> dict[str, tuple[str, ...]]:
        """Reach every server, seed and verify one of ``prompts`` at each that any of them goes to.

        Returns the components that each of these gave; where they are found by themselves they are the
        ``reward_names`` from then on. Raises ConfigError for a path that is not there or a row that is refused,
        RunError for a server that cannot be reached or fails.
        """
        found = self._run(self._preflight(prompts))
        if self.open_rewards:
            self.reward_names = tuple(dict.fromkeys(name for names in found.values() for name in names)) or ("reward",)
            self.open_rewards = not found
        return found

    def close(self) -> None:
        """Drop what is in flight; a ``verify`` under way in another thread raises RunError."""
        with self._lock:
            self._closed = True
            loop = self._loop
            self._loop = None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._shut(), loop).result(_CLOSE_S)
            loop.call_soon_threadsafe(loop.stop)

    async def _verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        return await (await self._ready()).verify(trajectories)

    async def _preflight(self, prompts: Sequence[Prompt]) -> dict[str, tuple[str, ...]]:
        verifier = await self._ready()
        if self._client is None:
            raise RunError("the environment is closed")
        return await preflight(self.settings, self._client, verifier, prompts)

    async def _ready(self) -> Verifier:
        """The verifier, made once. Raises RunError."""
        if self._verifier is None or (self._verifier.done() and self._verifier.exception()):
            self._verifier = asyncio.create_task(self._connect())
        try:
            return await asyncio.shield(self._verifier)
        except Failure as failure:
            raise RunError(f"head server {self.settings.head_server}: {failure}") from None

    async def _connect(self) -> Verifier:
        if self._client is None:
            limits = self.settings.limits
            key = api_key(self.settings.api_key_env)
            self._client = HttpClient(limits.concurrency, limits.max_reply_bytes, limits.max_json_depth, key)
        return Verifier(self.settings, self._client, await find_routes(self.settings, self._client))

    async def _shut(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work`` in the loop of this environment, a daemon thread that starts with the first work."""
        with self._lock:
            if self._closed:
                work.close()
                raise RunError("the environment is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="nemo_gym", daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RunError("the environment was closed during verification") from None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
