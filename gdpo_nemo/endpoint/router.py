"""Continuous batching of single requests: a request joins those its engine is sampling at the engine's next step.

A conversation stays on one engine, whose prefix cache holds its earlier turns. A completion depends on its seed and
prompt, not on the other requests of the batch. New weights wait until an engine has finished its requests.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import uuid
from concurrent.futures import Future
from typing import NamedTuple

from gdpo_nemo.cluster.fleet import EngineFleet, InflightRequests
from gdpo_nemo.errors import GdpoError, RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling


class _QueuedRequest(NamedTuple):
    name: str
    request: SampleRequest
    sampling: Sampling
    answer: Future


class EngineRouter:
    """One queue and one thread per engine.

    Args:
        engines: of the fleet.
    """

    def __init__(self, fleet: EngineFleet, engines: int):
        self._fleet = fleet
        self._queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(engines)]
        self._load = [0] * engines
        self._lock = threading.Lock()
        # An engine outlives its router and may return requests of an earlier one, so names are unique to a router.
        self._names = (f"{uuid.uuid4().hex}/{number}" for number in itertools.count())
        self.failure: GdpoError | None = None
        """Why sampling failed for good, once it did."""
        self.seconds = 0.0
        """Sum over engines of the time spent in ``advance``."""
        for i in range(engines):
            threading.Thread(target=self._serve, args=(i,), daemon=True, name=f"engine-{i}").start()

    def least_busy(self) -> int:
        """Number of the engine with the fewest requests under way."""
        with self._lock:
            return min(range(len(self._load)), key=self._load.__getitem__)

    def sample(self, engine: int, request: SampleRequest, sampling: Sampling) -> Future[tuple[Completion, int]]:
        """Submit a request; the future holds the completion and the version of the weights that sampled it."""
        answer: Future = Future()
        with self._lock:
            self._load[engine] += 1
            name = next(self._names)
        self._queues[engine].put(_QueuedRequest(name, request, sampling, answer))
        return answer

    def close(self) -> None:
        """End the threads. Unfinished requests are dropped."""
        for waiting in self._queues:
            waiting.put(None)

    def _serve(self, engine: int) -> None:
        drawing = InflightRequests(engine)
        waiting: dict[str, _QueuedRequest] = {}
        while (arrived := self._arrived(engine, wait=not waiting)) is not None:
            waiting |= {asked.name: asked for asked in arrived}
            start = time.monotonic()
            try:
                drawn = self._fleet.advance(drawing, {asked.name: (asked.request, asked.sampling) for asked in arrived})
            except Exception as error:  # of any kind: an answer that is never set would block its agent for ever
                self.failure = error if isinstance(error, GdpoError) else RunError(f"sampling: {error}")
                failed = waiting
                waiting = {}
                drawing = InflightRequests(engine)
                self._count(engine, len(failed), time.monotonic() - start)
                for asked in failed.values():
                    asked.answer.set_exception(self.failure)
                continue
            # An engine may also return requests of an earlier router; they are dropped.
            done = [(waiting.pop(name), completion) for name, completion in drawn if name in waiting]
            self._count(engine, len(done), time.monotonic() - start)
            for asked, completion in done:
                asked.answer.set_result((completion, completion.version))

    def _arrived(self, engine: int, wait: bool) -> list[_QueuedRequest] | None:
        """Requests queued for an engine, at least one with ``wait``; None when the router is closed."""
        arrived = [self._queues[engine].get()] if wait else []
        while not self._queues[engine].empty():
            arrived.append(self._queues[engine].get())
        return None if None in arrived else arrived

    def _count(self, engine: int, done: int, seconds: float) -> None:
        with self._lock:
            self._load[engine] -= done
            self.seconds += seconds
