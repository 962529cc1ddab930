"""One engine as the driver's event loop sees it: a long-poll, the requests it was given, its replacement when it dies.

Everything here runs on the loop's thread. An engine reports what it finished as soon as it has; a request waits in its
lane until then, so that the replacement of a dead engine can be given it again, with its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Callable, Protocol, Sequence

from gdpo_nemo.cluster.session import WorkerDied, answer, answered, ray
from gdpo_nemo.errors import GdpoError, RunError
from gdpo_nemo.generation.requests import Completion, EngineReport, SampleRequest, Sampling
from gdpo_nemo.waits import Patience, WaitExpired, running, waiting

START_S = 900.0
"""vLLM loads the model, profiles memory and captures graphs before it answers."""
REPLACEMENTS = 3
"""Times that an engine may be replaced without a completion in between before it is given up."""
POLL_S = 0.5
"""Longest that an engine without news keeps a poll."""
SILENT_S = 120.0
"""Shortest silence by which an engine, which answers every poll, is taken for dead: it is stopped, or hangs."""
_LISTEN_S = 0.1
"""Between two looks at a completion that somebody reads as it comes."""
_NODE_POLL_S = 2.0
"""How often an engine that starts again looks whether its node is still there."""
FULL_KV = 0.9
"""Share of the KV cache in use from which an engine with waiting requests gets no further group: vLLM would preempt."""

_NO_REPORT = EngineReport([], -1, 0, 0, 0.0, 0.0, 0, 0)

# An engine may report requests of an earlier lane of its process, so names are unique. Fleets name theirs in threads of
# their own: ``count`` is safe there, which a generator is not (ValueError: generator already executing).
_PROCESS = uuid.uuid4().hex
_numbers = itertools.count()


class LaneState(StrEnum):
    """What an engine is doing."""

    STARTING = "starting"
    """Its process loads the model."""
    LOADED = "loaded"
    """A replacement that has not been given the newest weights."""
    READY = "ready"
    UPDATING = "updating"
    ASLEEP = "asleep"
    LOST = "lost"
    """Its node has left the cluster; it starts again when another joins."""
    DEAD = "dead"
    """Given up."""


@dataclass(eq=False)
class PendingRequest:
    """A request that an engine has not answered."""

    name: str
    request: SampleRequest
    sampling: Sampling
    answer: asyncio.Future[Completion]
    lane: Lane = field(repr=False)
    """Of the engine that samples it; another one once its engine died."""

    async def follow(self, heard: Callable[[Sequence[int]], None]) -> Completion:
        """The completion. Until it is there, ``heard`` is told several times a second which tokens it has; where an
        engine dies they start again. Cancelling drops it."""
        try:
            while not (await asyncio.wait([self.answer], timeout=_LISTEN_S))[0]:
                if self.lane.state is LaneState.READY:
                    with contextlib.suppress(WorkerDied):  # the lane finds out, too, and has it drawn again
                        heard(await self.lane.drawn(self))
        except asyncio.CancelledError:
            self.lane.abort(self)
            raise
        return self.answer.result()


class LaneOwner(Protocol):
    """What a lane asks of its fleet."""

    exact: bool
    """Whether an engine's samples must not move to another one: which requests meet in an engine can change their
    log-probs in the last place."""
    awake: asyncio.Event
    """Whether an engine may start: where devices are shared, not while the policy has the memory."""

    async def deliver(self, lane: Lane) -> None:
        """Give a replacement the newest weights, if there are any."""

    def note(self, line: str) -> None:
        """Keep a sentence for whoever watches the run."""

    def reassign(self, lane: Lane, reason: str) -> None:
        """Move the requests of a lane, for the reason that it died or is gone, to those that can sample, if any can."""

    def changed(self) -> None:
        """A state or a load has changed."""

    def lost_node(self, lane: Lane) -> str | None:
        """The address of the engine's node, if that has left the cluster; blocks."""


