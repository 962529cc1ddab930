"""Groups that are sampled and verified by rollout hosts: the same samples as by the driver, through deaths and errors.

Engines follow a script, and each host runs on an event loop of its own (hosts_in_process); only Ray and vLLM are left
out."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from engines_in_process import InProcessFleet, Script, without_ray
from ray.exceptions import ActorDiedError
from scheduler_world import DEMO, Tokenizer, World, eventually

from gdpo_nemo.cluster import engine_client as clients, host_link as links
from gdpo_nemo.cluster.reservation import Placement
from gdpo_nemo.cluster.session import WorkerDied, answer as answer_of
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.placement import Places
from gdpo_nemo.generation.requests import SampleRequest, Sampling
from gdpo_nemo.rollouts import host as hosts
from gdpo_nemo.utils.errors import RunError

ENGINES = ["policy.generation.engines=3", "policy.generation.vllm_cfg.max_num_seqs=4"]
AHEAD = ["rollout.max_staleness=1"]


class HostActor:
    """``actor.method.remote(...)`` of a rollout host, on an event loop in a thread."""

    def __init__(self, host):
        self.engine = self  # as ``without_ray`` expects
        self.host = host
        self.calls: Counter[str] = Counter()
        self._dead = False
        self._answers: set[Future] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    def _call(self, name, arguments):
        self.calls[name] += 1
        answer: Future = Future()
        if self._dead:
            answer.set_exception(ActorDiedError())
            return SimpleNamespace(future=lambda: answer)
        self._answers.add(answer)
        asyncio.run_coroutine_threadsafe(self._answer(answer, getattr(self.host, name)(*arguments)), self._loop)
        return SimpleNamespace(future=lambda: answer)

    async def _answer(self, answer, call):
        try:
            result = await call
        except Exception as raised:
            self._fail(answer, raised)
        else:
            if answer in self._answers:
                self._answers.discard(answer)
                answer.set_result(result)

    def _fail(self, answer, error):
        if answer in self._answers:
            self._answers.discard(answer)
            answer.set_exception(error)

    @property
    def dead(self):
        return self._dead

    @dead.setter
    def dead(self, _):
        def end():
            self._dead = True
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            for answer in list(self._answers):
                self._fail(answer, ActorDiedError())
            self._loop.call_soon(self._loop.stop)

        if not self._dead:
            self._loop.call_soon_threadsafe(end)
            eventually(lambda: self._dead)


@pytest.fixture
def world_of(monkeypatch):
    """Returns a function that makes a ``World`` whose three engines belong to two hosts, or to the driver."""
    without_ray(monkeypatch)
    monkeypatch.setattr(links, "ray", clients.ray)
    monkeypatch.setattr(hosts, "guard_children", lambda: None)
    monkeypatch.setattr(hosts, "load_tokenizer", lambda *_: Tokenizer())
    monkeypatch.setattr(hosts, "load_image_reader", lambda *_: None)
    monkeypatch.setattr(links, "_GATHER_S", 0.0)
    monkeypatch.setattr(links, "_REPORT_S", 0.0)
    monkeypatch.setattr(links, "_REPORT_S_PER_HOST", 0.0)
    made = []

    def make(*overrides, with_hosts=True, **options):
        started: list[HostActor] = []
        recoveries: Counter[str] = Counter()

        def make_fleet(config, script):
            def start_host(node):
                started.append(HostActor(hosts.RolloutHost(".", config, "nowhere", 1)))
                return started[-1]

            placement = Placement(Places((0,), (0, 0, 1)))
            return InProcessFleet(config, script, placement, None, start_host if with_hosts else None)

        def take_recoveries():
            taken = Counter(recoveries)
            recoveries.clear()
            return taken

        def verify(trajectories):
            return made[-1].verify(trajectories)

        monkeypatch.setattr(
            hosts,
            "EnvironmentPools",
            lambda *_: SimpleNamespace(verify=verify, take_recoveries=take_recoveries, close=lambda: None),
        )
        made.append(World(*ENGINES, *overrides, make_fleet=make_fleet, **options))
        made[-1].hosts = started
        made[-1].host_recoveries = recoveries
        return made[-1]

    yield make
    for world in made:
        world.close()


def samples(rollout, ahead):
    """All of a sample in a synchronous step, otherwise what does not depend on the time of weight updates."""
    trajectories = [t for g in rollout.groups for t in g.trajectories]
    always = [(t.prompt.id, t.sample_index, t.completion_ids[0], t.rewards, t.trainer_state) for t in trajectories]
    rest = [(t.completion_ids.tolist(), t.logprobs.tolist(), t.spans, t.text, t.outcome) for t in trajectories]
    return always, [] if ahead else rest


@pytest.mark.parametrize("ahead", [[], AHEAD])
def test_hosts_make_the_groups_that_the_driver_makes(world_of, ahead):
    alone = world_of(*ahead, with_hosts=False)
    expected = [samples(alone.train(), ahead) for _ in range(3)]
    world = world_of(*ahead)
    assert [samples(world.train(), ahead) for _ in range(3)] == expected
    assert world.submitted() and len(world.hosts) == 2
    if not ahead:  # the requests of an engine's groups are one batch, in order
        assert world.submitted() == alone.submitted()
    eventually(lambda: all(client.load == client.promised == 0 for client in world.fleet.clients), 30)
    # Each of the weights 0 to 3 is announced by one call per host, and sent by another one.
    assert [host.calls["call_engines"] for host in world.hosts] == [2 * (world.fleet.version + 1)] * 2
    assert not any(client._cohort for client in world.fleet.clients)


@pytest.mark.parametrize("ahead", [[], AHEAD])
def test_groups_are_sampled_again_after_their_engine_dies(world_of, ahead):
    expected = samples(world_of(*ahead, with_hosts=False).train(), ahead)
    script = Script()
    script.delay = lambda engine, request: 600.0 if len(script.engines) == 3 and engine == 1 else 0.0
    world = world_of(*ahead, script=script)
    world.scheduler.schedule(0)
    eventually(lambda: script.now(1).batches)
    script.now(1).dead = True
    assert samples(world.train(), ahead) == expected
    assert [client.replaced for client in world.fleet.clients] == [0, 1, 0] and len(world.hosts) == 2


@pytest.mark.parametrize("ahead", [[], AHEAD])
def test_engines_of_a_dead_host_are_replaced_and_their_groups_sampled_again(world_of, ahead):
    expected = samples(world_of(*ahead, with_hosts=False).train(), ahead)
    script = Script()
    script.delay = lambda engine, request: 600.0 if len(script.engines) == 3 and engine < 2 else 0.0
    world = world_of(*ahead, script=script)
    world.scheduler.schedule(0)
    eventually(lambda: script.now(0).batches and script.now(1).batches)
    world.hosts[0].dead = True
    assert samples(world.train(), ahead) == expected
    assert [client.replaced for client in world.fleet.clients] == [1, 1, 0] and len(world.hosts) == 3


def test_an_engine_that_dies_during_an_update_fails_only_its_own_call_to_the_host(world_of):
    world = world_of(*AHEAD)
    world.train()
    fleet = world.fleet
    fleet.script.now(1).dead = True
    refs = fleet.spawn(_refs_of(fleet, "prepare_update", None, "keep")).result()
    found = [fleet.spawn(_result_of(ref)).result() for ref in refs]
    assert [type(result) for result in found] == [type(None), WorkerDied, type(None)]
    assert "engine 1" in str(found[1])


async def _refs_of(fleet, method, *arguments):
    return fleet.hosts.call({client.index: client.actor for client in fleet.clients}, method, *arguments)


async def _result_of(ref):
    try:
        return await answer_of(ref, "updating", 60.0)
    except WorkerDied as error:
        return error


def test_groups_admitted_together_go_to_the_engines_with_the_lowest_load(world_of):
    world = world_of(*AHEAD, "policy.generation.vllm_cfg.max_num_seqs=5", script=Script(lambda engine, request: 600.0))
    fleet = world.fleet
    fleet.spawn(fleet.sample(SampleRequest(np.arange(3, dtype=np.int32), 1), Sampling(1.0, 1.0, -1, 4), 0))
    eventually(lambda: fleet.clients[0].load == 1)
    assert fleet.spawn(fleet.rooms(-1, 2, 20)).result() == [1, 2, 0, 1, 2, 0, 1, 2]
    assert [client.promised for client in fleet.clients] == [4, 6, 6]


def test_samples_that_exceed_the_group_timeout_are_aborted_by_their_host(world_of):
    script = Script(lambda engine, request: 600.0 if request.seed == slow else 0.0)
    slow = -1
    world = world_of(*AHEAD, "rollout.group_timeout_s=4", "rollout.min_valid=0.5", script=script)
    slow = hosts_seed = world.scheduler._maker._seed(SimpleNamespace(position=1), 1)
    rollout = world.train()
    outcomes = {(g.position, t.sample_index): str(t.outcome) for g in rollout.groups for t in g.trajectories}
    assert outcomes[1, 1] == "aborted" and list(outcomes.values()).count("ok") == len(outcomes) - 1, hosts_seed
    eventually(lambda: any(engine.aborted for engine in script.engines))


def test_errors_and_recoveries_of_a_host_reach_the_driver(world_of):
    world = world_of(*AHEAD)
    world.host_recoveries["a worker process ended and was replaced"] += 2
    assert world.train().measured["environments/recovered"] in (0.0, 2.0)
    world.verify = lambda trajectories: (_ for _ in ()).throw(RunError("env.digit_sort: it raised"))
    with pytest.raises(RunError, match="^env.digit_sort: it raised$"):
        for _ in range(3):
            world.train()
    assert any("a worker process ended" in event for event in world.scheduler.take_events())


def test_finished_samples_of_a_host_leave_room_for_other_groups(world_of, monkeypatch):
    monkeypatch.setattr(links, "POLL_S", 0.05)
    world = world_of(*AHEAD, script=Script(lambda engine, request: 600.0 * (request.seed % 2)))
    seed = world.scheduler._maker._seed
    slow = {position: sum(seed(SimpleNamespace(position=position), j) % 2 for j in range(2)) for position in range(6)}
    world.scheduler.schedule(0)  # six groups of two samples are outstanding
    unfinished = [count for count in slow.values() if count]
    assert 1 in unfinished
    eventually(lambda: sum(client.load for client in world.fleet.clients) == sum(unfinished))


def test_single_requests_pass_through_hosts(world_of):
    requests = [SampleRequest(np.arange(3, dtype=np.int32), seed) for seed in range(5)]
    made = world_of(*AHEAD).fleet.generate(requests, Sampling(1.0, 1.0, -1, 4)).completions
    assert [completion.token_ids[0] for completion in made] == list(range(5))


def test_cancelled_groups_are_dropped_by_their_host(world_of):
    world = world_of(*AHEAD, script=Script(lambda engine, request: 600.0))
    world.scheduler.schedule(0)
    eventually(lambda: all(engine.batches for engine in world.script.engines))
    world.scheduler.close()
    eventually(lambda: not any(engine._running for engine in world.script.engines))
    eventually(lambda: all(client.load == 0 for client in world.fleet.clients))


@pytest.mark.parametrize(
    "changes, uses",
    [
        ([], True),
        (["policy.generation.engines=8"], False),
        (["cluster.env_nodes=1"], False),
        (["env.digit_sort.num_workers=2"], False),
        (["env.nemo_gym={}"], False),
        (["rollout.endpoint.enabled=true"], False),
        (["env.digit_turns={}"], False),
        (["env.digit_turns={}", "rollout.max_staleness=1"], True),
    ],
)
def test_hosts_are_used_with_many_engines_and_work_that_they_can_do(changes, uses):
    config = load_config(DEMO, ["policy.generation.engines=9", *changes])
    assert hosts.uses_hosts(config) is uses
