"""Which process of a run goes to which node. Pure arithmetic, shared by the plan and by Ray's placement."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Iterable

from gdpo_nemo.config.env_workers import place_workers
from gdpo_nemo.config.layout import Layout, resolve_layout
from gdpo_nemo.config.schema import ClusterConfig, Config
from gdpo_nemo.errors import ConfigError


def joined(config: ClusterConfig) -> str | None:
    """Address of the Ray cluster that a run joins; None where it starts its own."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


@dataclass(frozen=True)
class Places:
    """The node (0 .. nodes - 1) of every policy rank and of every engine."""

    policy: tuple[int, ...]
    engines: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...] = ()
    """Colocated: for every engine the policy ranks on whose devices its ranks sit, in its ranks' order. Separate:
    empty."""

    def policy_on(self, node: int) -> int:
        """Policy ranks on a node."""
        return self.policy.count(node)

    def engines_on(self, node: int) -> int:
        """Engines on a node."""
        return self.engines.count(node)


def place(config: Config) -> Places:
    """Put policy ranks on nodes from the first on, in rank order, and engines on nodes from the last on.

    Colocated engines go to the policy's ranks, from the first on, each device to one engine rank.

    Neighbouring ranks share a node, so that what talks most (Megatron counts tensor parallelism fastest, then context
    and data, the pipeline slowest) talks inside it. The ranks of a tensor-parallel group, and those of an engine, never
    part. On CPU a node takes as few processes as it can when all nodes are used.

    Raises:
        ConfigError: it does not fit, with the arithmetic.
    """
    layout = resolve_layout(config)
    nodes = config.cluster.num_nodes
    gpus = config.cluster.gpus_per_node
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
            f"fit a node of {gpus} GPUs (cluster.gpus_per_node)"
        )


def _policy_places(layout: Layout, nodes: int, gpus: int) -> tuple[int, ...]:
    """The nodes of the policy's ranks where it has them to itself."""
    alone = replace(layout, engines=0, colocated=False)
    if nodes == 1:
        return (0,) * layout.policy_ranks
    if not gpus:
        return _on_cpus(alone, nodes).policy
    _check_tensor(layout, gpus)
    places = _fill(alone, nodes, gpus)
    if places is None:
        raise ConfigError(
            f"policy.megatron_cfg.tensor_model_parallel_size: {layout.policy_ranks // layout.tensor} groups of "
            f"{layout.tensor} "
            f"do not fit {nodes} nodes of {gpus} GPUs without crossing nodes; choose a size that divides {gpus}"
        )
    return places.policy


def _colocated(layout: Layout, policy: tuple[int, ...]) -> Places:
    free = {node: [rank for rank, place in enumerate(policy) if place == node] for node in sorted(set(policy))}
    engines = []
    shared = []
    size = layout.engine_tensor
    for _ in range(layout.engines):
        node = next((node for node, ranks in free.items() if len(ranks) >= size), None)
        if node is None:
            each = ", ".join(str(policy.count(node)) for node in free)
            raise ConfigError(
                f"policy.generation.engines: {layout.engines} engines of {size} ranks do not fit on the policy's GPUs "
                f"(cluster.placement colocated): no engine may cross nodes, and the nodes have {each} policy ranks"
            )
        engines.append(node)
        shared.append(tuple(free[node][:size]))
        free[node] = free[node][size:]
    return Places(policy, tuple(engines), tuple(shared))


def _on_cpus(layout: Layout, nodes: int) -> Places:
    processes = layout.policy_ranks + layout.engine_ranks
    # A node with room for all processes takes every one of them, so the search ends.
    return next(places for room in range(1, processes + 1) if (places := _fill(layout, nodes, room)))


def _fill(layout: Layout, nodes: int, room: int) -> Places | None:
    """First fit with ``room`` ranks a node; None where it does not fit."""
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
        f"cluster: {groups} tensor-parallel groups of {layout.tensor} and {layout.engines} engines of "
        f"{layout.engine_tensor} need {layout.policy_ranks + layout.engine_ranks} of {nodes} x {gpus} GPUs, but "
        f"neither a group nor an engine may cross nodes: a node of {gpus} holds {gpus // layout.tensor} groups or "
        f"{gpus // layout.engine_tensor} engines; choose sizes that divide {gpus}"
    )


def describe_places(config: Config) -> str:
    """One line of the plan: what each node carries, neighbouring nodes with the same load together."""
    places = place(config)
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
