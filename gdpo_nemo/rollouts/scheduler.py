"""The scheduler of rollouts: which prompts are drawn when, by which engine, and which groups a step trains.

Who waits for whom: the trainer waits for P ready groups (``get_batch``); a group for room in an engine that holds
weights at least as new as those of its admission, for its samples, and for its verdicts; admission for the ledger's
bound. Nobody waits for a batch. With staleness 0 the bound is one step, so that the same rules give the synchronous
run: all groups of a step are drawn at once, each by an engine that follows from its place alone, and every turn of all
of them is submitted together (``Rendezvous``), so that nothing depends on timing.

Tasks run on the event loop of the engines; the public methods are the trainer's, and block.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Coroutine, Mapping, Sequence

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.config.layout import prompts_per_round, updates_per_step
from gdpo_nemo.config.rollout_bounds import replaceable_groups, resolved_depth, valid_needed
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prompts import PromptSource, told_apart
from gdpo_nemo.data.records import Group, Prompt, TrainerState
from gdpo_nemo.environments.execution.executor import EnvironmentExecutor
from gdpo_nemo.errors import GdpoError, RunError
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.phases import Tally
from gdpo_nemo.rollouts.accounts import LATE, NO_SIGNAL, SURPLUS, Accounts
from gdpo_nemo.rollouts.depth import AutoDepth
from gdpo_nemo.rollouts.functions import RolloutKind
from gdpo_nemo.rollouts.group_maker import GroupJob, GroupMaker, MadeGroup
from gdpo_nemo.rollouts.group_signal import InFlight, part_with_signal, retained_and_rest, siblings_of
from gdpo_nemo.rollouts.ledger import Stage
from gdpo_nemo.rollouts.prompt_stream import Span
from gdpo_nemo.rollouts.recorded_stream import recorded
from gdpo_nemo.rollouts.rendezvous import Rendezvous
from gdpo_nemo.rollouts.rollout_batch import Rollout, cut, num_samples
from gdpo_nemo.waits import waiting

METRICS = {
    "queue/outstanding": ("groups", "Groups under way when the batch was complete, those of the batch among them"),
    "queue/depth": ("groups", "Groups that may be under way: rollout.depth, or what auto has made of it"),
    "queue/ready": ("groups", "Judged groups left for later steps when the batch was complete"),
    "queue/age": ("s", "Time from the last verdict on a group to its training, mean over the batch"),
    "driver/cpu": ("cores", "CPU time of the driver's process over time, since the batch before"),
    "environments/recovered": ("times", "Workers replaced and verifications repeated since the batch before"),
}
_SPANS = 32
"""Most groups of a step that get a line in the trace."""
_LATE_ROUNDS = 4
"""Rounds in which a synchronous step replaces late groups before it takes them as they are."""


class RolloutScheduler:
    """Makes rollouts ahead of the trainer, never further than the staleness bound.

    Args:
        saved: where earlier steps left the prompts (``ledger``); empty at the start and in older checkpoints.
        position: prompts that these steps consumed.
        step: steps done; the next batch is number ``step``.
        limit: prompts of the whole run (``gdpo.max_num_epochs``); None: as many as the steps take.
        updates: optimizer updates done, and those of the whole run, as reward functions are told.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        fleet: EngineFleet,
        pool: EnvironmentExecutor,
        tokenizer: Any,
        saved: Mapping[str, Any],
        position: int,
        step: int,
        limit: int | None = None,
        updates: tuple[int, int] = (0, 1),
    ):
        self._config = config
        self._prompts = prompts
        self._fleet = fleet
        self._exact = config.rollout.max_staleness == 0
        self._pool = pool
        self._recovered: list[str] = []
        self._maker = GroupMaker(config, fleet, pool, tokenizer)
        generation = config.policy.generation
        self._sampling = Sampling(
            generation.temperature,
            generation.top_p,
            generation.top_k,
            generation.max_new_tokens,
            tuple(generation.stop_strings),
        )
        self._groups = config.gdpo.num_prompts_per_step
        self._accounts = Accounts(config, saved, position, step, limit, partial(recorded, Path(config.run.dir)))
        self._ledger = self._accounts.ledger
        self._first = (step, self._accounts.consumed)
        self._step = step
        self._updates = updates
        bound = self._ledger.bound
        self._depth = None if self._exact or resolved_depth(config) else AutoDepth(self._groups, bound)
        self._began = time.monotonic()
        """When the trainer asked for its last batch."""
        self._made: dict[int, MadeGroup] = {}
        self._drawn = InFlight(config)
        self._training: list[Group] = []
        """New groups of the batch that the trainer has."""
        self._unwanted = 0
        """Groups without signal since the last batch."""
        self._seen: set[int] = set()
        self._reasons: dict[int, str] = {}
        """Of a synchronous step: positions that its batch has looked at, and why some are not wanted."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: GdpoError | None = None
        self._change = asyncio.Event()
        self._tally: Tally | None = None
        self._door = asyncio.Lock()
        """Groups are given room in the order of their positions."""
        self._cpu = (time.process_time(), time.monotonic())

    # -- the trainer's ---------------------------------------------------------------------------------------------

    def schedule(self, step: int) -> None:
        """Account for the updates of ``step`` steps, and start every group that the published weights may sample."""
        self._fleet.spawn(self._schedule(step)).result()

    def get_batch(self, step: int) -> Rollout | None:
        """Wait for the groups of batch ``step``; None once too few prompts are left for a whole one.

        Raises:
            RunError: engines or environments failed for good.
        """
        with waiting(f"batch {step}", "rollouts"):
            return self._fleet.spawn(self._next_batch()).result()

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[list[Group]]:
        """Start to sample and judge held-out prompts with the published weights; seeds are the same at every call.

        Their samples must be done before the next weights are published.
        """
        return self._fleet.spawn(self._evaluate(prompts))

    def ledger(self) -> dict[str, Any]:
        """What a checkpoint holds of the prompts, the batches accounted for by ``schedule``."""
        return self._accounts.state()

    def take_events(self) -> list[str]:
        """What happened to engines and environments since the last call, a sentence each."""
        taken, self._recovered = self._recovered, []
        return [*self._fleet.take_events(), *taken]

    @property
    def in_flight(self) -> int:
        """Groups under way or finished but not yet trained."""
        return len(self._ledger)

    def queues(self) -> dict[str, Any]:
        """How far the groups under way are, and what each engine does; from any thread."""
        stages = {f"groups {stage}": self._ledger.count(stage) for stage in Stage}
        lanes = {f"engine {n.index}": f"{n.state}, {len(n.pending)} samples" for n in self._fleet.lanes}
        return {**stages, **lanes}

    def progress(self) -> str:
        """How far the synchronous step or the validation under way is, or else the next batch; from any thread."""
        if self._tally:
            return str(self._tally)
        return f"{self._ledger.count(Stage.READY)} of {self._accounts.wanted} groups ready"

    def close(self) -> None:
        """Drop the groups in flight without waiting for them."""
        self._fleet.spawn(self._cancel()).result()
        self._maker.close()

    # -- admission -------------------------------------------------------------------------------------------------

    async def _schedule(self, step: int) -> None:
        if self._training:
            self._accounts.begin(step, self._training)
            self._training = []
        self._step = step
        self._admit()

    def _admit(self) -> None:
        most = self._one_round() if self._exact else min(self._most_under_way(), self._groups * self._steps_left())
        self._start(self._accounts.admit(self._fleet.version, most))

    def _one_round(self) -> int:
        """Groups of a synchronous step, if none is under way and a whole round is left."""
        count = prompts_per_round(self._config) - len(self._accounts.again)
        left = self._accounts.prompts_left >= count and self._steps_left() > 0
        return count if left and not len(self._ledger) else 0

    def _most_under_way(self) -> int:
        return self._depth.depth if self._depth else resolved_depth(self._config) or self._ledger.bound

    def _steps_left(self) -> int:
        return self._config.gdpo.max_num_steps - self._step

    def _start(self, admitted: Sequence[tuple[int, int]]) -> None:
        """Start the tasks of (position, place of the prompt) that were admitted together."""
        if not admitted:
            return
        jobs = [
            GroupJob(
                prompt, position, self._config.gdpo.num_generations_per_prompt, self._sampling, self._told(position)
            )
            for (position, _), prompt in zip(admitted, self._prompts_at([place for _, place in admitted]))
        ]
        if self._exact:
            self._place(jobs)
            self._launch(self._exact_groups(jobs, self._settled))
        else:
            for job in jobs:
                self._drawn.add(job.position, job.prompt)
                self._launch(self._one_group(job))

    def _prompts_at(self, places: Sequence[int]) -> list[Prompt]:
        found = [self._prompts.batch(place, 1)[0] for place in places]
        # Ahead of the trainer nobody knows yet which will meet in a batch; ``_tell_apart`` does.
        return told_apart(found) if self._exact else found

    def _told(self, position: int) -> TrainerState:
        """What reward functions are told with a prompt: how far the run is before the step that will train it."""
        step, first = self._first
        ahead = (position - first) // self._groups
        done, total = self._updates
        if self._exact:
            begun, step_of_it = self._accounts.consumed, self._step
        else:
            begun, step_of_it = first + ahead * self._groups, step + ahead
        done += (step_of_it - step) * updates_per_step(self._config)
        return TrainerState(done, total, begun / len(self._prompts))

    def _launch(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._fleet.loop.create_task(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # of any kind: the trainer would wait for ever
            self._failure = self._failure or (
                error if isinstance(error, GdpoError) else RunError(f"rollouts: {type(error).__name__}: {error}")
            )
            self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _until_changed(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._change.wait()

    # -- groups ----------------------------------------------------------------------------------------------------

    def _place(self, jobs: Sequence[GroupJob]) -> None:
        """Give each group of a step its engine: a pure function of its place."""
        engines = len(self._fleet.lanes)
        for place, job in enumerate(jobs):
            job.engine = place * engines // len(jobs)

    async def _exact_groups(self, jobs: Sequence[GroupJob], settled: Any) -> None:
        """Make groups that are drawn together, so that timing cannot change what they are."""
        self._tally = Tally.of(sum(job.samples for job in jobs), len(jobs))
        calls: dict[str, list[GroupJob]] = {}
        alone = []
        for job in jobs:
            job.tally = self._tally
            if self._maker.kind(job.prompt) is RolloutKind.CALL:
                job.engine = None
                calls.setdefault(job.prompt.environment, []).append(job)
            else:
                alone.append(job)
        meeting = Rendezvous(self._fleet, sum(job.samples for job in alone)) if self._exact else None

        async def one(job: GroupJob) -> None:
            settled(await self._maker.make(job, meeting))

        async def together(same: Sequence[GroupJob]) -> None:
            for made in await self._maker.call(same):
                settled(made)

        await asyncio.gather(*map(one, alone), *map(together, calls.values()))
        self._tally = None

    async def _one_group(self, job: GroupJob) -> None:
        async with self._door:
            version = self._ledger[job.position].version
            job.engine = await self._fleet.room(version, job.samples)
            job.promised = True
        self._ledger.move(job.position, Stage.DRAWING)
        if self._maker.kind(job.prompt) is RolloutKind.CALL:
            (made,) = await self._maker.call([job])
        else:
            made = await self._maker.make(job)
        self._settled(made)

    def _settled(self, made: MadeGroup) -> None:
        """Note a judged group: ready, or dropped and replaced by another prompt."""
        position = made.group.position
        reason = None if self._exact else self._reason_to_drop(made)
        if reason is None:
            self._made[position] = made
            self._ledger.move(position, Stage.READY)
        else:
            self._accounts.drop(position, reason)
            self._admit()
        self._changed()

    def _reason_to_drop(self, made: MadeGroup) -> str | None:
        self._drawn.remove(made.group.position)
        if self._late(made):
            return LATE
        if self._config.gdpo.dynamic_sampling.enabled and not self._drawn.may_have_signal(made, self._made.values()):
            self._unwanted += 1
            return NO_SIGNAL if self._unwanted <= replaceable_groups(self._config) else None
        return None

    def _late(self, made: MadeGroup) -> bool:
        return made.valid < valid_needed(self._config)

    # -- batches ---------------------------------------------------------------------------------------------------

    async def _next_batch(self) -> Rollout | None:
        rollout = await (self._exact_batch() if self._exact else self._ready_batch())
        if rollout is None:
            return None
        self._unwanted = 0
        rollout.dropped = self._ledger.take_dropped()
        rollout.version = self._step
        rollout.dropped_groups = rollout.dropped_groups or sum(reason == NO_SIGNAL for _, reason in rollout.dropped)
        rollout.next_position = self._accounts.consumed + len({group.position for group in self._training})
        self._add_again(rollout)
        rollout.measured |= self._measure()
        rollout.spans += self._fleet.take_spans()
        return rollout

    async def _ready_batch(self) -> Rollout | None:
        asked = time.monotonic()
        while (positions := self._ledger.get_batch(self._accounts.wanted)) is None:
            if self._accounts.prompts_left <= 0 and len(self._ledger) < self._accounts.wanted:
                return None
            await self._until_changed()
        ready = self._ledger.count(Stage.READY) - len(positions)
        self._adapt_depth(asked, ready)
        made = [self._made.pop(position) for position in positions]
        rollout = _rollout(made)
        now = time.time()
        rollout.measured = {
            "queue/outstanding": float(len(self._ledger)),
            "queue/ready": float(ready),
            "queue/depth": float(self._most_under_way()),
            "queue/age": sum(now - m.judged for m in made) / len(made),
        }
        self._training = list(rollout.groups)
        return rollout

    def _add_again(self, rollout: Rollout) -> None:
        """Put groups of earlier steps behind the new ones."""
        again = self._accounts.again
        rollout.again = [group.position for group in again]
        rollout.groups = [*rollout.groups, *again]
        _tell_apart(rollout.groups)

    def _adapt_depth(self, asked: float, ready: int) -> None:
        """Let ``AutoDepth`` know how long the trainer waited, of the time since it asked for the batch before."""
        now = time.monotonic()
        if self._depth:
            self._depth.observe(now - asked, now - self._began, ready)
        self._began = now

    async def _exact_batch(self) -> Rollout | None:
        if not len(self._ledger):
            return None
        made = await self._round()
        rollout = _rollout(made)
        drawn = len(made)
        size = self._config.gdpo.num_generations_per_prompt
        wanted = self._accounts.wanted * size
        dynamic = self._config.gdpo.dynamic_sampling
        kept, spare = self._split(made, [])
        rounds = dynamic.max_rounds if dynamic.enabled else _LATE_ROUNDS
        while (
            (missing := wanted - num_samples(kept)) > 0 and rollout.rounds < rounds and self._accounts.prompts_left > 0
        ):
            whole = prompts_per_round(self._config) if dynamic.enabled and dynamic.batch_multiplier else 0
            count = int(min(whole or -(-missing // size), self._accounts.prompts_left))
            self._start(self._accounts.admit(self._fleet.version, len(self._ledger) + count))
            extra = await self._round()
            again = _rollout(extra)
            kept += self._split(extra, kept)[0]
            rollout.generation_s += again.generation_s
            rollout.verify_s += again.verify_s
            rollout.spans += again.spans
            rollout.rounds += 1
            drawn += count
        # The batch keeps its size, which the layout divides: groups without a replacement stay, with advantage 0.
        rollout.groups = cut(kept + spare, wanted)
        # At least 0: both parts of a group that was split may be kept, and then count as two.
        rollout.dropped_groups = max(0, drawn - len(rollout.groups))
        self._training = list(rollout.groups)
        self._drop_the_rest()
        return rollout

    async def _round(self) -> list[MadeGroup]:
        """The groups under way, in order, once all of them are judged."""
        while len(self._made) < len(self._ledger) - len(self._seen):
            await self._until_changed()
        made = [self._made[position] for position in sorted(self._made)]
        self._seen |= self._made.keys()
        self._made = {}
        return made

    def _drop_the_rest(self) -> None:
        """Give up positions that a synchronous step has drawn and does not train."""
        for position in sorted(self._seen - {group.position for group in self._training}):
            self._accounts.drop(position, self._reasons.get(position, SURPLUS))
        self._seen = set()
        self._reasons = {}

    def _split(self, made: Sequence[MadeGroup], before: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Split groups into the parts that are kept, beside those ``before``, and the rest: without signal, if dynamic
        sampling looks for it, or late."""
        kept: list[Group] = []
        spare: list[Group] = []
        batch = [*before, *(one.group for one in made if not self._late(one))]
        for one in made:
            group = one.group
            part: Group | None = group
            if self._late(one):
                part = None
                self._reasons[group.position] = LATE
            elif self._config.gdpo.dynamic_sampling.enabled:
                part = part_with_signal(group, self._config, siblings_of(group, batch, self._config))
                if part is None:
                    self._reasons[group.position] = NO_SIGNAL
            retained, rest = retained_and_rest(group, part)
            kept += retained
            spare += rest
        return kept, spare

    def _measure(self) -> dict[str, float]:
        cpu, wall = self._cpu
        self._cpu = (time.process_time(), time.monotonic())
        recovered = self._pool.take_recoveries()
        self._recovered += [
            f"environments: {what}" + (f" ({n} times)" if n > 1 else "") for what, n in recovered.items()
        ]
        load = (self._cpu[0] - cpu) / max(self._cpu[1] - wall, 1e-9)
        return {**self._fleet.measure(), "driver/cpu": load, "environments/recovered": float(recovered.total())}

    # -- validation ------------------------------------------------------------------------------------------------

    async def _evaluate(self, prompts: Sequence[Prompt]) -> list[Group]:
        gdpo = self._config.gdpo
        generation = self._config.policy.generation
        sampling = Sampling(gdpo.val_temperature, 1.0, -1, generation.max_new_tokens, tuple(generation.stop_strings))
        done, total = self._updates
        done += (self._step - self._first[0]) * updates_per_step(self._config)
        state = TrainerState(done, total, self._accounts.consumed / len(self._prompts))
        jobs = [
            GroupJob(prompt, -1 - place, gdpo.val_generations_per_prompt, sampling, state)
            for place, prompt in enumerate(prompts)
        ]
        self._place(jobs)
        made: dict[int, Group] = {}

        def settled(one: MadeGroup) -> None:
            made[one.group.position] = one.group

        await self._exact_groups(jobs, settled)
        return [made[job.position] for job in jobs]

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tell_apart(groups: Sequence[Group]) -> None:
    """Give prompts of several passes over the data, which may meet in one batch, ids of their own."""
    for group, prompt in zip(groups, told_apart([group.prompt for group in groups])):
        if prompt is not group.prompt:
            group.prompt = prompt
            for trajectory in group.trajectories:
                trajectory.prompt = replace(trajectory.prompt, id=prompt.id)


def _rollout(made: Sequence[MadeGroup]) -> Rollout:
    """A rollout of groups, with the time from the first request to the last sample, and from there to the last
    verdict."""
    started = min(m.started for m in made)
    sampled = max(m.sampled for m in made)
    judged = max(m.judged for m in made)
    spans: list[Span] = [
        ("rollouts" if m.engine is None else f"engine {m.engine}", f"group {m.group.position}", m.started, m.sampled)
        for m in made[:_SPANS]
    ]
    spans += [("verify", f"group {m.group.position}", m.sampled, m.judged) for m in made[:_SPANS]]
    return Rollout([m.group for m in made], 0, sampled - started, max(0.0, judged - sampled), spans=spans)
