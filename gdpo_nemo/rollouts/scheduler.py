"""Rollout scheduler: admits prompts, samples and verifies their groups, and passes complete batches to the trainer.

The trainer's thread calls the public methods, which block. Tasks run on the event loop of the engines::

    trainer                      event loop of the engines
    publish weights
    schedule(step) ───────────►  PromptTracker.begin (records trained groups) ─► _admit ─► _start: one task per group
                                 _place: fleet.rooms, in index order
                                 task: GroupMaker: sample, verify ─► _settled
                                 _settled: READY; or drop the index and _admit a replacement
    get_batch(step) ──────────►  _ready_batch: waits until the P groups of a batch are ready
    train, publish weights, schedule(step + 1), ledger() if a checkpoint is due

    index, staleness > 0:  WAITING ─► DRAWING ─► READY ─► trained;  DRAWING ─► dropped (late, no signal)
    index, staleness 0:    WAITING ─► READY ─► trained, or dropped (late, no signal, low variance, surplus)

* The trainer waits in ``get_batch`` for P ready groups. The trainer gets None if too few prompts are left for a batch.
* A group first waits for an engine with room and with weights at least as new as at the group's admission. Then the
  group waits for its samples and reward results.
* Admission never waits. The number of admitted groups is limited by the ledger's bound, by the depth (``AutoDepth``),
  and by the remaining steps and prompts.

With staleness 0 the bound is one step, and timing cannot change the result. All groups of a step start together. The
order of the groups determines their engines, and the requests of each turn are submitted together (``Rendezvous``).
``_exact_batch`` waits for the whole round and replaces late groups and groups without a training signal. Groups that
the step does not train are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.algorithms.component_weights import ComponentWeights
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.environment_algorithms import trained_configs
from gdpo_nemo.config.layout import prompts_per_round, updates_per_step
from gdpo_nemo.config.rollout_checks import replaceable_groups, resolved_depth
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prompts import PromptSource, with_unique_ids
from gdpo_nemo.data.records import Group, Prompt, TrainerState
from gdpo_nemo.environments.execution.pools import EnvironmentExecutor
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.batches import (
    BatchStream,
    Rollout,
    first_samples,
    make_prompt_ids_unique,
    num_samples,
    read_trained_groups,
)
from gdpo_nemo.rollouts.credit import with_weights
from gdpo_nemo.rollouts.depth import AutoDepth
from gdpo_nemo.rollouts.functions import RolloutKind
from gdpo_nemo.rollouts.group_maker import GroupJob, GroupMaker, MadeGroup, Rendezvous, cancel_all, rollout_of
from gdpo_nemo.rollouts.group_signal import InFlight, is_late, split_groups
from gdpo_nemo.rollouts.ledger import LATE, NO_SIGNAL, SURPLUS, PromptTracker, RunPosition, Stage
from gdpo_nemo.utils.errors import GdpoError, RunError
from gdpo_nemo.utils.progress import Tally
from gdpo_nemo.utils.waits import waiting

if TYPE_CHECKING:
    from gdpo_nemo.data.image_reader import ImageReader
    from gdpo_nemo.data.tokenizer import Tokenizer

METRICS = {
    "queue/outstanding": ("groups", "Outstanding groups when the batch was complete, including those of the batch"),
    "queue/depth": (
        "groups",
        "Maximum number of outstanding groups: rollout.depth, or the current value if rollout.depth is auto",
    ),
    "queue/ready": ("groups", "Scored groups that remained for later steps when the batch was complete"),
    "queue/age": ("s", "Mean time that a scored group waited for its batch"),
    "driver/cpu": ("cores", "CPU time of the driver process per second since the previous batch"),
    "environments/recovered": (
        "times",
        "Number of replaced workers and repeated verifications since the previous batch",
    ),
}
_LATE_ROUNDS = 4
"""Maximum number of rounds of a synchronous step without dynamic sampling. Late groups of the last round are not
replaced."""


class RolloutScheduler(BatchStream):
    """Produces rollouts ahead of the trainer, within the staleness bound.

    Args:
        at: progress of the run, from the checkpoint. The next batch is number ``at.step``.
    """

    def __init__(
        self,
        config: Config,
        at: RunPosition,
        *,
        prompts: PromptSource,
        fleet: EngineFleet,
        pool: EnvironmentExecutor,
        tokenizer: Tokenizer,
        images: ImageReader | None = None,
    ):
        self._config = config
        self._updates_per_step = updates_per_step(config, spec_of(config))
        self._prompts = prompts
        self._fleet = fleet
        self._exact = config.rollout.max_staleness == 0
        self._pool = pool
        self._recovered: list[str] = []
        self._maker = GroupMaker(config, fleet, pool, tokenizer, images)
        generation = config.policy.generation
        self._sampling = Sampling(
            generation.temperature,
            generation.top_p,
            generation.top_k,
            generation.max_new_tokens,
            tuple(generation.stop_strings),
        )
        self._groups = config.gdpo.num_prompts_per_step
        self._tracker = PromptTracker(config, at, partial(read_trained_groups, Path(config.run.dir)), prompts)
        self._ledger = self._tracker.ledger
        self._first = (at.step, self._tracker.consumed)
        self._step = at.step
        self._updates = at.updates
        bound = self._ledger.bound
        self._depth = None if self._exact or resolved_depth(config) else AutoDepth(self._groups, bound)
        self._last_batch_time = time.monotonic()
        """Time at which the previous ``get_batch`` returned a batch."""
        self._made: dict[int, MadeGroup] = {}
        gdpo = config.gdpo
        # Constraints are excluded with dynamic sampling, so all weights are known before the step.
        self._weights = ComponentWeights(gdpo.rewards, gdpo.constraints, gdpo.schedules)
        self._weighted = config
        """Config with the weights of the next step in ``gdpo.rewards``, by which dynamic sampling selects groups."""
        self._sampling_groups = InFlight(any(c.gdpo.group_by == "prompt" for c in trained_configs(config)))
        self._training: list[Group] = []
        """New groups of the current training batch."""
        self._num_without_signal = 0
        """Number of groups without a training signal since the last batch."""
        self._seen: set[int] = set()
        """Prompt indices sampled for the batch of a synchronous step."""
        self._reasons: dict[int, str] = {}
        """Reasons for rejecting prompt indices of ``_seen``."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: GdpoError | None = None
        self._change = asyncio.Event()
        self._tally: Tally | None = None
        self._admission_order = asyncio.Lock()
        """Held while groups wait for engines, so that engines are assigned in index order."""
        self._cpu = (time.process_time(), time.monotonic())

    # -- methods for the trainer ------------------------------------------------------------------------------------

    def schedule(self, step: int) -> None:
        """Record that ``step`` steps are trained, and start all groups that the published weights allow."""
        self._fleet.spawn(self._schedule(step)).result()

    def get_batch(self, step: int) -> Rollout | None:
        """Wait for batch number ``step`` and return it. Return None if too few prompts are left for a batch.

        Raises:
            RunError: if engines or environments failed permanently.
        """
        with waiting(f"batch {step}", "rollouts"):
            return self._fleet.spawn(self._next_batch()).result()

    def evaluate(self, prompts: Sequence[Prompt], as_in_training: bool = False) -> Future[list[Group]]:
        """Start sampling and verifying held-out prompts with the published weights, or with the training's sampling.

        The seeds are the same in every validation. The samples must be complete before the next weights are published.
        """
        return self._fleet.spawn(self._evaluate(prompts, as_in_training))

    def ledger(self) -> dict[str, Any]:
        """Return the prompt ledger for a checkpoint. The ledger includes all batches recorded by ``schedule``."""
        return self._tracker.state()

    def take_events(self) -> list[str]:
        """Return the events of engines and environments since the last call as a list of sentences."""
        taken, self._recovered = self._recovered, []
        return [*self._fleet.take_events(), *taken]

    def queues(self) -> dict[str, Any]:
        """Return the number of groups in each stage and the state of each engine. Any thread may call this method."""
        stages = {f"groups {stage}": self._ledger.count(stage) for stage in Stage}
        clients = {f"engine {n.index}": f"{n.state}, {n.load} samples" for n in self._fleet.clients}
        return {**stages, **clients}

    def progress(self) -> str:
        """Describe the progress of the current synchronous step or validation, otherwise of the next batch.

        Any thread may call this method.
        """
        if self._tally:
            return str(self._tally)
        return f"{self._ledger.count(Stage.READY)} of {self._tracker.num_new_groups} groups ready"

    def close(self) -> None:
        """Cancel the groups in flight."""
        self._fleet.spawn(self._cancel()).result()
        self._maker.close()

    # -- admission -------------------------------------------------------------------------------------------------

    async def _schedule(self, step: int) -> None:
        self._weighted = with_weights(self._config, self._weights.at(step + 1))
        if self._training:
            self._tracker.begin(step, self._training)
            self._training = []
        self._step = step
        self._admit()

    def _admit(self) -> None:
        ahead = min(self._max_outstanding(), self._groups * self._steps_left())
        most = self._round_size() if self._exact else ahead
        self._start(self._tracker.admit(self._fleet.version, most))

    def _round_size(self) -> int:
        """Return the number of groups in the next synchronous round, or 0 if no round can start."""
        count = prompts_per_round(self._config.gdpo) - len(self._tracker.reused_groups)
        can_start = self._tracker.prompts_left >= count and self._steps_left() > 0 and not len(self._ledger)
        return count if can_start else 0

    def _max_outstanding(self) -> int:
        return self._depth.depth if self._depth else resolved_depth(self._config) or self._ledger.bound

    def _steps_left(self) -> int:
        return self._config.gdpo.max_num_steps - self._step

    def _start(self, admitted: Sequence[tuple[int, int]]) -> None:
        """Start the tasks of (prompt index, dataset row) pairs that were admitted together."""
        if not admitted:
            return
        samples = self._config.gdpo.num_generations_per_prompt
        prompts = self._prompts_at([row for _, row in admitted])
        jobs = []
        for (position, _), prompt in zip(admitted, prompts):
            jobs.append(GroupJob(prompt, position, samples, self._sampling, self._trainer_state(position)))
        if self._exact:
            self._assign_engines(jobs)
            self._launch(self._exact_groups(jobs, self._settled))
        else:
            for job in jobs:
                self._sampling_groups.add(job.position, job.prompt)
            self._launch(self._place(jobs))

    def _prompts_at(self, rows: Sequence[int]) -> list[Prompt]:
        found = [self._prompts.batch(row, 1)[0] for row in rows]
        # With staleness, it is not yet known which prompts share a batch. The ids are made unique later, by
        # ``make_prompt_ids_unique``.
        return with_unique_ids(found) if self._exact else found

    def _trainer_state(self, position: int) -> TrainerState:
        """Return the training progress before the step that is expected to train the prompt, for reward functions."""
        step, first = self._first
        ahead = (position - first) // self._groups
        done, total = self._updates
        if self._exact:
            prompts, train_step = self._tracker.consumed, self._step
        else:
            prompts, train_step = first + ahead * self._groups, step + ahead
        done += (train_step - step) * self._updates_per_step
        return TrainerState(done, total, prompts / len(self._prompts))

    def _launch(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._fleet.loop.create_task(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # Any exception is stored; otherwise the trainer would wait forever.
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

    def _assign_engines(self, jobs: Sequence[GroupJob]) -> None:
        """Assign an engine to each group of a step. The assignment depends only on the order of the groups."""
        engines = len(self._fleet.clients)
        for index, job in enumerate(jobs):
            job.engine = index * engines // len(jobs)

    async def _exact_groups(self, jobs: Sequence[GroupJob], settled: Any) -> None:
        """Produce groups that are sampled together, so that timing cannot change the samples.

        Args:
            settled: function to call with each verified group.
        """
        self._tally = Tally.of(sum(job.samples for job in jobs), len(jobs))
        calls: dict[str, list[GroupJob]] = {}
        separate = []
        for job in jobs:
            job.tally = self._tally
            if self._maker.kind(job.prompt) is RolloutKind.CALL:
                job.engine = None
                calls.setdefault(job.prompt.environment, []).append(job)
            else:
                separate.append(job)
        # Hosts receive the groups of this loop iteration together, so that they need no barrier.
        meets = self._exact and not self._fleet.hosts
        meeting = Rendezvous(self._fleet, sum(job.samples for job in separate)) if meets else None

        async def make_group(job: GroupJob) -> None:
            settled(await self._maker.make(job, meeting))

        async def call_function(calls_of_environment: Sequence[GroupJob]) -> None:
            for made in await self._maker.call(calls_of_environment):
                settled(made)

        await asyncio.gather(*map(make_group, separate), *map(call_function, calls.values()))
        self._tally = None

    async def _place(self, jobs: Sequence[GroupJob]) -> None:
        """Wait for engines with room for groups that were admitted together, and start the groups."""
        async with self._admission_order:
            while jobs:
                version = self._ledger[jobs[0].position].version
                engines = await self._fleet.rooms(version, jobs[0].samples, len(jobs))
                for job, engine in zip(jobs, engines):
                    job.engine = engine
                    job.promised = True
                    self._ledger.move(job.position, Stage.DRAWING)
                    self._launch(self._one_group(job))
                jobs = jobs[len(engines) :]

    async def _one_group(self, job: GroupJob) -> None:
        if self._maker.kind(job.prompt) is RolloutKind.CALL:
            (made,) = await self._maker.call([job])
        else:
            made = await self._maker.make(job)
        self._settled(made)

    def _settled(self, made: MadeGroup) -> None:
        """Mark a verified group as ready, or drop it and admit a replacement."""
        position = made.group.position
        if not is_late(made, self._config):
            self._tracker.observe(made.group, self._weighted)
        reason = None if self._exact else self._reason_to_drop(made)
        if reason is None:
            self._made[position] = made
            self._ledger.move(position, Stage.READY)
        else:
            self._tracker.drop(position, reason)
            self._admit()
        self._changed()

    def _reason_to_drop(self, made: MadeGroup) -> str | None:
        self._sampling_groups.remove(made.group.position)
        if is_late(made, self._config):
            return LATE
        if self._config.gdpo.dynamic_sampling.enabled and not self._sampling_groups.may_have_signal(
            made, self._made.values(), self._weighted
        ):
            self._num_without_signal += 1
            return NO_SIGNAL if self._num_without_signal <= replaceable_groups(self._config.gdpo) else None
        return None

    # -- batches ---------------------------------------------------------------------------------------------------

    async def _next_batch(self) -> Rollout | None:
        rollout = await (self._exact_batch() if self._exact else self._ready_batch())
        if rollout is None:
            return None
        self._num_without_signal = 0
        rollout.dropped = self._ledger.take_dropped()
        rollout.version = self._step
        rollout.dropped_groups = rollout.dropped_groups or sum(reason == NO_SIGNAL for _, reason in rollout.dropped)
        rollout.next_position = self._tracker.consumed + len({group.position for group in self._training})
        self._append_reused(rollout)
        rollout.measured |= self._measure()
        rollout.spans += self._fleet.take_spans()
        return rollout

    async def _ready_batch(self) -> Rollout | None:
        requested = time.monotonic()
        needed = self._tracker.num_new_groups
        while len(self._made) < needed or (positions := self._ledger.get_batch(needed)) is None:
            if self._tracker.prompts_left <= 0 and len(self._ledger) < needed:
                return None
            await self._until_changed()
        ready = self._ledger.count(Stage.READY) - len(positions)
        self._adapt_depth(requested, ready)
        made = [self._made.pop(position) for position in positions]
        rollout = rollout_of(made)
        now = time.time()
        rollout.measured = {
            "queue/outstanding": float(len(self._ledger)),
            "queue/ready": float(ready),
            "queue/depth": float(self._max_outstanding()),
            "queue/age": sum(now - m.verified for m in made) / len(made),
        }
        self._training = list(rollout.groups)
        return rollout

    def _append_reused(self, rollout: Rollout) -> None:
        """Append the reused groups of earlier steps to the new groups."""
        reused = self._tracker.reused_groups
        rollout.again = [group.position for group in reused]
        rollout.groups = [*rollout.groups, *reused]
        make_prompt_ids_unique(rollout.groups)

    def _adapt_depth(self, requested: float, ready: int) -> None:
        """Pass the trainer's waiting time and the duration of the step to ``AutoDepth``.

        Args:
            requested: time of the trainer's request for the batch.
            ready: number of ready groups that remain after the batch is taken.
        """
        now = time.monotonic()
        if self._depth:
            self._depth.observe(now - requested, now - self._last_batch_time, ready)
        self._last_batch_time = now

    async def _exact_batch(self) -> Rollout | None:
        if not len(self._ledger):
            return None
        made = await self._round()
        rollout = rollout_of(made)
        num_sampled = len(made)
        size = self._config.gdpo.num_generations_per_prompt
        batch_samples = self._tracker.num_new_groups * size
        dynamic = self._config.gdpo.dynamic_sampling
        kept, spare = split_groups(made, [], self._weighted, self._reasons)
        max_rounds = dynamic.max_rounds if dynamic.enabled else _LATE_ROUNDS
        while (missing := batch_samples - num_samples(kept)) > 0:
            if rollout.rounds >= max_rounds or self._tracker.prompts_left <= 0:
                break
            # With ``batch_multiplier``, every round has the full size. Without this setting, a round only fills the
            # batch.
            full_rounds = dynamic.enabled and dynamic.batch_multiplier
            round_size = prompts_per_round(self._config.gdpo) if full_rounds else -(-missing // size)
            count = int(min(round_size, self._tracker.prompts_left))
            self._start(self._tracker.admit(self._fleet.version, len(self._ledger) + count))
            extra = await self._round()
            extra_rollout = rollout_of(extra)
            kept += split_groups(extra, kept, self._weighted, self._reasons)[0]
            rollout.generation_s += extra_rollout.generation_s
            rollout.verify_s += extra_rollout.verify_s
            rollout.spans += extra_rollout.spans
            rollout.rounds += 1
            num_sampled += count
        # The parallel layout requires a divisible batch size. Rejected groups with advantage 0 fill the batch up to
        # this size.
        rollout.groups = first_samples(kept + spare, batch_samples)
        # Return at least 0, because both parts of a split group may be in the batch and count as two groups.
        rollout.dropped_groups = max(0, num_sampled - len(rollout.groups))
        self._training = list(rollout.groups)
        self._drop_untrained()
        return rollout

    async def _round(self) -> list[MadeGroup]:
        """Wait until all groups in flight are verified, and return them in index order."""
        while len(self._made) < len(self._ledger) - len(self._seen):
            await self._until_changed()
        made = [self._made[position] for position in sorted(self._made)]
        self._seen |= self._made.keys()
        self._made = {}
        return made

    def _drop_untrained(self) -> None:
        """Drop the prompt indices that a synchronous step sampled and does not train."""
        for position in sorted(self._seen - {group.position for group in self._training}):
            self._tracker.drop(position, self._reasons.get(position, SURPLUS))
        self._seen = set()
        self._reasons = {}

    def _measure(self) -> dict[str, float]:
        cpu, wall = self._cpu
        self._cpu = (time.process_time(), time.monotonic())
        recovered = self._pool.take_recoveries() + self._fleet.hosts.take_recoveries()
        for event, count in recovered.items():
            times = f" ({count} times)" if count > 1 else ""
            self._recovered.append(f"environments: {event}{times}")
        load = (self._cpu[0] - cpu) / max(self._cpu[1] - wall, 1e-9)
        counts = {**self._fleet.measure(), **self._tracker.measure()}
        return {**counts, "driver/cpu": load, "environments/recovered": float(recovered.total())}

    # -- validation ------------------------------------------------------------------------------------------------

    async def _evaluate(self, prompts: Sequence[Prompt], as_in_training: bool) -> list[Group]:
        gdpo = self._config.gdpo
        validation = replace(
            self._sampling, temperature=gdpo.val_temperature, top_p=gdpo.val_top_p, top_k=gdpo.val_top_k
        )
        sampling = self._sampling if as_in_training else validation
        done, total = self._updates
        done += (self._step - self._first[0]) * self._updates_per_step
        state = TrainerState(done, total, self._tracker.consumed / len(self._prompts))
        samples = gdpo.val_generations_per_prompt
        jobs = [GroupJob(prompt, -1 - index, samples, sampling, state) for index, prompt in enumerate(prompts)]
        self._assign_engines(jobs)
        made: dict[int, Group] = {}

        def settled(made_group: MadeGroup) -> None:
            made[made_group.group.position] = made_group.group

        await self._exact_groups(jobs, settled)
        return [made[job.position] for job in jobs]

    async def _cancel(self) -> None:
        await cancel_all(list(self._tasks))
