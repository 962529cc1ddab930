"""Discrete-event simulation of a run's rollouts and training: engines, verifiers, trainer and their waiting times.

The entry point is ``simulate(Scenario(...))``. Only lengths and verification times are random. These values depend only
on the seed and the prompt index, so scenarios that differ in other settings have the same samples.

The simulation does not model network contention, slower engines, failures or dynamic sampling.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from gdpo_nemo.rollouts.depth import AutoDepth, outstanding_bound
from gdpo_nemo.tools.simulation.engine import Sequence, SimulatedEngine
from gdpo_nemo.tools.simulation.records import Result, Scenario, StepRecord, Trace

_ENDED, _RETURN, _VERIFIED, _DEADLINE, _TRAINED, _PUBLISHED = range(6)


@dataclass(slots=True)
class Group:
    """Samples of one prompt, from admission to training."""

    prompt_index: int
    admitted_at: int
    """Weight version at admission."""
    left: int
    """Number of samples that are not verified yet."""
    sequences: list[Sequence] = field(default_factory=list)
    tokens: float = 0.0


def simulate(scenario: Scenario) -> Result:
    """Simulate a run with the settings of ``scenario``.

    Raises:
        ValueError: if settings are invalid or inconsistent. The message names the setting.
    """
    scenario.check()
    return (_Barrier if scenario.scheduler == "barrier" else _Continuous)(scenario).run()


class _Simulation:
    """Base class of both schedulers, with the events, engines, verifiers, trainer and step records."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.now = 0.0
        self.engines = [SimulatedEngine(index, scenario.rates, scenario.slots) for index in range(scenario.engines)]
        self.groups: dict[int, Group] = {}
        """Admitted groups that are not in a training batch yet, by prompt index."""
        self.ready: list[int] = []
        """Sorted prompt indices of complete groups."""
        self.admitted = 0
        self.trained = 0
        self.version = 0
        self.free = True
        """True while the trainer waits for a batch."""
        self.free_since = 0.0
        self.waited = 0.0
        self.held_up = 0.0
        self.batch: list[Group] = []
        self.steps: list[StepRecord] = []
        self.late = 0
        self.trace = Trace() if scenario.trace else None
        self._last_trained = -1.0
        self._events: list[tuple[float, int, int, object]] = []
        self._order = 0
        self._driver_free = 0.0
        self._driver_busy = 0.0
        self._verifying = 0.0
        workers = scenario.verify_workers
        self._workers = [0.0] * workers if workers else []
        self._total = None if scenario.endless else scenario.steps * scenario.groups

    # -- event loop -----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Simulate until the weight update of the last step has finished."""
        self.admit()
        while len(self.steps) < self.scenario.steps:
            self.now, _, kind, payload = heappop(self._events)
            self._handle(kind, payload)
        for engine in self.engines:
            engine.advance(self.now)
        return Result(self.scenario, self.steps, self.late, self.trace)

    def _handle(self, kind: int, payload: object) -> None:
        if kind == _ENDED:
            self._engine_event(payload)  # type: ignore[arg-type]  # the kind of an event determines its payload
        elif kind == _RETURN:
            self._return(payload)  # type: ignore[arg-type]
        elif kind == _VERIFIED:
            self._verified(payload)  # type: ignore[arg-type]
        elif kind == _DEADLINE:
            self._deadline(payload)  # type: ignore[arg-type]
        elif kind == _TRAINED:
            self._trained()
        else:
            self._published()

    def later(self, seconds: float, kind: int, payload: object = None) -> None:
        """Schedule an event that occurs ``seconds`` from now."""
        self._order += 1
        heappush(self._events, (self.now + seconds, self._order, kind, payload))

    # -- sampling ---------------------------------------------------------------------------------------------------

    def new_group(self) -> Group:
        """Create the group of the next prompt. The sequences have lengths but are not assigned to an engine yet."""
        scenario = self.scenario
        group = Group(self.admitted, self.version, scenario.samples)
        lengths = scenario.lengths.sample_group(scenario.seed, group.prompt_index, scenario.samples)
        seconds = scenario.verifier.sample_group(scenario.seed, group.prompt_index, scenario.samples)
        prompt = scenario.prompt_tokens
        for index, (tokens, verify_s) in enumerate(zip(lengths, seconds)):
            prefill = 0.0 if index else prompt  # later sequences reuse the prompt's KV cache
            turn = tokens / scenario.turns
            group.sequences.append(Sequence(group.prompt_index, prompt, prefill, turn, scenario.turns, verify_s))
        self.groups[group.prompt_index] = group
        self.admitted += 1
        return group

    def submit(self, engine: SimulatedEngine, sequences: list[Sequence]) -> None:
        """Add sequences to an engine's queue."""
        engine.advance(self.now)
        for sequence in sequences:
            sequence.engine = engine
            sequence.waiting_since = self.now
            engine.queue.append(sequence)
        engine.load += len(sequences)
        self._refresh(engine)

    def _refresh(self, engine: SimulatedEngine) -> None:
        """Fill free slots and schedule the next completion. Pending weights are loaded first if the engine is idle."""
        if engine.pending is not None and not engine.active:
            engine.version = engine.pending
            engine.pending = None
            engine.stall(self.scenario.publish_s)
        engine.start_waiting()
        end = engine.next_end()
        engine.epoch += 1
        if end is not None:
            self.later(max(0.0, end - self.now), _ENDED, (engine, engine.epoch))
        if self.trace is not None:
            self.trace.record(self.now, engine.index, engine.active)

    def _engine_event(self, payload: tuple[SimulatedEngine, int]) -> None:
        engine, epoch = payload
        if epoch != engine.epoch:
            return
        engine.advance(self.now)
        for sequence in engine.pop_ended():
            sequence.turns -= 1
            if sequence.turns:
                self.later(self.scenario.turn_s, _RETURN, sequence)
            else:
                engine.load -= 1
                self.generated(sequence)
        self._refresh(engine)

    def _return(self, sequence: Sequence) -> None:
        if sequence.dropped or sequence.engine is None:
            return
        sequence.engine.advance(self.now)
        sequence.waiting_since = self.now
        sequence.engine.queue.appendleft(sequence)  # before new samples, because the sequence's KV cache still exists
        self._refresh(sequence.engine)

    def _deadline(self, group: Group) -> None:
        """Abort the group's samples that are not verified. The group is trained without these samples."""
        for sequence in group.sequences:
            if sequence.verified:
                continue
            if not sequence.ended and sequence.engine is not None:
                sequence.engine.advance(self.now)
                sequence.engine.drop(sequence)
                self._refresh(sequence.engine)
            sequence.dropped = True
            self.late += 1
            group.left -= 1
            if not group.left:
                self._complete(group)

    # -- verification -----------------------------------------------------------------------------------------------

    def generated(self, sequence: Sequence) -> None:
        """Pass a finished sample to the driver and then to a verifier."""
        sequence.ended = True
        self.verify(sequence)

    def verify(self, sequence: Sequence) -> None:
        """Schedule the verification of a sample. Driver and verifiers process samples in order of arrival."""
        scenario = self.scenario
        start = max(self.now, self._driver_free) + scenario.driver_sample_s
        self._driver_free = start
        self._driver_busy += scenario.driver_sample_s
        seconds = sequence.verify_s
        self._verifying += seconds
        if self._workers and seconds:
            start = max(start, self._workers[0])
            heapreplace(self._workers, start + seconds)
        end = start + seconds
        if end > self.now:
            self.later(end - self.now, _VERIFIED, sequence)
        else:
            self._verified(sequence)

    def _verified(self, sequence: Sequence) -> None:
        if sequence.dropped:
            return
        sequence.verified = True
        group = self.groups[sequence.group]
        group.left -= 1
        group.tokens += sequence.written
        if not group.left:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        insort(self.ready, group.prompt_index)
        self._train_if_ready()

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_if_ready(self) -> None:
        if not self.free:
            return
        taken = self.take()
        if taken is None:
            return
        self.free = False
        self.batch = [self.groups.pop(prompt_index) for prompt_index in taken]
        taken_set = set(taken)
        self.ready = [prompt_index for prompt_index in self.ready if prompt_index not in taken_set]
        self.waited = self.now - self.free_since
        self.later(self.scenario.train_s, _TRAINED)

    def _trained(self) -> None:
        if self._last_trained < 0:
            self._last_trained = self.now
        if self.may_publish():
            self._publish()

    def _publish(self) -> None:
        """Send the new weights.

        Engines load the weights between two decoding steps or, with ``drain``, as soon as they are idle.
        """
        self._last_trained, trained_at = -1.0, self._last_trained
        self.held_up = self.now - trained_at
        scenario = self.scenario
        for engine in self.engines:
            engine.advance(self.now)
            if scenario.kv == "drain" and engine.active:
                engine.pending = self.version + 1
            else:
                engine.pending = None
                engine.version = self.version + 1
                engine.stall(scenario.publish_s)
                if scenario.kv == "recompute":
                    engine.forget_cache()
            self._refresh(engine)
        self.later(scenario.publish_s, _PUBLISHED)

    def _published(self) -> None:
        self.version += 1
        self.trained += len(self.batch)
        self._record()
        self.on_step(self.steps[-1])
        self.free = True
        self.free_since = self.now
        self.batch = []
        self.admit()
        self._train_if_ready()

    def _record(self) -> None:
        trains = self.version - 1
        for engine in self.engines:
            engine.advance(self.now)
        staleness = []
        for group in self.batch:
            versions = [sequence.version for sequence in group.sequences if sequence.version >= 0]
            staleness.append(trains - min(versions, default=trains))
        self.steps.append(
            StepRecord(
                started=self.free_since,
                ended=self.now,
                waited=self.waited,
                held_up=self.held_up,
                prompt_indices=tuple(group.prompt_index for group in self.batch),
                staleness=tuple(staleness),
                tokens=sum(group.tokens for group in self.batch),
                depth=self.depth_now(),
                outstanding=self.admitted - self.trained + len(self.batch),
                engine_busy=sum(engine.busy for engine in self.engines),
                slot_seconds=sum(engine.slot_seconds for engine in self.engines),
                queue_seconds=sum(engine.queue_seconds for engine in self.engines),
                driver_busy=self._driver_busy,
                verifying=self._verifying,
                resident=max(engine.peak for engine in self.engines),
            )
        )

    # -- decisions of a scheduler --------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Submit new groups up to the limit on outstanding groups."""
        raise NotImplementedError

    def take(self) -> list[int] | None:
        """Return the sorted prompt indices of the next batch, or None if no batch is complete."""
        raise NotImplementedError

    def may_publish(self) -> bool:
        """Return whether the new weights can be sent now."""
        return True

    def depth_now(self) -> int:
        """Return the limit on outstanding groups."""
        raise NotImplementedError

    def on_step(self, step: StepRecord) -> None:
        """Process the record of a finished step."""

    def exhausted(self) -> bool:
        """Return whether all prompts of the run have been admitted."""
        return self._total is not None and self.admitted >= self._total


