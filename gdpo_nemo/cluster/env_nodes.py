"""Environments on separate nodes: the driver calls one actor per node, which runs the worker pools of its node.

An actor does the work that the driver does without environment nodes: it runs worker processes, enforces time limits
and returns typed verdicts. If an actor dies, it is replaced on the same node and its call is repeated. Environments
that run on servers are called from the driver.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.cluster.cleanup_process import guard_children
from gdpo_nemo.cluster.fork_server import thread_environment
from gdpo_nemo.cluster.reservation import Placement
from gdpo_nemo.cluster.session import WorkerDied, answered, gather, ray
from gdpo_nemo.config.placement import SHARED, place_workers
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.registry import is_remote
from gdpo_nemo.utils.errors import ConfigError, InfrastructureFailed, RunError
from gdpo_nemo.utils.waits import WaitExpired

_CALLS = 64
"""Maximum number of concurrent calls to an actor. The limit is high, because liveness checks must not queue."""
_LIVENESS_S = 60.0
"""Time without an answer after which an actor's liveness is checked, and the time limit of this check."""
_REPLACEMENTS = 3
"""Maximum number of replacements of an actor during one call."""
_CLOSE_S = 10.0
"""Time limit for actors to end their workers."""


class EnvironmentHost:
    """Ray actor that runs the worker pools of one node.

    Args:
        folder: working directory of the driver, to which paths in the config are relative.

    The other arguments are those of ``EnvironmentPools``.
    """

    def __init__(self, folder: str, environments: Mapping[str, Any], workers: int, timeout_s: float, seed: int):
        os.chdir(folder)
        guard_children()
        self._pools = EnvironmentPools(environments, workers, timeout_s, seed)

    def process_location(self) -> tuple[str, int]:
        """Return (host name, process id) of this actor."""
        return socket.gethostname(), os.getpid()

    def verify(self, trajectories: Sequence[Trajectory]) -> tuple[list[Verdict], Counter[str]]:
        """Return the results of ``EnvironmentPools.verify`` and ``take_recoveries``."""
        return self._pools.verify(trajectories), self._pools.take_recoveries()

    def step(self, steps: Sequence[EpisodeStep]) -> tuple[list[EpisodeReply], Counter[str]]:
        """Return the results of ``EnvironmentPools.step`` and ``take_recoveries``."""
        return self._pools.step(steps), self._pools.take_recoveries()

    def close(self) -> None:
        """End the workers and remove the semaphores that they share with this process. This must be the last call."""
        self._pools.close()
        del self._pools
        gc.collect()


