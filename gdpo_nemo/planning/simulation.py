"""A run's rollouts and training as discrete events: engines, verifiers, the trainer, and who waits for whom.

``simulate(Scenario(...))`` is the whole interface. Nothing is random but the lengths and the verifiers' seconds, which
follow from the seed and a group's position alone, so that scenarios that differ in anything else meet the same samples.

Left out: contention in the network, engines that are slower than others, failures, dynamic sampling.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from gdpo_nemo.planning.simulated_engine import Sequence, SimulatedEngine
from gdpo_nemo.planning.simulation_records import Result, Scenario, StepRecord, Trace
from gdpo_nemo.rollouts.depth import AutoDepth, outstanding_bound

_ENDED, _RETURN, _JUDGED, _DEADLINE, _TRAINED, _PUBLISHED = range(6)


@dataclass(slots=True)
class Group:
    """The samples of one prompt, from admission to training."""

    position: int
    admitted_at: int
    """Version of the engines' weights when it was admitted."""
    left: int
    """Samples not yet judged."""
    sequences: list[Sequence] = field(default_factory=list)
    tokens: float = 0.0


def simulate(scenario: Scenario) -> Result:
    """Play the scenario.

    Raises:
        ValueError: its figures contradict each other; the text says which.
    """
    scenario.check()
    return (_Barrier if scenario.scheduler == "barrier" else _Continuous)(scenario).run()


