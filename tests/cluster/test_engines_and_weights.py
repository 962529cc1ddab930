"""Engines, weight updates and their proofs on a live Ray session: one policy rank, two vLLM engines, kept for all
tests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
from across_update import across_update, packed

from gdpo_nemo.cluster import engine_actor, reservation as placement
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.fork_server import ENGINE
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.session import WorkerDied, gather, ray, session
from gdpo_nemo.cluster.weight_sync import SyncCheck, WeightSync
from gdpo_nemo.cluster.worker_launcher import PRELOADED
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.generation.requests import SampleRequest, Sampling
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.manifest import PeerLost, pack
from gdpo_nemo.weights.transports.base import Receiver, make_transport
from gdpo_nemo.weights.transports.ipc import IpcReceiver

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
OWN = "examples/custom_transport.py:CompressedTransport"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=16)
WORDS = np.arange(20, dtype=np.int32)
VERSIONS = count(100)
"""Numbers for weight updates, larger than those of all other tests in this file."""


class Parts:
    """What the tests share."""

    def __init__(self, config, model):
        self.config = config
        self.policy = PolicyGroup(config, str(model), total_updates=10)
        self.fleet = EngineFleet(config, str(model))
        self.policy.ready()
        self.fleet.ready()
        prompts = [request.prompt_ids for request in requests(4)]
        self.sync_check = SyncCheck.sampled(self.fleet, prompts, 20, config.policy.max_total_sequence_length)
        self.sync_check.calibrate(self.policy, config)
        self.sync = WeightSync(self.policy, self.fleet, self.sync_check)


@pytest.fixture(scope="module")
def parts(digit_model):
    config = load_config(
        REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml",
        [f"policy.model_name={digit_model}", "policy.generation.engines=2", "loss_fn.reference_policy_kl_penalty=0.1"],
    )
    with session(config.cluster):
        parts = Parts(config, digit_model)
        yield parts
        parts.fleet.close()


def requests(count: int, prompt_length: int = 6) -> list[SampleRequest]:
    rng = np.random.default_rng(3)
    return [SampleRequest(rng.integers(2, 12, prompt_length).astype(np.int32), 100 + i) for i in range(count)]


def draw(fleet: EngineFleet, wanted: list[SampleRequest]):
    return fleet.generate(wanted, SAMPLING)


def train_once(policy: PolicyGroup, learning_rate_sign: float = 1.0) -> None:
    """Change every weight a little, as training does."""
    from gdpo_nemo.algorithms import LossSettings

    rng = np.random.default_rng(0)
    sequence = TrainSequence(
        rng.integers(2, 12, 6).astype(np.int32),
        rng.integers(2, 20, 12).astype(np.int32),
        np.zeros(12, np.float32),
        advantage=learning_rate_sign,
        weight=1 / 12,
    )
    policy.train([sequence], LossSettings())


def same(left, right) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left.completions, right.completions, strict=True)
    )


def test_samples_depend_on_prompt_and_seed_only(parts):
    parts.sync.publish(0)
    wanted = requests(12)
    together = draw(parts.fleet, wanted)
    alone = [draw(parts.fleet, [r]).completions[0] for r in wanted[:3]]
    assert [c.token_ids.tolist() for c in together.completions[:3]] == [c.token_ids.tolist() for c in alone]
    twice = [SampleRequest(wanted[0].prompt_ids, seed) for seed in range(8)]
    assert len({tuple(c.token_ids) for c in draw(parts.fleet, twice).completions}) > 1


def test_single_requests_use_all_engines(parts):
    async def engines_of_each() -> list[int]:
        drawn = [parts.fleet.sample(request, SAMPLING) for request in requests(8)]
        return [engine for _, engine in await asyncio.gather(*drawn)]

    assert sorted(parts.fleet.spawn(engines_of_each()).result()) == [0] * 4 + [1] * 4


def test_all_groups_of_an_engine_share_one_gloo_device(parts):
    """Each device has a thread that polls."""
    threads = [task.read_text() for task in Path(f"/proc/{_engine(parts.fleet, 0).pid}/task").glob("*/comm")]
    assert threads.count("gloo_tcp_loop\n") == 1


def test_sampled_logprobs_are_the_trainers(parts):
    parts.sync.publish(1)
    wanted = requests(10)
    batch = draw(parts.fleet, wanted)
    sequences = [TrainSequence(r.prompt_ids, c.token_ids, c.logprobs) for r, c in zip(wanted, batch.completions)]
    for mine, completion in zip(parts.policy.logprobs(sequences), batch.completions):
        assert np.abs(mine - completion.logprobs).max() < 1e-4
    assert batch.version == 1


def test_published_weights_reach_every_engine_and_stale_prefixes_are_forgotten(parts):
    """The long prompt stays in the engines' prefix caches; after an update its old keys and values must not be used."""
    long = requests(4, prompt_length=40)
    before = draw(parts.fleet, long)
    train_once(parts.policy)
    row = parts.sync.publish(2)
    assert row["parity/probe"] < 1e-4
    after = draw(parts.fleet, long)
    assert not same(before, after) and after.version == 2
    sequences = [TrainSequence(r.prompt_ids, c.token_ids, c.logprobs) for r, c in zip(long, after.completions)]
    for mine, completion in zip(parts.policy.logprobs(sequences), after.completions):
        assert np.abs(mine - completion.logprobs).max() < 1e-4