class _Continuous(_Simulation):
    """Scheduler that sends each group to the least loaded engine, as long as the depth allows it.

    A batch consists of any P complete groups within the reorder window.
    """

    def __init__(self, scenario: Scenario):
        super().__init__(scenario)
        self.bound = outstanding_bound(scenario.groups, scenario.max_staleness, scenario.window)
        self.control = AutoDepth(scenario.groups, self.bound) if scenario.depth == "auto" else None
        self._fixed = scenario.depth if isinstance(scenario.depth, int) else self.bound
        self._oldest = 0
        """First prompt index that has not been in a training batch."""
        self._taken_later: set[int] = set()
        """Prompt indices after ``_oldest`` that have been in a training batch."""
        self._surplus = 0

    def depth_now(self) -> int:
        """Return the adaptive depth if ``depth`` is ``auto``, otherwise the fixed depth."""
        return self.control.depth if self.control else self._fixed

    def on_step(self, step: StepRecord) -> None:
        """Adapt the depth to the time that the trainer waited."""
        if self.control:
            self.control.observe(step.waited, step.ended - step.started, self._surplus)

    def admit(self) -> None:
        """Submit new groups while the number of outstanding groups is less than the depth."""
        depth = self.depth_now()
        timeout = self.scenario.group_timeout_s
        while self.admitted - self.trained < depth and not self.exhausted():
            group = self.new_group()
            self.submit(min(self.engines, key=_load), group.sequences)
            if timeout is not None:
                self.later(timeout, _DEADLINE, group)

    def take(self) -> list[int] | None:
        """Return the prompt indices of the oldest P complete groups within the window, or None for fewer groups."""
        batch_size = self.scenario.groups
        if len(self.ready) < batch_size:
            return None
        oldest = self._oldest
        taken: list[int] = []
        for prompt_index in self.ready:
            if prompt_index >= oldest + self.scenario.window or len(taken) == batch_size:
                break
            taken.append(prompt_index)
            if prompt_index == oldest:
                taken_set = {*taken}
                while oldest in self._taken_later or oldest in taken_set:
                    oldest += 1
        if len(taken) < batch_size:
            return None
        self._taken_later = {prompt_index for prompt_index in (*self._taken_later, *taken) if prompt_index > oldest}
        self._oldest = oldest
        self._surplus = bisect_left(self.ready, oldest + self.scenario.window) - batch_size
        return taken


