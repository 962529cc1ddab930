"""From a batch of trajectories to one verdict each: attempts, pauses, deadlines, groups.

Everything here runs in one event loop. A trajectory's own clock starts with its first request, not while it waits for
its turn; a pause between attempts keeps no other trajectory waiting.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Sequence

from gdpo_nemo.data.failures import Failure, FailureKind
from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.data.replies import check_measurement
from gdpo_nemo.environments.http_client import Cookies, HttpClient, with_retries
from gdpo_nemo.environments.nemo_gym.gym_rows import ROW, request_body, seed_body
from gdpo_nemo.environments.nemo_gym.reward_mapping import rewards_of
from gdpo_nemo.environments.nemo_gym.routing import Routes
from gdpo_nemo.environments.nemo_gym.server_settings import Settings

GIVE_UP_AFTER = 64
"""Trajectories of a batch that may fail in a row at one server before the others are not tried: a server that hangs
costs a few deadlines and not one per trajectory."""
_GIVES_UP = (FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.SERVER_ERROR)


@dataclass
class _Group:
    """The members of one prompt while they are verified."""

    size: int
    tasks: list[asyncio.Task] = field(default_factory=list)
    valid: int = 0
    started: bool = False
    closing: asyncio.TimerHandle | None = None
    deadline: asyncio.TimerHandle | None = None
    closed: str = ""
    """Why it was closed before all members were done."""

    def close(self, why: str) -> None:
        """Cut the members that are not done."""
        self.closed = why
        for task in self.tasks:
            task.cancel()

    def forget(self) -> None:
        """Drop the timers."""
        for timer in (self.closing, self.deadline):
            if timer is not None:
                timer.cancel()


class Verifier:
    """Verifies batches with the servers of ``routes``; batches may overlap and share the limits per server."""

    def __init__(self, settings: Settings, client: HttpClient, routes: Routes):
        self._settings = settings
        self._limits = settings.limits
        self._client = client
        self.routes = routes
        self._slots = {name: asyncio.Semaphore(self._limits.concurrency) for name in routes.servers}

    async def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order; grouped by prompt id. Raises ConfigError for a row without a server."""
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
                group.forget()
            for task in tasks:
                task.cancel()

    async def rewards(self, trajectory: Trajectory, server: str, started=lambda: None) -> dict[str, float | None]:
        """The rewards of one trajectory, after as many attempts as the limits allow. Raises Failure."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None  # starts when the first attempt gets a slot, not while it queues

        def time_left() -> float:
            return math.inf if deadline is None else deadline - loop.time()

        async def attempt() -> dict[str, float | None]:
            nonlocal deadline
            async with self._slots[server]:
                if deadline is None:
                    started()
                    deadline = loop.time() + self._limits.deadline_s
                return await self._attempt(trajectory, server, deadline)

        limit = f"deadline_s is {self._limits.deadline_s:g}"
        return await with_retries(attempt, self._limits.retries, time_left, limit)

    async def _verdict(self, trajectory: Trajectory, server: str, group: _Group, failures_in_a_row: dict) -> Verdict:
        """The verdict of a member; failures and cuts are verdicts too."""

        def started() -> None:
            if failures_in_a_row[server] >= GIVE_UP_AFTER:
                raise Failure(FailureKind.NOT_TRIED, f"{GIVE_UP_AFTER} samples in a row had failed at {server}")
            self._start(group)

        try:
            rewards = await self.rewards(trajectory, server, started)
        except Failure as failure:
            if failure.kind in _GIVES_UP:
                failures_in_a_row[server] += 1
            return Verdict({}, Outcome.ENV_FAILED, f"{failure.kind}: {server}: {failure.detail}")
        except asyncio.CancelledError:
            if not group.closed:
                raise
            return self._cut(group)
        failures_in_a_row[server] = 0
        self._count_valid(group)
        return Verdict(rewards)

    async def _attempt(self, trajectory: Trajectory, server: str, deadline: float) -> dict[str, float | None]:
        """Seed and verify once, with cookies of its own: after a failure the session may be gone, so none is kept."""
        settings = self._settings
        cookies = Cookies()
        url = self.routes.servers[server]
        if settings.seed_session:
            seed = seed_body(trajectory.prompt.fields[ROW])
            await self._client.post(f"{url}/seed_session", seed, cookies, self._time_left(deadline))
        body = request_body(trajectory, settings.tool_parser, settings.split_reasoning)
        reply = await self._client.post(f"{url}/verify", body, cookies, self._time_left(deadline))
        check_measurement(reply)
        return rewards_of(reply, settings.rules, server, settings.check_sum)

    def _time_left(self, deadline: float) -> float:
        return min(self._limits.request_timeout_s, deadline - asyncio.get_running_loop().time())

    # -- groups -------------------------------------------------------------------------------------------------

    def _start(self, group: _Group) -> None:
        """The clock of a group starts with its first member."""
        if not group.started and self._limits.group_deadline_s is not None:
            why = f"its group had taken group_deadline_s ({self._limits.group_deadline_s:g} s)"
            group.deadline = asyncio.get_running_loop().call_later(self._limits.group_deadline_s, group.close, why)
        group.started = True

    def _count_valid(self, group: _Group) -> None:
        group.valid += 1
        enough = self._limits.min_valid
        if enough is not None and group.valid >= enough and group.closing is None:
            grace = self._limits.straggler_grace_s
            why = f"its group had {enough} valid members {grace:g} s before"
            group.closing = asyncio.get_running_loop().call_later(grace, group.close, why)

    def _cut(self, group: _Group) -> Verdict:
        """A straggler of a group that has what it needs was given up by choice; without that its server failed."""
        enough = self._limits.min_valid is not None and group.valid >= self._limits.min_valid
        outcome = Outcome.ABORTED if enough else Outcome.ENV_FAILED
        return Verdict({}, outcome, f"{FailureKind.STRAGGLER}: cut, because {group.closed}")