def test_engines_that_hold_other_weights_are_found_by_the_probe(parts):
    train_once(parts.policy)
    parts.sync.transport.prepare(3)
    parts.fleet.update(parts.sync.transport, 3)
    train_once(parts.policy)
    train_once(parts.policy)
    with pytest.raises(RunError, match="does not hold the weights of version 3"):
        parts.sync_check.verify(parts.policy, parts.fleet, 3)
    parts.sync.publish(4)


@pytest.mark.parametrize("name", ["gloo", "folder", "memory", OWN])
def test_every_transport_gives_the_engines_the_same_weights(parts, tmp_path, name):
    """Against the object store, bit for bit, in buckets far smaller than the model. By difference if the transport can,
    but for the first version and the version after a full update through the object store, which drops the copies."""
    differs = name != OWN
    mode = "difference" if differs else "full"
    transport = make_transport(name, parts.policy, tmp_path / "weights", bucket_bytes=100_000, mode=mode)
    sync = WeightSync(parts.policy, parts.fleet, parts.sync_check, transport)
    wanted = requests(8)
    parts.fleet.take_events()
    for version in (10, 12):
        before = draw(parts.fleet, wanted)
        rows = []
        for published in (version, version + 1):
            train_once(parts.policy)
            rows.append(sync.publish(published))
        assert max(row["parity/probe"] for row in rows) < 1e-4
        if differs:
            found = [(row["weights/full"], row["weights/fallbacks"]) for row in rows]
            assert found == [(version == 10, version == 12), (0, 0)]
        through_it = draw(parts.fleet, wanted)
        parts.sync.publish(version + 1)
        assert same(through_it, draw(parts.fleet, wanted)) and through_it.version == version + 1
        assert not same(before, through_it)
    missing = "gets all weights: weight update 12: the engine does not hold version 11"
    assert parts.fleet.take_events() == [f"engine {engine} {missing}" for engine in range(2 * differs)]
    kept = [path.stem for path in (tmp_path / "weights").glob("*")]
    assert kept == ([] if name in ("gloo", "memory") else ["version_13"])
    transport.close()
    assert not (tmp_path / "weights").exists()


@pytest.fixture
def adapted(parts, digit_model):
    """A tensor-parallel policy with adapters beside the engines, with the folder that both started from."""
    config = copy.deepcopy(parts.config)
    config.policy.lora = LoraConfig(rank=4, alpha=8.0)
    config.policy.megatron_cfg.tensor_model_parallel_size = 2
    policy = PolicyGroup(config, str(digit_model), total_updates=10)
    policy.ready()
    yield policy
    policy.close()


def test_adapter_updates_give_the_engines_the_merged_weights_on_every_transport(parts, adapted, digit_model, tmp_path):
    """A tenth of the bytes; the sync check as near as with the whole model; the same samples either way."""
    wanted = requests(8)
    drawn = []
    train_once(adapted)
    for version, name in enumerate(("memory", "gloo", "folder"), 30):
        parts.sync.publish(version)  # other weights in between, whole
        before = draw(parts.fleet, wanted)
        transport = make_transport(name, adapted, tmp_path / "weights", bucket_bytes=10_000)
        assert WeightSync(adapted, parts.fleet, parts.sync_check, transport).publish(version)["parity/probe"] < 1e-5
        drawn.append(draw(parts.fleet, wanted))
        assert same(drawn[0], drawn[-1]) and not same(before, drawn[-1]) and drawn[-1].version == version
    manifest = transport.manifest
    assert manifest.nbytes < (digit_model / "model.safetensors").stat().st_size / 10
    files = {path.name for path in (tmp_path / "weights" / "version_32").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "full_00000.bin"}

    lost = type(manifest)(33, manifest.entries[2:], manifest.adapters)
    with pytest.raises(RunError, match="2 tensors missing, for instance base_model.model.model.layers.0"):
        gather([parts.fleet.clients[0].actor.prepare_update.remote(lost)], "asking", 60)


