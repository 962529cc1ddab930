"""The worker processes of a run: one pool that environments share, and one for each that asks for its own.

An environment with ``num_workers: N`` in its section has N processes to itself, so that slow verifiers neither wait for
others nor hold them up. The rest share ``rollout.env_workers`` processes.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Mapping, Sequence

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import own_workers


class EnvironmentPools:
    """The same as ``EnvironmentPool``, with processes of their own for environments that ask for them.

    Args: as for ``EnvironmentPool``; ``workers`` are those of the environments without ``num_workers``.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any] | None],
        workers: int = 1,
        timeout_s: float = 30.0,
        seed: int = 0,
    ):
        own = {name: number for name, options in environments.items() if (number := own_workers(name, options))}
        shared = {name: options for name, options in environments.items() if name not in own}
        # The shared pool, which comes first, is also what refuses unknown environments.
        self._pools = [EnvironmentPool(shared, workers, timeout_s, seed)]
        self._pools += [
            EnvironmentPool({name: environments[name]}, number, timeout_s, seed) for name, number in own.items()
        ]
        self._place = {name: place for place, name in enumerate(own, start=1)}

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order; the pools work side by side. Raises as ``EnvironmentPool.verify``."""
        return self._spread(EnvironmentPool.verify, trajectories)

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """One step of every episode, in order, as ``EnvironmentPool.step``."""
        return self._spread(EnvironmentPool.step, steps)

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """One step of one episode, as ``EnvironmentPool.step_one``."""
        return await self._pool_of(step).step_one(step)

    def abandon(self, step: EpisodeStep) -> None:
        """Release an episode, as ``EnvironmentPool.abandon``."""
        self._pool_of(step).abandon(step)

    def _pool_of(self, step: EpisodeStep) -> EnvironmentPool:
        return self._pools[self._place.get(step.prompt.environment, 0)]

    def _spread(self, method: Callable[[EnvironmentPool, list], list], asked: Sequence[Any]) -> list:
        parts: dict[int, list[int]] = {}
        for index, item in enumerate(asked):
            parts.setdefault(self._place.get(item.prompt.environment, 0), []).append(index)
        if len(parts) <= 1:
            return method(self._pools[next(iter(parts), 0)], list(asked))
        answers: dict[int, Any] = {}
        with ThreadPoolExecutor(len(parts)) as threads:
            running = {
                place: threads.submit(method, self._pools[place], [asked[index] for index in indices])
                for place, indices in parts.items()
            }
            for place, indices in parts.items():
                answers.update(zip(indices, running[place].result()))
        return [answers[index] for index in range(len(asked))]

    def take_recoveries(self) -> Counter[str]:
        """As ``EnvironmentPool.take_recoveries``, of all pools."""
        return sum((pool.take_recoveries() for pool in self._pools), Counter())

    def close(self) -> None:
        """End the workers. A ``verify`` under way in another thread raises RunError."""
        for pool in self._pools:
            pool.close()

    def __enter__(self) -> EnvironmentPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
