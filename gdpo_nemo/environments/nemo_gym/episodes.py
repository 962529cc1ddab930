"""Verification of trajectories by NeMo Gym servers with retries and deadlines, and a preflight check of the servers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.environments.http_client import Cookies, HttpClient, with_retries
from gdpo_nemo.environments.nemo_gym.rows import ROW, Routes, request_body, reward_spans_of, seed_body
from gdpo_nemo.environments.nemo_gym.settings import Scores, Settings, rewards_of
from gdpo_nemo.environments.server_replies import Failure, FailureKind, check_measurement
from gdpo_nemo.utils.errors import ConfigError, RunError

GIVE_UP_AFTER = 64
"""Number of consecutive failures at one server after which the remaining trajectories of a batch are not sent. This
limit bounds how long a batch waits for a server that hangs."""
_SERVER_FAILURES = (FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.SERVER_ERROR)


@dataclass
class _Group:
    """Trajectories of one prompt during verification."""

    size: int
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    valid: int = 0
    started: bool = False
    closing: asyncio.TimerHandle | None = None
    deadline: asyncio.TimerHandle | None = None
    closed: str = ""
    """Reason why the group was closed early, or an empty string if the group was not closed early."""

    def close(self, reason: str) -> None:
        """Cancel the verification of all trajectories that have no verdict yet."""
        self.closed = reason
        for task in self.tasks:
            task.cancel()

    def cancel_timers(self) -> None:
        """Cancel the timers."""
        for timer in (self.closing, self.deadline):
            if timer is not None:
                timer.cancel()


class Verifier:
    """Verifies batches of trajectories at the servers of ``routes``.

    Several batches may be in flight. The limits per server apply to the total of all batches.
    """

    def __init__(self, settings: Settings, client: HttpClient, routes: Routes):
        self._settings = settings
        self._limits = settings.limits
        self._client = client
        self.routes = routes
        self._slots = {name: asyncio.Semaphore(self._limits.concurrency) for name in routes.servers}

    async def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. Trajectories with the same prompt id form a group.

        Raises ConfigError if a row matches no server.
        """
        servers = [self.routes.server_of(trajectory.prompt.fields[ROW]) for trajectory in trajectories]
        groups: dict[str, _Group] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.prompt.id, _Group(0)).size += 1
        failures_in_a_row = dict.fromkeys(servers, 0)
        tasks = []
        for trajectory, server in zip(trajectories, servers):
            group = groups[trajectory.prompt.id]
            task = asyncio.create_task(self._verdict(trajectory, server, group, failures_in_a_row))
            group.tasks.append(task)
            tasks.append(task)
        try:
            return await asyncio.gather(*tasks)
        finally:
            for group in groups.values():
                group.cancel_timers()
            for task in tasks:
                task.cancel()

    async def verdict(self, trajectory: Trajectory, server: str, started: Callable[[], None] = lambda: None) -> Verdict:
        """Request the verdict of one trajectory, with retries within the limits. Raises Failure.

        Args:
            started: called when the first attempt starts.
        """
        loop = asyncio.get_running_loop()
        deadline: float | None = None  # set when the first attempt gets a slot; queueing does not count

        def time_left() -> float:
            return math.inf if deadline is None else deadline - loop.time()

        async def attempt() -> Verdict:
            nonlocal deadline
            async with self._slots[server]:
                if deadline is None:
                    started()
                    deadline = loop.time() + self._limits.deadline_s
                return await self._attempt(trajectory, server, deadline)

        limit = f"deadline_s is {self._limits.deadline_s:g}"
        return await with_retries(attempt, self._limits.retries, time_left, limit)

    async def _verdict(
        self, trajectory: Trajectory, server: str, group: _Group, failures_in_a_row: dict[str, int]
    ) -> Verdict:
        """Return the verdict of a trajectory, even if the verification fails or is cancelled."""

        def started() -> None:
            if failures_in_a_row[server] >= GIVE_UP_AFTER:
                raise Failure(FailureKind.NOT_TRIED, f"{GIVE_UP_AFTER} samples in a row failed at {server}")
            self._start(group)

        try:
            verdict = await self.verdict(trajectory, server, started)
        except Failure as failure:
            if failure.kind in _SERVER_FAILURES:
                failures_in_a_row[server] += 1
            return Verdict({}, Outcome.ENV_FAILED, f"{failure.kind}: {server}: {failure.detail}")
        except asyncio.CancelledError:
            if not group.closed:
                raise
            return self._cancelled_verdict(group)
        failures_in_a_row[server] = 0
        self._count_valid(group)
        return verdict

    async def _attempt(self, trajectory: Trajectory, server: str, deadline: float) -> Verdict:
        """Seed a session and verify one trajectory, without retries. Cookies are not reused between attempts, because a
        failure may end the session."""
        settings = self._settings
        cookies = Cookies()
        url = self.routes.servers[server]
        if settings.seed_session:
            seed = seed_body(trajectory.prompt.fields[ROW])
            await self._client.post(f"{url}/seed_session", seed, cookies, self._time_left(deadline))
        body = request_body(trajectory, settings.split_reasoning)
        reply = await self._client.post(f"{url}/verify", body, cookies, self._time_left(deadline))
        check_measurement(reply)
        rewards, criteria = rewards_of(reply, settings.rules, server, settings.check_sum)
        spans = reward_spans_of(reply, trajectory, rewards, settings.split_reasoning)
        return Verdict(rewards, reward_spans=spans, criteria=criteria)

    def _time_left(self, deadline: float) -> float:
        return min(self._limits.request_timeout_s, deadline - asyncio.get_running_loop().time())

    # -- groups -------------------------------------------------------------------------------------------------

    def _start(self, group: _Group) -> None:
        """Start the deadline of a group when its first trajectory starts."""
        if not group.started and self._limits.group_deadline_s is not None:
            reason = f"its group reached group_deadline_s ({self._limits.group_deadline_s:g} s)"
            group.deadline = asyncio.get_running_loop().call_later(self._limits.group_deadline_s, group.close, reason)
        group.started = True

    def _count_valid(self, group: _Group) -> None:
        group.valid += 1
        enough = self._limits.min_valid
        if enough is not None and group.valid >= enough and group.closing is None:
            grace = self._limits.straggler_grace_s
            reason = f"its group had {enough} valid members for {grace:g} s"
            group.closing = asyncio.get_running_loop().call_later(grace, group.close, reason)

    def _cancelled_verdict(self, group: _Group) -> Verdict:
        """Return the verdict of a cancelled trajectory: ABORTED if its group has enough valid members, else
        ENV_FAILED."""
        enough = self._limits.min_valid is not None and group.valid >= self._limits.min_valid
        outcome = Outcome.ABORTED if enough else Outcome.ENV_FAILED
        return Verdict({}, outcome, f"{FailureKind.STRAGGLER}: cancelled, because {group.closed}")