class _Simulation:
    """What both schedulers have in common: events, engines, verifiers, the trainer and the account."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.now = 0.0
        self.engines = [SimulatedEngine(index, scenario.rates, scenario.slots) for index in range(scenario.engines)]
        self.groups: dict[int, Group] = {}
        """Admitted and not yet taken for training, by position."""
        self.ready: list[int] = []
        """Positions of complete groups, in order."""
        self.admitted = 0
        self.trained = 0
        self.version = 0
        self.free = True
        """Whether the trainer waits for a batch."""
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

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Play until the last step is published."""
        self.admit()
        while len(self.steps) < self.scenario.steps:
            self.now, _, kind, what = heappop(self._events)
            self._handle(kind, what)
        for engine in self.engines:
            engine.advance(self.now)
        return Result(self.scenario, self.steps, self.late, self.trace)

    def _handle(self, kind: int, what: object) -> None:
        if kind == _ENDED:
            self._engine_event(what)  # type: ignore[arg-type]  # the kind of an event says what it carries
        elif kind == _RETURN:
            self._return(what)  # type: ignore[arg-type]
        elif kind == _JUDGED:
            self._judged(what)  # type: ignore[arg-type]
        elif kind == _DEADLINE:
            self._deadline(what)  # type: ignore[arg-type]
        elif kind == _TRAINED:
            self._trained()
        else:
            self._published()

    def later(self, seconds: float, kind: int, what: object = None) -> None:
        """Announce an event."""
        self._order += 1
        heappush(self._events, (self.now + seconds, self._order, kind, what))

    # -- sampling ---------------------------------------------------------------------------------------------------

    def new_group(self) -> Group:
        """Admit the next position; its sequences have their lengths, and no engine yet."""
        scenario = self.scenario
        group = Group(self.admitted, self.version, scenario.samples)
        lengths = scenario.lengths.of_group(scenario.seed, group.position, scenario.samples)
        seconds = scenario.verifier.of_group(scenario.seed, group.position, scenario.samples)
        prompt = scenario.prompt_tokens
        for index, (tokens, verify_s) in enumerate(zip(lengths, seconds)):
            prefill = 0.0 if index else prompt  # the others share its cache
            turn = tokens / scenario.turns
            group.sequences.append(Sequence(group.position, prompt, prefill, turn, scenario.turns, verify_s))
        self.groups[group.position] = group
        self.admitted += 1
        return group

    def submit(self, engine: SimulatedEngine, sequences: list[Sequence]) -> None:
        """Queue sequences at an engine."""
        engine.advance(self.now)
        for sequence in sequences:
            sequence.engine = engine
            sequence.waiting_since = self.now
            engine.queue.append(sequence)
        engine.load += len(sequences)
        self._refresh(engine)

    def _refresh(self, engine: SimulatedEngine) -> None:
        """Fill slots and announce the next completion; with nothing running, let weights in that wait for that."""
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
            self.trace.occupied(self.now, engine.index, engine.active)

    def _engine_event(self, what: tuple[SimulatedEngine, int]) -> None:
        engine, epoch = what
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
        sequence.engine.queue.appendleft(sequence)  # before samples that have not begun: its cache is there
        self._refresh(sequence.engine)

    def _deadline(self, group: Group) -> None:
        """Abort what is not judged; the group is trained without it."""
        for sequence in group.sequences:
            if sequence.judged:
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

    # -- judging ----------------------------------------------------------------------------------------------------

    def generated(self, sequence: Sequence) -> None:
        """A sample is written: the driver handles it, then a verifier judges it."""
        sequence.ended = True
        self.verify(sequence)

    def verify(self, sequence: Sequence) -> None:
        """Judge a sample when driver and a verifier have time for it, in order of arrival."""
        scenario = self.scenario
        start = max(self.now, self._driver_free) + scenario.driver_s
        self._driver_free = start
        self._driver_busy += scenario.driver_s
        seconds = sequence.verify_s
        self._verifying += seconds
        if self._workers and seconds:
            start = max(start, self._workers[0])
            heapreplace(self._workers, start + seconds)
        end = start + seconds
        if end > self.now:
            self.later(end - self.now, _JUDGED, sequence)
        else:
            self._judged(sequence)

    def _judged(self, sequence: Sequence) -> None:
        if sequence.dropped:
            return
        sequence.judged = True
        group = self.groups[sequence.group]
        group.left -= 1
        group.tokens += sequence.written
        if not group.left:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        insort(self.ready, group.position)
        self._train_if_ready()

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_if_ready(self) -> None:
        if not self.free:
            return
        taken = self.take()
        if taken is None:
            return
        self.free = False
        self.batch = [self.groups.pop(position) for position in taken]
        gone = set(taken)
        self.ready = [position for position in self.ready if position not in gone]
        self.waited = self.now - self.free_since
        self.later(self.scenario.train_s, _TRAINED)

    def _trained(self) -> None:
        if self._last_trained < 0:
            self._last_trained = self.now
        if self.may_publish():
            self._publish()

    def _publish(self) -> None:
        """Send the new weights: engines take them between two steps, or when what they have begun has ended."""
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
        self.noted(self.steps[-1])
        self.free = True
        self.free_since = self.now
        self.batch = []
        self.admit()
        self._train_if_ready()

    def _record(self) -> None:
        trains = self.version - 1
        for engine in self.engines:
            engine.advance(self.now)
        written_by = [[s.version for s in group.sequences if s.version >= 0] for group in self.batch]
        self.steps.append(
            StepRecord(
                started=self.free_since,
                ended=self.now,
                waited=self.waited,
                held_up=self.held_up,
                positions=tuple(group.position for group in self.batch),
                staleness=tuple(trains - min(versions, default=trains) for versions in written_by),
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

    # -- what a scheduler decides -------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Submit groups, as many as may be outstanding."""
        raise NotImplementedError

    def take(self) -> list[int] | None:
        """Positions of the next batch, in order; None while there is none."""
        raise NotImplementedError

    def may_publish(self) -> bool:
        """Whether the new weights can be sent now."""
        return True

    def depth_now(self) -> int:
        """Groups that may be outstanding."""
        raise NotImplementedError

    def noted(self, step: StepRecord) -> None:
        """Take note of a step that is done."""

    def exhausted(self) -> bool:
        """Whether the last prompt of the run is admitted."""
        return self._total is not None and self.admitted >= self._total


class _Continuous(_Simulation):
    """Whole groups to the least loaded engine, one by one, as many as the depth allows; a batch is any P complete
    groups within the window."""

    def __init__(self, scenario: Scenario):
        super().__init__(scenario)
        self.bound = outstanding_bound(scenario.groups, scenario.max_staleness, scenario.window)
        self.control = AutoDepth(scenario.groups, self.bound) if scenario.depth == "auto" else None
        self._fixed = scenario.depth if isinstance(scenario.depth, int) else self.bound
        self._oldest = 0
        """The first position that was not taken for training."""
        self._beyond: set[int] = set()
        """Positions after it that were."""
        self._surplus = 0

    def depth_now(self) -> int:
        """The rule's, or the one that was set."""
        return self.control.depth if self.control else self._fixed

    def noted(self, step: StepRecord) -> None:
        """Tell the rule how long the trainer waited."""
        if self.control:
            self.control.observe(step.waited, step.ended - step.started, self._surplus)

    def admit(self) -> None:
        """Submit groups while fewer than the depth are outstanding."""
        depth = self.depth_now()
        timeout = self.scenario.group_timeout_s
        while self.admitted - self.trained < depth and not self.exhausted():
            group = self.new_group()
            self.submit(min(self.engines, key=_load), group.sequences)
            if timeout is not None:
                self.later(timeout, _DEADLINE, group)

    def take(self) -> list[int] | None:
        """The oldest P complete groups of which none overtakes more than the window allows."""
        wanted = self.scenario.groups
        if len(self.ready) < wanted:
            return None
        oldest = self._oldest
        taken: list[int] = []
        for position in self.ready:
            if position >= oldest + self.scenario.window or len(taken) == wanted:
                break
            taken.append(position)
            if position == oldest:
                gone = {*taken}
                while oldest in self._beyond or oldest in gone:
                    oldest += 1
        if len(taken) < wanted:
            return None
        self._beyond = {position for position in (*self._beyond, *taken) if position > oldest}
        self._oldest = oldest
        self._surplus = bisect_left(self.ready, oldest + self.scenario.window) - wanted
        return taken


def _load(engine: SimulatedEngine) -> int:
    return engine.load


class _Barrier(_Simulation):
    """Whole batches, cut evenly among the engines when the weights have been sent, which waits until all that was
    submitted is written; a batch is judged when its last sample is there."""

    def __init__(self, scenario: Scenario):
        super().__init__(scenario)
        self._writing: dict[int, int] = {}
        """Samples that a batch still lacks, by batch."""
        self._finished: dict[int, list[Sequence]] = {}

    def depth_now(self) -> int:
        """All batches that staleness allows, always."""
        return (self.scenario.max_staleness + 1) * self.scenario.groups

    def admit(self) -> None:
        """Submit whole batches."""
        scenario = self.scenario
        while self.admitted - self.trained < self.depth_now() and not self.exhausted():
            batch = self.admitted // scenario.groups
            sequences = [s for _ in range(scenario.groups) for s in self.new_group().sequences]
            self._writing[batch] = len(sequences)
            self._finished[batch] = []
            cuts = [len(sequences) * index // len(self.engines) for index in range(len(self.engines) + 1)]
            for engine, start, end in zip(self.engines, cuts, cuts[1:]):
                self.submit(engine, sequences[start:end])

    def generated(self, sequence: Sequence) -> None:
        """Judge a batch when the last of its samples is written."""
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
        """The next batch, when all its groups are judged."""
        first = self.trained
        if len(self.ready) < self.scenario.groups or self.ready[self.scenario.groups - 1] != first + (
            self.scenario.groups - 1
        ):
            return None
        return self.ready[: self.scenario.groups]

    def may_publish(self) -> bool:
        """Whether all engines are empty."""
        return not any(engine.load for engine in self.engines)
