"""Nodes of a Ray cluster for one run: reserved together by a placement group, one bundle a node, checked before use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from gdpo_nemo.cluster.session import gather, ray, watch_nodes
from gdpo_nemo.config.placement import Places, joined, place
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import InfrastructureFailed, RunError

_JOIN_S = 300.0
"""Limit for all nodes to join the cluster and be free."""
_LOOK_S = 120.0
"""Limit for every node to list its folders; the first task on a node starts a Python process there."""


@dataclass(frozen=True)
class Placement:
    """Where the processes of a run go."""

    places: Places
    group: Any = None
    """Ray's placement group; None: this machine, in a session of our own."""
    bundles: tuple[int, ...] = ()
    """Bundle of the group for every node of ``places``, then for every environment node."""
    addresses: tuple[str, ...] = ()
    """Address of every node, in the same order."""
    nodes: tuple[str, ...] = ()
    """Ray's id of every node, in the same order."""

    def is_lost(self, node: int) -> bool:
        """Whether a node has left the cluster."""
        return bool(self.nodes) and self.nodes[node] not in {n["NodeID"] for n in ray.nodes() if n["Alive"]}

    def on(self, node: int) -> dict[str, Any]:
        """Options that put a Ray actor or task on a node."""
        if self.group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundles[node])}

    def environment(self, node: int) -> dict[str, str]:
        """Variables that make vLLM use the address that the node has in the cluster."""
        return {"VLLM_HOST_IP": self.addresses[node]} if self.addresses else {}


def here(config: Config) -> Placement:
    """Place everything on this machine, whatever ``cluster.num_nodes`` says."""
    layout = place(config)
    return Placement(Places((0,) * len(layout.policy), (0,) * len(layout.engines), layout.shared))


def reserve(config: Config, shared: Sequence[Path]) -> Placement:
    """Reserve the nodes of a run; the driver's own node comes first if it is one of them.

    Args:
        shared: folders that must be visible on every node; those for environments need the working directory instead.

    Raises:
        RunError: the nodes are not free in time, or one does not see a folder.
    """
    if not joined(config.cluster):
        return here(config)
    from ray.util.placement_group import placement_group, placement_group_table

    nodes = config.cluster.num_nodes
    gpus = config.cluster.gpus_per_node
    bundle = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    wanted = [bundle] * nodes + [{"CPU": 1}] * config.cluster.env_nodes
    group = placement_group(wanted, strategy="STRICT_SPREAD")
    if not group.wait(_JOIN_S):
        raise InfrastructureFailed(_missing(nodes, bundle, config.cluster.env_nodes))
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    taken = placement_group_table(group)["bundles_to_node_id"]
    driver = ray.get_runtime_context().get_node_id()
    # Without GPUs all bundles are equal, so choose: the driver's node is no environment node. Then by address, for an
    # order that is the same at every start.
    bundles = sorted(
        taken, key=lambda b: (bool(gpus) and b >= nodes, taken[b] != driver, known.get(taken[b], ""), taken[b])
    )
    places = place(config)
    # A node with engines alone can be done without, as long as another has some (``fleet``).
    spare = set(places.engines) - set(places.policy)
    needed = [b for node, b in enumerate(bundles) if node not in spare]
    watch_nodes({taken[b]: known.get(taken[b], taken[b]) for b in needed})
    placement = Placement(
        places,
        group,
        tuple(bundles),
        tuple(known.get(taken[b], "") for b in bundles),
        tuple(taken[b] for b in bundles),
    )
    _check_shared(placement, [shared] * nodes + [[Path.cwd()]] * config.cluster.env_nodes)
    return placement


def _missing(nodes: int, bundle: dict[str, int], env_nodes: int) -> str:
    alive = [node for node in ray.nodes() if node["Alive"]]
    fit = sum(all(node["Resources"].get(what, 0) >= count for what, count in bundle.items()) for node in alive)
    wanted = " and ".join(f"{count} {what}" for what, count in bundle.items())
    others = f" and {env_nodes} more with 1 CPU for environments (cluster.env_nodes)" if env_nodes else ""
    return (
        f"cluster.num_nodes: {nodes} nodes with {wanted} each{others} were not free within {_JOIN_S:.0f} s; the Ray "
        f"cluster has {len(alive)} nodes, {fit} of that size, perhaps in use by another run"
    )


def _check_shared(placement: Placement, shared: Sequence[Sequence[Path]]) -> None:
    """Check that every node sees its folders (``shared``, node by node), now and not at the first checkpoint."""
    look = ray.remote(num_cpus=0, max_retries=0)(_absent)
    refs = [
        look.options(**placement.on(node)).remote([str(path) for path in paths]) for node, paths in enumerate(shared)
    ]
    for address, absent in zip(placement.addresses, gather(refs, "checking the nodes' folders", _LOOK_S)):
        if absent:
            raise RunError(f"node {address} does not see {absent[0]}: it must be on a file system that all nodes share")


def _absent(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.isdir(path)]
