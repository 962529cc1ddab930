"""Placement of policy ranks, engines and environment workers on nodes. The placement is computed without Ray, for both
the plan and the run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from gdpo_nemo.config.layout import Layout
from gdpo_nemo.config.schema import ClusterConfig, Config
from gdpo_nemo.utils.errors import ConfigError


def joined(config: ClusterConfig) -> str | None:
    """Return the address of the Ray cluster that the run joins, or None if the run starts a new cluster."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


def address_source(config: ClusterConfig) -> str:
    """Return the key or the environment variable that specifies the address of ``joined``."""
    return "cluster.address" if config.address else "environment variable RAY_ADDRESS"


@dataclass(frozen=True)
class Places:
    """Node index (0 to nodes - 1) of each policy rank and of each engine."""

    policy: tuple[int, ...]
    """Node of each policy rank."""
    engines: tuple[int, ...]
    """Node of each engine."""
    shared: tuple[tuple[int, ...], ...] = ()
    """For each engine, the policy ranks whose devices it uses, in the order of the engine's ranks. Empty if engines and
    policy use separate devices."""

    def policy_on(self, node: int) -> int:
        """Return the number of policy ranks on a node."""
        return self.policy.count(node)

    def engines_on(self, node: int) -> int:
        """Return the number of engines on a node."""
        return self.engines.count(node)


def place(cluster: ClusterConfig, layout: Layout) -> Places:
    """Assign policy ranks and engines to nodes.

    Policy ranks are assigned in rank order, starting with the first node. Engines are assigned starting with the last
    node. Colocated engines use the policy's devices, starting with the first rank, with one engine rank per device.

    Consecutive ranks share a node if possible, so that the most frequent communication stays within a node. In
    Megatron's rank order, the tensor-parallel rank varies fastest, then context and data, and the pipeline rank
    slowest. The ranks of a tensor-parallel group or of an engine are never split across nodes. On CPU, processes are
    spread evenly: each node gets at most the smallest number with which all processes fit.

    Raises:
        ConfigError: if the processes do not fit. The message shows the arithmetic.
    """
    nodes = cluster.num_nodes
    gpus = cluster.gpus_per_node
    if layout.colocated:
        return _colocated(layout, _policy_places(layout, nodes, gpus))
    if nodes == 1:
        return Places((0,) * layout.policy_ranks, (0,) * layout.engines)
    if not gpus:
        return _on_cpus(layout, nodes)
    _check_tensor(layout, gpus)
    places = _fill(layout, nodes, gpus)
    if places is None:
        raise ConfigError(_does_not_fit(layout, nodes, gpus))
    return places


def _check_tensor(layout: Layout, gpus: int) -> None:
    if layout.tensor > gpus:
        raise ConfigError(
            f"policy.megatron_cfg.tensor_model_parallel_size: {layout.tensor} ranks of a tensor-parallel group do not "
            f"fit on a node of {gpus} GPUs (cluster.gpus_per_node)"
        )


def _policy_places(layout: Layout, nodes: int, gpus: int) -> tuple[int, ...]:
    """Return the node of each policy rank, assigned as in a run without engines."""
    without_engines = replace(layout, engines=0, colocated=False)
    if nodes == 1:
        return (0,) * layout.policy_ranks
    if not gpus:
        return _on_cpus(without_engines, nodes).policy
    _check_tensor(layout, gpus)
    places = _fill(without_engines, nodes, gpus)
    if places is None:
        raise ConfigError(
            f"policy.megatron_cfg.tensor_model_parallel_size: {layout.policy_ranks // layout.tensor} groups "
            f"of {layout.tensor} do not fit on {nodes} nodes of {gpus} GPUs without crossing nodes; choose a size "
            f"that divides {gpus}"
        )
    return places.policy


def _colocated(layout: Layout, policy: tuple[int, ...]) -> Places:
    free: dict[int, list[int]] = {node: [] for node in sorted(set(policy))}
    for rank, node_of_rank in enumerate(policy):
        free[node_of_rank].append(rank)
    engines = []
    shared = []
    size = layout.engine_tensor
    for _ in range(layout.engines):
        node = next((node for node, ranks in free.items() if len(ranks) >= size), None)
        if node is None:
            each = ", ".join(str(policy.count(node)) for node in free)
            raise ConfigError(
                f"policy.generation.engines: {layout.engines} engines of {size} ranks do not fit on the policy's GPUs "
                f"(cluster.placement colocated); nodes have {each} policy ranks, and engines must not cross nodes"
            )
        engines.append(node)
        shared.append(tuple(free[node][:size]))
        free[node] = free[node][size:]
    return Places(policy, tuple(engines), tuple(shared))


