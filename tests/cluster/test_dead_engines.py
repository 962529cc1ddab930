"""How often an engine may die: real Ray actors that die on demand, in the place of vLLM, under the fleet as it is."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.cluster import fleet as fleets
from gdpo_nemo.cluster.session import ray, session
from gdpo_nemo.config.load import load_config
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import Completion, FinishedRequest, SampleRequest, Sampling

SAMPLING = Sampling(1.0, 1.0, -1, 4)
SEED = 40


class Mortal:
    """An engine whose process ends at every call as long as the file of its number has a line to give."""

    def __init__(self, folder, vllm, precision, length, seed, on_cpu, sleeps, targets):
        self.file = Path(folder) / str(seed - SEED)

    def _live(self) -> None:
        left = self.file.read_text().splitlines() if self.file.exists() else []
        if left:
            self.file.write_text("\n".join(left[1:]))
            os._exit(1)

    def process_location(self):
        return "here", os.getpid()

    def advance(self, new):
        self._live()
        return [FinishedRequest(name, Completion(np.arange(2), np.zeros(2), "stop", ((7, 2),))) for name in new]

    def expect(self, manifest) -> None:
        self._live()

    def update_weights(self) -> int:
        return 7


class ToEveryone:
    """Weights that are there at once."""

    manifest = None

    def send(self, engines):
        return [engine.update_weights.remote() for engine in engines.values()], []


@pytest.fixture(scope="module")
def config():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    path = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
    config = load_config(path, [f"run.seed={SEED}", "policy.generation.engines=2"])
    with session(config.cluster):
        yield config


@pytest.fixture
def fleet(config, tmp_path, monkeypatch):
    monkeypatch.setattr(fleets, "Engine", Mortal)
    fleet = fleets.EngineFleet(config, str(tmp_path))
    yield fleet
    fleet.close()


def request(name: str) -> dict:
    return {name: (SampleRequest(np.arange(3, dtype=np.int32), 1), SAMPLING)}


def test_an_engine_that_keeps_dying_ends_the_run_however_well_the_others_do(fleet, tmp_path):
    fleet.advance(fleets.InflightRequests(1), request("before"))
    (tmp_path / "1").write_text("dies\n" * 12)
    over = threading.Event()
    drawn = []

    def beside() -> None:
        while not over.is_set():
            drawn.extend(fleet.advance(fleets.InflightRequests(0), request(str(len(drawn)))))

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        with pytest.raises(RunError, match="engine 1 died 4 times in a row"):
            fleet.advance(fleets.InflightRequests(1), request("mine"))
    finally:
        over.set()
        thread.join()
    assert len(drawn) > 4


def test_several_engines_that_die_at_one_update_are_not_one_engine_that_dies_often(fleet, tmp_path):
    for engine in ("0", "1"):
        (tmp_path / engine).write_text("dies\n" * 2)
    fleet.update(ToEveryone())
    assert [len(fleet.advance(fleets.InflightRequests(engine), request("mine"))) for engine in (0, 1)] == [1, 1]


def test_a_completion_clears_the_count_of_the_engine_that_made_it(fleet, tmp_path):
    for round in range(3):
        (tmp_path / "1").write_text("dies\n" * 2)
        assert len(fleet.advance(fleets.InflightRequests(1), request(f"mine {round}"))) == 1
