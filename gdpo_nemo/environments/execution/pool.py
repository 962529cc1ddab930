"""Verification in worker processes with time limits, and in threads for environments that call servers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, groupby
from pathlib import Path
from typing import Any, cast

from pebble import ProcessExpired, ProcessPool

from gdpo_nemo.data.records import Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import checked_verdicts
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep, RemoteEpisodes
from gdpo_nemo.environments.execution import worker
from gdpo_nemo.environments.execution.worker import RecordingSpawnContext
from gdpo_nemo.environments.registry import is_remote, load_environment
from gdpo_nemo.utils.errors import ConfigError, RunError, UserCodeFailed, first_line
from gdpo_nemo.utils.waits import WaitExpired, running, waiting

SHARD_SIZE = 32
"""Maximum number of trajectories in one task. The time limit applies to the whole task. The trajectories of a failed
task are retried individually. A shard exceeds this size only to keep the samples of a prompt together."""
RETRY_FAILURES = 3
"""Number of individual retries of a shard that may fail before its remaining trajectories count as failed. This bounds
the time that is lost if a verifier hangs on every sample."""
_ATTEMPTS = 3
"""Maximum number of pools to which a shard is sent, because a pool can break. See ``_replies``."""
_POLL_S = 0.5

type _Request = Trajectory | EpisodeStep
type _Reply = list[Any] | worker.Fault
type _Task = Callable[[str, Sequence[Any], float, int], _Reply]
"""Function type of ``worker.verify`` and ``worker.step``."""


class EnvironmentPool:
    """Worker processes that run the environments of a config.

    The workers start at the first ``verify``. ``verify`` may be called from several threads.

    Args:
        environments: config section ``env`` as plain dictionaries, options by environment name.
        workers: number of worker processes.
        timeout_s: time limit in seconds of one task: a shard, or a single trajectory that is retried.
        seed: base seed. Every task seeds Python's and NumPy's global generators with this seed and the prompt id.
        run_folder: run folder for remote environments, or None outside of training runs.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any] | None],
        workers: int = 1,
        timeout_s: float = 30.0,
        seed: int = 0,
        run_folder: Path | None = None,
    ):
        remote: dict[str, dict[str, Any]] = {}
        self._environments: dict[str, dict[str, Any]] = {}
        for name, section in environments.items():
            options = dict(section or {})
            (remote if is_remote(name, options) else self._environments)[name] = options
        self._remote = RemoteEnvironments(remote, run_folder)
        self._workers = max(1, workers)
        self._timeout_s = timeout_s
        self._seed = seed
        self._lock = threading.Lock()
        self._closed = False
        self._last_progress = running.now()
        self._recovered: Counter[str] = Counter()
        self._context = RecordingSpawnContext()
        self._pool = self._new_pool()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order.

        Trajectories are sharded by environment; consecutive samples of a prompt stay together.

        Raises:
            RunError: if an environment is unknown, its code raises, the workers cannot start, or the pool is closed.
        """
        for trajectory in trajectories:
            self._check_known(trajectory.prompt, remote_names=self._remote.names)
        with self._remote.verifying(trajectories) as wait_for_remote:
            local = [t for t in trajectories if t.prompt.environment in self._environments]
            verdicts = self._run(worker.verify, local, _failed)
            remote = wait_for_remote()
        return _in_order(remote, verdicts)

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """Run one step of every episode and return the replies, in order. Timeouts, dead workers and errors are handled
        as in ``verify``."""
        for step in steps:
            self._check_known(step.prompt, remote_names=self._remote.names)
        remote_steps = {i: step for i, step in enumerate(steps) if step.prompt.environment in self._remote.names}
        wait_for_remote = self._remote.replies(remote_steps)
        local = [step for i, step in enumerate(steps) if i not in remote_steps]
        replies = self._run(worker.step, local, lambda detail: EpisodeReply(outcome=Outcome.ENV_FAILED, detail=detail))
        return _in_order(wait_for_remote(), replies)

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """Run one step and return its reply. If a server runs the step, no thread waits for it. Cancelling the call
        abandons the episode."""
        if step.prompt.environment in self._remote.names:
            return await self._remote.reply(step)
        return (await asyncio.to_thread(self.step, [step]))[0]

    def abandon(self, step: EpisodeStep) -> None:
        """Release the server resources of an episode that will not be stepped again."""
        if step.state and step.prompt.environment in self._remote.names:
            self._remote.abandon(step.prompt.environment, step.state)

    def take_recoveries(self) -> Counter[str]:
        """Return the number of retries and worker replacements since the last call, by message."""
        with self._lock:
            self._note_deaths()
            recovered, self._recovered = self._recovered, Counter()
        return recovered

    def _note_deaths(self) -> None:
        """Record deaths of workers. Without this call, the death of an idle worker would not be reported. The caller
        must hold the lock."""
        self._recovered.update(f"a worker process ended {how} and was replaced" for how in self._context.take_deaths())

    def _check_known(self, prompt: Prompt, remote_names: Container[str] = ()) -> None:
        if prompt.environment not in self._environments and prompt.environment not in remote_names:
            raise RunError(f"prompt {prompt.id}: its environment {prompt.environment!r} is not defined in env")

    def _run(self, task: _Task, requests: Sequence[_Request], failed: Callable[[str], Any]) -> list[Any]:
        """Run a task for all requests and return the answers, in order.

        Args:
            failed: function that maps the one-line reason for a failed request to its answer.
        """
        answers: dict[int, Any] = {}
        shards = _split_into_shards(requests, self._workers)
        for shard, reply in zip(shards, self._replies(task, requests, shards)):
            if isinstance(reply, str):
                with self._lock:
                    self._recovered[f"{reply}; the samples of its shard were retried individually"] += 1
                answers.update(self._retry_individually(task, requests, shard, reply, failed))
            else:
                answers.update(zip(shard, reply))
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        """Stop the workers. A ``verify`` in flight in another thread raises RunError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._remote.close()
        _stop(self._pool)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _retry_individually(
        self, task: _Task, requests: Sequence[_Request], shard: Sequence[int], reason: str, failed: Callable[[str], Any]
    ) -> dict[int, Any]:
        """Run each request of a failed shard as a separate task. Return the answers by request index."""
        answers: dict[int, Any] = {}
        failures = 0
        for index in shard:
            if failures >= RETRY_FAILURES:
                answers[index] = failed(
                    f"{reason}; the sample was not retried individually, because {failures} other samples of its "
                    "shard failed"
                )
                continue
            [reply] = self._replies(task, requests, [[index]])
            if isinstance(reply, str):
                failures += 1
                answers[index] = failed(reply)
            else:
                answers[index] = reply[0]
        return answers

    def _replies(
        self, task: _Task, requests: Sequence[_Request], shards: Sequence[Sequence[int]]
    ) -> list[list[Any] | str]:
        """Return the answers of each shard, or a one-line reason if the shard failed.

        If a worker dies while it takes a task from the queue, pebble breaks the pool and fails all tasks. The failed
        tasks are then sent to a new pool.
        """
        replies: dict[int, list[Any] | str] = {}
        unanswered = list(range(len(shards)))
        for _ in range(_ATTEMPTS):
            batches = []
            for number in unanswered:
                batches.append([requests[i] for i in shards[number]])
            pool, futures = self._schedule(task, batches)
            try:
                outcomes = [self._result(pool, future) for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
            replies.update((number, reply) for number, reply in zip(unanswered, outcomes) if reply is not None)
            unanswered = [number for number in unanswered if number not in replies]
            if not unanswered:
                return [replies[number] for number in range(len(shards))]
            self._replace(pool)
        raise RunError(f"environment workers ({', '.join(self._environments)}) die during startup or while idle")

    def _schedule(self, task: _Task, shards: Sequence[Sequence[_Request]]) -> tuple[ProcessPool, list[Future[_Reply]]]:
        pool = self._pool
        futures: list[Future[_Reply]] = []
        for shard in shards:
            name = shard[0].prompt.environment
            try:
                future: Future[_Reply] = pool.schedule(
                    task, [name, shard, self._timeout_s, self._seed], timeout=self._timeout_s
                )
            except RuntimeError as error:  # the pool broke since it was last used
                self._check_open()
                future = Future()
                future.set_exception(BrokenProcessPool(str(error)))
            future.add_done_callback(self._note_progress)
            futures.append(future)
        self._last_progress = running.now()
        return pool, futures

    def _result(self, pool: ProcessPool, future: Future[_Reply]) -> list[Any] | str | None:
        """Return the answers of a task, a one-line reason if the task failed, or None if the pool broke.

        Raises RunError if the environment's code raised, or if the pool is closed.
        """
        # pebble enforces the time limit of a task. If no task ends for much longer than this limit, pebble itself is
        # stuck.
        stall_limit_s = worker.STARTUP_LIMIT_S + 2 * self._timeout_s + 30.0
        with waiting(f"verdicts of {', '.join(self._environments)}", "environments", self._timeout_s):
            while not wait([future], timeout=_POLL_S).done:
                self._check_open()
                if not pool.active:  # pebble loses a task that it takes from the queue while the pool breaks
                    return None
                if running.now() - self._last_progress > stall_limit_s:
                    raise WaitExpired(f"environment workers made no progress for {stall_limit_s:.0f} s")
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, BrokenProcessPool):
            self._check_open()
            return None
        if isinstance(error, TimeoutError):
            return f"verification exceeded {self._timeout_s:g} s"
        if isinstance(error, ProcessExpired):
            if error.exitcode == worker.EXIT_CALLED:
                return "the verifier ended its process (os._exit(0))"
            return f"verification process died (exit code {error.exitcode})"
        if error is not None:
            raise RunError(f"environment worker failed: {first_line(error)}")
        reply = future.result()
        if isinstance(reply, worker.Fault):
            raise UserCodeFailed(reply.message)
        return reply

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            initializer=worker.start,
            initargs=(self._environments, os.getpid()),
            context=self._context,
        )

    def _replace(self, broken: ProcessPool) -> None:
        with self._lock:
            if self._pool is broken and not self._closed:
                self._note_deaths()
                self._context = RecordingSpawnContext()  # workers of the stopped pool must not count as deaths
                self._pool = self._new_pool()
                _stop(broken)

    def _note_progress(self, _: Future[_Reply]) -> None:
        self._last_progress = running.now()

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the environment pool was closed during verification")


