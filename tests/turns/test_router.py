"""Single requests join what an engine draws, and are drawn as they would be alone."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future

import numpy as np

from gdpo_nemo.cluster.weight_sync import WeightSync
from gdpo_nemo.generation.requests import SampleRequest, Sampling

LONG = Sampling(2.0, 1.0, -1, 300)
SHORT = Sampling(0.5, 1.0, -1, 2)
"""Hot, so that some are long; and as episodes are sampled."""


def requests(count: int, of: int = 24) -> list[SampleRequest]:
    """Requests with prompts and seeds of their own."""
    return [SampleRequest(np.arange(5, 5 + of + n, dtype=np.int32), 1000 + n) for n in range(count)]


def drawn(answers: list[Future]) -> list:
    return [answer.result(timeout=1200) for answer in answers]


def assert_same(found, alone, version: int) -> None:
    for (completion, by), expected in zip(found, alone, strict=True):
        assert by == version and completion.token_ids.tolist() == expected.token_ids.tolist()
        assert np.abs(completion.logprobs - expected.logprobs).max() < 1e-4


def test_a_request_joins_those_under_way_and_is_drawn_as_it_would_be_alone(stage, router):
    """Other settings and all; nobody waits for the longest before it."""
    long = requests(12)
    short = requests(3, of=40)
    alone = [
        stage.fleet.collect(stage.fleet.submit(part, how, 0)).completions
        for part, how in ((long, LONG), (short, SHORT))
    ]
    first = [router.sample(0, request, LONG) for request in long]
    await_work(router)
    second = [router.sample(0, request, SHORT) for request in short]
    found = drawn(second)
    assert not all(answer.done() for answer in first)
    version = found[0][1]
    assert_same(found, alone[1], version)
    assert_same(drawn(first), alone[0], version)
    assert router._load == [0, 0]


def test_new_weights_wait_for_what_is_being_drawn_and_a_lost_engine_draws_it_again(stage, router):
    """No completion is of two versions; the weights of both versions are equal here."""
    asked = requests(12)
    alone = stage.fleet.collect(stage.fleet.submit(asked, LONG, 0)).completions
    sync = WeightSync(stage.policy, stage.fleet, None)
    sync.publish(1)
    before = [router.sample(0, request, LONG) for request in asked]
    await_work(router)
    sync.publish(2)
    after = [router.sample(0, request, LONG) for request in asked]
    assert_same(drawn(before), alone, 1)
    await_work(router)
    os.kill(stage.fleet.process_locations()[0][1], signal.SIGKILL)
    assert_same(drawn(after), alone, 2)
    assert not stage.fleet._deaths[0] and router.failure is None


def await_work(router) -> None:
    """Until the engine has worked a little on what it was asked."""
    start = router.seconds
    while router.seconds == start:
        time.sleep(0.005)
