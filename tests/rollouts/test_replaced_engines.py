"""Engines that die between a question and the use of its answer: what the one before was told or said is not its
replacement's. Engines follow a script (engines_in_process)."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines_in_process import InProcessFleet, Script, without_ray
from ray.exceptions import ActorDiedError

from gdpo_nemo.cluster import engine_client as clients
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.generation.requests import SampleRequest, Sampling
from gdpo_nemo.utils.errors import RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
REQUEST = SampleRequest(np.arange(3, dtype=np.int32), 5)
SAMPLING = Sampling(1.0, 1.0, -1, 4)
LIMIT_S = 120.0


@pytest.fixture
def fleet_of(monkeypatch):
    without_ray(monkeypatch)
    made = []

    def make(*overrides, delay=lambda engine, request: 0.0) -> InProcessFleet:
        made.append(InProcessFleet(load_config(DEMO, list(overrides)), Script(delay)))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def eventually(holds) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


def raise_(error):
    raise error


def receiving(engine) -> tuple[list[int], set[str]]:
    """Let an engine keep images as a real one does. Return the sizes of the calls that it accepts, and its images."""
    sizes: list[int] = []
    known: set[str] = set()
    submit = engine.submit

    def received(requests):
        wanted = [placed.image for request, _ in requests.values() for placed in request.images]
        known.update(image.sha256 for image in wanted if image.data)
        sizes.append(len(pickle.dumps(requests)))
        missing = sorted({image.sha256 for image in wanted} - known)
        if not missing:
            submit(requests)
        return missing

    engine.submit = received
    return sizes, known


def test_data_of_an_image_is_sent_once_to_each_engine_and_again_if_the_engine_lacks_it(fleet_of):
    image = Image("a" * 64, 8, 8, bytes(100_000))
    request = replace(REQUEST, images=(PlacedImage(image, 0, 1),))
    fleet = fleet_of()
    sizes, known = receiving(fleet.script.now(0))

    def sample(count: int) -> None:
        assert len(fleet.generate([replace(request, seed=n) for n in range(count)], SAMPLING).completions) == count

    sample(8)
    sample(8)
    assert sum(sizes) < 1.1 * len(image.data)
    known.clear()
    sample(8)  # the first call is refused
    assert len(sizes) == 4 and sum(sizes) < 2.1 * len(image.data)
    fleet.script.now(0).dead = True
    eventually(lambda: len(fleet.script.engines) == 2)
    sizes, known = receiving(fleet.script.now(0))
    sample(8)
    sample(2)
    assert len(sizes) == 2 and len(image.data) < sum(sizes) < 1.1 * len(image.data)


def test_the_sync_check_gets_an_answer_where_a_client_learns_last_that_its_engine_died(fleet_of):
    """The update finds the engine dead, and says that a replacement is wanted, before the client's own poll does."""
    fleet = fleet_of()
    fleet.publish(0)
    engine = fleet.script.now(0)
    engine.prepare_update = lambda manifest, kv: raise_(ActorDiedError())
    fleet.publish(1)
    engine.dead = True
    eventually(lambda: len(fleet.script.engines) == 2)
    (found,) = fleet.spawn(fleet._score([np.arange(3, dtype=np.int32)])).result(LIMIT_S).items()
    assert found[0] == 0 and fleet.clients[0].version == fleet.script.now(0).version == 1


def test_the_sync_check_asks_a_replacement_where_every_engine_died_of_the_question(fleet_of):
    fleet = fleet_of()
    fleet.publish(0)
    engine = fleet.script.now(0)

    def score(sequences):
        engine.dead = True
        raise ActorDiedError()

    engine.score = score
    scores = fleet.score([np.arange(3, dtype=np.int32)])
    assert [len(of_one) for of_one in scores[0]] == [2] and len(fleet.script.engines) == 2


def test_an_update_waits_for_no_replacement_of_an_engine_that_was_ready_for_it(fleet_of):
    """Engine 1 is ready at once and dies while engine 0 drains; its replacement is long in coming."""
    fleet = fleet_of("policy.generation.engines=2", delay=lambda engine, request: 600.0 if engine == 0 else 0.0)
    fleet.publish(0)
    draining = fleet.spawn(fleet.sample(REQUEST, SAMPLING, 0))
    first = fleet.script.now(1)
    prepared = threading.Event()
    first.prepare_update = lambda manifest, kv: prepared.set()
    eventually(lambda: fleet.script.now(0)._running)
    update = threading.Thread(target=fleet.publish, args=(1,))
    update.start()
    assert prepared.wait(LIMIT_S)
    fleet.script.unplaced = {1}
    first.dead = True
    eventually(lambda: fleet.script.now(1) is not first and fleet.clients[1].actor.engine is not first)
    running = fleet.script.now(0)._running
    for name, (request, _, spans) in list(running.items()):
        running[name] = (request, 0.0, spans)
    update.join(LIMIT_S)
    assert not update.is_alive() and draining.result(LIMIT_S)[0].version == 0
    assert [client.version for client in fleet.clients] == [1, -1] and fleet.script.now(1).version == -1
    fleet.script.unplaced = set()
    eventually(lambda: fleet.clients[1].version == fleet.script.now(1).version == 1)


