"""Environments on separate nodes: an actor on each holds the worker pools and is called by the driver.

Inside the actor everything is as it otherwise is in the driver: worker processes, time limits, typed verdicts. An actor
that dies is replaced on the same node, and its call is repeated. Environments that are clients of servers stay in the
driver.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.cluster.reaper import guard_children
from gdpo_nemo.cluster.reservation import Placement
from gdpo_nemo.cluster.session import WorkerDied, answered, gather, ray, thread_environment
from gdpo_nemo.config.env_workers import SHARED, place_workers
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution.dispatch import EnvironmentPools
from gdpo_nemo.environments.execution.remote import is_remote
from gdpo_nemo.errors import ConfigError, InfrastructureFailed, RunError
from gdpo_nemo.waits import WaitExpired

_CALLS = 64
"""Concurrent calls of one actor: the driver's few, and always room for the sign of life, which must not queue."""
_LOOK_S = 60.0
"""Silence after which an actor is asked for a sign of life, and the limit for that answer."""
_REPLACEMENTS = 3
_CLOSE_S = 10.0
"""Longest wait for actors to end their workers."""


class EnvironmentHost:
    """The worker pools of one node inside a Ray actor.

    Args: as for ``EnvironmentPools``; ``folder`` is the driver's working directory, which paths in the config start
    from.
    """

    def __init__(self, folder: str, environments: Mapping[str, Any], workers: int, timeout_s: float, seed: int):
        os.chdir(folder)
        guard_children()
        self._pools = EnvironmentPools(environments, workers, timeout_s, seed)

    def process_location(self) -> tuple[str, int]:
        """(host, process) of this actor."""
        return socket.gethostname(), os.getpid()

    def verify(self, trajectories: Sequence[Trajectory]) -> tuple[list[Verdict], Counter[str]]:
        """As ``EnvironmentPools.verify``, and what was done again for it."""
        return self._pools.verify(trajectories), self._pools.take_recoveries()

    def step(self, steps: Sequence[EpisodeStep]) -> tuple[list[EpisodeReply], Counter[str]]:
        """As ``EnvironmentPools.step``, and what was done again for it."""
        return self._pools.step(steps), self._pools.take_recoveries()

    def close(self) -> None:
        """End the workers, and remove the semaphores that they share with this process. Nothing works afterwards."""
        self._pools.close()
        del self._pools
        gc.collect()


