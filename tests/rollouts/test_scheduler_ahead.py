"""Which groups are drawn ahead of the trainer, which a step trains, and what happens to those that are late. Engines
follow a script (scheduler_world)."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import psutil
import pytest
from engines_in_process import Script
from scheduler_world import eventually, places

from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.rollouts import scheduler as schedulers
from gdpo_nemo.rollouts.batches import sample_seed
from gdpo_nemo.rollouts.ledger import LATE, NO_SIGNAL


@pytest.mark.parametrize("staleness", [1, 3])
def test_groups_are_admitted_as_far_ahead_as_the_bound_allows_and_no_further(world, staleness):
    w = world(f"rollout.max_staleness={staleness}", f"rollout.depth={3 * (staleness + 1)}", "gdpo.max_num_steps=9")
    for step in range(6):
        w.scheduler.schedule(step)
        assert len(w.scheduler._ledger) == min(3 * (staleness + 1), 3 * (9 - step))
        rollout = w.scheduler.get_batch(step)
        assert places(rollout) == [3 * step, 3 * step + 1, 3 * step + 2]
        w.fleet.publish(step + 1)


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_no_trained_token_is_older_than_the_bound_for_all_delays(world, kv):
    rng = random.Random(7)
    script = Script(lambda engine, request: rng.random() ** 4 / 8)
    w = world("rollout.max_staleness=2", "rollout.window=3", "policy.generation.engines=2", "gdpo.max_num_steps=25",
              script=script)  # fmt: skip
    ages = []
    seen = []
    for step in range(25):
        rollout = w.train(kv)
        ages += [step - version for t in rollout.trajectories for version, _ in t.spans]
        seen += [group.position for group in rollout.groups]
        assert all(sum(tokens for _, tokens in t.spans) == len(t.completion_ids) for t in rollout.trajectories)
    assert min(ages) >= 0 and max(ages) <= 2 and np.mean(ages) > 0
    assert sorted(seen) == list(range(75))


def test_a_batch_is_in_the_order_of_its_positions_whenever_they_were_done(world):
    script = Script(lambda engine, request: 0.05 if int(request.prompt_ids[0]) % 3 == 0 else 0.0)
    w = world("rollout.max_staleness=2", script=script)
    assert [places(w.train()) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_within_the_window_later_groups_overtake_a_late_one_and_then_wait_for_it(world):
    w = world("rollout.max_staleness=2", "rollout.window=3", "rollout.depth=7")
    w.hanging = {0}
    w.scheduler.schedule(0)
    eventually(lambda: w.scheduler._ledger.count("ready") == 6)
    assert places_when_ready(w) is None  # 1 and 2 may overtake, 3 may not
    w.release.set()
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]


def places_when_ready(w):
    return w.scheduler._ledger.get_batch()


def test_a_hanging_verifier_delays_its_own_group_only(world):
    w = world("rollout.max_staleness=1", "rollout.depth=6")
    w.hanging = {5}
    w.scheduler.schedule(0)
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]
    eventually(lambda: w.scheduler._ledger.count("ready") == 5)


def test_samples_that_miss_the_groups_deadline_are_aborted_and_the_group_is_trained(world):
    script = Script(lambda engine, request: 600.0 if request.seed == sample_seed(0, 1, 1) else 0.0)
    w = world("rollout.group_timeout_s=4", "rollout.min_valid=0.5", "gdpo.num_generations_per_prompt=4",
              script=script)  # fmt: skip
    rollout = w.train()
    late = rollout.groups[1].trajectories
    assert [t.outcome for t in late] == [Outcome.OK, Outcome.ABORTED, Outcome.OK, Outcome.OK]
    assert not late[1].trains and late[1].rewards == {} and "rollout.group_timeout_s" in late[1].detail
    eventually(lambda: len(script.now(0).aborted) == 1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_with_too_few_samples_in_time_is_dropped_and_replaced(world, staleness):
    script = Script(lambda engine, request: 600.0 if int(request.prompt_ids[0]) == 1 else 0.0)
    w = world(f"rollout.max_staleness={staleness}", "rollout.group_timeout_s=4", "rollout.min_valid=1.0",
              script=script)  # fmt: skip
    rollout = w.train()
    assert places(rollout) == [0, 2, 3] and rollout.dropped == [(1, LATE)] and rollout.next_position == 4


def test_groups_without_signal_are_dropped_individually_ahead_of_the_trainer(world):
    w = world("rollout.max_staleness=1", "gdpo.dynamic_sampling.enabled=true", "gdpo.max_num_steps=3", dead={1, 4})
    found = [w.train() for _ in range(2)]
    assert [places(rollout) for rollout in found] == [[0, 2, 3], [5, 6, 7]]
    assert sorted(d for rollout in found for d in rollout.dropped) == [(1, NO_SIGNAL), (4, NO_SIGNAL)]
    assert found[1].next_position == 8


def test_prompt_without_signal_is_sampled_again_at_a_new_prompt_index(world):
    w = world("rollout.max_staleness=1", "gdpo.dynamic_sampling={enabled: true, reroll_after: 1}", "rollout.depth=3",
              "gdpo.max_num_steps=4", dead={1})  # fmt: skip
    first = w.train()
    assert places(first) == [0, 2, 3]
    w.dead.clear()
    later = [w.train(), w.train()]
    assert 1 in {place for rollout in later for place in places(rollout)}
    assert [g.position for rollout in [first, *later] for g in rollout.groups] == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_run_resumed_from_the_accounts_trains_every_position_once(world):
    rng = random.Random(3)
    script = Script(lambda engine, request: rng.random() / 30)
    options = ("rollout.max_staleness=2", "rollout.window=3", "gdpo.max_num_steps=12")
    seen = []
    saved: dict = {}
    position = 0
    for part in range(4):
        w = world(*options, step=3 * part, position=position, saved=saved, script=Script(script.delay))
        for _ in range(3):
            rollout = w.train()
            seen += [group.position for group in rollout.groups] + [p for p, _ in rollout.dropped]
        w.scheduler.schedule(w.step)
        saved = w.scheduler.ledger()
        position = rollout.next_position
    assert sorted(seen) == list(range(36))


@pytest.mark.parametrize("overrides", [[], ["rollout.group_timeout_s=600"], ["policy.generation.engines=8"]])
def test_engines_report_whole_groups_only_if_there_are_many_and_groups_have_no_deadline(world, overrides):
    asked = []

    def delay(engine, request):
        asked.append((request.group, int(request.prompt_ids[0]), request.decodes))
        return 0.0

    settings = ["rollout.max_staleness=1", "policy.generation.engines=9", *overrides]
    world(*settings, script=Script(delay)).train()
    assert len(asked) >= 6 and all(decodes for _, _, decodes in asked)
    assert all(group == (None if overrides else place) for group, place, _ in asked)


def test_the_end_of_the_data_ends_the_run_where_drops_have_used_prompts_up(world):
    w = world("rollout.max_staleness=1", "gdpo.dynamic_sampling.enabled=true", limit=7, dead={2, 5})
    assert places(w.train()) == [0, 1, 3]
    w.scheduler.schedule(1)
    assert w.scheduler.get_batch(1) is None


def test_two_epochs_in_one_batch_have_separate_ids(world):
    w = world("rollout.max_staleness=1")
    w.prompt = lambda place: Prompt(str(place % 2), np.array([place], np.int32), "", "digit_sort", {"digits": "1"})
    found = [w.train(), w.train()]
    assert [[group.prompt.id for group in rollout.groups] for rollout in found] == [
        ["0", "1", "0#2"],
        ["1", "0", "1#2"],
    ]
    assert all(t.prompt.id == group.prompt.id for r in found for group in r.groups for t in group.trajectories)


def test_groups_of_earlier_steps_are_reused_and_a_resumed_run_reuses_the_same(world, monkeypatch):
    options = ("rollout.max_staleness=1", "rollout.replay_buffer={groups: 1, reuse: 2, max_age: 4}",
               "gdpo.max_num_steps=9")  # fmt: skip
    w = world(*options)
    found = [w.train() for _ in range(4)]
    new = [[g.position for g in rollout.groups if g.position not in rollout.again] for rollout in found]
    assert new == [[0, 1, 2], [3, 4], [5, 6], [7, 8]] and found[3].next_position == 9
    assert [len(rollout.again) for rollout in found] == [0, 1, 1, 1] and all(len(r.groups) == 3 for r in found)
    first_trained = {position: step for step, positions in enumerate(new, start=1) for position in positions}
    originals = {g.position: g for rollout in found for g in rollout.groups if g.position not in rollout.again}
    for step, rollout in enumerate(found, start=1):
        for group in rollout.groups[3 - len(rollout.again) :]:
            assert first_trained[group.position] < step and group is not originals[group.position]

    w.scheduler.schedule(4)
    saved = w.scheduler.ledger()
    assert {position: step for step, position, _ in saved["replay_buffer"]}.items() <= first_trained.items()
    monkeypatch.setattr(
        schedulers,
        "read_trained_groups",
        lambda run_dir, step, positions: [originals[position] for position in positions],
    )
    resumed = world(*options, step=4, position=9, saved=json.loads(json.dumps(saved)))
    assert resumed.train().again == w.train().again != []


def test_an_engine_that_missed_the_newest_weights_gets_no_group_admitted_under_them(world):
    w = world("rollout.max_staleness=1", "policy.generation.engines=2")
    w.fleet.clients[0].version = -5
    w.scheduler.schedule(0)
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]
    assert w.script.now(0).batches == []


def test_memory_stays_within_the_bound_over_500_steps(world):
    w = world("rollout.max_staleness=2", "gdpo.max_num_steps=500")
    process = psutil.Process(os.getpid())
    sizes = []
    for step in range(500):
        w.train()
        scheduler = w.scheduler
        assert len(scheduler._ledger) <= 9 and len(scheduler._made) <= 9 and len(scheduler._tasks) <= 9
        assert len(w.fleet.clients[0].pending) <= 18
        if step in (150, 499):
            sizes.append(process.memory_info().rss)
    assert sizes[1] - sizes[0] < 20e6
