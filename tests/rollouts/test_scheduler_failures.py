"""What the scheduler does where engines, their nodes or verifiers fail. Engines follow a script (scheduler_world)."""

from __future__ import annotations

import threading

import pytest
from engines_in_process import Script
from scheduler_world import eventually, places

from gdpo_nemo.cluster import engine_client as clients
from gdpo_nemo.rollouts.batches import sample_seed
from gdpo_nemo.utils.errors import RunError


def test_samples_of_a_killed_engine_are_sampled_again_and_no_others(world):
    slow = threading.Event()
    script = Script(lambda engine, request: 0.0 if slow.is_set() else 60.0)
    w = world("rollout.max_staleness=1", "rollout.depth=6", "policy.generation.engines=2", script=script)
    w.scheduler.schedule(0)
    eventually(lambda: sum(map(len, w.submitted())) == 12)
    before = [sum(engine.batches, []) for engine in script.engines]
    slow.set()
    script.now(0).dead = True
    eventually(lambda: sum(map(len, w.submitted())) == 12 + len(before[0]))
    assert sorted(sum(script.engines[1].batches, [])) == sorted(before[0] + before[1])
    eventually(lambda: w.fleet.clients[0].state == "ready" and w.fleet.clients[0].version == 0)
    assert any("engine 0" in line for line in w.fleet.take_events())


def test_samples_of_a_synchronous_step_are_sampled_again_unchanged(world):
    """So that the composition of the engine's batch, and with it the last digits, are those of an undisturbed step."""
    first = sample_seed(0, 0, 0)
    script = Script(lambda engine, request: 0.0 if request.seed == first or len(script.engines) > 1 else 60.0)
    w = world(script=script)
    w.scheduler.schedule(0)
    eventually(lambda: len(w.fleet.clients[0].pending) == 5)  # one of six is done
    script.now(0).dead = True
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]
    first, again = w.submitted()
    assert first == again


def test_a_replacement_is_given_the_newest_weights_before_it_samples(world):
    w = world("rollout.max_staleness=1", "gdpo.max_num_steps=9")
    w.train()
    w.script.now(0).dead = True
    rollout = w.train()
    eventually(lambda: len(w.script.engines) == 2 and w.fleet.clients[0].version == w.script.now(0).version == 2)
    assert {version for t in rollout.trajectories for version, _ in t.spans} <= {0, 1}


def test_engine_that_keeps_dying_is_given_up_and_the_others_continue(world):
    w = world("rollout.max_staleness=1", "policy.generation.engines=2", "gdpo.max_num_steps=9")
    w.script.stillborn = {1}
    w.script.now(1).dead = True
    eventually(lambda: w.fleet.clients[1].state == "dead")
    assert [places(w.train()) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert any("died 4 times in a row" in line for line in w.fleet.take_events())


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_without_any_engine_left_ends_at_once_with_the_reason(world, staleness):
    w = world(f"rollout.max_staleness={staleness}", "policy.generation.engines=2", script=Script(lambda *_: 600.0))
    w.scheduler.schedule(0)
    w.script.stillborn = {0, 1}
    for engine in list(w.script.engines):
        engine.dead = True
    with pytest.raises(RunError, match="no engine is left: engine .: it died 4 times"):
        w.scheduler.get_batch(0)


def test_node_with_only_engines_may_be_lost_and_return(world, monkeypatch):
    monkeypatch.setattr(clients, "_NODE_POLL_S", 0.05)
    w = world("rollout.max_staleness=1", "policy.generation.engines=2", "gdpo.max_num_steps=9")
    monkeypatch.setattr(w.fleet, "lost_node", lambda client: "10.0.0.2")
    w.script.unplaced = {1}
    w.script.now(1).dead = True
    eventually(lambda: w.fleet.clients[1].state == "lost")
    assert [places(w.train()) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert any("engine 1: its node 10.0.0.2 is no longer in the cluster" in line for line in w.fleet.take_events())
    w.script.unplaced = set()
    eventually(lambda: w.fleet.clients[1].state == "ready" and w.fleet.clients[1].version == 2)
    w.train()
    w.train()
    assert w.script.now(1).batches


def test_a_run_ends_when_the_node_of_its_last_engine_is_lost(world, monkeypatch):
    monkeypatch.setattr(clients, "_NODE_POLL_S", 0.05)
    w = world(script=Script(lambda *_: 60.0))
    monkeypatch.setattr(w.fleet, "lost_node", lambda client: "10.0.0.2")
    w.scheduler.schedule(0)
    w.script.unplaced = {0}
    w.script.now(0).dead = True
    with pytest.raises(
        RunError, match="no engine is left: engine 0: its node 10.0.0.2 is no longer in the cluster; restart the run"
    ):
        w.scheduler.get_batch(0)
    w.script.unplaced = set()


def test_exception_of_a_verifier_ends_the_run_and_not_only_the_scheduler(world):
    w = world("rollout.max_staleness=1")

    def broken(trajectories):
        raise RunError("a mistake")

    w.verify = broken
    w.scheduler._maker._pool.verify = broken
    w.scheduler.schedule(0)
    with pytest.raises(RunError, match="a mistake"):
        w.scheduler.get_batch(0)
