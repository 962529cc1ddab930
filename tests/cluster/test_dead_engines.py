"""How often an engine may die: real Ray actors that die or fail on demand, in the place of vLLM, under the fleet as it
is."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.cluster import engine_actor, fleet as fleets
from gdpo_nemo.cluster.session import WorkerDied, gather, one_has_ended, ray, session
from gdpo_nemo.config.load import load_config
from gdpo_nemo.generation.requests import Completion, EngineReport, FinishedRequest, SampleRequest, Sampling
from gdpo_nemo.utils.errors import EngineFailed, RunError
from gdpo_nemo.utils.waits import Patience

pytestmark = pytest.mark.slow

SAMPLING = Sampling(1.0, 1.0, -1, 4)
SEED = 40


class Mortal:
    """An engine whose process ends, or fails for good without ending, at every call as long as the file of its number
    has a line to give that says which."""

    def __init__(self, options, replies):
        self.file = Path(options.model) / str(options.seed - SEED)
        self.version = -1
        self.asked = []
        self.failed = False
        starts = self.file.with_suffix(".starts")
        if starts.exists():
            left = starts.read_text().splitlines()
            starts.write_text("\n".join(left[1:]))
            if left:
                raise {"engine": EngineFailed, "other": ValueError}[left[0]]("vLLM did not start: the cause")

    def _live(self) -> None:
        left = self.file.read_text().splitlines() if self.file.exists() else []
        if left:
            if left[0] == "fails":
                self.failed = True  # first: calls run beside each other
            # In one move: a call beside this one may end the process between a file's truncation and its writing.
            rest = self.file.with_suffix(f".{threading.get_ident()}")
            rest.write_text("\n".join(left[1:]))
            rest.replace(self.file)
            if not self.failed:
                os._exit(1)
        if self.failed:
            raise EngineFailed("vLLM failed: AcceleratorError: CUDA error: unspecified launch failure")

    def process_location(self):
        return "here", os.getpid()

    def submit(self, requests) -> None:
        self._live()
        self.asked += requests

    def poll(self, wait_s):
        self._live()
        while self.file.with_suffix(".stopped").exists():
            self.file.with_suffix(".stands").touch()
            time.sleep(0.02)
        if not self.asked:
            time.sleep(0.02)
        spans = ((self.version, 2),)
        done = [FinishedRequest(name, Completion(np.arange(2), np.zeros(2), "stop", spans)) for name in self.asked]
        self.asked = []
        return EngineReport(done, self.version, 0, 0, 0.0, 0.0, 0, 0)

    def prepare_update(self, manifest, kv) -> None:
        self._live()

    def update_weights(self, version) -> int:
        while self.file.with_suffix(".slow").exists():
            time.sleep(0.02)
        self.version = version
        return version


class ToEveryone:
    """Weights that are there at once."""

    manifest = None

    def send(self, engines):
        return [engine.update_weights.remote(7) for engine in engines.values()], []


@pytest.fixture(scope="module")
def config():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    path = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
    config = load_config(path, [f"run.seed={SEED}", "policy.generation.engines=2"])
    with session(config.cluster):
        yield config


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of the files that tell the engines to die."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def shared_fleet(config, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_actor, "EngineActor", Mortal)
        fleet = fleets.EngineFleet(config, str(folder))
        yield fleet
        fleet.close()


@pytest.fixture
def fleet(shared_fleet, folder):
    """The shared fleet: all engines ready, no deaths counted, no weights, no events."""
    for file in folder.iterdir():
        file.unlink()
    shared_fleet.ready()
    for engine in (0, 1):
        drawn(shared_fleet, engine)  # which clears the deaths in a row
    shared_fleet.forget_weights()
    shared_fleet.take_events()
    return shared_fleet


def replaced(fleet) -> list[int]:
    """How often each engine was replaced."""
    return [client.replaced for client in fleet.clients]


def drawn(fleet, engine: int, limit_s: float = 300.0):
    """(completion, number of the engine that drew it) of a request to ``engine``."""
    request = SampleRequest(np.arange(3, dtype=np.int32), 1)
    return fleet.spawn(fleet.sample(request, SAMPLING, engine)).result(limit_s)


def test_an_engine_that_fails_alive_is_replaced_like_a_dead_one(fleet, folder):
    before = fleet.clients[1].actor
    (folder / "1").write_text("fails\n")
    assert drawn(fleet, 1)[1] == 1
    (note,) = fleet.take_events()
    assert note == (
        "engine 1: vLLM failed: AcceleratorError: CUDA error: unspecified launch failure; the engine is replaced "
        "and its samples are repeated"
    )
    with pytest.raises(WorkerDied):  # nobody asks it again, and its memory is free
        gather([before.process_location.remote()], "asking the one before", 60)
    for engine in ("0", "1"):
        (folder / engine).write_text("fails\n")
    with fleet.delivering():
        fleet.update(ToEveryone(), 7)
    assert [drawn(fleet, engine)[0].version for engine in (0, 1)] == [7, 7]


def test_an_engine_that_dies_after_its_answer_while_another_takes_the_weights_gets_them_again(fleet, folder):
    before = fleet.clients[1].actor
    (folder / "0.slow").touch()
    with fleet.delivering(), ThreadPoolExecutor(1) as beside:
        update = beside.submit(fleet.update, ToEveryone(), 7)
        # As soon as engine 1 has answered, it dies; its replacement is up before engine 0 answers.
        until(lambda: drawn(fleet, 1)[0].version == 7)
        (folder / "1").write_text("dies")
        until(lambda: fleet.clients[1].actor is not before and fleet.clients[1].state == "loaded")
        (folder / "0.slow").unlink()
        update.result(300)
    assert [drawn(fleet, engine)[0].version for engine in (0, 1)] == [7, 7]


def until(holds, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_engine_is_not_replaced_when_it_was_stopped_together_with_its_driver(fleet, folder, monkeypatch):
    """As by SIGSTOP of the whole tree, or on a machine that was suspended: five minutes are gone at once."""
    before = replaced(fleet)
    for _ in range(Patience.ENOUGH + 1):  # from then on its silence has a limit of two minutes
        drawn(fleet, 0)
    (folder / "0.stopped").touch()
    while not (folder / "0.stands").exists():
        time.sleep(0.01)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 300.0)
    fleet.spawn(asyncio.sleep(0.1)).result(300.0)  # the driver continues first
    (folder / "0.stopped").unlink()
    assert drawn(fleet, 0)[1] == 0
    assert replaced(fleet) == before


def test_several_engines_that_die_at_one_update_are_not_one_engine_that_dies_often(fleet, folder):
    for engine in ("0", "1"):
        (folder / engine).write_text("dies\n" * 2)
    with fleet.delivering():
        fleet.update(ToEveryone(), 7)
    found = [drawn(fleet, engine) for engine in (0, 1)]
    assert [(completion.version, engine) for completion, engine in found] == [(7, 0), (7, 1)]


def test_a_completion_clears_the_count_of_the_engine_that_made_it(fleet, folder):
    before = replaced(fleet)
    for _ in range(3):
        (folder / "1").write_text("dies\n" * 2)
        assert drawn(fleet, 1)[1] == 1
    assert fleet.clients[1].deaths == 0 and replaced(fleet)[1] >= before[1] + 3


class Busy:
    """A process that computes for as long as the file is there."""

    def wait(self, file) -> None:
        while Path(file).exists():
            time.sleep(0.05)

    def number(self) -> int:
        return os.getpid()


def test_ended_process_is_distinguished_from_a_busy_one(config, tmp_path):
    actors = [ray.remote(Busy).remote() for _ in range(3)]
    pids = ray.get([actor.number.remote() for actor in actors])
    stays = tmp_path / "stays"
    stays.touch()
    for actor in actors[:2]:
        actor.wait.remote(str(stays))

    def asked():
        return [actor.number.remote() for actor in actors]

    assert not one_has_ended(asked(), 1.0), "two are busy, and the third answers"
    os.kill(pids[1], signal.SIGKILL)
    assert one_has_ended(asked(), 30.0)
    stays.unlink()
    assert one_has_ended(asked(), 30.0), "the others answer, and it does not"
    assert not one_has_ended([actors[0].number.remote(), actors[2].number.remote()], 30.0)


def test_idle_replacement_engine_is_waited_for(fleet, folder):
    """As where an engine dies with the policy: the next policy waits for all engines before it has weights to give."""
    before = replaced(fleet)
    (folder / "1").write_text("dies\n")
    client = fleet.clients[1]
    deadline = time.monotonic() + 300
    while not (client.replaced == before[1] + 1 and client.state == "loaded"):
        assert time.monotonic() < deadline, client.state
        time.sleep(0.02)
    assert not fleet.all_ready()
    waits = threading.Thread(target=fleet.ready, daemon=True)
    waits.start()
    waits.join(60)
    assert not waits.is_alive() and fleet.all_ready() and client.version == -1


def test_engines_without_a_policy_hold_no_version_and_take_any(fleet):
    with fleet.delivering():
        fleet.update(ToEveryone(), 7)
    assert fleet.version == 7 and [client.version for client in fleet.clients] == [7, 7] and fleet.all_ready()
    fleet.forget_weights()
    assert fleet.version == -1 and [client.version for client in fleet.clients] == [-1, -1] and fleet.all_ready()
    with fleet.delivering():
        fleet.update(ToEveryone(), 7)
    assert drawn(fleet, 1)[0].version == 7


def test_start_is_repeated_if_the_engine_fails_and_not_for_another_error(config, folder, monkeypatch):
    monkeypatch.setattr(engine_actor, "EngineActor", Mortal)
    for starts, error in (("engine\n" * 2, None), ("engine\n" * 5, r"it died 4 times in a row, last: .*: the cause"),
                          ("engine\nother", "engine 0: ValueError: vLLM did not start: the cause")):  # fmt: skip
        (folder / "0.starts").write_text(starts)
        fleet = fleets.EngineFleet(one_engine(config), str(folder))
        try:
            if error is None:
                fleet.ready()
                assert fleet.clients[0].replaced == 2 and drawn(fleet, 0)[1] == 0
                assert "starting engine 0: vLLM did not start: the cause; the engine" in fleet.take_events()[0]
            else:
                with pytest.raises(RunError, match=error):
                    fleet.ready()
        finally:
            fleet.close()
    (folder / "0.starts").unlink()


def one_engine(config):
    config = copy.deepcopy(config)
    config.policy.generation.engines = 1
    return config


def test_engine_that_keeps_dying_is_given_up_and_the_other_samples_for_it(fleet, folder):
    """This test and the next one are the last of the file: the fleet has lost engines afterwards."""
    assert drawn(fleet, 1)[1] == 1
    (folder / "1").write_text("dies\n" * 12)
    assert drawn(fleet, 1)[1] == 0
    assert [client.state for client in fleet.clients] == ["ready", "dead"]
    *replaced, given_up = fleet.take_events()
    assert [line.endswith("; the engine is replaced and its samples are repeated") for line in replaced] == [True] * 3
    assert given_up.startswith("engine 1 is abandoned: it died 4 times in a row, last: engine 1: a worker process died")
    assert drawn(fleet, 0)[1] == 0


def test_callers_get_an_error_if_no_engine_is_left(shared_fleet, folder):
    for engine in ("0", "1"):
        (folder / engine).write_text("dies\n" * 12)
    with pytest.raises(RunError, match=r"no engine is left: engine \d: it died 4 times in a row, last"):
        drawn(shared_fleet, 0)
    with pytest.raises(RunError, match="no engine is left"):
        shared_fleet.least_loaded()
