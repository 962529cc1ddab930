"""The account of prompt positions: what it promises under random readiness, drops, kills and late publications."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.rollouts.ledger import Ledger, LedgerState, Stage, admission_bound


@dataclass
class Run:
    """A run's ledger, with a trainer that publishes every ``sync_every`` steps, and what becomes of its record."""

    groups: int
    staleness: int
    window: int
    sync_every: int = 1
    start: LedgerState = field(default_factory=LedgerState)
    step: int = 0
    lines: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Of each step: trained and dropped positions."""

    def __post_init__(self):
        late = self.sync_every - 1
        self.bound = admission_bound(self.groups, self.staleness - late, self.window)
        self.ledger = Ledger(self.groups, self.bound, self.window, self.start, updates=self.step, late=late)
        self.published = self.step  # a resume publishes first

    def outstanding(self) -> list[int]:
        return [p for p in range(self.ledger._next) if p in self.ledger]

    def admit(self, most: int | None = None) -> None:
        self.ledger.admit(self.published, most)
        assert len(self.ledger) <= self.bound

    def train(self) -> bool:
        """Train a batch, if there is one; assert what each of its groups must fulfil."""
        batch = self.ledger.get_batch()
        if batch is None:
            return False
        assert len(set(batch)) == self.groups
        left = self.outstanding()
        for position in batch:
            assert self.step - self.ledger[position].version <= self.staleness
            assert position < left[0] + self.window
            left.remove(position)
        dropped = self.ledger.take_dropped()
        later = [position for position in self.outstanding() if position not in batch]
        if later and self.step % 3 == 2:
            self.ledger.drop(later[-1], "late while the batch trains")
        self.ledger.trained(batch)
        self.lines.append((batch, [position for position, _ in dropped]))
        self.step += 1
        return True

    def publish(self) -> None:
        if self.step - self.published >= self.sync_every:
            self.published = self.step

    def saved(self) -> tuple[str, int]:
        """A checkpoint: the state as it is written, and the step."""
        return json.dumps(asdict(self.ledger.state())), self.step

    def resumed(self, checkpoint: tuple[str, int]) -> Run:
        """The run after a kill: what is later than the checkpoint is gone."""
        state, step = checkpoint
        start = LedgerState.of(json.loads(state))
        return Run(self.groups, self.staleness, self.window, self.sync_every, start, step, self.lines[:step])


@st.composite
def shapes(draw) -> Run:
    groups = draw(st.integers(1, 5))
    staleness = draw(st.integers(0, 3))
    late = draw(st.integers(0, staleness))
    window = draw(st.integers(1, groups * (staleness - late) + 1))
    return Run(groups, staleness, window, late + 1)


EVENTS = ("admit", "admit some", "ready", "ready", "drop", "train", "publish", "save", "kill")


@given(shapes(), st.data())
def test_every_position_is_trained_or_dropped_exactly_once_within_both_bounds(run, data):
    checkpoint = run.saved()
    for _ in range(data.draw(st.integers(20, 120))):
        event = data.draw(st.sampled_from(EVENTS))
        outstanding = run.outstanding()
        if event == "admit":
            run.admit()
        elif event == "admit some":
            run.admit(data.draw(st.integers(0, run.bound)))
        elif event in ("ready", "drop") and outstanding:
            position = data.draw(st.sampled_from(outstanding))
            run.ledger.move(position, Stage.READY) if event == "ready" else run.ledger.drop(position, "late")
        elif event == "train":
            run.train()
        elif event == "publish":
            run.publish()
        elif event == "save":
            checkpoint = run.saved()
        elif event == "kill":
            run = run.resumed(checkpoint)
    for _ in range(2):  # to the end: whatever happened, the run goes on, and the record of drops is complete
        run.publish()
        run.admit()
        for position in run.outstanding():
            run.ledger.move(position, Stage.READY)
        assert run.train()
    done = [position for trained, dropped in run.lines for position in (*trained, *dropped)]
    assert len(done) == len(set(done))
    assert set(done).isdisjoint(run.outstanding())
    assert set(done) | set(run.outstanding()) >= set(range(max(done) + 1))


@given(shapes())
def test_a_run_never_stalls_where_publications_are_late(run):
    for _ in range(4 * run.sync_every):
        run.publish()
        run.admit()
        for position in run.outstanding():
            run.ledger.move(position, Stage.READY)
        assert run.train()


def ready(ledger: Ledger, *positions: int) -> None:
    for position in positions:
        ledger.move(position, Stage.READY)


def test_a_position_trained_before_a_kill_is_not_admitted_again_when_all_before_it_are_done():
    """Two positions are outstanding after the resume, and the next one is retired already."""
    ledger = Ledger(2, admission_bound(2, 2, 3), 3, LedgerState(3, [5]), updates=2)
    assert ledger.admit(2, most=2) == [3, 4]
    ready(ledger, 3, 4)
    ledger.trained(ledger.get_batch())
    assert ledger.state() == LedgerState(6), "the position of a checkpoint is the first that was not trained"
    assert ledger.admit(3, most=2) == [6, 7]


def test_second_checkpoint_contains_the_prompts_trained_before_the_first_resume():
    ledger = Ledger(1, admission_bound(1, 3, 2), 2, LedgerState(0, [1]))
    assert ledger.admit(0) == [0, 2, 3]
    assert ledger.state() == LedgerState(0, [1])


def test_prompts_dropped_before_a_checkpoint_are_counted_by_the_step_after_it():
    ledger = Ledger(1, admission_bound(1, 3, 2), 2)
    ledger.admit(0)
    ledger.drop(0, "timeout")
    state = LedgerState.of(json.loads(json.dumps(asdict(ledger.state()))))
    resumed = Ledger(1, admission_bound(1, 3, 2), 2, state)
    resumed.admit(0)
    ready(resumed, 1)
    assert resumed.take_dropped() == [(0, "timeout")] and resumed.take_dropped() == []


def test_prompts_dropped_while_a_batch_trains_are_counted_by_the_next():
    ledger = Ledger(1, admission_bound(1, 3, 2), 2)
    ledger.admit(0)
    ready(ledger, 0)
    batch = ledger.get_batch()
    assert ledger.take_dropped() == []
    ledger.drop(1, "timeout")
    ledger.trained(batch)
    assert ledger.state().dropped == [(1, "timeout")] and ledger.take_dropped() == [(1, "timeout")]


@pytest.mark.parametrize("late, published, room", [(0, 4, 6), (0, 3, 4), (0, 2, 2), (0, 1, 0), (1, 3, 6), (1, 2, 4)])
def test_each_update_that_engines_should_have_had_takes_a_step_from_the_bound(late, published, room):
    ledger = Ledger(2, admission_bound(2, 2, 1), 1, LedgerState(8), updates=4, late=late)
    assert len(ledger.admit(published)) == room


def test_checkpoint_without_a_ledger_resumes_from_its_prompt_index():
    assert LedgerState.of({}, 48) == LedgerState(48)


def test_staleness_0_trains_the_groups_of_a_step_in_order():
    ledger = Ledger(3, admission_bound(3, 0, 1), 1)
    for step in range(3):
        assert ledger.admit(step) == [3 * step, 3 * step + 1, 3 * step + 2] and ledger.admit(step) == []
        ready(ledger, 3 * step + 2, 3 * step + 1)
        assert ledger.get_batch() is None
        ready(ledger, 3 * step)
        batch = ledger.get_batch()
        assert batch == [3 * step, 3 * step + 1, 3 * step + 2]
        ledger.trained(batch)


@pytest.mark.parametrize("ready, batch", [(2, [2]), (3, None)])
def test_a_group_is_overtaken_only_by_groups_less_than_a_window_behind(ready, batch):
    ledger = Ledger(groups=1, bound=4, window=3)
    assert ledger.admit(0) == [0, 1, 2, 3]
    ledger.move(ready, Stage.READY)
    assert ledger.get_batch() == batch


def test_the_limit_of_a_run_ends_admission():
    ledger = Ledger(2, admission_bound(2, 1, 1), 1, LedgerState(0, [3]), limit=5)
    assert ledger.admit(0) == [0, 1, 2, 4] and ledger.admit(0) == []


def test_a_stage_never_goes_back():
    ledger = Ledger(1, 1, 1)
    ledger.admit(0)
    ledger.move(0, Stage.READY)
    with pytest.raises(ValueError, match="prompt index 0 cannot move from stage ready back to drawing"):
        ledger.move(0, Stage.DRAWING)
