"""Reservation of a Ray cluster's nodes for one run: a placement group with one bundle per node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_nemo.cluster.session import gather, live_nodes, ray, watch_nodes
from gdpo_nemo.config.layout import Layout, resolve_layout
from gdpo_nemo.config.placement import Places, joined, place
from gdpo_nemo.config.schema import ClusterConfig, Config
from gdpo_nemo.utils.errors import InfrastructureFailed, RunError

_JOIN_S = 300.0
"""Time limit for all nodes to join the cluster and become free."""
_LOOK_S = 120.0
"""Time limit for checking folders on all nodes. The first task on a node starts a Python process on this node."""


@dataclass(frozen=True)
class Placement:
    """Placement of a run's processes on nodes."""

    places: Places
    group: Any = None
    """Ray's placement group, or None in a local session, which uses only this machine."""
    bundles: tuple[int, ...] = ()
    """Bundle index of each node in the group. The nodes of ``places`` come first, then the environment nodes."""
    addresses: tuple[str, ...] = ()
    """Address of each node, in the order of ``bundles``."""
    nodes: tuple[str, ...] = ()
    """Ray's id of each node, in the order of ``bundles``."""

    def is_lost(self, node: int) -> bool:
        """Return whether a node has left the cluster."""
        return bool(self.nodes) and self.nodes[node] not in live_nodes()

    def on(self, node: int) -> dict[str, Any]:
        """Return the options that place a Ray actor or task on a node."""
        if self.group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundles[node])}

    def environment(self, node: int) -> dict[str, str]:
        """Return the environment variables that make vLLM use the node's address in the cluster."""
        return {"VLLM_HOST_IP": self.addresses[node]} if self.addresses else {}


def place_on_this_machine(config: Config) -> Placement:
    """Place all processes on this machine, regardless of ``cluster.num_nodes``."""
    return _on_one_node(place(config.cluster, resolve_layout(config)))


def _on_one_node(places: Places) -> Placement:
    return Placement(Places((0,) * len(places.policy), (0,) * len(places.engines), places.shared))


def reserve(cluster: ClusterConfig, layout: Layout, shared: Sequence[Path]) -> Placement:
    """Reserve the nodes of a run. If the driver's node is among these nodes, it comes first.

    Args:
        shared: folders that must exist on every node except environment nodes, which need only the working directory.

    Raises:
        RunError: if the nodes are not free in time, or if a folder does not exist on a node.
    """
    places = place(cluster, layout)
    if not joined(cluster):
        return _on_one_node(places)
    from ray.util.placement_group import placement_group, placement_group_table

    nodes = cluster.num_nodes
    gpus = cluster.gpus_per_node
    bundle = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    requested = [bundle] * nodes + [{"CPU": 1}] * cluster.env_nodes
    group = placement_group(requested, strategy="STRICT_SPREAD")
    if not group.wait(_JOIN_S):
        raise InfrastructureFailed(_missing(nodes, bundle, cluster.env_nodes))
    known = {name: node["NodeManagerAddress"] for name, node in live_nodes().items()}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    driver = ray.get_runtime_context().get_node_id()
    # Without GPUs, all bundles are equal, and the order decides which nodes are environment nodes. The driver's node
    # comes first, so it is not an environment node. The other nodes are sorted by address, so that every start uses the
    # same order.
    bundles = sorted(
        node_of, key=lambda b: (bool(gpus) and b >= nodes, node_of[b] != driver, known.get(node_of[b], ""), node_of[b])
    )
    # Do not watch nodes that run only engines. The run continues without them as long as another node has engines
    # (``fleet``).
    optional = set(places.engines) - set(places.policy)
    required = [b for node, b in enumerate(bundles) if node not in optional]
    watch_nodes({node_of[b]: known.get(node_of[b], node_of[b]) for b in required})
    placement = Placement(
        places,
        group,
        tuple(bundles),
        tuple(known.get(node_of[b], "") for b in bundles),
        tuple(node_of[b] for b in bundles),
    )
    _check_shared(placement, [shared] * nodes + [[Path.cwd()]] * cluster.env_nodes)
    return placement


def _missing(nodes: int, bundle: dict[str, int], env_nodes: int) -> str:
    alive = live_nodes()
    fit = 0
    for node in alive.values():
        fit += all(node["Resources"].get(what, 0) >= count for what, count in bundle.items())
    requested = " and ".join(f"{count} {what}" for what, count in bundle.items())
    others = f" and {env_nodes} more with 1 CPU for environments (cluster.env_nodes)" if env_nodes else ""
    return (
        f"cluster.num_nodes: {nodes} nodes with {requested} each{others} were not free within {_JOIN_S:.0f} s; the Ray "
        f"cluster has {len(alive)} nodes, {fit} of that size, perhaps in use by another run"
    )


def _check_shared(placement: Placement, shared: Sequence[Sequence[Path]]) -> None:
    """Check that the folders of each node exist, before the first checkpoint needs them.

    Args:
        shared: folders that must exist, by node.
    """
    check = ray.remote(num_cpus=0, max_retries=0)(_absent)
    refs = []
    for node, paths in enumerate(shared):
        refs.append(check.options(**placement.on(node)).remote(list(map(str, paths))))
    for address, absent in zip(placement.addresses, gather(refs, "checking the nodes' folders", _LOOK_S)):
        if absent:
            raise RunError(f"{absent[0]} not found on node {address}; put it on a file system that all nodes share")


def _absent(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.isdir(path)]
