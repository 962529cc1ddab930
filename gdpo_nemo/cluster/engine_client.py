"""Client of one engine: polls the engine, stores unanswered requests, and replaces the engine if it dies.

All code in this module runs on the fleet's event loop. A request stays in ``pending`` until its completion arrives, so
that a replacement can receive it again with the same seed.

A request passes through ``submit``, ``adopt``, ``_outbox``, ``_flush`` in the next loop iteration, ``_send`` and
``actor.submit``, and once more through ``_send`` if the engine lacks the data of an image. A completion returns through
``actor.poll``, ``_poll`` and ``_take``, which sets ``PendingRequest.answer``. If the engine dies, ``_poll`` raises
WorkerDied. ``_replace`` then calls ``owner.reassign``, waits for ``owner.awake`` and creates a new actor. Finally,
``_begin`` calls ``_send`` for the remaining requests.

``EngineState`` documents the states and their transitions. If an engine dies in any state except DEAD, its next state
is STARTING, or DEAD if it is not replaced. Any other error ends ``serve`` and the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from gdpo_nemo.cluster import host_link
from gdpo_nemo.cluster.host_link import HostLink, kill_process
from gdpo_nemo.cluster.sent_images import SentImages
from gdpo_nemo.cluster.session import WorkerDied, answer, ray
from gdpo_nemo.generation.requests import Completion, EngineReport, EngineRequest, Sampling
from gdpo_nemo.utils.errors import GdpoError, RunError
from gdpo_nemo.utils.waits import Patience, WaitExpired, running, waiting
from gdpo_nemo.weights.manifest import PeerLost

START_S = 900.0
"""Time limit for an engine to start, in which vLLM loads the model, profiles memory and captures graphs."""
REPLACEMENTS = 3
"""Maximum number of consecutive replacements of an engine without a completion between them."""
POLL_S = 0.5
"""Minimum of ``EngineClient._poll_s``."""
_LONGEST_POLL_S = 10.0
"""Maximum of ``EngineClient._poll_s``, far less than ``SILENT_S``."""
_POLL_S_PER_ENGINE = 0.04
"""A poll takes the driver up to 1 ms of CPU time, so polls without a completion take at most 2.5 % of a core."""
SILENT_S = 120.0
"""Minimum time without a response after which an engine is considered stopped or stuck.

A healthy engine answers every poll.
"""
_LISTEN_S = 0.1
"""Interval between two reads of the tokens of an unfinished completion."""
_NODE_POLL_S = 2.0
"""Interval between two checks of a starting engine's node."""
FULL_KV = 0.9
"""KV cache usage, as a fraction, above which an engine with waiting requests gets no new group.

Above this usage, vLLM would preempt requests.
"""

_NO_REPORT = EngineReport([], -1, 0, 0, 0.0, 0.0, 0, 0)

# An engine may report requests from an earlier client in the same process, so request names must be unique. Each fleet
# creates request names in a separate thread. ``count`` is thread-safe, unlike a generator (ValueError: generator
# already executing).
_PROCESS = uuid.uuid4().hex
_numbers = itertools.count()


class EngineState(StrEnum):
    """State of an engine."""

    STARTING = "starting"
    """The new actor is loading the model. The next state is LOADED, or LOST if the node has left the cluster."""
    LOADED = "loaded"
    """The model is loaded (the actor answers ``__ray_ready__``), but the newest weights are not loaded yet.

    The next state is READY, after ``owner.deliver``. In an exact run, a replacement first waits for a request or an
    update.
    """
    READY = "ready"
    """The engine has the newest weights. The next state is UPDATING or ASLEEP."""
    UPDATING = "updating"
    """``EngineFleet.update`` has begun. The next state is READY."""
    ASLEEP = "asleep"
    """``EngineFleet.sleep`` is done. The next state is READY, after ``wake("kv_cache")``."""
    LOST = "lost"
    """The engine's node left the cluster while the engine started, and Ray waits for another node to join.

    The next state is LOADED, when the actor runs on another node.
    """
    DEAD = "dead"
    """The engine has died more than ``REPLACEMENTS`` times in a row and is not replaced again."""


@dataclass(eq=False)
class PendingRequest:
    """Request whose completion has not arrived."""

    name: str
    request: EngineRequest
    sampling: Sampling
    answer: asyncio.Future[Any]
    client: EngineClient = field(repr=False)
    """Client of the engine that samples the request. The client may change if the engine dies."""

    async def follow(self, on_tokens: Callable[[Sequence[int]], None]) -> Completion:
        """Wait for the completion and return it. Cancelling this coroutine drops the request.

        If the engine dies, the request is repeated and the tokens start from the beginning.

        Args:
            on_tokens: function called several times a second with the tokens that were sampled so far.
        """
        try:
            while not (await asyncio.wait([self.answer], timeout=_LISTEN_S))[0]:
                if self.client.state is EngineState.READY:
                    with contextlib.suppress(WorkerDied):  # the client repeats the request
                        on_tokens(await self.client.drawn(self))
        except asyncio.CancelledError:
            self.client.abort(self)
            raise
        completion: Completion = self.answer.result()
        return completion


