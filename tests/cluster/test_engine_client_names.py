"""Requests of an engine's client: their names, which fleets of one process share, and how many load the engine."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.cluster.engine_client import EngineClient
from gdpo_nemo.generation.requests import Completion, EngineReport, FinishedRequest, SampleRequest, Sampling

THREADS = 4
REQUESTS = 5_000


class Owner:
    """The fleet's interface, as a client uses it while its engine loads."""

    exact = False

    def changed(self) -> None:
        """Nobody waits."""


@pytest.fixture
def impatient_threads():
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _names_of_a_fleet(_: int) -> list[str]:
    """Return the names of a client's requests. Runs in a thread with its own event loop, as in a fleet."""
    engine = SimpleNamespace(process_location=SimpleNamespace(remote=lambda: None))
    request, sampling = SampleRequest(np.zeros(1, np.int32), 0), Sampling(1.0, 1.0, -1, 1)

    async def submit() -> list[str]:
        client = EngineClient(0, lambda index: engine, 1, 60.0, Owner())
        names = [client.submit(request, sampling).name for _ in range(REQUESTS)]
        client.take_pending()  # also ends the client's wait, which later tests would otherwise see
        return names

    return asyncio.run(submit())


def test_fleets_that_submit_in_separate_threads_give_every_request_a_unique_name(impatient_threads):
    with ThreadPoolExecutor(THREADS) as threads:
        names = [name for found in threads.map(_names_of_a_fleet, range(THREADS)) for name in found]
    assert len(set(names)) == len(names) == THREADS * REQUESTS


def test_samples_that_wait_for_their_group_leave_room_and_prove_that_the_engine_samples():
    engine = SimpleNamespace(process_location=SimpleNamespace(remote=lambda: None))
    request, sampling = SampleRequest(np.zeros(1, np.int32), 0, group=1), Sampling(1.0, 1.0, -1, 1)

    async def take() -> None:
        client = EngineClient(0, lambda index: engine, 8, 60.0, Owner())
        pending = [client.submit(request, sampling) for _ in range(4)]
        client.deaths, client._progress = 2, -1.0
        client._take(EngineReport([], 0, 1, 0, 0.0, 0.0, 0, 0, kept=3))
        assert (client.load, client.deaths) == (1, 0) and client._progress > 0
        client._progress = -1.0
        client._take(EngineReport([], 0, 1, 0, 0.0, 0.0, 0, 0, kept=3))
        assert client._progress == -1.0  # no further sample has finished
        completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop")
        client._take(EngineReport([FinishedRequest(p.name, completion) for p in pending], 0, 0, 0, 0.0, 0.0, 0, 0))
        assert client.load == 0 and all(p.answer.done() for p in pending)

    asyncio.run(take())
