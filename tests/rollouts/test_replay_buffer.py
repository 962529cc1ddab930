"""Groups used again: never too old, never too often, and the same ones after a resume."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from gdpo_nemo.config.rollout_checks import admission_bound
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.rollouts.ledger import Ledger, Stage
from gdpo_nemo.rollouts.replay_buffer import ReplayBuffer, oldest_version
from gdpo_nemo.utils.errors import RunError

PER_STEP = 4


def sample(version: int, *, spans=(), outcome: Outcome = Outcome.OK) -> Trajectory:
    tokens = np.arange(3, dtype=np.int32)
    prompt = Prompt("p", tokens, "p", "toy")
    return Trajectory(prompt, 0, tokens, np.zeros(3, np.float32), version, "", "stop", outcome=outcome, spans=spans)


def group(position: int, *versions: int, outcome: Outcome = Outcome.OK) -> Group:
    trajectories = [sample(version, outcome=outcome) for version in versions]
    return Group(Prompt(f"train/{position}", np.arange(3, dtype=np.int32), "p", "toy"), trajectories, position)


def trained_in(step: int) -> list[Group]:
    """The groups that are new in a step, sampled by weights of one to three steps before."""
    return [group(step * PER_STEP + i, max(0, step - 1 - i % 3), max(0, step - 1)) for i in range(PER_STEP)]


def run(buffer: ReplayBuffer, steps: range, count: int = 2) -> list[list[int]]:
    """The positions that each step draws; step ``s`` trains weights of version s - 1."""
    drawn = []
    for step in steps:
        drawn.append([group.position for group in buffer.draw(count, step - 1)])
        buffer.add(step, trained_in(step))
    return drawn


def test_no_group_is_used_when_a_token_of_it_is_too_old_or_used_too_often():
    buffer = ReplayBuffer(reuse=2, max_age=3, seed=0)
    drawn = run(buffer, range(1, 60), count=3)
    uses: dict[int, int] = {}
    for version, positions in enumerate(drawn):
        for position in positions:
            origin = next(g for g in trained_in(position // PER_STEP) if g.position == position)
            assert version - oldest_version(origin) <= 3
            assert position // PER_STEP <= version, "a step uses groups of earlier steps alone"
            uses[position] = uses.get(position, 0) + 1
    assert max(uses.values()) == 2
    assert len(drawn[0]) == 0 and all(len(positions) == 3 for positions in drawn[2:])


def test_the_age_of_a_group_is_that_of_its_oldest_trained_token():
    mixed = Group(group(0, 5).prompt, [sample(5), sample(4, spans=((4, 1), (6, 2)))], 0)
    assert oldest_version(mixed) == 4
    masked = Group(mixed.prompt, [*mixed.trajectories, sample(1, outcome=Outcome.ABORTED)], 0)
    assert oldest_version(masked) == 4
    with pytest.raises(ValueError, match="has no trainable sample"):
        oldest_version(group(0, 1, outcome=Outcome.ENV_FAILED))


@pytest.mark.parametrize(("version", "drawn"), [(8, [0]), (9, [])])
def test_group_is_reused_up_to_its_largest_age_and_not_after(version, drawn):
    buffer = ReplayBuffer(reuse=2, max_age=3, seed=0)
    buffer.add(6, [group(0, 5)])
    assert [found.position for found in buffer.draw(1, version)] == drawn


def test_reused_groups_depend_on_seed_and_step_and_not_on_the_order_of_arrival():
    orders = [trained_in(4), trained_in(4)[::-1]]
    first, second = (ReplayBuffer(reuse=1, max_age=8, seed=3) for _ in orders)
    for buffer, groups in zip((first, second), orders):
        buffer.add(4, groups)
    expected = [g.position for g in first.draw(2, 4)]
    assert [g.position for g in second.draw(2, 4)] == expected == sorted(expected)
    draws = set()
    for seed in range(8):
        other = ReplayBuffer(reuse=1, max_age=8, seed=seed)
        other.add(4, trained_in(4))
        draws.add(tuple(g.position for g in other.draw(2, 4)))
    assert len(draws) > 2


@pytest.mark.parametrize("saved_after", [1, 5, 12])
def test_resumed_buffer_equals_an_uninterrupted_one(saved_after):
    undisturbed = run(ReplayBuffer(reuse=2, max_age=4, seed=1), range(1, 25))
    before = ReplayBuffer(reuse=2, max_age=4, seed=1)
    drawn = run(before, range(1, saved_after + 1))
    after = ReplayBuffer(reuse=2, max_age=4, seed=1)
    asked = []

    def load(step: int, positions) -> list[Group]:
        asked.append(step)
        return [g for g in trained_in(step) if g.position in positions]

    after.restore(before.state(), load)
    assert asked == sorted(set(asked)), "each file is read once"
    assert after.state() == before.state()
    assert drawn + run(after, range(saved_after + 1, 25)) == undisturbed


def test_a_group_that_cannot_be_read_back_ends_the_resume_with_its_place():
    buffer = ReplayBuffer(reuse=1, max_age=4, seed=0)
    buffer.add(3, trained_in(3))
    with pytest.raises(RunError, match="samples of step 3 lack the groups with prompt indices 13, which"):
        ReplayBuffer(1, 4, 0).restore(buffer.state(), lambda *_: [g for g in trained_in(3) if g.position != 13])


def test_groups_that_train_nothing_are_not_stored_and_none_is_stored_twice():
    buffer = ReplayBuffer(reuse=1, max_age=4, seed=0)
    buffer.add(1, [group(0, 0, outcome=Outcome.ENV_FAILED), group(1, 0)])
    assert len(buffer) == 1
    with pytest.raises(ValueError, match=r"is already in the replay buffer \(prompt index 1\)"):
        buffer.add(2, [group(1, 1)])
    with pytest.raises(ValueError, match="prompt index -1"):
        buffer.add(2, [group(-1, 1)])


@pytest.mark.parametrize("staleness, again, reuse", [(1, 4, 1), (2, 3, 1), (3, 5, 2)])
def test_steps_that_use_groups_again_stay_full_and_within_the_staleness_of_new_ones(staleness, again, reuse):
    size = 8
    fresh = size - again
    window = 2 if (staleness + 1) * fresh > size else 1
    ledger = Ledger(fresh, admission_bound(fresh, staleness, window), window)
    buffer = ReplayBuffer(reuse, max_age=staleness + 2, seed=0)
    random = Random(staleness)
    made: dict[int, Group] = {}
    for version in range(60):
        old = buffer.draw(again, version)
        ledger.groups = size - len(old)
        while True:
            made.update((position, group(position, version, version)) for position in ledger.admit(version))
            if (batch := ledger.get_batch()) is not None:
                break
            waiting = sorted(p for p in made if p in ledger and ledger[p].stage is Stage.WAITING)
            ledger.move(random.choice(waiting), Stage.READY)
        new = [made[position] for position in batch]
        assert len(old) + len(new) == size
        assert max(version - oldest_version(g) for g in new) <= staleness
        assert not {g.position for g in old} & set(batch)
        ledger.trained(batch)
        buffer.add(version + 1, new)
    assert len(old) == again, "once there are groups of earlier steps, each step has its share of them"
