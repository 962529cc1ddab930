"""A completion that is read while it is drawn, over scripted engines (engines_in_process)."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from engines_in_process import InProcessFleet, Script, without_ray

from gdpo_nemo.config.load import load_config
from gdpo_nemo.generation.requests import SampleRequest, Sampling

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
SAMPLING = Sampling(1.0, 1.0, -1, 8)


@pytest.fixture
def fleet(monkeypatch):
    without_ray(monkeypatch)
    script = Script(lambda engine, request: script.seconds)
    script.seconds = 0.5
    found = InProcessFleet(load_config(DEMO), script)
    found.publish(0)
    yield found
    found.close()


def followed(fleet, heard: list, seed: int = 5):
    async def draw():
        return await fleet.submit(SampleRequest(np.array([1, 2], np.int32), seed), SAMPLING).follow(heard.append)

    return fleet.spawn(draw())


def wait_until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_follower_of_a_completion_gets_tokens_before_its_end(fleet):
    fleet.script.seconds = 3600
    heard: list[list[int]] = []
    answer = followed(fleet, heard)
    wait_until(lambda: any(heard))
    running = fleet.script.now(0)._running
    for name, (request, _, spans) in running.items():
        running[name] = (request, 0.0, spans)
    assert next(filter(None, heard)) == answer.result(60).token_ids[:1].tolist()


def test_completion_without_followers_is_dropped_by_the_engine(fleet):
    fleet.script.seconds = 3600
    heard: list[list[int]] = []
    answer = followed(fleet, heard)
    wait_until(lambda: heard)
    assert answer.cancel()
    with pytest.raises(CancelledError):
        answer.result(60)
    wait_until(lambda: fleet.script.now(0).aborted)
    assert not fleet.clients[0].pending


def test_completion_is_sampled_again_if_its_engine_dies(fleet):
    fleet.script.seconds = 3600
    heard: list[list[int]] = []
    answer = followed(fleet, heard)
    wait_until(lambda: heard)
    fleet.script.seconds = 0.0
    fleet.script.now(0).dead = True
    assert answer.result(60).token_ids[0] == 5 and len(fleet.script.engines) == 2
