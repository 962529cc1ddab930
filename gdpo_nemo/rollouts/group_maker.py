"""From a prompt to a judged group: a coroutine per trajectory, a deadline for all of them, verdicts as they come."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Sequence

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group, Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.environments.execution.executor import EnvironmentExecutor
from gdpo_nemo.environments.registry import judges_by_sample
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.phases import Tally
from gdpo_nemo.rollouts.calls import Draws, call_within
from gdpo_nemo.rollouts.functions import RolloutKind, RolloutRunner, SamplingJob, needs_verdict
from gdpo_nemo.rollouts.rendezvous import Rendezvous
from gdpo_nemo.rollouts.rollout_batch import aborted, apply_verdicts, decode, sample_seed, sampled
from gdpo_nemo.rollouts.turns import EpisodeJob


@dataclass
class GroupJob:
    """What is drawn of one prompt."""

    prompt: Prompt
    position: int
    """By which samples have their seeds; negative: of validation."""
    samples: int
    sampling: Sampling
    state: TrainerState
    engine: int | None = None
    """Which engine draws it, its later turns too; None: one that is free."""
    tally: Tally | None = None
    """Counts it, beside those drawn together with it."""
    promised: bool = False
    """Whether that engine keeps room for every sample (``EngineFleet.room``)."""


@dataclass
class MadeGroup:
    """A judged group, and when it was begun, sampled and judged, in seconds since the epoch."""

    group: Group
    engine: int | None
    started: float
    sampled: float
    judged: float

    @property
    def valid(self) -> int:
        """Samples that ended before the deadline."""
        return sum(t.outcome is not Outcome.ABORTED for t in self.group.trajectories)


class GroupMaker:
    """Makes groups, on the event loop of the engines."""

    def __init__(self, config: Config, fleet: EngineFleet, pool: EnvironmentExecutor, tokenizer: Any):
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._runner = RolloutRunner(config, fleet, pool, tokenizer)
        # Of our own: texts are decoded in threads, while others may set the padding of the run's tokenizer.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._by_sample = {name for name, options in config.env.items() if judges_by_sample(name, dict(options or {}))}

    def kind(self, prompt: Prompt) -> RolloutKind:
        """What makes the trajectories of a prompt."""
        return self._runner.kind(prompt.environment)

    def close(self) -> None:
        """Stop the endpoint; calls under way end by themselves."""
        self._runner.close()

    async def make(self, job: GroupJob, meeting: Rendezvous | None = None) -> MadeGroup:
        """Sample and judge one group.

        Args:
            meeting: where its requests meet those of other groups (``Rendezvous``).

        Raises:
            RunError: engines or environments failed for good.
        """
        started = time.time()
        made = await self._in_time(
            [asyncio.create_task(self._trajectory(job, j, meeting)) for j in range(job.samples)], job
        )
        done = time.time()
        if job.prompt.environment not in self._by_sample:
            await self._judge(made, job.state)
        if job.tally:
            job.tally.groups.done += 1
        return MadeGroup(Group(job.prompt, made, job.position), job.engine, started, done, time.time())

    async def call(self, jobs: Sequence[GroupJob]) -> list[MadeGroup]:
        """Groups by the rollout function of their environment, which gets all prompts in one call, in a thread.

        A call that is late is given up with all its groups.
        """
        started = time.time()
        first = jobs[0]
        version = self._fleet.version
        asked = SamplingJob(first.sampling, first.samples, lambda i, j, turn: self._seed(jobs[i], j, turn), version)
        if first.promised:
            for _ in range(first.samples):
                self._keep_promise(first)
        draws = Draws(self._fleet, first.sampling, first.engine)
        # Beside the threads of the loop: a call lasts as long as its episodes, and must not keep verdicts waiting.
        call = partial(self._runner.call, [job.prompt for job in jobs], asked, draws)
        made = await call_within(self._config.rollout.group_timeout_s, call, draws)
        if made is None:
            made = [[self._late(job, j, version) for j in range(job.samples)] for job in jobs]
        done = time.time()
        if first.tally:
            first.tally.samples.done += sum(job.samples for job in jobs)
        await self._judge([t for group in made for t in group], first.state, decoded=True)
        now = time.time()
        if first.tally:
            first.tally.groups.done += len(jobs)
        return [
            MadeGroup(Group(job.prompt, group, job.position), job.engine, started, done, now)
            for job, group in zip(jobs, made)
        ]

    async def _in_time(self, tasks: Sequence[asyncio.Task[Trajectory]], job: GroupJob) -> list[Trajectory]:
        """Results of the trajectories; those that are late are given up."""
        limit = self._config.rollout.group_timeout_s
        try:
            done, late = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # one that failed ends the run
        except BaseException:
            await _cancelled(tasks)
            raise
        await _cancelled(late)
        version = self._fleet.version
        return [task.result() if task in done else self._late(job, j, version) for j, task in enumerate(tasks)]

    def _late(self, job: GroupJob, sample: int, version: int) -> Trajectory:
        limit = self._config.rollout.group_timeout_s
        return aborted(job.prompt, sample, version, f"not done within {limit:g} s (rollout.group_timeout_s)")

    async def _trajectory(self, job: GroupJob, sample: int, meeting: Rendezvous | None) -> Trajectory:
        promised = job.promised
        engine = job.engine

        async def draw(request: SampleRequest) -> Completion:
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
                asked = EpisodeJob(
                    job.sampling,
                    lambda turn: self._seed(job, sample, turn),
                    draw,
                    self._pool.step_one,
                    self._fleet.version,
                    self._pool.abandon,
                )
                return await self._runner.episode(job.prompt, sample, asked)
            completion = await draw(SampleRequest(job.prompt.token_ids, self._seed(job, sample)))
        finally:
            if job.tally:
                job.tally.samples.done += 1
            if promised:
                self._keep_promise(job)
            if meeting is not None:
                meeting.leave()
        trajectory = sampled(job.prompt, sample, completion)
        if job.prompt.environment in self._by_sample:
            await self._judge([trajectory], job.state)
        return trajectory

    def _keep_promise(self, job: GroupJob) -> None:
        if job.engine is not None:
            self._fleet.lanes[job.engine].keep_promise()

    async def _judge(self, made: Sequence[Trajectory], state: TrainerState, decoded: bool = False) -> None:
        wanted = [t for t in made if needs_verdict(t)]
        if wanted:
            await asyncio.to_thread(self._verdicts, wanted, state, decoded)

    def _verdicts(self, made: Sequence[Trajectory], state: TrainerState, decoded: bool) -> None:
        if not decoded:
            decode([t for t in made if not t.text], self._tokenizer)
        apply_verdicts(made, self._pool, state)

    def _seed(self, job: GroupJob, sample: int, turn: int = 0) -> int:
        return sample_seed(self._config.run.seed, job.position, sample, turn)


async def _cancelled(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
