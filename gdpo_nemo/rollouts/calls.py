"""Calls of rollout functions and agents: each in a thread, with draws that end when the call is given up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Callable, Sequence, TypeVar

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import CompletionBatch, SampleRequest, Sampling

Result = TypeVar("Result")


class Draws:
    """What one call draws its completions with, from any thread but the fleet's.

    Args:
        engine: the number of the engine that draws them; None spreads them evenly.
    """

    def __init__(self, fleet: EngineFleet, sampling: Sampling, engine: int | None):
        self._fleet = fleet
        self._sampling = sampling
        self._engine = engine
        self._lock = threading.Lock()
        self._under_way: set[Future[CompletionBatch]] = set()
        self._over = False

    def __call__(self, requests: Sequence[SampleRequest]) -> CompletionBatch:
        """Sample, and wait for it. Raises RunError: as ``EngineFleet.generate``; the call was given up."""
        with self._lock:
            if self._over:
                raise RunError("the call was given up")
            drawing = self._fleet.spawn(self._fleet.sample_all(requests, self._sampling, self._engine))
            self._under_way.add(drawing)
        try:
            return drawing.result()
        finally:
            with self._lock:
                self._under_way.discard(drawing)

    def end(self) -> None:
        """Drop the requests under way, and refuse others."""
        with self._lock:
            self._over = True
            under_way = list(self._under_way)
        for drawing in under_way:
            drawing.cancel()


async def call_within(limit_s: float | None, call: Callable[[], Result], draws: Draws) -> Result | None:
    """What ``call`` returns, or None if it has not after ``limit_s`` seconds; it then goes on to its end unheard.

    Raises:
        Exception: what the call raised.
    """
    calling = asyncio.wrap_future(_in_a_thread(call))
    try:
        done, _ = await asyncio.wait([calling], timeout=limit_s)
    except asyncio.CancelledError:
        _leave(calling, draws)
        raise
    if done:
        return calling.result()
    _leave(calling, draws)
    return None


def _leave(calling: asyncio.Future[Result], draws: Draws) -> None:
    draws.end()
    # Asked for, so that asyncio does not print what nobody has to hear.
    calling.add_done_callback(lambda done: done.cancelled() or done.exception())


def _in_a_thread(call: Callable[[], Result]) -> Future[Result]:
    """In a thread that does not keep the process from its end, as those of an executor would."""
    answer: Future[Result] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # whoever waits gets it, of any kind
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="calls").start()
    return answer