_ANSWER = "preflight"
"""Dummy completion of the preflight check."""
_CONFIG_FAILURES = (FailureKind.REJECTED, FailureKind.MISSING_REWARD, FailureKind.BAD_REPLY)
"""Failures of the first request that indicate an error in the configuration or the rows."""


async def preflight(
    settings: Settings, client: HttpClient, verifier: Verifier, prompts: Sequence[Prompt]
) -> dict[str, tuple[str, ...]]:
    """Verify a dummy completion of one row at each server that ``prompts`` use. Return the component names by server.

    Every server in the options is contacted, even if no prompt uses it. A server from the head server is contacted only
    if a prompt uses it.

    Raises:
        ConfigError: if a server rejects the row (422 with the field), or its reply lacks a configured path.
        RunError: if a server cannot be reached or fails.
    """
    prompt_by_server: dict[str, Prompt] = {}
    for prompt in prompts:
        prompt_by_server.setdefault(verifier.routes.server_of(prompt.fields[ROW]), prompt)
    for server in dict.fromkeys([*settings.servers, *prompt_by_server]):
        try:
            await client.reach(f"{verifier.routes.servers[server]}/", settings.limits.request_timeout_s)
        except Failure as failure:
            raise RunError(f"server {server} at {verifier.routes.servers[server]}: {failure}") from None
    components = {}
    for server, prompt in prompt_by_server.items():
        components[server] = await _components(settings, verifier, server, prompt)
    return components


async def _components(settings: Settings, verifier: Verifier, server: str, prompt: Prompt) -> tuple[str, ...]:
    empty = np.zeros(0, np.int32)
    trajectory = Trajectory(prompt, 0, empty, empty.astype(np.float32), 0, _ANSWER, "stop")
    try:
        verdict = await verifier.verdict(trajectory, server)
    except Failure as failure:
        message = f"server {server} at {verifier.routes.servers[server]}, row of prompt {prompt.id}: {failure}"
        raise (ConfigError if failure.kind in _CONFIG_FAILURES else RunError)(message) from None
    if settings.rules:
        return Scores(dict(verdict.rewards), dict(verdict.criteria)).names
    return tuple(verdict.rewards)