class EnvironmentNodes:
    """``EnvironmentPools`` whose workers run on environment nodes (``cluster.env_nodes``).

    Raises:
        ConfigError: if no environment in the config has workers.
    """

    def __init__(self, config: Config, placement: Placement, run_folder: Path | None = None):
        rollout = config.rollout
        seed = config.run.seed
        remote = {}
        self._on_nodes: dict[str, dict[str, Any]] = {}
        for name, options in config.env.items():
            if is_remote(name, options or {}):
                remote[name] = options
            else:
                self._on_nodes[name] = dict(options or {})
        if not self._on_nodes:
            raise ConfigError("cluster.env_nodes: has no effect, because all environments run on servers; remove it")
        self._driver_pools = EnvironmentPools(remote, 1, rollout.env_timeout_s, seed, run_folder)
        self._workers_by_node = place_workers(config)
        self._limits = rollout.env_timeout_s, seed
        self._nodes = [config.cluster.num_nodes + index for index in range(len(self._workers_by_node))]
        self._placement = placement
        self._lock = threading.Lock()
        self._closed = False
        self._recovered: Counter[str] = Counter()
        self._locations: dict[int, ray.ObjectRef] = {}
        self._actors = [self._start(index) for index in range(len(self._workers_by_node))]

    def _start(self, index: int) -> ray.actor.ActorHandle:
        workers = self._workers_by_node[index]
        section: dict[str, Any] = {}
        for name, options in self._on_nodes.items():
            if options.get("num_workers") is None:
                if SHARED in workers:
                    section[name] = options
            elif name in workers:
                section[name] = {**options, "num_workers": workers[name]}
        # Worker processes inherit this setting. Each worker gets one thread, because there are enough workers to use
        # all cores.
        environment = {**thread_environment(1), "CUDA_VISIBLE_DEVICES": ""}
        options = dict(num_cpus=0, max_concurrency=_CALLS, runtime_env={"env_vars": environment})
        actor = ray.remote(EnvironmentHost).options(**options, **self._placement.on(self._nodes[index]))
        host = actor.remote(os.getcwd(), section, workers.get(SHARED, 1), *self._limits)
        self._locations[index] = host.process_location.remote()
        return host

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """Return (host name, process id) of every actor that has started, by number of the environment node."""
        return answered(dict(self._locations))

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return the verdict of each trajectory, in order.

        Raises:
            InfrastructureFailed: if an actor dies repeatedly.

        This method also raises the errors of ``EnvironmentPool.verify``.
        """
        return self._call_all("verify", trajectories)

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """Run one step of each episode. See ``EnvironmentPool.step``."""
        return self._call_all("step", steps)

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """Run one step of one episode. See ``EnvironmentPool.step_one``."""
        if step.prompt.environment not in self._on_nodes:
            return await self._driver_pools.step_one(step)
        return (await asyncio.to_thread(self.step, [step]))[0]

    def abandon(self, step: EpisodeStep) -> None:
        """Release an episode (see ``EnvironmentPool.abandon``). Only environments on servers need this."""
        self._driver_pools.abandon(step)

    def _call_all(self, method: str, items: Sequence[Any]) -> list[Any]:
        """Call a method in the driver and on all nodes, each with its part of the items. Return answers in order."""
        parts = self._indices_by_node(items)
        calls = []
        answers: dict[int, Any] = {}
        with ThreadPoolExecutor(max(1, len(parts)), thread_name_prefix="environments") as threads:
            for node, indices in parts.items():
                part = [items[index] for index in indices]
                calls.append(threads.submit(self._call_node, node, method, part))
            for indices, call in zip(parts.values(), calls):
                answers.update(zip(indices, call.result()))
        return [answers[index] for index in range(len(items))]

    def _indices_by_node(self, items: Sequence[Any]) -> dict[int | None, list[int]]:
        """Return item indices by node, in proportion to the number of workers. The driver's items have the key None."""
        pools: dict[Any, list[int]] = {}
        parts: dict[int | None, list[int]] = {}
        for index, item in enumerate(items):
            name = item.prompt.environment
            if name not in self._on_nodes:  # a server, or an unknown name, which the pools reject
                parts.setdefault(None, []).append(index)
                continue
            has_workers = self._on_nodes[name].get("num_workers") is not None
            pools.setdefault(name if has_workers else SHARED, []).append(index)
        for pool, indices in pools.items():
            shares = [workers.get(pool, 0) for workers in self._workers_by_node]
            for node, part in enumerate(divide(indices, shares, lambda index: items[index].prompt.id)):
                if part:
                    parts.setdefault(node, []).extend(part)
        return parts

    def _call_node(self, node: int | None, method: str, items: list[Any]) -> list[Any]:
        if node is None:
            results: list[Any] = getattr(self._driver_pools, method)(items)
            return results
        for _ in range(1 + _REPLACEMENTS):
            actor = self._actors[node]
            try:
                answers: list[Any]
                answers, recovered = self._wait(node, actor, getattr(actor, method).remote(items))
                with self._lock:
                    for sentence, count in recovered.items():
                        self._recovered[f"{sentence} (node {node})"] += count
                return answers
            except WorkerDied as error:
                self._replace(node, actor, error)
        raise InfrastructureFailed(f"environment node {node}: its process died {1 + _REPLACEMENTS} times in a row")

    def _wait(self, node: int, actor: Any, ref: Any) -> Any:
        """Wait for the answer as long as the actor is alive. The pools enforce the time limits of environments."""
        owner = f"environment node {node}"
        what = f"verdicts of {', '.join(self._on_nodes)}"
        while True:
            try:
                return gather([ref], what, _LIVENESS_S, owner)[0]
            except WaitExpired:
                if ray.wait([ref], timeout=0)[0]:
                    break
                gather([actor.process_location.remote()], f"liveness check of {owner}", _LIVENESS_S, owner)
        # Either the actor itself has raised WaitExpired, which this call raises again, or the answer has just arrived.
        return gather([ref], what, _LIVENESS_S, owner)[0]

    def _replace(self, node: int, dead: Any, error: WorkerDied) -> None:
        with self._lock:
            if self._closed:
                raise RunError("the environment pool was closed during verification") from error
            if self._actors[node] is dead:
                self._recovered[f"the process of node {node} died and was replaced ({error})"] += 1
                self._actors[node] = self._start(node)

    def take_recoveries(self) -> Counter[str]:
        """Return and clear the recoveries of all nodes and the driver. See ``EnvironmentPool.take_recoveries``."""
        with self._lock:
            taken, self._recovered = self._recovered, Counter()
        return taken + self._driver_pools.take_recoveries()

    def close(self) -> None:
        """End the actors and their workers. A concurrent ``verify`` in another thread raises RunError."""
        with self._lock:
            self._closed = True
        self._driver_pools.close()
        # Ray kills an actor together with its children, which include multiprocessing's tracker of named semaphores.
        # Semaphores that the actor has not removed before would remain on its node.
        ray.wait([actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)


def divide(indices: Sequence[int], shares: Sequence[int], group_of: Callable[[int], Any]) -> list[list[int]]:
    """Split ``indices`` into one part per share, with sizes proportional to the shares.

    Adjacent indices of the same group (``group_of``) are not separated, so the proportions are approximate.
    """
    bounds = np.cumsum(shares) * len(indices) / sum(shares)
    parts: list[list[int]] = [[] for _ in shares]
    done = 0
    for _, members in groupby(indices, key=group_of):
        group = list(members)
        # A group that crosses a boundary goes to the part that contains its middle, and thus most of the group.
        parts[int(np.searchsorted(bounds, done + len(group) / 2))] += group
        done += len(group)
    return parts
