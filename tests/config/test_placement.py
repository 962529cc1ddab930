"""Which process goes to which node: the plan that --dry-run shows and Ray's placement follows."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.placement import SHARED, describe_places, place, place_workers
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.transports import chosen_transport
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

TINY = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


def config(
    nodes: int, gpus: int, tensor: int = 1, data: int | None = None, engines: int = 1, engine_tensor: int = 1
) -> Config:
    found = Config()
    found.cluster.num_nodes = nodes
    found.cluster.gpus_per_node = gpus
    found.policy.megatron_cfg.tensor_model_parallel_size = tensor
    found.policy.megatron_cfg.data_parallel_size = data
    found.policy.generation.engines = engines
    found.policy.generation.vllm_cfg.tensor_parallel_size = engine_tensor
    return found


def test_no_gpu_is_given_twice_and_no_group_crosses_nodes():
    """Over all layouts of powers of two that fit two to four nodes of eight."""
    tried = 0
    for nodes, tensor, engine_tensor, engines in product((2, 3, 4), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 5)):
        data = (nodes * 8 - engines * engine_tensor) // tensor
        if data < 1:
            continue
        wanted = config(nodes, 8, tensor, data, engines, engine_tensor)
        try:
            places = place(wanted.cluster, resolve_layout(wanted))
        except ConfigError as error:
            assert "without crossing nodes" in str(error)
            continue
        tried += 1
        assert len(places.policy) == resolve_layout(wanted).policy_ranks and len(places.engines) == engines
        for node in range(nodes):
            assert places.policy_on(node) + engine_tensor * places.engines_on(node) <= 8
        for first in range(0, len(places.policy), tensor):
            assert len(set(places.policy[first : first + tensor])) == 1
        assert list(places.policy) == sorted(places.policy)
    assert tried > 100


@pytest.mark.parametrize(
    "wanted, plan",
    [
        (config(2, 0), "node 0: 1 policy rank; node 1: 1 engine"),
        (config(2, 0, data=2, engines=2), "node 0: 2 policy ranks; node 1: 2 engines"),
        (config(2, 0, tensor=2, data=2, engines=1), "node 0: 2 policy ranks; node 1: 2 policy ranks and 1 engine"),
        (config(3, 0), "node 0: 1 policy rank; node 1: nothing; node 2: 1 engine"),
        (config(4, 8, engines=8), "nodes 0-2: 8 policy ranks each; node 3: 8 engines"),
        (config(2, 8, tensor=2, engines=3, engine_tensor=4), "node 0: 4 policy ranks and 1 engine; node 1: 2 engines"),
    ],
)
def test_policy_fills_nodes_from_the_first_and_engines_from_the_last(wanted, plan):
    assert describe_places(wanted, resolve_layout(wanted)) == plan


@pytest.mark.parametrize(
    "wanted, why",
    [
        (config(2, 4, tensor=6, data=1), "6 ranks of a tensor-parallel group do not fit on a node of 4 GPUs"),
        (config(2, 8, data=1, engines=5, engine_tensor=3), "a node of 8 fits 8 groups or 2 engines"),
        (config(2, 8, data=9, engines=8), "the policy needs 9 GPUs .* 16 GPUs minus 8 x 1 for the engines leave 8"),
    ],
)
def test_placement_that_does_not_fit_is_refused_with_the_arithmetic(wanted, why):
    with pytest.raises(ConfigError, match=why):
        place(wanted.cluster, resolve_layout(wanted))


def test_environment_workers_are_distributed_evenly_to_separate_nodes():
    wanted = config(2, 8, engines=8)
    wanted.cluster.env_nodes = 3
    wanted.rollout.env_workers = 4
    wanted.env = {"gsm8k": None, "slow": {"num_workers": 3}, "digits": {}}
    loads = place_workers(wanted)
    assert loads == [{SHARED: 2, "slow": 1}, {SHARED: 1, "slow": 1}, {SHARED: 1, "slow": 1}]
    assert describe_places(wanted, resolve_layout(wanted)) == (
        "node 0: 8 policy ranks; node 1: 8 engines; node 2: 3 environment workers; nodes 3-4: 2 environment workers "
        "each"
    )
    wanted.env = {"slow": {"num_workers": 2}}
    with pytest.raises(
        ConfigError, match=r"3 nodes for 2 environment workers \(2 of slow\); each node requires at least one"
    ):
        place_workers(wanted)


@pytest.mark.parametrize(
    "overrides, why",
    [
        (["cluster.env_nodes=2"], r"cluster.env_nodes: 2 nodes for 1 environment workers \(rollout.env_workers 1\)"),
        (["cluster.env_nodes=-1"], "cluster.env_nodes: must be 0 or more"),
    ],
)
def test_environment_nodes_without_workers_are_refused(overrides, why):
    with pytest.raises(ConfigError, match=why):
        validate(load_config(TINY, overrides))


def test_notes_name_a_cluster_that_the_environment_specifies(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "h:6379")
    note = "the run joins the Ray cluster at h:6379 (environment variable RAY_ADDRESS)"
    assert note in validate(load_config(TINY)).notes
    assert note not in validate(load_config(TINY, ["cluster.address=g:1"])).notes


def test_run_on_several_nodes_must_join_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    notes = validate(load_config(TINY, ["cluster.env_nodes=1"])).notes
    assert any(note.startswith("cluster.address: a run on 2 nodes joins a Ray cluster") for note in notes)
    notes = validate(load_config(TINY, ["cluster.num_nodes=3"])).notes
    assert any(note.startswith("cluster.address: a run on 3 nodes joins a Ray cluster") for note in notes)
    assert "cluster.num_nodes: 1 of 3 nodes have no processes" in notes
    assert not any(
        "cluster." in note for note in validate(load_config(TINY, ["cluster={num_nodes: 2, address: 'h:1'}"])).notes
    )


@pytest.mark.parametrize(
    "overrides, why",
    [
        (["weights.transport=rdma"], "weights.transport: .*rdma.*memory, gloo, nccl, ipc, folder"),
        (["weights.bucket_mib=8"], "weights.bucket_mib: has no effect with weights.transport memory"),
        (["weights={transport: gloo, bucket_mib: 0}"], "weights.bucket_mib: must be at least 1"),
    ],
)
def test_a_transport_that_is_not_there_and_a_bucket_without_use_are_refused(overrides, why):
    with pytest.raises(ConfigError, match=why):
        validate(load_config(TINY, overrides))


def test_colocated_engines_sit_on_devices_of_the_policy_and_each_device_has_one():
    """Over layouts on CPU and on nodes of eight, with ranks left over and without."""
    tried = 0
    for (nodes, gpus), tensor, engine_tensor, engines in product(
        ((1, 0), (2, 0), (1, 8), (3, 8)), (1, 2, 4), (1, 2, 4), (1, 2, 3, 6)
    ):
        wanted = config(nodes, gpus, tensor, None if gpus else 4, engines, engine_tensor)
        wanted.cluster.placement = "colocated"
        try:
            places = place(wanted.cluster, resolve_layout(wanted))
        except ConfigError as error:
            assert "do not fit on the policy's GPUs" in str(error) or "cannot share the devices" in str(error)
            continue
        tried += 1
        layout = resolve_layout(wanted)
        assert layout.data == (nodes * gpus // tensor if gpus else 4) and layout.idle_gpus == 0
        used = [rank for ranks in places.shared for rank in ranks]
        assert len(used) == len(set(used)) == layout.engine_ranks
        for node, ranks in zip(places.engines, places.shared, strict=True):
            assert {places.policy[rank] for rank in ranks} == {node}
    assert tried > 60


def test_a_colocated_layout_that_cannot_be_is_refused_with_the_arithmetic():
    few = config(1, 8, 2, 2, engines=5)
    few.cluster.placement = "colocated"
    with pytest.raises(
        ConfigError, match="5 x 1 = 5 engine ranks cannot share the devices of 4 policy ranks .*; use at most 4 engines"
    ):
        place(few.cluster, resolve_layout(few))
    crossing = config(2, 4, 1, None, engines=2, engine_tensor=3)
    crossing.cluster.placement = "colocated"
    assert describe_places(crossing, resolve_layout(crossing)) == "nodes 0-1: 4 policy ranks and 1 engine each"
    crossing.policy.generation.engines = 3
    with pytest.raises(ConfigError, match="9 engine ranks cannot share the devices of 8"):
        place(crossing.cluster, resolve_layout(crossing))
    crossing.cluster.num_nodes = 3
    crossing.policy.generation.engines = 4
    with pytest.raises(ConfigError, match="nodes have 4, 4, 4 policy ranks, and engines must not cross nodes"):
        place(crossing.cluster, resolve_layout(crossing))
    stale = load_config(TINY, ["cluster.placement=colocated", "rollout.max_staleness=1"])
    with pytest.raises(
        ConfigError, match="cluster.placement: colocated requires .* engines sleep while the policy trains"
    ):
        validate(stale)


@pytest.mark.parametrize(
    "nodes, gpus, placement, wanted, chosen",
    [
        (1, 0, "separate", "auto", "memory"),
        (2, 0, "separate", "auto", "gloo"),
        (1, 8, "separate", "auto", "nccl"),
        (2, 0, "colocated", "auto", "ipc"),
        (2, 8, "colocated", "folder", "folder"),
        (2, 0, "colocated", "nccl", "nccl requires GPUs"),
        (1, 8, "colocated", "nccl", "nccl does not support two processes on one GPU"),
        (1, 8, "separate", "ipc", "ipc requires engines on the policy's devices"),
    ],
)
def test_transport_follows_from_the_placement_or_is_refused(nodes, gpus, placement, wanted, chosen):
    found = load_config(TINY, [f"weights.transport={wanted}", f"cluster.placement={placement}"])
    found.cluster.num_nodes = nodes
    found.cluster.gpus_per_node = gpus
    found.policy.megatron_cfg.data_parallel_size = 2
    if " " in chosen:
        with pytest.raises(ConfigError, match=f"weights.transport: {chosen}"):
            validate(found)
    else:
        validate(found)
        assert chosen_transport(found) == chosen
