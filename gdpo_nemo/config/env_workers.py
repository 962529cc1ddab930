"""How many environment workers go to which of the nodes that are kept for environments. Pure arithmetic."""

from __future__ import annotations

from itertools import count

from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

SHARED = None
"""Stands for the workers that environments without ``num_workers`` share."""


def worker_pools(config: Config) -> dict[str | None, int]:
    """Worker processes of every environment that has its own, and of those that share (``rollout.env_workers``)."""
    own = {name: (options or {}).get("num_workers") for name, options in config.env.items()}
    pools: dict[str | None, int] = {SHARED: config.rollout.env_workers} if None in own.values() else {}
    return pools | {name: number for name, number in own.items() if isinstance(number, int)}


def place_workers(config: Config) -> list[dict[str | None, int]]:
    """For each of ``cluster.env_nodes`` its workers by pool, assigned in turn, so that nodes differ by one at most.

    Raises:
        ConfigError: there are fewer workers than nodes.
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
            f"cluster.env_nodes: {nodes} nodes for {total} environment workers ({' + '.join(parts)}); a node takes at "
            "least one"
        )
    return loads