def _on_cpus(layout: Layout, nodes: int) -> Places:
    processes = layout.policy_ranks + layout.engine_ranks
    # The search always succeeds, because the largest limit allows one node to hold all processes.
    return next(places for room in range(1, processes + 1) if (places := _fill(layout, nodes, room)))


def _fill(layout: Layout, nodes: int, room: int) -> Places | None:
    """Assign processes by first fit, with at most ``room`` ranks per node. Returns None if they do not fit."""
    free = [room] * nodes
    policy = [_take(free, range(nodes), layout.tensor) for _ in range(layout.policy_ranks // layout.tensor)]
    engines = [_take(free, reversed(range(nodes)), layout.engine_tensor) for _ in range(layout.engines)]
    found = [node for node in policy if node is not None]
    found_engines = [node for node in engines if node is not None]
    if len(found) < len(policy) or len(found_engines) < len(engines):
        return None
    return Places(tuple(node for node in found for _ in range(layout.tensor)), tuple(found_engines))


def _take(free: list[int], order: Iterable[int], size: int) -> int | None:
    node = next((node for node in order if free[node] >= size), None)
    if node is not None:
        free[node] -= size
    return node


def _does_not_fit(layout: Layout, nodes: int, gpus: int) -> str:
    groups = layout.policy_ranks // layout.tensor
    return (
        f"cluster: {groups} tensor-parallel groups of {layout.tensor} and {layout.engines} engines "
        f"of {layout.engine_tensor} need {layout.policy_ranks + layout.engine_ranks} of {nodes} x {gpus} GPUs without "
        f"crossing nodes; a node of {gpus} fits {gpus // layout.tensor} groups or {gpus // layout.engine_tensor} "
        f"engines; choose sizes that divide {gpus}"
    )


def describe_places(config: Config, layout: Layout) -> str:
    """Describe the processes on each node in one line, for the plan. Consecutive nodes with the same processes are
    merged."""
    places = place(config.cluster, layout)
    nodes = config.cluster.num_nodes
    loads = [_load(places.policy_on(node), places.engines_on(node)) for node in range(nodes)]
    loads += [_workers(sum(load.values())) for load in place_workers(config)]
    starts = [node for node in range(len(loads)) if node == 0 or loads[node] != loads[node - 1]]
    spans = zip(starts, [*(start - 1 for start in starts[1:]), len(loads) - 1])
    return "; ".join(f"node {a}: {loads[a]}" if a == b else f"nodes {a}-{b}: {loads[a]} each" for a, b in spans)


def _load(ranks: int, engines: int) -> str:
    parts = [f"{n} {noun}{'s' * (n > 1)}" for n, noun in ((ranks, "policy rank"), (engines, "engine")) if n]
    return " and ".join(parts) or "nothing"


def _workers(number: int) -> str:
    return f"{number} environment worker{'s' * (number > 1)}"


SHARED = None
"""Key of the worker pool that is shared by all environments without ``num_workers``."""


def worker_pools(config: Config) -> dict[str | None, int]:
    """Return the number of worker processes per pool. An environment with ``num_workers`` has a separate pool. All
    other environments share ``rollout.env_workers`` workers."""
    separate = {name: (options or {}).get("num_workers") for name, options in config.env.items()}
    pools: dict[str | None, int] = {SHARED: config.rollout.env_workers} if None in separate.values() else {}
    return pools | {name: number for name, number in separate.items() if isinstance(number, int)}


def place_workers(config: Config) -> list[dict[str | None, int]]:
    """Return the number of workers per pool for each of the ``cluster.env_nodes`` nodes.

    Workers are assigned round-robin, so the loads of two nodes differ by at most one worker.

    Raises:
        ConfigError: if there are fewer workers than nodes.
    """
    nodes = config.cluster.env_nodes
    pools = worker_pools(config)
    loads: list[dict[str | None, int]] = [{} for _ in range(nodes)]
    turn = count()
    for pool, workers in pools.items() if nodes else ():
        for _ in range(workers):
            load = loads[next(turn) % nodes]
            load[pool] = load.get(pool, 0) + 1
    if not all(loads):
        parts = [f"{number} of {name}" if name else f"rollout.env_workers {number}" for name, number in pools.items()]
        total = sum(pools.values())
        raise ConfigError(
            f"cluster.env_nodes: {nodes} nodes for {total} environment workers ({' + '.join(parts)}); each node "
            "requires at least one"
        )
    return loads