def test_a_request_for_an_engine_that_dies_meanwhile_does_not_reach_a_replacement_without_weights(fleet_of):
    fleet = fleet_of(delay=lambda engine, request: 600.0)
    fleet.publish(0)
    client = fleet.clients[0]

    async def submitted_and_replaced():
        client.submit(REQUEST, SAMPLING)
        client.enter(client.state)
        # After the turn of the loop that hands the requests over, and before any task that it starts.
        fleet.loop.call_soon(lambda: setattr(client, "actor", fleet.script.start(0)))
        await asyncio.sleep(0.05)

    fleet.spawn(submitted_and_replaced()).result(LIMIT_S)
    eventually(lambda: fleet.script.engines[0].batches == [[5]])
    assert fleet.script.now(0).batches == []


def test_refusals_of_a_dead_engine_fail_no_request_of_its_replacement(fleet_of):
    fleet = fleet_of(delay=lambda engine, request: 0.0)
    fleet.publish(0)
    engine = fleet.script.now(0)
    asked, late = threading.Event(), threading.Event()

    def submit(requests):
        asked.set()
        late.wait(LIMIT_S)
        raise RunError("the engine cannot sample: it is asleep")

    engine.submit = submit
    fleet.script.delay = lambda engine, request: 0.0 if late.is_set() else 600.0
    drawn = fleet.spawn(fleet.sample(REQUEST, SAMPLING))
    assert asked.wait(LIMIT_S)
    engine.dead = True
    eventually(lambda: fleet.script.now(0).batches == [[5]])
    late.set()
    running = fleet.script.now(0)._running
    eventually(lambda: fleet.spawn(_tasks(fleet.clients[0])).result(LIMIT_S) == 0)
    for name, (request, _, spans) in list(running.items()):
        running[name] = (request, 0.0, spans)
    assert drawn.result(LIMIT_S)[0].version == 0


async def _tasks(client) -> int:
    return len(client._tasks)


def test_a_replacement_has_room_though_the_engine_before_it_was_full(fleet_of):
    fleet = fleet_of()
    fleet.publish(0)
    client = fleet.clients[0]
    fleet.script.now(0).full = True
    eventually(lambda: client.report.kv_used == 1.0)
    placed = fleet.spawn(fleet.rooms(0, 1))
    fleet.script.now(0).dead = True
    eventually(lambda: len(fleet.script.engines) == 2)
    fleet.script.now(0).full = False
    client_wanted = fleet.spawn(fleet.sample(REQUEST, SAMPLING))
    assert client_wanted.result(LIMIT_S)[0].version == 0 and placed.result(LIMIT_S) == [0]


def test_group_is_admitted_as_soon_as_an_engine_reports_room(fleet_of):
    """Nothing finishes in between: the requests that filled it were given up."""
    fleet = fleet_of()
    fleet.publish(0)
    client = fleet.clients[0]
    fleet.script.now(0).full = True
    eventually(lambda: client.report.kv_used == 1.0)
    placed = fleet.spawn(fleet.rooms(0, 1))
    fleet.script.now(0).full = False
    assert placed.result(LIMIT_S) == [0]


def test_a_group_gets_the_room_of_one_that_was_given_up(fleet_of):
    fleet = fleet_of("policy.generation.vllm_cfg.max_num_seqs=1", delay=lambda engine, request: 600.0)
    fleet.publish(0)
    held = fleet.spawn(fleet.sample(REQUEST, SAMPLING))
    eventually(lambda: fleet.clients[0].load == 1)
    placed = fleet.spawn(fleet.rooms(0, 1))
    held.cancel()
    assert placed.result(LIMIT_S) == [0]


@pytest.mark.slow
def test_an_engine_that_answers_no_more_is_replaced_like_one_that_died(fleet_of, monkeypatch):
    """It is stopped, or hangs: no connection breaks. Its answers so far say how long one may take."""
    monkeypatch.setattr(clients, "SILENT_S", 0.5)
    fleet = fleet_of("rollout.generation_timeout_s=100000", delay=lambda engine, request: 2.0)
    fleet.publish(0)
    engine = fleet.script.now(0)
    eventually(lambda: fleet.clients[0]._answering.limit_s < 100000)
    stopped = threading.Event()
    poll = engine.poll
    engine.poll = lambda wait_s: stopped.wait(LIMIT_S) and poll(wait_s)
    drawn = fleet.spawn(fleet.sample(REQUEST, SAMPLING))
    assert drawn.result(LIMIT_S)[1] == 0 and len(fleet.script.engines) == 2
    (line,) = fleet.take_events()
    assert "engine 0 has not answered for" in line and "the engine is replaced and its samples are repeated" in line
    assert fleet.measure()["engines/replaced"] == 1
    stopped.set()