def test_an_update_that_misses_a_tensor_is_refused_before_it_touches_the_engine(parts):
    parts.sync.publish(5)
    manifest, _ = packed(parts.policy, 6)
    short = copy.replace(manifest, entries=manifest.entries[1:]) if hasattr(copy, "replace") else None
    short = short or type(manifest)(manifest.version, manifest.entries[1:])
    with pytest.raises(RunError, match="1 tensors missing"):
        short.check_names({e.name for e in manifest.entries})
    twice = type(manifest)(manifest.version, (*manifest.entries, manifest.entries[0]))
    with pytest.raises(RunError, match="1 tensors twice"):
        twice.check_names({e.name for e in manifest.entries})


def test_a_changed_byte_in_transport_is_named():
    import torch

    from gdpo_nemo.weights.manifest import unpack

    manifest, buffer = pack([("a", torch.ones(3)), ("b", torch.arange(5, dtype=torch.bfloat16))], 1)
    whole = dict(unpack(manifest, buffer))
    assert torch.equal(whole["a"], torch.ones(3)) and torch.equal(whole["b"], torch.arange(5, dtype=torch.bfloat16))
    buffer[manifest.entries[1].offset] ^= 1
    with pytest.raises(RunError, match="checksum of b"):
        dict(unpack(manifest, buffer))


def test_sleeping_engines_sample_again_only_when_all_their_memory_is_back(parts):
    """Colocated, publishing wakes them; one that is lost while it sleeps comes back with the newest weights."""
    sync = WeightSync(parts.policy, parts.fleet, parts.sync_check, shared=True)
    sync.publish(30)
    before = draw(parts.fleet, requests(8))
    sync.sleep_engines()
    with pytest.raises(RunError, match="the engines cannot sample: they are asleep"):
        draw(parts.fleet, requests(8))
    parts.fleet.wake("weights")
    with pytest.raises(RunError, match="the engines cannot sample: they are asleep"):
        parts.fleet.score([WORDS])
    parts.fleet.wake("kv_cache")
    sync.sleep_engines()
    _engine(parts.fleet).kill()
    assert sync.publish(31)["parity/probe"] < 1e-4
    assert same(before, draw(parts.fleet, requests(8)))


def test_a_prompt_without_room_for_a_completion_is_refused_and_the_engine_lives_on(parts):
    with pytest.raises(RunError, match="a prompt has 64 tokens, which leaves no room in the context of 64"):
        draw(parts.fleet, requests(1, prompt_length=64))
    (one,) = draw(parts.fleet, requests(1, prompt_length=63)).completions
    assert len(one.token_ids) == 1


def test_the_reference_model_stays_where_training_started(parts):
    sequence = TrainSequence(WORDS[:6], WORDS[6:], np.zeros(14, np.float32))
    (reference,) = parts.policy.logprobs([sequence], reference=True)
    (now,) = parts.policy.logprobs([sequence])
    train_once(parts.policy)
    (later_reference,) = parts.policy.logprobs([sequence], reference=True)
    (later,) = parts.policy.logprobs([sequence])
    assert np.array_equal(reference, later_reference)
    assert not np.array_equal(now, later) and not np.array_equal(now, reference)


def test_a_killed_engine_is_replaced_with_newest_weights_and_its_samples_redrawn(parts, tmp_path):
    """The policy has trained on by then, so the weights come from what was kept; both engines join the next
    broadcast."""
    transport = make_transport("gloo", parts.policy, tmp_path, bucket_bytes=100_000, mode="difference")
    sync = WeightSync(parts.policy, parts.fleet, parts.sync_check, transport)
    sync.publish(20)
    wanted = requests(16)
    before = draw(parts.fleet, wanted)
    drawing = parts.fleet.spawn(parts.fleet.sample_all(wanted, SAMPLING))
    _engine(parts.fleet).kill()
    train_once(parts.policy)
    after = drawing.result()
    assert same(before, after) and after.version == 20
    assert transport.statistics["weights/fallbacks"] == 0, "the first version is always sent in full"
    row = sync.publish(21)
    assert row["parity/probe"] < 1e-4 and row["weights/full"] == row["weights/fallbacks"] == 0
    assert draw(parts.fleet, wanted).version == 21


