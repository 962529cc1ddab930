"""The ``nemo_gym`` environment: prompts from NeMo Gym rows, and verdicts from NeMo Gym resource servers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import chain
from typing import Any

from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.http_client import HttpClient, LoopThread, api_key
from gdpo_nemo.environments.nemo_gym.episodes import Verifier, preflight
from gdpo_nemo.environments.nemo_gym.rows import ROW, agent_of, choose_server, find_routes, read_row
from gdpo_nemo.environments.nemo_gym.settings import read_settings
from gdpo_nemo.environments.server_replies import Failure
from gdpo_nemo.utils.errors import RunError


class NemoGym(Environment):
    """Environment whose verdicts come from NeMo Gym resource servers (nemo-gym 0.4 to 0.7), through their routes
    /seed_session and /verify.

    Options:
        servers: base URLs by name. Conflicts with ``head_server``.
        head_server: URL of a head server, which provides the servers and their agents.
        agents: server names by agent name, as in a row's ``agent_ref``. This option is not needed with a head server,
            with a single server, or if ``agent_ref`` contains the server's name.
        rewards: reward components as a list of ``{name, path, weight, missing: error|mask|zero, servers}``. The path of
            a component in the reply is a dotted string or a list (default: ``reward_components.<name>``). Without this
            option, the components in ``reward_components`` and the scalar ``reward`` are used. The path of a family
            (``rubric/*``) is that of a list of evaluations of criteria (default: ``rubric_evaluations``).
        check_sum (false): reject replies whose components do not add up to ``reward``.
        seed_session (true): call /seed_session before every trajectory, as stateful servers require.
        split_reasoning (false): send ``<think>...</think>`` as a reasoning item.
        api_key_env: name of the environment variable with the bearer token.
        concurrency (256), deadline_s (60), request_timeout_s (30), retries (5), max_reply_bytes (8 MiB),
        max_json_depth (100), min_valid (null), straggler_grace_s (5), group_deadline_s (null): see
            ``settings.Limits``.
    """

    instant = True

    remote = True
    by_sample = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        self.settings = read_settings(options)
        self.open_rewards = not self.settings.rules
        """True if the components are read from replies. In this case ``reward_names`` is unknown until
        ``preflight``."""
        self.reward_names: tuple[str, ...] = tuple(rule.name for rule in self.settings.rules) or ("reward",)
        self._loop = LoopThread("nemo_gym")
        self._client: HttpClient | None = None
        self._verifier: asyncio.Task[Verifier] | None = None

    def read_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row of NeMo Gym's JSONL to prompt columns. Raises ConfigError if the row is invalid or matches no
        configured server."""
        columns = read_row(row)
        if self.settings.servers:  # with a head server, the servers are not known yet
            choose_server(row, self.settings.servers, self.settings.agents)
        return columns

    def server_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the name of the server that verifies a row. With a head server, return the row's agent name."""
        if self.settings.servers:
            return choose_server(row[ROW], self.settings.servers, self.settings.agents)
        return agent_of(row[ROW])

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. Several threads may call this method.

        Raises:
            ConfigError: if a row matches no server.
            RunError: if the environment is closed during the call, or the head server cannot be reached.
        """
        return self._run(self._verify(trajectories))

    def preflight(self, prompts: Sequence[Prompt]) -> dict[str, tuple[str, ...]]:
        """Check that every server responds, and verify one row at each server that ``prompts`` use.

        If the option ``rewards`` is not set, the components of the replies become the ``reward_names``.

        Returns:
            Component names by server.

        Raises:
            ConfigError: if a server rejects a row, or its reply lacks a configured path.
            RunError: if a server fails or cannot be reached.
        """
        components = self._run(self._preflight(prompts))
        if self.open_rewards:
            self.reward_names = tuple(dict.fromkeys(chain.from_iterable(components.values()))) or ("reward",)
            self.open_rewards = not components
        return components

    def close(self) -> None:
        """Cancel requests in flight. Calls of ``verify`` in other threads raise RunError."""
        self._loop.close(self._close_client())

    async def _verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        return await (await self._get_verifier()).verify(trajectories)

    async def _preflight(self, prompts: Sequence[Prompt]) -> dict[str, tuple[str, ...]]:
        verifier = await self._get_verifier()
        if self._client is None:
            raise RunError("the environment is closed")
        return await preflight(self.settings, self._client, verifier, prompts)

    async def _get_verifier(self) -> Verifier:
        """Return the verifier, which the first call creates. Raises RunError if the head server cannot be reached."""
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

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this environment's event loop and return its result."""
        try:
            return self._loop.start(coroutine).result()
        except CancelledError:
            raise RunError("the environment was closed during verification") from None
