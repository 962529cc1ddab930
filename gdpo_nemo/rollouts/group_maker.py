"""Sampling and verification of groups, either with one coroutine per trajectory or with calls of rollout functions."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.cluster.engine_client import PendingRequest
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.config.rollout_checks import engines_report_groups
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import (
    Group,
    Outcome,
    Prompt,
    TrainerState,
    Trajectory,
    pack_trajectories,
    unpack_trajectories,
)
from gdpo_nemo.data.replies import reply_parser
from gdpo_nemo.environments.execution.pools import EnvironmentExecutor
from gdpo_nemo.environments.registry import verifies_by_sample
from gdpo_nemo.generation.requests import Completion, CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.rollouts.batches import Rollout, Span, aborted, apply_verdicts, decode, sample_seed, sampled
from gdpo_nemo.rollouts.functions import RolloutKind, RolloutRunner, SamplingJob, needs_verdict
from gdpo_nemo.rollouts.turns import EpisodeJob
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.progress import Tally
from gdpo_nemo.utils.waits import in_daemon_thread

if TYPE_CHECKING:
    from gdpo_nemo.data.image_reader import ImageReader
    from gdpo_nemo.data.tokenizer import Tokenizer


_MAX_SPANS = 32
"""Maximum number of groups per step in the trace."""


@dataclass
class GroupJob:
    """Request to make one group: the prompt and its sampling settings."""

    prompt: Prompt
    position: int
    """Prompt index, which determines the seeds of the samples. Negative for validation."""
    samples: int
    sampling: Sampling
    state: TrainerState
    engine: int | None = None
    """Index of the engine that samples all turns of the group, or None for any free engine."""
    tally: Tally | None = None
    """Progress counter, shared by all groups that are sampled together. The counter is None if progress is not
    counted."""
    promised: bool = False
    """True if ``EngineFleet.room`` has reserved room for every sample on the engine."""
    version: int = -1
    """Version of the newest weights when the job is sent to a rollout host."""

    @property
    def prompt_ids(self) -> np.ndarray:
        """Token ids of the prompt, as in ``SampleRequest``."""
        return self.prompt.token_ids


@dataclass
class MadeGroup:
    """A verified group with its timing. All times are in seconds since the epoch."""

    group: Group
    engine: int | None
    started: float
    """Time at which sampling began."""
    sampled: float
    """Time at which the last sample was complete."""
    verified: float
    """Time at which the last reward result arrived."""

    @property
    def valid(self) -> int:
        """Number of samples that were not aborted."""
        return sum(t.outcome is not Outcome.ABORTED for t in self.group.trajectories)

    def packed(self) -> tuple[bytes, float, float, float]:
        """Return the group for ``unpacked``, without the data that its job contains."""
        return pack_trajectories(self.group.trajectories), self.started, self.sampled, self.verified

    @classmethod
    def unpacked(cls, packed: tuple[bytes, float, float, float], job: GroupJob, engine: int) -> MadeGroup:
        """Return the group of a job from the result of ``packed``."""
        data, *times = packed
        trajectories = unpack_trajectories(data, job.prompt, job.state)
        return cls(Group(job.prompt, trajectories, job.position, data), engine, *times)


def rollout_of(made: Sequence[MadeGroup]) -> Rollout:
    """Combine groups into a rollout and compute its timing.

    Generation lasts from the start of the first group to the last sample. Verification lasts from the last sample to
    the last reward result.
    """
    started = min(m.started for m in made)
    sampled = max(m.sampled for m in made)
    verified = max(m.verified for m in made)
    sampling: list[Span] = []
    verification: list[Span] = []
    for m in made[:_MAX_SPANS]:
        row = "rollouts" if m.engine is None else f"engine {m.engine}"
        name = f"group {m.group.position}"
        sampling.append((row, name, m.started, m.sampled))
        verification.append(("verify", name, m.sampled, m.verified))
    spans = sampling + verification
    return Rollout([m.group for m in made], 0, sampled - started, max(0.0, verified - sampled), spans=spans)


class GroupMaker:
    """Maker of groups, whose coroutines run on the event loop of the engine fleet.

    Args:
        images: reader of images in observations and requests, or None if the policy reads only text.
    """

    def __init__(
        self,
        config: Config,
        fleet: EngineFleet,
        pool: EnvironmentExecutor,
        tokenizer: Tokenizer,
        images: ImageReader | None = None,
    ):
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._runner = RolloutRunner(config, fleet, pool, tokenizer, images)
        # Copy the tokenizer, because threads decode texts while other code may change the padding of the run's
        # tokenizer.
        self._replies = reply_parser(config, copy.deepcopy(tokenizer))
        self._by_sample = set()
        """Environments that verify each sample as soon as it is complete."""
        for name, options in config.env.items():
            if verifies_by_sample(name, dict(options or {})):
                self._by_sample.add(name)
        has_deadline = config.rollout.group_timeout_s is not None
        self._reports_groups = engines_report_groups(config.policy.generation) and not has_deadline

    def kind(self, prompt: Prompt) -> RolloutKind:
        """Return the rollout method of a prompt's environment."""
        return self._runner.kind(prompt.environment)

    def close(self) -> None:
        """Stop the endpoint, without waiting for rollout function calls in flight."""
        self._runner.close()

    async def make(self, job: GroupJob, meeting: Rendezvous | None = None) -> MadeGroup:
        """Sample and verify a single group.

        Args:
            meeting: barrier that submits the requests of several groups together. Without a barrier, each request is
                submitted immediately.

        Raises:
            RunError: if engines or environments failed permanently.
        """
        if self._fleet.hosts:
            return await self._made_by_host(job)
        started = time.time()
        made = await self._within_timeout(
            [asyncio.create_task(self._trajectory(job, j, meeting)) for j in range(job.samples)], job
        )
        done = time.time()
        if job.prompt.environment not in self._by_sample:
            await self._verify(made, job.state)
        if job.tally:
            job.tally.groups.done += 1
        return MadeGroup(Group(job.prompt, made, job.position), job.engine, started, done, time.time())

    async def _made_by_host(self, job: GroupJob) -> MadeGroup:
        """Let the rollout host of an engine make the group, with its own ``GroupMaker``."""
        pending = self._fleet.submit(
            replace(job, tally=None, promised=False, version=self._fleet.version), job.sampling, job.engine
        )
        if job.promised:
            self._keep_promise(job, job.samples)
        packed, engine = await self._fleet.answer_of(pending)
        if job.tally:
            job.tally.samples.done += job.samples
            job.tally.groups.done += 1
        return MadeGroup.unpacked(packed, job, engine)

    async def call(self, jobs: Sequence[GroupJob]) -> list[MadeGroup]:
        """Make groups with the rollout function of their environment.

        The rollout function runs in a thread and receives all prompts in one call. If the call exceeds
        ``rollout.group_timeout_s``, all samples of its groups are aborted.
        """
        started = time.time()
        first = jobs[0]
        version = self._fleet.version
        settings = SamplingJob(first.sampling, first.samples, lambda i, j, turn: self._seed(jobs[i], j, turn), version)
        if first.promised:
            self._keep_promise(first, first.samples)
        sampler = CallSampler(self._fleet, first.sampling, first.engine)
        # The call does not use the event loop's thread pool, because a long call would delay verification.
        call = partial(self._runner.call, [job.prompt for job in jobs], settings, sampler)
        made = await call_within(self._config.rollout.group_timeout_s, call, sampler)
        if made is None:
            made = []
            for job in jobs:
                made.append([self._timed_out(job, j, version) for j in range(job.samples)])
        done = time.time()
        if first.tally:
            first.tally.samples.done += sum(job.samples for job in jobs)
        await self._verify(list(chain.from_iterable(made)), first.state, decoded=True)
        now = time.time()
        if first.tally:
            first.tally.groups.done += len(jobs)
        groups = []
        for job, trajectories in zip(jobs, made):
            group = Group(job.prompt, trajectories, job.position)
            groups.append(MadeGroup(group, job.engine, started, done, now))
        return groups

    async def _within_timeout(self, tasks: Sequence[asyncio.Task[Trajectory]], job: GroupJob) -> list[Trajectory]:
        """Wait for the trajectories until the group timeout. Unfinished trajectories are aborted."""
        limit = self._config.rollout.group_timeout_s
        try:
            done, unfinished = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # Raises the exception of a failed trajectory, which ends the run.
        except BaseException:
            await cancel_all(tasks)
            raise
        await cancel_all(unfinished)
        version = self._fleet.version
        return [task.result() if task in done else self._timed_out(job, j, version) for j, task in enumerate(tasks)]

    def _timed_out(self, job: GroupJob, sample: int, version: int) -> Trajectory:
        limit = self._config.rollout.group_timeout_s
        return aborted(job.prompt, sample, version, f"not done within {limit:g} s (rollout.group_timeout_s)")

    async def _trajectory(self, job: GroupJob, sample: int, meeting: Rendezvous | None) -> Trajectory:
        promised = job.promised
        engine = job.engine

        async def sample_turn(request: SampleRequest) -> Completion:
            nonlocal promised, engine
            if meeting is not None:
                answer = meeting.sample((job.position, sample), request, job.sampling, engine)
            else:
                answer = self._fleet.sample(request, job.sampling, engine)
            if promised:
                promised = False
                self._keep_promise(job)
            completion, engine = await answer
            return completion

        try:
            if self.kind(job.prompt) is RolloutKind.EPISODE:
                episode = EpisodeJob(
                    job.sampling,
                    lambda turn: self._seed(job, sample, turn),
                    sample_turn,
                    self._pool.step_one,
                    self._fleet.version,
                    self._pool.abandon,
                )
                return await self._runner.episode(job.prompt, sample, episode)
            together = self._reports_groups and job.prompt.environment not in self._by_sample
            group = job.position if together else None
            seed = self._seed(job, sample)
            prompt = job.prompt
            request = SampleRequest(prompt.token_ids, seed, images=prompt.images, decodes=True, group=group)
            completion = await sample_turn(request)
        finally:
            if job.tally:
                job.tally.samples.done += 1
            if promised:
                self._keep_promise(job)
            if meeting is not None:
                meeting.leave()
        trajectory = sampled(job.prompt, sample, completion)
        if job.prompt.environment in self._by_sample:
            await self._verify([trajectory], job.state)
        return trajectory

    def _keep_promise(self, job: GroupJob, samples: int = 1) -> None:
        if job.engine is not None:
            self._fleet.clients[job.engine].keep_promise(samples)

    async def _verify(self, made: Sequence[Trajectory], state: TrainerState, decoded: bool = False) -> None:
        unverified = [t for t in made if needs_verdict(t)]
        if unverified:
            await asyncio.to_thread(self._apply_verdicts, unverified, state, decoded)

    def _apply_verdicts(self, made: Sequence[Trajectory], state: TrainerState, decoded: bool) -> None:
        if not decoded:
            decode([t for t in made if t.loss_mask is None or not t.text], self._replies)
        apply_verdicts(made, self._pool, state, self._replies)

    def _seed(self, job: GroupJob, sample: int, turn: int = 0) -> int:
        return sample_seed(self._config.run.seed, job.position, sample, turn)


