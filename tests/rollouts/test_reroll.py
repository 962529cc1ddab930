"""Prompts drawn again: each attempt is a position of its own, and every position is accounted for once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from random import Random

import pytest

from gdpo_nemo.config.rollout_checks import admission_bound
from gdpo_nemo.rollouts.ledger import DealState, Ledger, LedgerState, PromptDeal, Stage

GROUPS, WINDOW = 4, 3


def has_signal(place: int, position: int) -> bool:
    """A third of the prompts never has any; others have it from their second attempt on, or at once."""
    return place % 3 != 0 and (place % 3 == 1 or position % 2 == 0)


class Run:
    """A run with a ledger and a deal, in which samples become ready in a random order."""

    def __init__(self, after: int, most: int = 1, ahead: int = 1, state=None, seed: int = 0):
        window = WINDOW if ahead else 1
        ledger, deal = state or (LedgerState(), DealState())
        self.step = 0
        self.ledger = Ledger(GROUPS, admission_bound(GROUPS, ahead, window), window, ledger)
        self.deal = PromptDeal(after, most, deal)
        self.random = Random(seed)
        self.places: dict[int, int] = {}
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self.steps: list[list[tuple[int, int]]] = []
        self.drops_of: dict[int, list[int]] = {}

    def train_step(self) -> None:
        while True:
            for position in self.ledger.admit(self.step):
                self.places[position] = self.deal.deal(position, self.step)
            batch = self.ledger.get_batch()
            if batch is not None:
                break
            waiting = sorted(p for p in self.places if p in self.ledger and self.ledger[p].stage is Stage.WAITING)
            self.judge(self.random.choice(waiting))
        self.ledger.trained(batch)
        self.deal.done(batch)
        self.trained += batch
        self.steps.append([(position, self.places[position]) for position in batch])
        self.step += 1

    def judge(self, position: int) -> None:
        place = self.places[position]
        if has_signal(place, position):
            self.ledger.move(position, Stage.READY)
            return
        self.ledger.drop(position, "no_signal")
        self.deal.no_signal(position, self.step)
        self.dropped.append(position)
        self.drops_of.setdefault(place, []).append(self.step)

    def saved(self) -> tuple[LedgerState, DealState]:
        """The states as a checkpoint would give them back."""
        ledger, deal = (json.loads(json.dumps(asdict(part.state()))) for part in (self.ledger, self.deal))
        return LedgerState.of(ledger), DealState.of(deal)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("after, most", [(1, 1), (2, 3), (5, 2)])
def test_every_position_is_trained_or_dropped_once_and_no_prompt_comes_too_often(ahead, after, most):
    run = Run(after, most, ahead)
    for _ in range(60):
        run.train_step()
    ended = Counter(run.trained + run.dropped)
    assert set(ended.values()) == {1}
    assert set(run.places) == set(ended) | {p for p in run.places if p in run.ledger}
    attempts = Counter(run.places.values())
    assert max(attempts.values()) == most + 1
    assert Counter(run.places[p] for p in run.trained).most_common(1)[0][1] == 1, (
        "a prompt with signal is not drawn again"
    )
    assert sorted(attempts) == list(range(run.deal.state().next_place)), "no prompt of the data is left out"
    assert len(run.places) == run.deal.state().next_place + sum(count - 1 for count in attempts.values())


def test_a_prompt_comes_again_after_as_many_steps_as_asked_and_not_before():
    after = 3
    run = Run(after, ahead=0)
    admitted: dict[int, list[int]] = {}
    known = 0
    for _ in range(40):
        run.train_step()
        for position in sorted(run.places)[known:]:
            admitted.setdefault(run.places[position], []).append(run.step - 1)
        known = len(run.places)
    again = [place for place, steps in admitted.items() if len(steps) == 2]
    assert len(again) > 10
    for place in again:
        assert admitted[place][1] == run.drops_of[place][0] + after


@pytest.mark.parametrize("stop", [1, 7, 20])
def test_resumed_synchronous_run_samples_the_prompts_of_an_uninterrupted_one(stop):
    whole = Run(after=2, most=2, ahead=0)
    for _ in range(40):
        whole.train_step()
    first = Run(after=2, most=2, ahead=0)
    for _ in range(stop):
        first.train_step()
    second = Run(after=2, most=2, ahead=0, state=first.saved(), seed=99)
    second.step = stop
    for _ in range(40 - stop):
        second.train_step()
    assert first.steps + second.steps == whole.steps


def test_outstanding_positions_keep_their_prompts_when_a_run_resumes():
    run = Run(after=1, ahead=3)
    for _ in range(15):
        run.train_step()
    ledger, deal = run.saved()
    resumed = PromptDeal(1, 1, deal)
    outstanding = [p for p in run.places if p in run.ledger]
    assert len(outstanding) > GROUPS and any(run.places[p] != p for p in outstanding)
    assert [resumed.deal(p, 15) for p in outstanding[::-1]] == [run.places[p] for p in outstanding[::-1]]
    assert resumed.state().next_place == run.deal.state().next_place
    assert ledger.position == min(outstanding)


def test_without_re_rolls_a_position_is_the_place_of_its_prompt():
    run = Run(after=0)
    for _ in range(30):
        run.train_step()
    assert all(position == place for position, place in run.places.items())
    assert run.deal.positions(1000, 30) == 1000


def test_checkpoint_from_before_re_rolls_resumes_at_its_prompt_index():
    deal = PromptDeal(1, 1, DealState.of({}, 48))
    assert [deal.deal(position, 3) for position in (48, 49)] == [48, 49]


def test_a_limit_of_prompts_counts_no_prompt_twice():
    deal = PromptDeal(after=2)
    assert [deal.deal(position, 0) for position in range(4)] == [0, 1, 2, 3]
    assert deal.no_signal(1, 0) and deal.no_signal(3, 0)
    deal.done([0, 2])
    assert deal.positions(4, 1) == 4
    assert deal.positions(4, 2) == 6
    assert [deal.deal(position, 2) for position in (4, 5)] == [1, 3]
    assert deal.positions(4, 2) == 6 and deal.state().next_place == 4
    assert not deal.no_signal(4, 2), "once is all that was asked for"
