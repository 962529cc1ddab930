"""Which GPU every process of a run sees: policy ranks and engines, however the node names its devices. No Ray is
started: the calls are recorded, and what a worker makes of them is computed by Ray's own functions."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.utils import set_visible_accelerator_ids
from ray._private.worker import Worker

from gdpo_nemo.cluster import engine_actor, policy_group, policy_rank
from gdpo_nemo.cluster.reservation import Placement, place_on_this_machine
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.placement import place
from gdpo_nemo.config.schema import Config

NUMBERS = ["4", "5", "6", "7"]
UUIDS = [f"GPU-8932f937-d72c-4106-c12f-20bd9faed9f{n}" for n in range(4)]
SLICES = [f"MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f1/{n}/0" for n in range(4)]
NAMINGS = {"all": None, "numbers": NUMBERS, "uuids": UUIDS, "slices": SLICES}


@dataclass
class Process:
    """A recorded actor: its options, what it was constructed with, and its share of the node's GPUs."""

    kind: str
    options: dict[str, Any]
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    assigned: list[str]
    """What Ray says that it was given."""
    answers: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments, **options: (self, method, arguments))

    @property
    def sees(self) -> list[str]:
        """Its CUDA_VISIBLE_DEVICES."""
        return [name for name in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


class RecordingRay:
    """``ray.remote(Class).options(...).remote(...)`` on a node whose raylet deals its GPUs out in order."""

    def __init__(self, visible: list[str] | None, gpus: int, monkeypatch: pytest.MonkeyPatch):
        self.inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
        self.free = list(range(gpus))
        self.monkeypatch = monkeypatch
        self.processes: list[Process] = []

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda *a, **k: self._start(kind.__name__, given, (*a, *k.values())))

        return SimpleNamespace(options=options)

    def _start(self, kind: str, options: dict[str, Any], arguments: tuple[Any, ...]) -> Process:
        environment = {**self.inherited, **options["runtime_env"]["env_vars"]}
        slots = [self.free.pop(0) for _ in range(options["num_gpus"])]
        with self.monkeypatch.context() as patch:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            value = os.environ.get("CUDA_VISIBLE_DEVICES")
            worker = SimpleNamespace(
                core_worker=SimpleNamespace(resource_ids=lambda: {"GPU": [(slot, 1.0) for slot in slots]}),
                original_visible_accelerator_ids={"GPU": None if value is None else value.split(",") if value else []},
            )
            found = Worker.get_accelerator_ids_for_accelerator_resource(worker, "GPU", "^GPU_group_[0-9A-Za-z]+$")
            assigned = [str(name) for name in found]
            context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
            patch.setattr("ray.get_runtime_context", lambda: context)
            set_visible_accelerator_ids()
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.processes.append(Process(kind, options, arguments, environment, assigned))
        return self.processes[-1]


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """The folder `model`, in which the driver looks for the cost of attention."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "model_type": "qwen2"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes | heads))


def config(gpus: int, placement: str, tensor: int, engines: int, engine_tensor: int) -> Config:
    found = Config()
    found.gdpo.rewards = {"correct": 1.0}
    found.cluster.gpus_per_node = gpus
    found.cluster.placement = placement
    found.policy.megatron_cfg.tensor_model_parallel_size = tensor
    found.policy.megatron_cfg.data_parallel_size = None if gpus else 1
    found.policy.generation.engines = engines
    found.policy.generation.vllm_cfg.tensor_parallel_size = engine_tensor
    return found


def start(run: Config, placement: Placement, visible: list[str] | None, monkeypatch) -> tuple[list, list]:
    """(policy ranks, engines) as the driver starts them."""
    ray = RecordingRay(visible, run.cluster.gpus_per_node, monkeypatch)
    monkeypatch.setattr(policy_group, "ray", ray)
    monkeypatch.setattr(engine_actor, "ray", ray)
    policy_group.PolicyGroup(run, "model", 1, placement)
    ranks = list(ray.processes)
    devices = [_device(rank, monkeypatch) for rank in ranks] if placement.places.shared else ()
    count = run.policy.generation.engines
    return ranks, [engine_actor.start_engine(run, "model", placement, devices, index) for index in range(count)]


def _device(rank: Process, monkeypatch) -> str:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": rank.assigned})
    with monkeypatch.context() as patch:
        patch.setattr(policy_rank.ray, "get_runtime_context", lambda: context, raising=False)
        return policy_rank.PolicyRank.device(SimpleNamespace())


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(
    "tensor, engines, engine_tensor", [(1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 3, 1), (1, 1, 3)]
)
def test_separate_engines_and_ranks_share_no_device(naming, tensor, engines, engine_tensor, monkeypatch):
    run = config(4, "separate", tensor, engines, engine_tensor)
    ranks, fleet_ = start(run, place_on_this_machine(run), NAMINGS[naming], monkeypatch)
    assert [len(rank.sees) for rank in ranks] == [1] * resolve_layout(run).policy_ranks
    assert [len(engine.sees) for engine in fleet_] == [engine_tensor] * engines
    seen = [name for process in (*ranks, *fleet_) for name in process.sees]
    assert len(seen) == len(set(seen)) and set(seen) <= set(NAMINGS[naming] or "0123")


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("tensor, engines, engine_tensor", [(1, 4, 1), (2, 4, 1), (4, 2, 2), (1, 1, 4), (2, 1, 2)])
def test_colocated_engines_see_the_devices_of_their_policy_ranks_in_order(
    naming, tensor, engines, engine_tensor, monkeypatch
):
    run = config(4, "colocated", tensor, engines, engine_tensor)
    ranks, fleet_ = start(run, place_on_this_machine(run), NAMINGS[naming], monkeypatch)
    names = NAMINGS[naming] or list("0123")
    assert [rank.sees for rank in ranks] == [[name] for name in names]
    for engine, shared in zip(fleet_, place(run.cluster, resolve_layout(run)).shared, strict=True):
        assert engine.sees == [names[rank] for rank in shared]
        assert engine.options["num_gpus"] == 0, "the policy has the GPU in Ray's books"


def test_a_node_of_one_gpu_is_shared_by_its_rank_and_its_engine(monkeypatch):
    run = config(1, "colocated", 1, 1, 1)
    (rank,), (engine,) = start(run, place_on_this_machine(run), ["GPU-8932f937"], monkeypatch)
    assert rank.sees == engine.sees == ["GPU-8932f937"]


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_without_gpus_no_process_sees_one_that_the_node_has(placement, monkeypatch):
    run = config(0, placement, 1, 1, 1)
    ranks, fleet_ = start(run, place_on_this_machine(run), NUMBERS, monkeypatch)
    assert [process.sees for process in (*ranks, *fleet_)] == [[], []]
    assert all(process.options["num_gpus"] == 0 for process in (*ranks, *fleet_))


def test_the_cpu_engine_environment_does_not_reach_engines_on_gpus(monkeypatch):
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT

    for placement in ("separate", "colocated"):
        run = config(2, placement, 1, 1, 1)
        _, (engine,) = start(run, place_on_this_machine(run), NUMBERS[:2], monkeypatch)
        given = engine.options["runtime_env"]["env_vars"]
        assert not (given.keys() & CPU_ENVIRONMENT.keys() - {"CUDA_VISIBLE_DEVICES"}) and given.items() >= (
            ENVIRONMENT.items()
        )


@pytest.mark.parametrize("placement, tensor", [("separate", 2), ("separate", 1), ("colocated", 2), ("colocated", 1)])
def test_ranks_on_gpus_get_the_environment_that_placement_and_layout_need(placement, tensor, monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)  # torch sets the last one when it compiles
    run = config(4, placement, tensor, {"separate": 2, "colocated": 4}[placement], 1)
    ranks, engines = start(run, place_on_this_machine(run), NUMBERS, monkeypatch)
    for rank in ranks:
        assert rank.environment.get("PYTORCH_ALLOC_CONF") == {"separate": "expandable_segments:True"}.get(placement)
        assert rank.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == {2: "1"}.get(tensor)
        assert not rank.environment["TORCHINDUCTOR_CACHE_DIR"].startswith(os.environ.get("TMPDIR", "/tmp"))
    assert "PYTORCH_ALLOC_CONF" not in engines[0].environment, "vLLM's sleep mode refuses expandable segments"


def test_the_users_environment_takes_precedence_on_gpus(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    chosen = policy_group.gpu_environment(config(4, "separate", 2, 1, 1))
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"} & chosen.keys()


def test_every_process_of_several_nodes_goes_to_its_bundle_and_engines_use_its_address(monkeypatch):
    run = config(4, "separate", 2, 2, 2)
    run.cluster.num_nodes = 2
    group = SimpleNamespace(bundle_count=2)
    placement = Placement(place(run.cluster, resolve_layout(run)), group, (1, 0), ("10.0.0.1", "10.0.0.2"), ("a", "b"))
    ray = RecordingRay(None, 8, monkeypatch)
    monkeypatch.setattr(policy_group, "ray", ray)
    monkeypatch.setattr(engine_actor, "ray", ray)
    policy_group.PolicyGroup(run, "model", 1, placement)
    engines = [engine_actor.start_engine(run, "model", placement, (), index) for index in range(2)]
    bundles = [process.options["scheduling_strategy"].placement_group_bundle_index for process in ray.processes]
    assert bundles == [placement.bundles[node] for node in (*placement.places.policy, *placement.places.engines)]
    addresses = [engine.options["runtime_env"]["env_vars"]["VLLM_HOST_IP"] for engine in engines]
    assert addresses == [placement.addresses[node] for node in placement.places.engines]
