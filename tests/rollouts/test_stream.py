"""The stream's bookkeeping: which batch may start when, which prompts it gets, and what dynamic sampling replaces.

Engines, prompts and verdicts are made up here, so that every place and every reward is known.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Prompt, TrainerState, Verdict
from gdpo_nemo.generation.requests import Completion, CompletionBatch
from gdpo_nemo.rollouts.groups import RolloutStream, sample_seed

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
SMALL = [
    "gdpo.rewards={correctness: 1}",
    "gdpo.num_prompts_per_step=3",
    "gdpo.num_generations_per_prompt=2",
    "gdpo.max_num_steps=5",
]


class World:
    """Prompts are numbered by their place; those in ``dead`` reward both samples alike. Engines are of version 7."""

    def __init__(
        self, *overrides: str, dead: frozenset[int] = frozenset(), position: int = 0, step: int = 0, limit=None
    ):
        self.config = load_config(DEMO, [*SMALL, *overrides])
        self.dead = dead
        self.asked = []
        fleet = SimpleNamespace(submit=self.submit, collect=lambda ticket: ticket)
        tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: ["text"] * len(ids), chat_template=None)
        pool = SimpleNamespace(verify=lambda trajectories: [self.verdict(t) for t in trajectories])
        updates = (step * 2, 10)
        self.stream = RolloutStream(self.config, self, fleet, pool, tokenizer, position, step, limit, updates)

    def __len__(self) -> int:
        return 12

    def batch(self, position: int, count: int) -> list[Prompt]:
        return [self.prompt(position + i) for i in range(count)]

    def prompt(self, place: int) -> Prompt:
        return Prompt(str(place), np.array([place], np.int32), "", "digit_sort", {"digits": "12345"})

    def submit(self, requests, sampling) -> CompletionBatch:
        self.asked.append((requests, sampling))
        made = [Completion(np.array([i], np.int32), np.zeros(1, np.float32), "stop") for i in range(len(requests))]
        return CompletionBatch(made, version=7, seconds=2.0)

    def verdict(self, t) -> Verdict:
        return Verdict({"correctness": float(t.sample_index) * (int(t.prompt.id) not in self.dead)})

    def places(self, rollout) -> list[int]:
        return [int(group.prompt.id) for group in rollout.groups]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_batch_starts_no_sooner_than_the_staleness_bound_allows_and_no_later(staleness):
    world = World(f"rollout.max_staleness={staleness}")
    started = []
    for version in range(5):
        world.stream.schedule(version)
        started.append(len(world.asked))
        assert world.stream.in_flight == len(world.asked) - version
        rollout = world.stream.get_batch(version)
        assert world.places(rollout) == [3 * version, 3 * version + 1, 3 * version + 2]
        assert (
            rollout.version == version
            and rollout.next_position == 3 * version + 3
            and {t.policy_version for t in rollout.trajectories} == {7}
        )
    # Batch k is for update k + 1; none is made that no step would train.
    assert started == [min(version + staleness + 1, 5) for version in range(5)]
    world.stream.close()


def test_a_stream_goes_on_where_the_checkpoint_says():
    world = World(position=20, step=4)
    world.stream.schedule(4)
    rollout = world.stream.get_batch(4)
    assert world.places(rollout) == [20, 21, 22] and rollout.next_position == 23
    requests, sampling = world.asked[0]
    assert [r.seed for r in requests] == [
        sample_seed(world.config.run.seed, 20 + i, j) for i in range(3) for j in range(2)
    ]
    assert [r.prompt_ids.tolist() for r in requests] == [[20], [20], [21], [21], [22], [22]]
    assert (sampling.temperature, sampling.max_new_tokens) == (1.0, 36)


def test_what_a_rollout_took_is_said_in_seconds_and_spans():
    world = World()
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert (
        rollout.generation_s == 2.0 and 0 <= rollout.verify_s < 2 and (rollout.rounds, rollout.dropped_groups) == (1, 0)
    )
    (lane, name, start, end), (other, verified, begun, done) = rollout.spans
    assert (lane, name, other, verified) == ("rollout", "sample 6", "verify", "verify 6")
    assert end - start == pytest.approx(2.0) and end == begun <= done


def test_dead_groups_are_replaced_by_the_next_prompts_until_there_are_enough():
    world = World("gdpo.dynamic_sampling.enabled=true", dead=frozenset({0, 2, 3}))
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert world.places(rollout) == [1, 4, 5]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (3, 3, 6)
    assert rollout.generation_s == 6.0 and len(rollout.spans) == 6
    world.stream.schedule(1)
    assert world.places(world.stream.get_batch(1)) == [6, 7, 8]


def test_a_round_of_a_multiple_is_drawn_whole_and_what_is_not_needed_is_discarded():
    """Rounds of four for three groups: 0 to 3 have two with signal, 4 to 7 four of which one is kept."""
    world = World("gdpo.dynamic_sampling={enabled: true, batch_multiplier: 1.5}", dead=frozenset({0, 2}), limit=12)
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert [len({r.seed for r in requests}) for requests, _ in world.asked] == [8, 8]
    assert world.places(rollout) == [1, 3, 4]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (2, 5, 8)
    world.stream.schedule(1)
    again = world.stream.get_batch(1)
    assert world.places(again) == [8, 9, 10] and (again.rounds, again.dropped_groups, again.next_position) == (1, 1, 12)
    world.stream.schedule(2)
    assert world.stream.in_flight == 0


def test_leave_one_out_fills_the_step_to_its_samples_with_a_part_of_a_group():
    """Groups of three with one right sample keep two: five of them make nine samples and a tenth that is cut."""
    world = World("gdpo.dynamic_sampling={enabled: true, leave_one_out: true}", "gdpo.num_generations_per_prompt=3")
    world.verdict = lambda t: Verdict({"correctness": float(t.sample_index == 2)})
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert [[t.sample_index for t in group.trajectories] for group in rollout.groups] == [[0, 1]] * 4 + [[0]]
    assert world.places(rollout) == [0, 1, 2, 3, 4] and (
        rollout.rounds,
        rollout.dropped_groups,
        rollout.next_position,
    ) == (3, 0, 5)


def test_samples_that_leave_one_out_dropped_stay_where_the_rounds_are_used_up():
    world = World(
        "gdpo.dynamic_sampling={enabled: true, leave_one_out: true, max_rounds: 1}", "gdpo.num_generations_per_prompt=3"
    )
    world.verdict = lambda t: Verdict({"correctness": float(t.sample_index == 2)})
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert [[t.sample_index for t in group.trajectories] for group in rollout.groups] == [[0, 1]] * 3 + [[2]] * 3
    assert rollout.dropped_groups == 0


def test_rounds_are_bounded_and_a_step_never_has_fewer_groups_than_asked_for():
    world = World("gdpo.dynamic_sampling={enabled: true, max_rounds: 2}", dead=frozenset(range(1, 100)))
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert world.places(rollout) == [0, 1, 2] and (rollout.rounds, rollout.next_position) == (2, 5)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_batch_is_started_that_the_limit_of_prompts_has_no_room_for(staleness):
    world = World(f"rollout.max_staleness={staleness}", limit=8)
    for version in range(2):
        world.stream.schedule(version)
        assert world.places(world.stream.get_batch(version)) == [3 * version, 3 * version + 1, 3 * version + 2]
    world.stream.schedule(2)
    assert world.stream.in_flight == 0 and len(world.asked) == 2


def test_dead_groups_are_replaced_by_no_prompt_past_the_limit():
    world = World("gdpo.dynamic_sampling.enabled=true", dead=frozenset(range(3)), limit=5)
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert world.places(rollout) == [3, 4, 0] and (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (
        2,
        2,
        5,
    )


def test_validation_draws_the_same_samples_each_time_and_none_of_trainings():
    world = World("gdpo.val_temperature=0.5", "gdpo.val_generations_per_prompt=3")
    for _ in range(2):
        groups = world.stream.evaluate([world.prompt(0), world.prompt(1)])
        assert [[t.rewards["correctness"] for t in g.trajectories] for g in groups] == [[0, 1, 2]] * 2
    (first, sampling), (second, _) = world.asked
    assert [r.seed for r in first] == [r.seed for r in second] and len({r.seed for r in first}) == 6
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.5, 1.0, -1, 36)
    world.stream.schedule(0)
    assert not {r.seed for r in world.asked[2][0]} & {r.seed for r in first}


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_batch_travels_with_the_updates_done_before_it_is_trained(staleness):
    """Steps of two updates: three prompts of two samples, in batches of three samples."""
    world = World(f"rollout.max_staleness={staleness}", "policy.train_global_batch_size=3", position=9, step=3)
    for step in (3, 4):
        world.stream.schedule(step)
        [state] = {t.trainer_state for t in world.stream.get_batch(step).trajectories}
        assert (state.global_step, state.max_steps, state.epoch) == (2 * step, 10, step * 3 / len(world))
    # A validation is told what is done by then: two steps more than at the start.
    groups = world.stream.evaluate([world.prompt(0)])
    assert {t.trainer_state for group in groups for t in group.trajectories} == {TrainerState(10, 10, 15 / len(world))}
    world.stream.close()


def test_replacements_of_dead_groups_are_told_the_same_step_as_the_rest():
    world = World("gdpo.dynamic_sampling.enabled=true", dead=frozenset({0}))
    world.stream.schedule(0)
    rollout = world.stream.get_batch(0)
    assert world.places(rollout) == [1, 2, 3]
    assert {(t.trainer_state.global_step, t.trainer_state.epoch) for t in rollout.trajectories} == {(0, 0.0)}
