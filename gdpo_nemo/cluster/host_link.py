"""Driver side of a rollout host: the actor on a node that samples and verifies complete groups (``rollouts.host``).

A link stands between the ``EngineClient`` objects of a node and their engines. It sends the requests of all these
clients together and receives all their reports together, so that the driver needs few calls. All code runs on the
fleet's event loop.

``attach`` tells the host about a new engine. Requests then pass through ``submit``, ``_flush`` and the host's
``submit``. Reports return through the host's ``poll``, ``_serve`` and ``poll``. Weight updates pass through ``call``.
If the host dies, its engines count as dead: their clients replace them, and the first ``attach`` starts another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

from gdpo_nemo.cluster.session import WorkerDied, answer, answered, ray
from gdpo_nemo.generation.requests import EngineReport
from gdpo_nemo.utils.errors import GdpoError, RunError

_GATHER_S = 0.01
"""Time during which requests are collected before they are sent to the host together."""
_REPORT_S = 0.05
"""Time during which a host collects finished groups before it reports them together."""
_REPORT_S_PER_HOST = 0.005
"""A report takes the driver about 1 ms of CPU time, so the reports of asynchronous runs take at most 20 % of a core."""
POLL_S = 10.0
"""Time after which a host reports all its engines even if no group is complete."""
_CLOSE_S = 10.0
"""Time limit for hosts to end their environment workers."""

HostReport = tuple[list[tuple[int, int, EngineReport | GdpoError]], Counter[str]]
"""Result of the host's ``poll``: (engine number, generation, report or failure) of each engine, and recoveries."""


class Answer:
    """Result of a call through a link, with the interface of a Ray reference that ``session.answer`` uses.

    Each answer belongs to the fleet's event loop.
    """

    def __init__(self) -> None:
        # Unlike the futures of Ray's references, this future wakes its loop without a system call.
        self._future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def future(self) -> asyncio.Future[Any]:
        """Return the future of the result."""
        return self._future

    def set(self, result: Any) -> Answer:
        """Set the result, or the exception that the call raises."""
        if isinstance(result, GdpoError):
            self._future.set_exception(result)
            self._future.exception()  # asyncio warns about exceptions that are never retrieved
        else:
            self._future.set_result(result)
        return self


class EngineHandle:
    """Engine actor for ``Transport.send``, with the attributes of the actor.

    Its calls of ``update_weights`` are made after ``send``, together with those of other engines (``HostLinks.call``).
    """

    def __init__(self, index: int, actor: Any):
        self.index = index
        self.actor = actor
        self.arguments: tuple[Any, ...] = ()
        """Arguments of the deferred call."""
        self.update_weights = SimpleNamespace(remote=self._defer)

    def _defer(self, *arguments: Any) -> EngineHandle:
        self.arguments = arguments
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineHandle) and self.actor is other.actor

    def __hash__(self) -> int:
        return id(self.actor)


class HostLink:
    """Link to the rollout host of one node.

    Args:
        start: function that starts the host's actor.
        report_s: time during which the host collects finished groups before it reports them together.
    """

    def __init__(self, start: Callable[[], Any], report_s: float = _REPORT_S):
        self._start = start
        self._report_s = report_s
        self._actor: Any = None
        self._location: Any = None
        self._generations: Counter[int] = Counter()
        """Number of ``attach`` calls by engine, which distinguishes an engine from its replacements."""
        self._attached: dict[int, Any] = {}
        """Actors of the engines with which the host samples."""
        self._reports: dict[int, deque[EngineReport | GdpoError]] = {}
        """Reports that the engine's client has not asked for yet."""
        self._polls: dict[int, Answer] = {}
        """Calls of ``poll`` in progress."""
        self._outbox: dict[int, dict[str, Any]] = {}
        self._recovered: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def attach(self, index: int, engine: Any, timeout_s: float) -> None:
        """Let the host sample with a new actor of an engine. Requests to the earlier actor are forgotten.

        Raises:
            WorkerDied: if the host died.
            WaitExpired: if the host did not start in time.
        """
        if self._actor is None:
            self._actor = self._start()
            self._location = self._actor.process_location.remote()
            self._task = asyncio.get_running_loop().create_task(self._serve(self._actor))
        self._generations[index] += 1
        self._reports[index] = deque()
        self._polls.pop(index, None)
        self._outbox.pop(index, None)
        self._attached.pop(index, None)
        # Ray does not keep the order of calls, so requests must wait for the answer.
        attached = self._actor.attach.remote(index, self._generations[index], engine)
        await answer(attached, f"starting the rollout host of engine {index}", timeout_s)
        self._attached[index] = engine

    def has(self, index: int, engine: Any) -> bool:
        """Return whether the host samples with this actor of an engine."""
        return self._actor is not None and self._attached.get(index) is engine

    def call(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> dict[int, Answer]:
        """Let the host call a method of several engines. Return the answers by engine number."""
        answers = {index: Answer() for index in arguments}
        called = self._actor.call_engines.remote(method, arguments)
        task = asyncio.get_running_loop().create_task(self._forward(called, answers))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return answers

    async def _forward(self, called: Any, answers: Mapping[int, Answer]) -> None:
        try:
            results = await answer(called, "rollout host", math.inf, POLL_S)
        except GdpoError as error:
            results = dict.fromkeys(answers, error)
        for index, found in answers.items():
            found.set(results[index])

    def submit(self, index: int, requests: Mapping[str, Any]) -> None:
        """Send requests to an engine. Failures are reported by ``poll``."""
        if not self._outbox:
            asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
        self._outbox.setdefault(index, {}).update(requests)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        if outbox and self._actor is not None:
            self._actor.submit.remote(outbox)

    def abort(self, index: int, names: Collection[str]) -> None:
        """Drop requests of an engine."""
        waiting = self._outbox.get(index, {})
        sent = [name for name in names if waiting.pop(name, None) is None]
        if sent and self._actor is not None:
            self._actor.abort.remote(index, sent)

    def poll(self, index: int, wait_s: float) -> Answer:
        """Return the next report of an engine. Unlike ``Engine.poll``, the host decides how long to wait."""
        if self._reports[index]:
            return Answer().set(self._reports[index].popleft())
        self._polls[index] = Answer()
        return self._polls[index]

    async def _serve(self, actor: Any) -> None:
        try:
            while True:
                reports, recovered = await answer(
                    actor.poll.remote(POLL_S, self._report_s), "rollout host", math.inf, POLL_S
                )
                self._recovered += recovered
                for index, generation, report in reports:
                    if generation == self._generations[index]:
                        self._put(index, report)
        except Exception as error:  # an unreported exception would leave the clients waiting
            self._end(error if isinstance(error, GdpoError) else RunError(f"rollout host: {error!r}"))

    def _end(self, error: GdpoError) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)  # the actor may be alive, but unreachable
        self._actor = None
        self._outbox = {}
        self._attached = {}
        for index in self._reports:
            self._put(index, WorkerDied(f"engine {index}: {error}") if isinstance(error, WorkerDied) else error)

    def _put(self, index: int, report: EngineReport | GdpoError) -> None:
        waiting = self._polls.pop(index, None)
        if waiting is None:
            self._reports[index].append(report)
        else:
            waiting.set(report)

    def take_recoveries(self) -> Counter[str]:
        """Return and clear the recoveries of the host's environments (``EnvironmentPools.take_recoveries``)."""
        taken, self._recovered = self._recovered, Counter()
        return taken

    def kill(self) -> None:
        """End the host's actor, because it does not answer or is not needed any more."""
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor)
            kill_process(self._location)

    def closing(self) -> list[Future[None]]:
        """Begin to end the environment workers of the host. ``kill`` must follow."""
        return [] if self._actor is None else [self._actor.close.remote().future()]