def test_engine_replaced_by_an_update_is_not_replaced_again_by_waiting_callers(parts):
    """The engine is stopped while it is asked, so that it dies with the call, and the update is the first to notice."""
    parts.sync.publish(22)
    wanted = requests(16)
    stopped = _engine(parts.fleet, 0)
    before = [client.replaced for client in parts.fleet.clients]
    stopped.suspend()
    drawing = parts.fleet.spawn(parts.fleet.sample_all(wanted, SAMPLING))
    stopped.kill()
    parts.sync.publish(23)
    drawn = drawing.result()
    assert [client.replaced for client in parts.fleet.clients] == [before[0] + 1, before[1]]
    deadline = time.monotonic() + 240
    while len(_launchers()) != 2:  # the launcher of the killed engine ends after it
        assert time.monotonic() < deadline, _launchers()
        time.sleep(0.1)
    assert same(drawn, draw(parts.fleet, wanted)) and drawn.version == 22  # the older of the two that drew


class BreaksOff(Receiver):
    """Its sender is lost halfway."""

    def __init__(self, buffer: np.ndarray):
        self.buffer = buffer

    def receive(self, manifest, device, worker):
        from itertools import islice

        from gdpo_nemo.weights.manifest import PeerLost, unpack

        yield from islice(unpack(manifest, self.buffer), len(manifest.entries) // 2)
        raise PeerLost("halfway")


def test_an_engine_with_half_an_update_does_not_sample_before_a_whole_one(parts):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    parts.sync.publish(40)
    before = draw(parts.fleet, requests(8))
    train_once(parts.policy)
    manifest, buffer = packed(parts.policy, 41)
    engine = parts.fleet.clients[0].actor
    with pytest.raises(PeerLost, match="halfway"):
        gather([engine.update_weights.remote(manifest, BreaksOff(buffer))], "half an update", 60)
    with pytest.raises(RunError, match="the engine cannot sample: it received only part of a weight update"):
        draw(parts.fleet, requests(8))
    parts.sync.publish(41)
    assert not same(before, draw(parts.fleet, requests(8)))


def test_nodes_that_are_not_there_and_folders_that_a_node_does_not_see_are_named(parts, tmp_path, monkeypatch):
    """The wait for nodes is shortened: its length is not what is shown."""
    monkeypatch.setattr(placement, "_JOIN_S", 1.0)
    config = copy.deepcopy(parts.config)
    config.cluster.address = "auto"
    with pytest.raises(
        RunError, match=r"\S+absent not found on node \S+; put it on a file system that all nodes share"
    ):
        placement.reserve(config.cluster, resolve_layout(config), [tmp_path, tmp_path / "absent"])
    config.cluster.num_nodes = 2
    with pytest.raises(RunError, match="2 nodes with 1 CPU each were not free within 1 s; the Ray cluster has 1 nodes"):
        placement.reserve(config.cluster, resolve_layout(config), [tmp_path])
    config.cluster.num_nodes = 1
    config.cluster.env_nodes = 3
    with pytest.raises(
        RunError,
        match=r"1 nodes with 1 CPU each and 3 more with 1 CPU for environments \(cluster.env_nodes\) were not free",
    ):
        placement.reserve(config.cluster, resolve_layout(config), [tmp_path])


def _engine(fleet: EngineFleet, number: int = 0) -> psutil.Process:
    (_, pid) = fleet.process_locations()[number]
    return psutil.Process(pid)


def _launchers() -> list[int]:
    """Processes below this one that each wait for a forked engine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if f'"{PRELOADED}": "{ENGINE}"' in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def _cores(engine: psutil.Process) -> list[psutil.Process]:
    """vLLM's own processes of an engine."""
    return [p for p in engine.children() if "EngineCore" in " ".join(p.cmdline())]


@pytest.fixture(scope="module")
def apart(parts, digit_model):
    """An engine whose vLLM has a process of its own, as on GPUs, where what is sent to it crosses a border."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_actor.CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setitem(engine_actor.CPU_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND", "0")
        config = copy.deepcopy(parts.config)
        config.policy.max_total_sequence_length = 128
        config.policy.generation.engines = 1
        config.policy.generation.vllm_cfg.max_num_seqs = 8
        fleet = EngineFleet(config, str(digit_model))
        fleet.ready()
        yield fleet
        fleet.close()


def test_engine_with_a_separate_vllm_process_gets_the_same_weights(parts, apart, tmp_path, monkeypatch):
    """nccl needs GPUs; it is gloo but for the group, for which see tests/weights/test_nccl_group.py."""
    monkeypatch.setattr(parts.policy, "shared", [[0]])  # as if rank 0 and the engine were on one device, for ipc
    for version, name in enumerate(("memory", "gloo", "folder", "ipc", OWN), 50):
        train_once(parts.policy)
        transport = make_transport(name, parts.policy, tmp_path / str(version), bucket_bytes=100_000)
        assert WeightSync(parts.policy, apart, parts.sync_check, transport).publish(version)["parity/probe"] < 1e-4
    nobody = IpcReceiver((("\0nobody", b"key"),), 1, 1.0)
    with pytest.raises(PeerLost, match="weight update 54: the other process of the transfer has ended"):
        gather([apart.clients[0].actor.update_weights.remote(transport.manifest, nobody)], "from nobody", 60)


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_a_scheduler_in_another_process_keeps_versions_apart(apart, digit_model, kv):
    """It does not wait to be stepped. In one process: tests/generation/test_engine_in_flight.py."""
    drawn = across_update(apart, digit_model, kv, VERSIONS)
    assert len(drawn) == 20
    for spans, tokens, off in drawn:
        assert [version for version, _ in spans] in ([0], [1], [0, 1]) and sum(n for _, n in spans) == tokens
        assert max(off[:1] if kv == "keep" else off) < 1e-4
    mixed = sum(len(spans) == 2 for spans, *_ in drawn)
    only_new = sum(spans[0][0] == 1 for spans, *_ in drawn)
    assert (mixed == 0 and only_new == 4) if kv == "drain" else (mixed >= 4 and only_new >= 8)
    assert kv != "keep" or max(max(off) for _, _, off in drawn) > 1e-2, "kept keys are those of the old weights"


def test_the_death_of_vllms_own_process_is_the_death_of_its_engine(parts, apart):
    """The process is killed while it samples and receives an update. No call hangs and no request is lost."""
    sync = WeightSync(parts.policy, apart, parts.sync_check)
    sync.publish(next(VERSIONS))
    wanted = requests(16)
    before = draw(apart, wanted)
    engine = _engine(apart)
    (core,) = _cores(engine)
    core.suspend()  # so that it dies with all that it was asked
    drawing = apart.spawn(apart.sample_all(wanted, SAMPLING))
    while not apart.clients[0].pending:
        time.sleep(0.01)
    threading.Timer(2.0, core.kill).start()
    assert sync.publish(newest := next(VERSIONS))["parity/probe"] < 1e-4
    assert same(before, drawing.result()) and apart.clients[0].replaced == 1
    (note,) = apart.take_events()
    assert note.startswith("engine 0: vLLM's process EngineCore was killed by SIGKILL (see its output in the engine's")
    assert psutil.wait_procs([engine], timeout=240)[1] == []
    assert draw(apart, wanted).version == newest


def test_a_killed_engine_takes_vllms_own_process_with_it(apart):
    """Last of those of ``apart``: the engine is gone afterwards."""
    engine = _engine(apart)
    cores = _cores(engine)
    engine.kill()
    assert len(cores) == 1 and psutil.wait_procs(cores, timeout=240)[1] == []


def test_a_worker_that_does_not_answer_ends_the_wait_with_a_sentence(parts):
    @ray.remote(num_cpus=0)
    def slow():
        time.sleep(900)

    @ray.remote(num_cpus=0)
    def dies():
        os._exit(1)

    with pytest.raises(RunError, match="the slow thing: 1 of 1 workers did not answer within 2 s"):
        gather([slow.remote()], "the slow thing", 2)
    start = time.monotonic()
    with pytest.raises(RunError):
        gather([slow.remote(), dies.options(max_retries=0).remote()], "both", 800)
    assert time.monotonic() - start < 400


def test_a_dead_policy_rank_surfaces_as_an_error_of_the_call(parts):
    """Last of the file: the policy is gone afterwards."""
    (_, rank) = parts.policy.process_locations()[0]
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="exporting weights: a worker process died"):
        packed(parts.policy, 9)