class Lane:
    """One engine of a fleet.

    Args:
        start: starts the engine's actor.
        slots: requests that the engine samples at once.
        timeout_s: seconds that it may take to finish a sample.
    """

    def __init__(self, index: int, start: Callable[[int], Any], slots: int, timeout_s: float, owner: LaneOwner):
        self.index = index
        self.slots = slots
        self.version = -1
        """Of the weights that the engine holds; -1: those of the model's folder."""
        self.deaths = 0
        """Since the last completion."""
        self.replaced = 0
        """In all."""
        self.report = _NO_REPORT
        """The engine's newest."""
        self._busy_s = 0.0
        self.pending: dict[str, PendingRequest] = {}
        self.promised = 0
        """Samples of groups that were placed here and have not been submitted."""
        self._cohort: list[PendingRequest] = []
        """Requests since the engine was last without work, the finished ones included."""
        self._outbox: list[PendingRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = start
        self._timeout_s = timeout_s
        self._owner = owner
        self._state = LaneState.STARTING
        self._wanted = asyncio.Event()
        """Set by the first request to a replacement."""
        self._progress = running.now()
        self._answering = Patience(timeout_s, SILENT_S)
        self._wait = contextlib.ExitStack()
        self.actor = start(index)
        self.location = self.actor.process_location.remote()

    @property
    def state(self) -> LaneState:
        """What the engine is doing."""
        return self._state

    def enter(self, state: LaneState) -> None:
        """Note a change of state."""
        self._state = state
        self._owner.changed()

    @property
    def samples(self) -> bool:
        """Whether it is at work, or will be after an update."""
        return self._state in (LaneState.READY, LaneState.UPDATING)

    def has_room(self, version: int) -> bool:
        """Whether another group may go to the engine, to be sampled by weights of ``version`` or newer."""
        current = self._state is LaneState.READY and self.version >= version
        return current and self.load < self.slots and not self._full

    @property
    def _full(self) -> bool:
        return self.report.kv_used > FULL_KV and self.report.waiting > 0

    @property
    def load(self) -> int:
        """Requests that it has or will have."""
        return len(self.pending) + self.promised

    def keep_promise(self) -> None:
        """A sample that was placed here is submitted, or will not be."""
        self.promised -= 1
        self._owner.changed()

    def busy_since(self) -> float:
        """Seconds of decode steps since the last call."""
        before = self._busy_s
        self._busy_s = self.report.busy_s
        return max(0.0, self._busy_s - before)  # a replacement starts from 0

    def submit(self, request: SampleRequest, sampling: Sampling) -> PendingRequest:
        """Give the engine a request. Those of one turn of the event loop reach it together, in order."""
        pending = PendingRequest(
            f"{_PROCESS}/{next(_numbers)}", request, sampling, asyncio.get_running_loop().create_future(), self
        )
        self.adopt(pending)
        return pending

    def adopt(self, pending: PendingRequest) -> None:
        """Take over a request."""
        pending.lane = self
        if not self.pending:
            self._progress = running.now()
            self._begin_wait()
        self.pending[pending.name] = pending
        self._cohort.append(pending)
        self._wanted.set()
        if self.samples:
            if not self._outbox:
                asyncio.get_running_loop().call_soon(self._flush)
            self._outbox.append(pending)

    async def drawn(self, pending: PendingRequest) -> list[int]:
        """Tokens that an unfinished request has so far. Raises WorkerDied where the engine is gone."""
        tokens: list[int] = await answer(self.actor.drawn.remote(pending.name), f"engine {self.index}", self._timeout_s)
        return tokens

    def abort(self, pending: PendingRequest) -> None:
        """Drop a request that nobody waits for any more."""
        if self.pending.pop(pending.name, None) is None:
            return
        if self.samples:
            self.actor.abort.remote([pending.name])
        self._note_done()
        self._owner.changed()

    def surrender(self) -> list[PendingRequest]:
        """Hand out the unanswered requests, for other lanes."""
        given = list(self.pending.values())
        self.pending.clear()
        self._outbox.clear()
        self._note_done()
        return given

    def want_weights(self) -> None:
        """Tell a replacement that waits for somebody to need it that a publication does."""
        self._wanted.set()

    def fail(self, error: GdpoError) -> None:
        """Answer every request with an error."""
        for pending in self.surrender():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    async def serve(self) -> None:
        """Start the engine, ask it for what it finished, replace it when it dies; returns when it is given up.

        Raises:
            RunError: of another kind than a death; it ends the run.
        """
        while True:
            try:
                await self._begin()
                while True:
                    self._take(await self._poll())
            except WorkerDied as error:
                if not await self._replace(error):
                    return

    async def _begin(self) -> None:
        self.version = -1
        self.report = _NO_REPORT
        self.enter(LaneState.STARTING)
        await self._started()
        self.enter(LaneState.LOADED)
        if self._owner.exact and self.replaced and not self.pending:
            # The policy may be training, and some transports gather the weights from it anew. Nobody asks for samples
            # then: the next publication, or the next request, finds it idle.
            await self._wanted.wait()
        await self._owner.deliver(self)
        self.enter(LaneState.READY)
        self._progress = running.now()
        # In exact runs with what was finished already: the engine must have the same requests beside each other.
        again = list(self._cohort) if self._owner.exact else list(self.pending.values())
        if self.pending:
            self._send(again)

    async def _started(self) -> None:
        ready = self.actor.__ray_ready__.remote()
        deadline = running.now() + START_S
        while True:
            try:
                await answer(ready, f"starting engine {self.index}", _NODE_POLL_S)
                return
            except WaitExpired:
                if self._state is LaneState.STARTING:
                    lost = await asyncio.to_thread(self._owner.lost_node, self)
                    if lost is not None:
                        # Ray places the actor when a node joins in its stead, however late.
                        self.enter(LaneState.LOST)
                        reason = f"its node {lost} is no longer in the cluster"
                        self._owner.note(f"engine {self.index}: {reason}; the others go on without it")
                        self._owner.reassign(self, reason)
                if self._state is LaneState.STARTING and running.now() > deadline:
                    raise

    async def _poll(self) -> EngineReport:
        if not self.pending:
            self._progress = running.now()
        start = running.now()
        left = max(0.0, self._progress + self._timeout_s - start)
        limit = self._answering.limit_s
        polled = self.actor.poll.remote(min(POLL_S, left))
        try:
            report: EngineReport = await answer(polled, f"engine {self.index}", min(left + POLL_S, limit))
        except WaitExpired:
            if limit >= left + POLL_S:
                raise
            # Samples may take long, answers do not.
            self._kill_silent()
            raise WorkerDied(f"engine {self.index} has not answered for {limit:.0f} s") from None
        self._answering.took(running.now() - start)
        if self.pending and not report.finished and left <= 0:
            raise WaitExpired(f"engine {self.index} finished no sample within {self._timeout_s:.0f} s")
        return report

    def _take(self, report: EngineReport) -> None:
        was_full = self._full
        self.report = report
        for done in report.finished:
            pending = self.pending.pop(done.name, None)
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(done.completion)
        if report.finished:  # steps without a completion do not show that the engine is sound
            self.deaths = 0
            self._progress = running.now()
            self._begin_wait()
            self._note_done()
        if report.finished or was_full:
            self._owner.changed()

    def _begin_wait(self) -> None:
        """Make it known that somebody waits for the engine, and since when."""
        self._wait.close()
        self._wait.enter_context(waiting("sampling", f"engine {self.index}", self._timeout_s))

    def _note_done(self) -> None:
        if not self.pending:
            self._cohort.clear()
            self._wait.close()
            self._wanted.clear()

    def _flush(self) -> None:
        given = [pending for pending in self._outbox if pending.name in self.pending]
        self._outbox = []
        if given and self.samples:
            self._send(given)

    def _send(self, requests: list[PendingRequest]) -> None:
        asked = {pending.name: (pending.request, pending.sampling) for pending in requests}
        # At once: a turn of the loop later the actor may be a replacement, which has no weights yet.
        submitted = self.actor.submit.remote(asked)
        task = asyncio.get_running_loop().create_task(self._submitted(submitted, self.actor, requests))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submitted(self, ref: Any, actor: Any, requests: list[PendingRequest]) -> None:
        try:
            await answer(ref, f"engine {self.index}", self._timeout_s)
        except WorkerDied:
            return  # the poll finds out, too; the replacement is given all again
        except GdpoError as error:
            if self.actor is not actor:
                return  # the replacement has been given them
            for pending in requests:
                if self.pending.pop(pending.name, None) is not None and not pending.answer.done():
                    pending.answer.set_exception(error)
            self._note_done()
            self._owner.changed()

    def _kill_silent(self) -> None:
        """Kill the engine's process, if it is on this host: one that is stopped does not hear Ray's request to end."""
        host, process = answered({self.index: self.location}).get(self.index, ("", 0))
        if host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    async def _replace(self, error: WorkerDied) -> bool:
        """Start another engine in place of a dead one; False once it is given up."""
        self.deaths += 1
        self.replaced += 1
        self._outbox.clear()
        if not self.pending:
            self._wanted.clear()
        with contextlib.suppress(RunError, ray.exceptions.RayError):
            ray.kill(self.actor)  # of one that is only unreachable
        if self.deaths > REPLACEMENTS:
            self.enter(LaneState.DEAD)
            reason = f"it died {self.deaths} times in a row, last: {error}"
            self._owner.note(f"engine {self.index} is given up: {reason}")
            self._owner.reassign(self, reason)
            return False
        self.enter(LaneState.STARTING)
        self._owner.note(f"{error}; it is replaced, and its samples are drawn again")
        if not self._owner.exact:
            self._owner.reassign(self, str(error))
        await self._owner.awake.wait()
        self.actor = self._start(self.index)
        self.location = self.actor.process_location.remote()
        return True
