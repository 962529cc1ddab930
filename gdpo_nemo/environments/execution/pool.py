"""Verification in worker processes, where a verifier that hangs, crashes or floods its output cannot harm the run.

Built on pebble's ProcessPool, which kills a worker at the task's time limit and starts another. Workers are spawned,
never forked: a fork would copy locks that other threads of the driver hold. Three things can happen to a shard of
trajectories:

* it is verified: its verdicts are returned;
* it exceeds the time limit or its process dies: its members are tried once more one by one, and those that fail again
  are ``env_failed``, which is never a reward;
* the environment's code is wrong (it raises, returns too few values or an infinite one): RunError.

Environments that are clients of servers elsewhere (``remote``) need no such protection; they run in threads of the
driver.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import Counter
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import groupby
from typing import Any, Callable, Container, Mapping, Sequence

from pebble import ProcessExpired, ProcessPool

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution import worker
from gdpo_nemo.environments.execution.remote import RemoteEnvironments, is_remote
from gdpo_nemo.environments.execution.spawning import Spawning
from gdpo_nemo.errors import RunError, UserCodeFailed
from gdpo_nemo.waits import WaitExpired, running, waiting

SHARD_SIZE = 32
"""Trajectories in one task: the time limit is per task, and a failed one is repeated member by member. A shard exceeds
it only to keep the samples of one prompt together."""
RETRY_FAILURES = 3
"""Members of a shard that may fail alone before the rest counts as failed: a verifier that always hangs costs a few
time limits, not one per sample."""
_ATTEMPTS = 3
"""Pools tried for one shard; see ``_replies``."""
_POLL_S = 0.5


class EnvironmentPool:
    """Worker processes that hold the environments of a config.

    Args:
        environments: the config section ``env`` as plain dictionaries, options by environment name.
        workers: worker processes.
        timeout_s: seconds one verification task (a shard, or a single member of it) may take.
        seed: seed of Python's and NumPy's global generators in the workers, renewed for every task.

    Workers start at the first ``verify``. ``verify`` may be called from several threads.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any] | None],
        workers: int = 1,
        timeout_s: float = 30.0,
        seed: int = 0,
    ):
        sections = {name: dict(options or {}) for name, options in environments.items()}
        self._remote = RemoteEnvironments({n: options for n, options in sections.items() if is_remote(n, options)})
        self._environments = {n: options for n, options in sections.items() if n not in self._remote.names}
        self._workers = max(1, workers)
        self._timeout_s = timeout_s
        self._seed = seed
        self._lock = threading.Lock()
        self._closed = False
        self._last_progress = running.now()
        self._recovered: Counter[str] = Counter()
        self._spawning = Spawning()
        self._pool = self._new_pool()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order.

        Trajectories are sharded by environment, the consecutive samples of a prompt staying together. Raises RunError
        for an unknown environment, a mistake in an environment's code, workers that cannot start, or a closed pool.
        """
        for trajectory in trajectories:
            self._check_known(trajectory.prompt, also=self._remote.names)
        with self._remote.verifying(trajectories) as elsewhere:
            here = [t for t in trajectories if t.prompt.environment in self._environments]
            verdicts = iter(self._run(worker.verify, here, _failed))
            remote = elsewhere()
        return [remote[i] if i in remote else next(verdicts) for i in range(len(trajectories))]

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """One step of every episode, in order; time-outs, deaths and mistakes are treated as by ``verify``."""
        for step in steps:
            self._check_known(step.prompt, also=self._remote.names)
        elsewhere = {i: step for i, step in enumerate(steps) if step.prompt.environment in self._remote.names}
        wait_for_remote = self._remote.replies(elsewhere)
        here = [step for i, step in enumerate(steps) if i not in elsewhere]
        replies = iter(
            self._run(worker.step, here, lambda detail: EpisodeReply(outcome=Outcome.ENV_FAILED, detail=detail))
        )
        remote = wait_for_remote()
        return [remote[i] if i in remote else next(replies) for i in range(len(steps))]

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """As ``step`` for one episode. While a server does the step no thread waits for it; cancelled, the episode is
        abandoned."""
        if step.prompt.environment in self._remote.names:
            return await self._remote.reply(step)
        return (await asyncio.to_thread(self.step, [step]))[0]

    def abandon(self, step: EpisodeStep) -> None:
        """Release what a server holds for the episode, which nobody will step again."""
        if step.state and step.prompt.environment in self._remote.names:
            self._remote.abandon(step.prompt.environment, step.state)

    def take_recoveries(self) -> Counter[str]:
        """What went wrong and was done again since the last call, and how often: a sentence each."""
        with self._lock:
            self._note_deaths()
            taken, self._recovered = self._recovered, Counter()
        return taken

    def _note_deaths(self) -> None:
        """Those of workers; one that had no task would pass unseen. Under the lock."""
        self._recovered.update(f"a worker process ended {how} and was replaced" for how in self._spawning.take_deaths())

    def _check_known(self, prompt: Prompt, also: Container[str] = ()) -> None:
        if prompt.environment not in self._environments and prompt.environment not in also:
            raise RunError(f"prompt {prompt.id} names the environment {prompt.environment!r}, which env does not have")

    def _run(self, task: Callable, asked: Sequence[Trajectory | EpisodeStep], failed: Callable[[str], Any]) -> list:
        """The workers' answer to each of ``asked``, in order; ``failed(line)`` for those without one."""
        answers: dict[int, Any] = {}
        shards = _shards(asked, self._workers)
        for shard, reply in zip(shards, self._replies(task, asked, shards)):
            if isinstance(reply, str):
                with self._lock:
                    self._recovered[f"{reply}: its samples were tried again one by one"] += 1
                answers.update(self._one_by_one(task, asked, shard, reply, failed))
            else:
                answers.update(zip(shard, reply))
        return [answers[index] for index in range(len(asked))]

    def close(self) -> None:
        """End the workers. A ``verify`` under way in another thread raises RunError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._remote.close()
        _end(self._pool)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one_by_one(self, task, asked, shard: Sequence[int], reason: str, failed) -> dict[int, Any]:
        """Answers of a shard that failed as a whole: each member in its own task."""
        answers: dict[int, Any] = {}
        failures = 0
        for index in shard:
            if failures >= RETRY_FAILURES:
                answers[index] = failed(f"{reason}; not tried alone after {failures} other samples of its shard failed")
                continue
            [reply] = self._replies(task, asked, [[index]])
            if isinstance(reply, str):
                failures += 1
                answers[index] = failed(reply)
            else:
                answers[index] = reply[0]
        return answers

    def _replies(self, task, asked: Sequence, shards: Sequence[Sequence[int]]) -> list[list | str]:
        """For each shard its answers, or one line with the reason why there are none.

        When a worker dies while it takes a task, pebble gives up the whole pool with all its tasks; the innocent ones
        are sent to a new pool.
        """
        replies: dict[int, list | str] = {}
        open_shards = list(range(len(shards)))
        for _ in range(_ATTEMPTS):
            pool, futures = self._schedule(task, [[asked[i] for i in shards[number]] for number in open_shards])
            try:
                outcomes = [self._result(future) for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
            replies.update((number, reply) for number, reply in zip(open_shards, outcomes) if reply is not None)
            open_shards = [number for number in open_shards if number not in replies]
            if not open_shards:
                return [replies[number] for number in range(len(shards))]
            self._replace(pool)
        raise RunError(f"environment workers ({', '.join(self._environments)}) die while starting or idle")

    def _schedule(self, task, shards: Sequence[Sequence]) -> tuple[ProcessPool, list[Future]]:
        pool = self._pool
        futures: list[Future] = []
        for shard in shards:
            name = shard[0].prompt.environment
            try:
                future: Future = pool.schedule(
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

    def _result(self, future: Future) -> list | str | None:
        """The task's answers, one line why it failed, or None when the pool broke around it. Raises RunError."""
        # pebble enforces the task's limit; silence beyond it and a worker's start means that pebble itself is stuck.
        silence = worker.STARTUP_LIMIT_S + 2 * self._timeout_s + 30.0
        with waiting(f"verdicts of {', '.join(self._environments)}", "environments", self._timeout_s):
            while not wait([future], timeout=_POLL_S).done:
                self._check_open()
                if running.now() - self._last_progress > silence:
                    raise WaitExpired(f"environment workers made no progress for {silence:.0f} s")
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, BrokenProcessPool):
            self._check_open()
            return None
        if isinstance(error, TimeoutError):
            return f"verification exceeded {self._timeout_s:g} s"
        if isinstance(error, ProcessExpired):
            if error.exitcode == worker.LEFT:
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
            context=self._spawning,
        )

    def _replace(self, broken: ProcessPool) -> None:
        with self._lock:
            if self._pool is broken and not self._closed:
                self._note_deaths()
                self._spawning = Spawning()  # the others of the broken pool are ended here
                self._pool = self._new_pool()
                _end(broken)

    def _note_progress(self, _: Future) -> None:
        self._last_progress = running.now()

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the environment pool was closed during verification")


def _failed(detail: str) -> Verdict:
    return Verdict({}, Outcome.ENV_FAILED, detail)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _shards(trajectories: Sequence[Trajectory | EpisodeStep], workers: int) -> list[list[int]]:
    """Indices of the trajectories by shard: one environment each, whole groups, about even between the workers."""
    by_environment: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        by_environment.setdefault(trajectory.prompt.environment, []).append(index)
    shards: list[list[int]] = []
    for indices in by_environment.values():
        target = min(SHARD_SIZE, math.ceil(len(indices) / workers))
        shard: list[int] = []
        for _, group in groupby(indices, key=lambda index: trajectories[index].prompt.id):
            if len(shard) >= target:
                shards.append(shard)
                shard = []
            shard = shard + list(group)
        shards.append(shard)
    return shards