def _load(engine: SimulatedEngine) -> int:
    return engine.load


class _Barrier(_Simulation):
    """Scheduler that submits whole batches and divides each batch evenly among the engines.

    A weight update waits until all submitted sequences are generated. The verification of a batch begins when all
    samples of the batch are generated.
    """

    def __init__(self, scenario: Scenario):
        super().__init__(scenario)
        self._writing: dict[int, int] = {}
        """Number of unfinished samples of each batch, by batch index."""
        self._finished: dict[int, list[Sequence]] = {}

    def depth_now(self) -> int:
        """Return the number of groups that the staleness bound allows."""
        return (self.scenario.max_staleness + 1) * self.scenario.groups

    def admit(self) -> None:
        """Submit whole batches."""
        scenario = self.scenario
        while self.admitted - self.trained < self.depth_now() and not self.exhausted():
            batch = self.admitted // scenario.groups
            sequences: list[Sequence] = []
            for _ in range(scenario.groups):
                sequences += self.new_group().sequences
            self._writing[batch] = len(sequences)
            self._finished[batch] = []
            cuts = [len(sequences) * index // len(self.engines) for index in range(len(self.engines) + 1)]
            for engine, start, end in zip(self.engines, cuts, cuts[1:]):
                self.submit(engine, sequences[start:end])

    def generated(self, sequence: Sequence) -> None:
        """Record a finished sample. After the last sample of a batch, verify the batch."""
        sequence.ended = True
        batch = sequence.group // self.scenario.groups
        self._finished[batch].append(sequence)
        self._writing[batch] -= 1
        if not self._writing[batch]:
            for finished in self._finished.pop(batch):
                self.verify(finished)
        if self._last_trained >= 0 and self.may_publish():
            self.later(0.0, _TRAINED)

    def take(self) -> list[int] | None:
        """Return the prompt indices of the next batch if all its groups are verified, otherwise None."""
        first = self.trained
        if len(self.ready) < self.scenario.groups or self.ready[self.scenario.groups - 1] != first + (
            self.scenario.groups - 1
        ):
            return None
        return self.ready[: self.scenario.groups]

    def may_publish(self) -> bool:
        """Return whether no engine has unfinished sequences."""
        return not any(engine.load for engine in self.engines)