async def cancel_all(tasks: Any) -> None:
    """Cancel the tasks and wait until they have ended. Exceptions of the tasks are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class CallSampler:
    """Sampling function of one call. Any thread may call the function except the thread of the fleet's event loop.

    Args:
        engine: index of the engine that samples. If the index is None, the requests are distributed evenly.
    """

    def __init__(self, fleet: EngineFleet, sampling: Sampling, engine: int | None):
        self._fleet = fleet
        self._sampling = sampling
        self._engine = engine
        self._lock = threading.Lock()
        self._in_flight: set[Future[CompletionBatch]] = set()
        self._closed = False

    def __call__(self, requests: Sequence[SampleRequest]) -> CompletionBatch:
        """Sample one completion per request and wait for all of them.

        Raises:
            RunError: if the engines failed permanently or the call was abandoned.
        """
        with self._lock:
            if self._closed:
                raise RunError("the call was abandoned")
            pending = self._fleet.spawn(self._fleet.sample_all(requests, self._sampling, self._engine))
            self._in_flight.add(pending)
        try:
            return pending.result()
        finally:
            with self._lock:
                self._in_flight.discard(pending)

    def end(self) -> None:
        """Cancel the requests in flight and reject new requests."""
        with self._lock:
            self._closed = True
            in_flight = list(self._in_flight)
        for pending in in_flight:
            pending.cancel()


async def call_within[Result](limit_s: float | None, call: Callable[[], Result], sampler: CallSampler) -> Result | None:
    """Run ``call`` in a thread and return its result, or None if the call takes more than ``limit_s`` seconds.

    A call that exceeds the limit continues, but its requests are cancelled and its result is ignored.

    Raises:
        Exception: any exception of the call.
    """
    future = asyncio.wrap_future(in_daemon_thread(call, "calls"))
    try:
        done, _ = await asyncio.wait([future], timeout=limit_s)
    except asyncio.CancelledError:
        _abandon(future, sampler)
        raise
    if done:
        return future.result()
    _abandon(future, sampler)
    return None


def _abandon(future: asyncio.Future[Any], sampler: CallSampler) -> None:
    sampler.end()
    # Retrieve the exception, so that asyncio does not warn about an unretrieved exception.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


_Entry = tuple[tuple[int, int], SampleRequest, Sampling, int | None, asyncio.Future[PendingRequest]]
"""(key, request, sampling, engine, future of the submitted request)."""


class Rendezvous:
    """Barrier for the requests of all trajectories of a step. The barrier submits the requests together, in a fixed
    order.

    Args:
        members: number of trajectories. Each trajectory must call ``leave`` when it ends.
    """

    def __init__(self, fleet: EngineFleet, members: int):
        self._fleet = fleet
        self._members = members
        self._waiting: list[_Entry] = []

    async def sample(
        self, key: tuple[int, int], request: SampleRequest, sampling: Sampling, engine: int | None
    ) -> tuple[Completion, int]:
        """Wait until every trajectory has a request or has ended, then sample all requests.

        Args:
            key: (prompt index, sample index) of the trajectory. Requests are submitted in the order of their keys.

        Returns:
            The completion and the index of its engine, as ``EngineFleet.sample`` does.
        """
        submitted: asyncio.Future[PendingRequest] = asyncio.get_running_loop().create_future()
        entry = (key, request, sampling, engine, submitted)
        self._waiting.append(entry)
        self._submit_if_complete()
        try:
            pending = await submitted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise
        return await self._fleet.answer_of(pending)

    def leave(self) -> None:
        """Record that a trajectory has ended."""
        self._members -= 1
        self._submit_if_complete()

    def _submit_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._members:
            return
        waiting = sorted(self._waiting, key=lambda entry: entry[0])
        self._waiting = []
        for _, request, sampling, engine, submitted in waiting:
            if not submitted.done():
                try:
                    submitted.set_result(self._fleet.submit(request, sampling, engine))
                except Exception as error:  # noqa: BLE001 - passed to the trajectory that made the request
                    submitted.set_exception(error)