def kill_process(location: Any) -> None:
    """Kill an actor's process if it runs on this host. A stopped process ignores Ray's request to exit.

    Args:
        location: reference to the result of the actor's ``process_location``.
    """
    host, process = answered({0: location}).get(0, ("", 0))
    if host == socket.gethostname():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class HostLinks:
    """Links to the rollout hosts of a fleet. False if there are none, so that the driver makes the groups.

    Args:
        nodes: node of each engine.
        start: function that starts the host of a node, or None.
        exact: True if the run is synchronous, so that each step waits for the report of its last group.
    """

    def __init__(self, nodes: Sequence[int], start: Callable[[int], Any] | None, exact: bool = False):
        self._nodes = nodes
        report_s = _REPORT_S if exact else max(_REPORT_S, _REPORT_S_PER_HOST * len(set(nodes)))
        self._links = {node: HostLink(partial(start, node), report_s) for node in sorted(set(nodes))} if start else {}

    def __bool__(self) -> bool:
        return bool(self._links)

    def of(self, engine: int) -> HostLink | None:
        """Return the link of an engine. None if the driver makes the groups."""
        return self._links.get(self._nodes[engine])

    def call(self, actors: Mapping[int, Any], method: str, *arguments: Any) -> list[Any]:
        """Call a method of engines, with one Ray call per rollout host. Return a reference per engine, in order.

        Args:
            actors: actors by engine number. An actor without a host is called directly.
        """
        return self._call(actors, method, dict.fromkeys(actors, arguments))

    def _call(self, actors: Mapping[int, Any], method: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        refs: dict[int, Any] = {}
        for node, link in self._links.items():
            hosted = {}
            for index, actor in actors.items():
                if self._nodes[index] == node and link.has(index, actor):
                    hosted[index] = arguments[index]
            if hosted:
                refs |= link.call(method, hosted)
        for index, actor in actors.items():
            if index not in refs:
                refs[index] = getattr(actor, method).remote(*arguments[index])
        return [refs[index] for index in actors]

    def handles(self, actors: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return engine actors for ``Transport.send``. With hosts, their updates wait for ``make_deferred``."""
        return {index: EngineHandle(index, actor) for index, actor in actors.items()} if self else actors

    def make_deferred(self, refs: Sequence[Any]) -> list[Any]:
        """Make the updates that a transport has deferred, and replace them with references."""
        deferred = {ref.index: ref for ref in refs if isinstance(ref, EngineHandle)}
        actors = {}
        arguments = {}
        for index, handle in deferred.items():
            actors[index] = handle.actor
            arguments[index] = handle.arguments
        made = dict(zip(deferred, self._call(actors, "update_weights", arguments)))
        return [made[ref.index] if isinstance(ref, EngineHandle) else ref for ref in refs]

    def take_recoveries(self) -> Counter[str]:
        """Return and clear the recoveries of all hosts (``HostLink.take_recoveries``)."""
        return sum((link.take_recoveries() for link in self._links.values()), Counter())

    def close(self) -> None:
        """End the hosts and their environment workers."""
        wait(list(chain.from_iterable(link.closing() for link in self._links.values())), _CLOSE_S)
        for link in self._links.values():
            link.kill()
