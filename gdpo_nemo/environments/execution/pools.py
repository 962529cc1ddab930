"""All environment pools of a run: a shared pool, and a dedicated pool for each environment with ``num_workers``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import dedicated_workers


class EnvironmentPools:
    """Environment pools of a run, with the same interface as ``EnvironmentPool``. Each environment with the option
    ``num_workers`` has dedicated worker processes.

    Args:
        environments: config section ``env``, options by environment name.
        workers: number of worker processes of the shared pool, for the environments without ``num_workers``.
        timeout_s, seed, run_folder: same as in ``EnvironmentPool``.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any] | None],
        workers: int = 1,
        timeout_s: float = 30.0,
        seed: int = 0,
        run_folder: Path | None = None,
    ):
        dedicated: dict[str, int] = {}
        shared = {}
        for name, options in environments.items():
            if number := dedicated_workers(name, options):
                dedicated[name] = number
            else:
                shared[name] = options
        # The shared pool has index 0. Prompts of unknown environments are also sent to this pool, which rejects them.
        self._pools = [EnvironmentPool(shared, workers, timeout_s, seed, run_folder)]
        self._pool_index: dict[str, int] = {}
        for name, number in dedicated.items():
            self._pool_index[name] = len(self._pools)
            self._pools.append(EnvironmentPool({name: environments[name]}, number, timeout_s, seed))

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. The pools run concurrently. Raises the same exceptions as
        ``EnvironmentPool.verify``."""
        return self._dispatch(EnvironmentPool.verify, trajectories)

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """Run one step of every episode and return the replies, in order, like ``EnvironmentPool.step``."""
        return self._dispatch(EnvironmentPool.step, steps)

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """Run one step of one episode and return its reply, like ``EnvironmentPool.step_one``."""
        return await self._pool_of(step).step_one(step)

    def abandon(self, step: EpisodeStep) -> None:
        """Release an episode, like ``EnvironmentPool.abandon``."""
        self._pool_of(step).abandon(step)

    def _pool_of(self, step: EpisodeStep) -> EnvironmentPool:
        return self._pools[self._pool_index.get(step.prompt.environment, 0)]

    def _dispatch(
        self, method: Callable[[EnvironmentPool, list[Any]], list[Any]], requests: Sequence[Any]
    ) -> list[Any]:
        indices_by_pool: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            indices_by_pool.setdefault(self._pool_index.get(request.prompt.environment, 0), []).append(index)
        if len(indices_by_pool) <= 1:
            return method(self._pools[next(iter(indices_by_pool), 0)], list(requests))
        answers: dict[int, Any] = {}
        with ThreadPoolExecutor(len(indices_by_pool)) as threads:
            futures = []
            for pool_number, indices in indices_by_pool.items():
                share = [requests[index] for index in indices]
                futures.append(threads.submit(method, self._pools[pool_number], share))
            for indices, future in zip(indices_by_pool.values(), futures):
                answers.update(zip(indices, future.result()))
        return [answers[index] for index in range(len(requests))]

    def take_recoveries(self) -> Counter[str]:
        """Return the retries and worker replacements of all pools, like ``EnvironmentPool.take_recoveries``."""
        return sum((pool.take_recoveries() for pool in self._pools), Counter())

    def close(self) -> None:
        """Stop the workers. A ``verify`` in flight in another thread raises RunError."""
        for pool in self._pools:
            pool.close()

    def __enter__(self) -> EnvironmentPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EnvironmentExecutor(Protocol):
    """Interface for running the environments of a config: ``EnvironmentPool``, ``EnvironmentPools`` or
    ``EnvironmentNodes``."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. Raises RunError if an environment's code raises or returns
        invalid values."""
        ...

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """Run one step of every episode and return the replies, in order. Raises RunError like ``verify``."""
        ...

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """Run one step and return its reply. If a server runs the step, no thread waits for it. Raises RunError."""
        ...

    def abandon(self, step: EpisodeStep) -> None:
        """Release the server resources of an episode that will not be stepped again."""
        ...

    def take_recoveries(self) -> Counter[str]:
        """Return the number of retries and worker replacements since the last call, by message."""
        ...

    def close(self) -> None:
        """Stop the worker processes. Calls in flight in other threads raise RunError."""
        ...