class EnvironmentNodes:
    """``EnvironmentPools`` with the workers on the nodes of ``cluster.env_nodes``.

    Raises:
        ConfigError: no environment of the config has workers.
    """

    def __init__(self, config: Config, placement: Placement):
        rollout = config.rollout
        seed = config.run.seed
        remote = {name: options for name, options in config.env.items() if is_remote(name, options or {})}
        self._local = {name: dict(options or {}) for name, options in config.env.items() if name not in remote}
        if not self._local:
            raise ConfigError(
                "cluster.env_nodes: has no effect, every environment here is a client of servers; remove it"
            )
        self._here = EnvironmentPools(remote, 1, rollout.env_timeout_s, seed)
        self._loads = place_workers(config)
        self._limits = rollout.env_timeout_s, seed
        self._nodes = [config.cluster.num_nodes + index for index in range(len(self._loads))]
        self._placement = placement
        self._lock = threading.Lock()
        self._closed = False
        self._recovered: Counter[str] = Counter()
        self._locations: dict[int, ray.ObjectRef] = {}
        self._actors = [self._start(index) for index in range(len(self._loads))]

    def _start(self, index: int):
        load = self._loads[index]
        section: dict[str, Any] = {}
        for name, options in self._local.items():
            if "num_workers" not in options or options["num_workers"] is None:
                section |= {name: options} if SHARED in load else {}
            elif name in load:
                section[name] = {**options, "num_workers": load[name]}
        # One thread: the workers, a process each, inherit this, and there are as many of them as the node is to bear.
        environment = {**thread_environment(1), "CUDA_VISIBLE_DEVICES": ""}
        options = dict(num_cpus=0, max_concurrency=_CALLS, runtime_env={"env_vars": environment})
        actor = ray.remote(EnvironmentHost).options(**options, **self._placement.on(self._nodes[index]))
        host = actor.remote(os.getcwd(), section, load.get(SHARED, 1), *self._limits)
        self._locations[index] = host.process_location.remote()
        return host

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """(host, process) of every actor that has started, by the number of its node among those for environments."""
        return answered(dict(self._locations))

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order; raises as ``EnvironmentPool.verify``, and RunError where actors keep
        dying."""
        return self._spread("verify", trajectories)

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """One step of every episode, in order, as ``EnvironmentPool.step``."""
        return self._spread("step", steps)

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """One step of one episode, as ``EnvironmentPool.step_one``."""
        if step.prompt.environment not in self._local:
            return await self._here.step_one(step)
        return (await asyncio.to_thread(self.step, [step]))[0]

    def abandon(self, step: EpisodeStep) -> None:
        """Release an episode, as ``EnvironmentPool.abandon``: what servers hold is known here."""
        self._here.abandon(step)

    def _spread(self, method: str, asked: Sequence[Any]) -> list:
        parts = {place: indices for place, indices in self._parts(asked).items() if indices}
        answers: dict[int, Any] = {}
        with ThreadPoolExecutor(max(1, len(parts)), thread_name_prefix="environments") as threads:
            running = {
                place: threads.submit(self._ask, place, method, [asked[index] for index in indices])
                for place, indices in parts.items()
            }
            for place, indices in parts.items():
                answers.update(zip(indices, running[place].result()))
        return [answers[index] for index in range(len(asked))]

    def _parts(self, asked: Sequence[Any]) -> dict[int | None, list[int]]:
        """Indices by node, in proportion to its workers; None is the driver itself."""
        pools: dict[Any, list[int]] = {}
        parts: dict[int | None, list[int]] = {None: []}
        for index, item in enumerate(asked):
            name = item.prompt.environment
            if name not in self._local:  # a client of servers; or unknown, which the driver's pool refuses
                parts[None].append(index)
                continue
            own = self._local[name].get("num_workers") is not None
            pools.setdefault(name if own else SHARED, []).append(index)
        for pool, indices in pools.items():
            shares = [load.get(pool, 0) for load in self._loads]
            for place, part in enumerate(divide(indices, shares, lambda index: asked[index].prompt.id)):
                parts.setdefault(place, []).extend(part)
        return parts

    def _ask(self, place: int | None, method: str, asked: list) -> list:
        if place is None:
            return getattr(self._here, method)(asked)
        for _ in range(1 + _REPLACEMENTS):
            actor = self._actors[place]
            try:
                answers, recovered = self._wait(place, actor, getattr(actor, method).remote(asked))
                with self._lock:
                    self._recovered.update({f"{sentence} (node {place})": n for sentence, n in recovered.items()})
                return answers
            except WorkerDied as error:
                self._replace(place, actor, error)
        raise InfrastructureFailed(f"environment node {place}: its process died {1 + _REPLACEMENTS} times in a row")

    def _wait(self, place: int, actor: Any, ref: Any) -> Any:
        """Wait for the answer. The pools inside enforce the deadlines; this only watches whether the actor lives."""
        owner = f"environment node {place}"
        what = f"verdicts of {', '.join(self._local)}"
        while True:
            try:
                return gather([ref], what, _LOOK_S, owner)[0]
            except WaitExpired:
                if ray.wait([ref], timeout=0)[0]:
                    break
                gather([actor.process_location.remote()], f"a sign of life of {owner}", _LOOK_S, owner)
        # Either WaitExpired came from inside the actor, and is raised again here, or the answer has just come.
        return gather([ref], what, _LOOK_S, owner)[0]

    def _replace(self, place: int, dead: Any, error: WorkerDied) -> None:
        with self._lock:
            if self._closed:
                raise RunError("the environment pool was closed during verification") from error
            if self._actors[place] is dead:
                self._recovered[f"the process of node {place} died and was replaced ({error})"] += 1
                self._actors[place] = self._start(place)

    def take_recoveries(self) -> Counter[str]:
        """As ``EnvironmentPool.take_recoveries``, of all nodes and of the driver."""
        with self._lock:
            taken, self._recovered = self._recovered, Counter()
        return taken + self._here.take_recoveries()

    def close(self) -> None:
        """End the actors and their workers. A ``verify`` under way in another thread raises RunError."""
        with self._lock:
            self._closed = True
        self._here.close()
        # Ray kills an actor with its children, multiprocessing's tracker of named semaphores among them: what an actor
        # has not removed itself would stay on its node.
        ray.wait([actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)


def divide(indices: Sequence[int], shares: Sequence[int], group_of) -> list[list[int]]:
    """Split ``indices`` into one part per share, roughly in proportion; neighbours of one group stay together."""
    bounds = np.cumsum(shares) * len(indices) / sum(shares)
    parts: list[list[int]] = [[] for _ in shares]
    done = 0
    for _, members in groupby(indices, key=group_of):
        group = list(members)
        # By its middle, so that a group on a boundary goes to the part that holds most of it.
        parts[int(np.searchsorted(bounds, done + len(group) / 2))] += group
        done += len(group)
    return parts
