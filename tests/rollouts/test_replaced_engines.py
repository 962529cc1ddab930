"""A fleet whose engine dies while weights are on their way to it. Its engines follow a script (engines_in_process)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from engines_in_process import InProcessFleet, Script, without_ray
from ray.exceptions import ActorDiedError

from gdpo_nemo.config.load import load_config

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


def test_the_probe_gets_an_answer_where_a_lane_learns_last_that_its_engine_died(monkeypatch):
    """The update finds the engine dead, and says that a replacement is wanted, before the lane's own poll does."""
    without_ray(monkeypatch)
    fleet = InProcessFleet(load_config(DEMO), Script())
    try:
        fleet.publish(0)
        engine = fleet.script.now(0)

        def prepare_update(manifest, kv):
            raise ActorDiedError()

        engine.prepare_update = prepare_update
        fleet.publish(1)
        engine.dead = True
        deadline = time.monotonic() + 10
        while len(fleet.script.engines) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        (found,) = fleet.spawn(fleet._score([np.arange(3, dtype=np.int32)])).result(10).items()
        assert found[0] == 0 and fleet.lanes[0].version == fleet.script.now(0).version == 1
    finally:
        fleet.close()
