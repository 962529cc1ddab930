"""Which prompts a synchronous step draws and trains, and by which engine. Engines follow a script (scheduler_world)."""

from __future__ import annotations

import random

import pytest
from engines_in_process import Script
from scheduler_world import eventually, places

from gdpo_nemo.data.records import TrainerState, Verdict
from gdpo_nemo.rollouts.batches import sample_seed
from gdpo_nemo.rollouts.ledger import NO_SIGNAL, SURPLUS


def test_a_synchronous_step_is_submitted_at_once_in_order_with_its_own_seeds(world):
    w = world()
    w.train()
    w.train()
    seeds = [[sample_seed(0, 3 * step + i, j) for i in range(3) for j in range(2)] for step in range(2)]
    assert w.submitted() == seeds


@pytest.mark.parametrize("engines, each", [(2, [4, 2]), (3, [2, 2, 2])])
def test_engine_of_a_group_follows_from_its_prompt_index_only(world, engines, each):
    rng = random.Random(0)
    found = []
    for _ in range(2):
        w = world(f"policy.generation.engines={engines}", script=Script(lambda engine, request: rng.random() / 50))
        for _ in range(3):
            w.train()
        found.append([engine.batches for engine in w.script.engines])
    assert found[0] == found[1]
    assert [[len(batch) for batch in batches] for batches in found[0]] == [[samples] * 3 for samples in each]


def test_steps_take_the_prompts_in_order_and_account_for_them(world):
    w = world(position=20, step=2)
    for step in range(2, 5):
        rollout = w.train()
        first = 20 + 3 * (step - 2)
        assert places(rollout) == [first, first + 1, first + 2]
        assert (rollout.version, rollout.next_position, rollout.dropped) == (step, first + 3, [])
        assert {t.policy_version for t in rollout.trajectories} == {step}
        assert [group.position for group in rollout.groups] == places(rollout)


def test_nothing_is_started_that_no_step_would_train(world):
    w = world("gdpo.max_num_steps=2")
    w.train()
    w.train()
    w.scheduler.schedule(2)
    assert len(w.scheduler._ledger) == 0 and len(w.submitted()) == 2


def test_dead_groups_are_replaced_by_the_next_prompts_until_there_are_enough(world):
    w = world("gdpo.dynamic_sampling.enabled=true", dead={0, 2, 3})
    rollout = w.train()
    assert places(rollout) == [1, 4, 5]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (3, 3, 6)
    assert rollout.dropped == [(0, NO_SIGNAL), (2, NO_SIGNAL), (3, NO_SIGNAL)]
    assert {(t.trainer_state.global_step, t.trainer_state.epoch) for t in rollout.trajectories} == {(0, 0.0)}
    assert places(w.train()) == [6, 7, 8]


def test_round_of_a_multiple_is_sampled_whole_and_surplus_groups_are_discarded(world):
    """Rounds of four for three groups: 0 to 3 have two with signal, 4 to 7 four of which one is kept."""
    w = world("gdpo.dynamic_sampling={enabled: true, batch_multiplier: 1.5}", dead={0, 2}, limit=12)
    rollout = w.train()
    assert [len(set(seeds)) for seeds in w.submitted()] == [8, 8]
    assert places(rollout) == [1, 3, 4]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (2, 5, 8)
    assert rollout.dropped == [(0, NO_SIGNAL), (2, NO_SIGNAL), (5, SURPLUS), (6, SURPLUS), (7, SURPLUS)]
    again = w.train()
    assert places(again) == [8, 9, 10] and (again.rounds, again.dropped_groups, again.next_position) == (1, 1, 12)
    w.scheduler.schedule(2)
    assert len(w.scheduler._ledger) == 0 and w.scheduler.get_batch(2) is None


def test_leave_one_out_fills_the_step_to_its_samples_with_a_part_of_a_group(world):
    """Groups of three with one right sample keep two: five of them make nine samples and a tenth that is cut."""
    w = world("gdpo.dynamic_sampling={enabled: true, leave_one_out: true}", "gdpo.num_generations_per_prompt=3")
    w.verdict = lambda t: Verdict({"correctness": float(t.sample_index == 2)})
    rollout = w.train()
    assert [[t.sample_index for t in group.trajectories] for group in rollout.groups] == [[0, 1]] * 4 + [[0]]
    assert places(rollout) == [0, 1, 2, 3, 4]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (3, 0, 5)


def test_rounds_are_bounded_and_a_step_never_has_fewer_groups_than_asked_for(world):
    w = world("gdpo.dynamic_sampling={enabled: true, max_rounds: 2}", dead=range(1, 100))
    rollout = w.train()
    assert places(rollout) == [0, 1, 2] and (rollout.rounds, rollout.next_position) == (2, 5)


def test_dead_groups_are_replaced_by_no_prompt_past_the_limit(world):
    w = world("gdpo.dynamic_sampling.enabled=true", dead=range(3), limit=5)
    rollout = w.train()
    assert places(rollout) == [3, 4, 0]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (2, 2, 5)


def test_validation_has_the_same_samples_each_time_and_none_of_training(world):
    changes = ("gdpo.val_temperature=0.5", "gdpo.val_top_p=0.9", "gdpo.val_top_k=7")
    w = world(*changes, "gdpo.val_generations_per_prompt=3")
    for _ in range(2):
        groups = w.scheduler.evaluate([w.prompt(0), w.prompt(1)]).result()
        assert [[t.rewards["correctness"] for t in g.trajectories] for g in groups] == [[0, 1, 2]] * 2
    first, second = w.submitted()
    assert first == second and len(set(first)) == 6
    drawn = {(s.temperature, s.top_p, s.top_k) for engine in w.script.engines for s in engine.samplings}
    assert drawn == {(0.5, 0.9, 7)}
    w.train()
    assert not set(w.submitted()[2]) & set(first)
    assert w.script.engines[-1].samplings[-1].top_p == 1


def test_watcher_of_a_step_gets_its_samples_and_verdicts_as_they_arrive(world):
    w = world()
    w.hanging = {1}
    w.scheduler.schedule(0)
    eventually(lambda: w.scheduler.progress() == "6 of 6 samples, 2 of 3 groups scored")
    w.release.set()
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]
    ahead = world("rollout.max_staleness=1", "rollout.depth=6")
    ahead.scheduler.schedule(0)
    eventually(lambda: ahead.scheduler.progress() == "6 of 3 groups ready")


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_group_travels_with_the_updates_done_before_it_is_trained(world, staleness):
    """Steps of two updates: three prompts of two samples, in batches of three samples."""
    w = world(f"rollout.max_staleness={staleness}", "policy.train_global_batch_size=3", position=9, step=3)
    for step in (3, 4):
        [state] = {t.trainer_state for t in w.train().trajectories}
        assert (state.global_step, state.max_steps, state.epoch) == (2 * step, 10, step * 3 / len(w))
    w.scheduler.schedule(5)
    groups = w.scheduler.evaluate([w.prompt(0)]).result()
    assert {t.trainer_state for group in groups for t in group.trajectories} == {TrainerState(10, 10, 15 / len(w))}


def test_recoveries_of_environments_are_counted_in_their_batch_and_reported_once(world):
    w = world()
    assert w.train().measured["environments/recovered"] == 0 and w.scheduler.take_events() == []
    w.recoveries.update({"a worker was replaced": 2, "a verification was repeated": 1})
    assert w.train().measured["environments/recovered"] == 3
    told = ["environments: a worker was replaced (2 times)", "environments: a verification was repeated"]
    assert w.scheduler.take_events() == told and w.scheduler.take_events() == []
    assert w.train().measured["environments/recovered"] == 0