class ClientOwner(Protocol):
    """Interface of the fleet for its clients."""

    exact: bool
    """True if requests must stay on their engine, so that samples are reproducible.

    The last digits of log-probs may depend on which requests an engine batches together.
    """
    awake: asyncio.Event
    """Event that is set while engines may start. On shared devices, it is cleared while the policy uses the memory."""

    async def deliver(self, client: EngineClient) -> None:
        """Send the newest weights to a replacement if the policy has already sent weights."""

    def note(self, line: str) -> None:
        """Record an event of the run as a sentence for the user."""

    def reassign(self, client: EngineClient, reason: str) -> None:
        """Move the requests of a client whose engine is dead or lost to other clients, if any client can sample."""

    def changed(self) -> None:
        """Notify waiting tasks that the state or the load of a client has changed."""

    def lost_node(self, client: EngineClient) -> str | None:
        """Return the address of the engine's node if the node has left the cluster, else None. This call blocks."""


class EngineClient:
    """Client of one engine of a fleet.

    Args:
        index: number of the engine.
        start: function that starts the actor of the engine with a given number.
        slots: maximum number of requests that the engine samples concurrently.
        timeout_s: time limit for the next completion in seconds.
        owner: fleet of the client.
        engines: number of engines in the fleet.
        host: link to the rollout host through which the engine samples groups, or None to sample without a host.
    """

    def __init__(
        self,
        index: int,
        start: Callable[[int], Any],
        slots: int,
        timeout_s: float,
        owner: ClientOwner,
        *,
        engines: int = 1,
        host: HostLink | None = None,
    ):
        self.index = index
        self.slots = slots
        self.version = -1
        """Version of the engine's weights, or -1 for the weights in the model's folder."""
        self.deaths = 0
        """Number of deaths of the engine since its last completion."""
        self.replaced = 0
        """Total number of replacements."""
        self.report = _NO_REPORT
        """Latest report of the engine."""
        self._busy_s = 0.0
        self.pending: dict[str, PendingRequest] = {}
        self._samples = 0
        """Number of samples of the pending requests."""
        self.promised = 0
        """Number of samples that have a reserved slot but are not submitted yet."""
        self._cohort: list[PendingRequest] = []
        """All requests of an exact run since the engine was last idle, including finished requests."""
        self._outbox: list[PendingRequest] = []
        self._sent_images = SentImages()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = start
        self._timeout_s = timeout_s
        self._poll_s = min(max(POLL_S, _POLL_S_PER_ENGINE * engines), _LONGEST_POLL_S)
        """Maximum duration of a poll if there is nothing to report."""
        if host is not None:
            self._poll_s = 2 * host_link.POLL_S
        self._owner = owner
        self._host = host
        self._state = EngineState.STARTING
        self._needed = asyncio.Event()
        """Event that makes a replacement load the newest weights: the first request or a weight update."""
        self._progress = running.now()
        self._answering = Patience(timeout_s, SILENT_S)
        self._wait = contextlib.ExitStack()
        self.actor = start(index)
        self.location = self.actor.process_location.remote()

    @property
    def state(self) -> EngineState:
        """State of the engine."""
        return self._state

    def enter(self, state: EngineState) -> None:
        """Change the state, and notify the fleet."""
        self._state = state
        self._owner.changed()

    @property
    def can_sample(self) -> bool:
        """True if the engine is sampling requests, or will sample them after the weight update in progress."""
        return self._state in (EngineState.READY, EngineState.UPDATING)

    def has_room(self, version: int) -> bool:
        """Return whether the engine can accept another group, with weights of ``version`` or newer."""
        current = self._state is EngineState.READY and self.version >= version
        return current and self.load < self.slots and not self._full

    @property
    def _full(self) -> bool:
        return self.report.kv_used > FULL_KV and self.report.waiting > 0

    @property
    def load(self) -> int:
        """Number of requests that the engine still samples, and of reserved slots."""
        return max(0, self._samples - self.report.kept) + self.promised

    def keep_promise(self, samples: int = 1) -> None:
        """Release reserved slots, because their samples were submitted or cancelled."""
        self.promised -= samples
        self._owner.changed()

    def busy_since(self) -> float:
        """Return the time in seconds that the engine has spent in decode steps since the last call."""
        before = self._busy_s
        self._busy_s = self.report.busy_s
        return max(0.0, self._busy_s - before)  # negative after a replacement, whose time starts at 0

    def submit(self, request: EngineRequest, sampling: Sampling) -> PendingRequest:
        """Send a request to the engine. Requests of one event-loop iteration are sent together, in order."""
        pending = PendingRequest(
            f"{_PROCESS}/{next(_numbers)}", request, sampling, asyncio.get_running_loop().create_future(), self
        )
        self.adopt(pending)
        return pending

    def adopt(self, pending: PendingRequest) -> None:
        """Add a new request, or take over a request from another client."""
        pending.client = self
        if not self.pending:
            self._progress = running.now()
            self._begin_wait()
        self.pending[pending.name] = pending
        self._samples += pending.request.samples
        if self._owner.exact:  # other runs never read the cohort, and their engines may never be idle
            self._cohort.append(pending)
        self._needed.set()
        if self.can_sample:
            if not self._outbox:
                asyncio.get_running_loop().call_soon(self._flush)
            self._outbox.append(pending)

    def _pop(self, name: str) -> PendingRequest | None:
        pending = self.pending.pop(name, None)
        if pending is not None:
            self._samples -= pending.request.samples
        return pending

    async def drawn(self, pending: PendingRequest) -> list[int]:
        """Return the tokens that an unfinished request has sampled so far. Raises WorkerDied if the engine died."""
        tokens: list[int] = await answer(self.actor.drawn.remote(pending.name), f"engine {self.index}", self._timeout_s)
        return tokens

    def abort(self, pending: PendingRequest) -> None:
        """Drop a request that is no longer needed."""
        if self._pop(pending.name) is None:
            return
        if self.can_sample:
            self._call("abort", [pending.name])
        self._reset_if_idle()
        self._owner.changed()

    def take_pending(self) -> list[PendingRequest]:
        """Remove and return all unanswered requests."""
        taken = list(self.pending.values())
        self.pending.clear()
        self._samples = 0
        self._outbox.clear()
        self._reset_if_idle()
        return taken

    def request_weights(self) -> None:
        """Make a replacement load the newest weights now, even if it waits for its first request."""
        self._needed.set()

    def fail(self, error: GdpoError) -> None:
        """Raise an error in every task that waits for a completion."""
        for pending in self.take_pending():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    async def serve(self) -> None:
        """Start the engine, poll it, and replace it if it dies. Return after too many deaths (``REPLACEMENTS``).

        Raises:
            RunError: for any error other than the death of the engine. This error ends the run.
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
        self.enter(EngineState.STARTING)
        await self._wait_for_start()
        self.enter(EngineState.LOADED)
        if self._owner.exact and self.replaced and not self.pending:
            # Wait until the engine is needed for a request or a weight update. The policy may be training, and some
            # transports would have to gather the policy's weights again.
            await self._needed.wait()
        await self._owner.deliver(self)
        if self._host is not None:
            await self._host.attach(self.index, self.actor, START_S)
        self.enter(EngineState.READY)
        self._progress = running.now()
        # In an exact run, repeat finished requests as well, because the engine must batch the same requests together.
        repeated = list(self._cohort) if self._owner.exact else list(self.pending.values())
        if self.pending:
            self._send(repeated)

    async def _wait_for_start(self) -> None:
        ready = self.actor.__ray_ready__.remote()
        deadline = running.now() + START_S
        while True:
            try:
                await answer(ready, f"starting engine {self.index}", _NODE_POLL_S)
                return
            except WaitExpired:
                if self._state is EngineState.STARTING:
                    lost = await asyncio.to_thread(self._owner.lost_node, self)
                    if lost is not None:
                        # Ray starts the actor as soon as another node joins, and this wait has no time limit.
                        self.enter(EngineState.LOST)
                        reason = f"its node {lost} is no longer in the cluster"
                        self._owner.note(f"engine {self.index}: {reason}; the other engines continue")
                        self._owner.reassign(self, reason)
                if self._state is EngineState.STARTING and running.now() > deadline:
                    raise

    def _call(self, method: str, argument: Any) -> Any:
        """Call a method for sampling, of the rollout host if there is one."""
        if self._host is not None:
            return getattr(self._host, method)(self.index, argument)
        return getattr(self.actor, method).remote(argument)

    async def _poll(self) -> EngineReport:
        if not self.pending:
            self._progress = running.now()
        start = running.now()
        remaining = max(0.0, self._progress + self._timeout_s - start)
        limit = self._answering.limit_s
        polled = self._call("poll", min(self._poll_s, remaining))
        try:
            report: EngineReport = await answer(
                polled, f"engine {self.index}", min(remaining + self._poll_s, limit), self._poll_s
            )
        except WaitExpired:
            if limit >= remaining + self._poll_s:
                raise
            # The engine does not answer, although engines must answer polls even during long samples.
            self._kill_unresponsive()
            raise WorkerDied(f"engine {self.index} has not answered for {limit:.0f} s") from None
        self._answering.took(running.now() - start)
        if self.pending and not report.finished and report.kept <= self.report.kept and remaining <= 0:
            raise WaitExpired(f"engine {self.index} finished no sample within {self._timeout_s:.0f} s")
        return report

    def _take(self, report: EngineReport) -> None:
        was_full = self._full
        ended = bool(report.finished) or report.kept > self.report.kept
        self.report = report
        for finished in report.finished:
            pending = self._pop(finished.name)
            if pending is not None and not pending.answer.done():
                if isinstance(finished.completion, GdpoError):
                    pending.answer.set_exception(finished.completion)
                else:
                    pending.answer.set_result(finished.completion)
        if ended:  # only a completion proves that the engine can sample
            self.deaths = 0
            self._progress = running.now()
            self._begin_wait()
            self._reset_if_idle()
        if ended or was_full:
            self._owner.changed()

    def _begin_wait(self) -> None:
        """Register a wait for this engine, so that the wait can be displayed."""
        self._wait.close()
        self._wait.enter_context(waiting("sampling", f"engine {self.index}", self._timeout_s))

    def _reset_if_idle(self) -> None:
        if not self.pending:
            self._cohort.clear()
            self._wait.close()
            self._needed.clear()

    def _flush(self) -> None:
        taken = [pending for pending in self._outbox if pending.name in self.pending]
        self._outbox = []
        if taken and self.can_sample:
            self._send(taken)

    def _send(self, requests: list[PendingRequest]) -> None:
        by_name = {}
        for pending in requests:
            request = pending.request
            if self._host is None:  # a host needs the images, and sends them to its engines
                request = self._sent_images.without_sent(request)
            by_name[pending.name] = request, pending.sampling
        # Call the actor now: in the next loop iteration, the actor may be a replacement without the newest weights.
        submitted = self._call("submit", by_name)
        if self._host is not None:
            return  # the host reports failures
        task = asyncio.get_running_loop().create_task(self._wait_for_submit(submitted, self.actor, requests))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_submit(self, ref: Any, actor: Any, requests: list[PendingRequest]) -> None:
        try:
            missing = await answer(ref, f"engine {self.index}", self._timeout_s)
            if missing and self.actor is actor:
                self._send_again(requests, missing)
        except WorkerDied:
            return  # the replacement will get these requests
        except GdpoError as error:
            if self.actor is not actor:
                return  # the replacement has received these requests
            for pending in requests:
                if self._pop(pending.name) is not None and not pending.answer.done():
                    pending.answer.set_exception(error)
            self._reset_if_idle()
            self._owner.changed()

    def _send_again(self, requests: list[PendingRequest], missing: Sequence[str]) -> None:
        """Send requests with images that the engine does not have. An exact run repeats also aborted requests."""
        self._sent_images.forget(missing)
        needed = [pending for pending in requests if self._owner.exact or pending.name in self.pending]
        if needed and self.can_sample:
            self._send(needed)

    def _kill_unresponsive(self) -> None:
        """Kill the engine's process and its rollout host, which would otherwise have reported a silent engine."""
        if self._host is not None:
            self._host.kill()
        kill_process(self.location)

    async def _replace(self, error: WorkerDied) -> bool:
        """Replace a dead engine. Return False if it has died too often and is not replaced."""
        self.deaths += 1
        self.replaced += 1
        self._outbox.clear()
        if not self.pending:
            self._needed.clear()
        with contextlib.suppress(RunError, ray.exceptions.RayError):
            ray.kill(self.actor)  # the actor may be alive, but unreachable
        if self.deaths > REPLACEMENTS:
            self.enter(EngineState.DEAD)
            reason = f"it died {self.deaths} times in a row, last: {error}"
            self._owner.note(f"engine {self.index} is abandoned: {reason}")
            self._owner.reassign(self, reason)
            return False
        self.enter(EngineState.STARTING)
        self._owner.note(f"{error}; the engine is replaced and its samples are repeated")
        if not self._owner.exact:
            self._owner.reassign(self, str(error))
        await self._owner.awake.wait()
        self._sent_images.clear()
        self.actor = self._start(self.index)
        self.location = self.actor.process_location.remote()
        return True


def died(result: Any) -> bool:
    """Return whether a call failed because its engine died. Raise any other error except ``PeerLost``."""
    if isinstance(result, BaseException) and not isinstance(result, (WorkerDied, PeerLost)):
        raise result
    return isinstance(result, WorkerDied)