def _in_order(remote: Mapping[int, Any], local: Sequence[Any]) -> list[Any]:
    """Return all answers in the order of their requests, given the remote ones by index."""
    answers = list(local)
    for index in sorted(remote):
        answers.insert(index, remote[index])
    return answers


def _failed(detail: str) -> Verdict:
    return Verdict({}, Outcome.ENV_FAILED, detail)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # pebble has no annotations
    pool.join()


def _split_into_shards(requests: Sequence[_Request], workers: int) -> list[list[int]]:
    """Split requests into shards of about equal size, as lists of indices.

    A shard contains requests of one environment. Consecutive requests of the same prompt stay in one shard.
    """
    by_environment: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_environment.setdefault(request.prompt.environment, []).append(index)
    shards: list[list[int]] = []
    for indices in by_environment.values():
        target = min(SHARD_SIZE, math.ceil(len(indices) / workers))
        shard: list[int] = []
        for _, group in groupby(indices, key=lambda index: requests[index].prompt.id):
            if len(shard) >= target:
                shards.append(shard)
                shard = []
            shard = shard + list(group)
        shards.append(shard)
    return shards


class RemoteEnvironments:
    """Environments of a config with ``remote = True``. Their methods run on the driver, not in worker processes.

    Args:
        section: remote environments of the config section ``env``, options by environment name.
        run_folder: see ``EnvironmentPool``.
    """

    def __init__(self, section: Mapping[str, Mapping[str, Any]], run_folder: Path | None = None):
        self._environments = {name: load_environment(name, options) for name, options in section.items()}
        if run_folder is not None:
            for environment in self._environments.values():
                environment.use_run_folder(run_folder)
        self.names = frozenset(self._environments)

    @contextlib.contextmanager
    def verifying(self, trajectories: Sequence[Trajectory]) -> Iterator[Callable[[], dict[int, Verdict]]]:
        """Start verifying the trajectories of remote environments, and yield a function that waits for the verdicts.

        The function returns verdicts by index in ``trajectories``. The function raises RunError for invalid verdicts.
        """
        indices: dict[str, list[int]] = {}
        for i, trajectory in enumerate(trajectories):
            if trajectory.prompt.environment in self.names:
                indices.setdefault(trajectory.prompt.environment, []).append(i)
        with ThreadPoolExecutor(max(1, len(indices)), thread_name_prefix="remote") as threads:
            futures: dict[str, Future[list[Verdict]]] = {}
            for name, chosen in indices.items():
                futures[name] = threads.submit(self._verify, name, [trajectories[i] for i in chosen])

            def verdicts() -> dict[int, Verdict]:
                found: dict[int, Verdict] = {}
                for name, future in futures.items():
                    found.update(zip(indices[name], future.result()))
                return found

            yield verdicts

    def replies(self, steps: Mapping[int, EpisodeStep]) -> Callable[[], dict[int, EpisodeReply]]:
        """Start one step of each episode, and return a function that waits for all replies.

        The function raises RunError if an option is invalid or the environment is closed during the step.
        """
        futures = {i: self._start_step(step) for i, step in steps.items()}
        return lambda: {i: self._reply(steps[i], future) for i, future in futures.items()}

    async def reply(self, step: EpisodeStep) -> EpisodeReply:
        """Run one step and return its reply. No thread waits for the reply. Cancelling the call abandons the episode.

        Raises RunError like ``replies``.
        """
        name = step.prompt.environment
        try:
            return await asyncio.wrap_future(self._start_step(step))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _closed(name) from None
        except ConfigError as error:
            raise RunError(f"environment {name!r}: {error}") from error

    def abandon(self, name: str, state: bytes) -> None:
        """Release an episode that will not be stepped again."""
        self._episodes(name).abandon(state)

    def _episodes(self, name: str) -> RemoteEpisodes:
        return cast(RemoteEpisodes, self._environments[name])

    def _start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        return self._episodes(step.prompt.environment).start_step(step)

    def _reply(self, step: EpisodeStep, future: Future[EpisodeReply]) -> EpisodeReply:
        name = step.prompt.environment
        try:
            return future.result()
        except CancelledError:
            raise _closed(name) from None
        except ConfigError as error:
            raise RunError(f"environment {name!r}: {error}") from error

    def close(self) -> None:
        """Close the environments and cancel their work in flight."""
        for environment in self._environments.values():
            environment.close()

    def _verify(self, name: str, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        environment = self._environments[name]
        try:
            verdicts = environment.verify(trajectories)
            names: Sequence[str] = environment.reward_names
            if environment.open_rewards:
                names = list(chain.from_iterable(verdict.rewards for verdict in verdicts))
            return checked_verdicts(names, trajectories, verdicts)
        except (ConfigError, RunError) as error:
            raise RunError(f"environment {name!r}: {error}") from error


def _closed(name: str) -> RunError:
    return RunError(f"environment {name!r} was closed during a step")
