"""Single requests on engines that work in batches: what arrives while an engine works goes into its next batch.

A conversation stays on one engine, whose prefix cache holds its earlier turns. An engine finishes a batch before it takes
the next, so a request waits for the longest completion before it; requests are not slipped into a running batch.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import NamedTuple

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.errors import GdpoError, RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling


class _Asked(NamedTuple):
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
        self.failure: GdpoError | None = None
        """Why sampling failed for good, once it did."""
        self.seconds = 0.0
        """That the engines worked."""
        for i in range(engines):
            threading.Thread(target=self._serve, args=(i,), daemon=True, name=f"engine-{i}").start()

    def least_busy(self) -> int:
        """The engine with the fewest requests under way."""
        with self._lock:
            return min(range(len(self._load)), key=self._load.__getitem__)

    def sample(self, engine: int, request: SampleRequest, sampling: Sampling) -> Future[tuple[Completion, int]]:
        """The completion and the version that wrote it, once it is drawn."""
        answer: Future = Future()
        with self._lock:
            self._load[engine] += 1
        self._queues[engine].put(_Asked(request, sampling, answer))
        return answer

    def close(self) -> None:
        """End the threads when their batch is done."""
        for waiting in self._queues:
            waiting.put(None)

    def _serve(self, engine: int) -> None:
        while True:
            batch = self._next_batch(engine)
            if batch is None:
                return
            sampling = batch[0].sampling
            now, later = ([a for a in batch if (a.sampling == sampling) is same] for same in (True, False))
            for asked in later:
                self._queues[engine].put(asked)
            self._draw(engine, now, sampling)

    def _next_batch(self, engine: int) -> list[_Asked] | None:
        """What is waiting, at least one; None to end."""
        batch = [self._queues[engine].get()]
        while not self._queues[engine].empty():
            batch.append(self._queues[engine].get())
        return None if None in batch else batch

    def _draw(self, engine: int, batch: list[_Asked], sampling: Sampling) -> None:
        try:
            drawn = self._fleet.collect(self._fleet.submit([a.request for a in batch], sampling, engine))
        except Exception as error:  # whatever it is, those who wait must hear of it
            self.failure = error if isinstance(error, GdpoError) else RunError(f"sampling: {error}")
            for asked in batch:
                asked.answer.set_exception(self.failure)
            return
        finally:
            with self._lock:
                self._load[engine] -= len(batch)
        with self._lock:
            self.seconds += drawn.seconds
        for asked, completion in zip(batch, drawn.completions):
            asked.answer.set_result((completion, drawn.version))
