"""Which prompts are drawn when and by whom, which groups a step trains, and what happens where something is late or
dies. The fleet, its lanes and the scheduler are real; the engines follow a script."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from engines_in_process import InProcessFleet, Script, without_ray

from gdpo_nemo.cluster import lane as lanes
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Outcome, Prompt, TrainerState, Verdict
from gdpo_nemo.errors import RunError
from gdpo_nemo.rollouts import scheduler as schedulers
from gdpo_nemo.rollouts.accounts import LATE, NO_SIGNAL, SURPLUS
from gdpo_nemo.rollouts.rollout_batch import sample_seed
from gdpo_nemo.rollouts.scheduler import RolloutScheduler

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
SMALL = [
    "gdpo.rewards={correctness: 1}",
    "gdpo.num_prompts_per_step=3",
    "gdpo.num_generations_per_prompt=2",
    "gdpo.max_num_steps=5",
]


class Tokenizer:
    chat_template = None

    def batch_decode(self, ids, **_):
        return ["text"] * len(ids)


class World:
    """Prompts are numbered by their place; those in ``dead`` reward both samples alike."""

    def __init__(self, *overrides, dead=(), position=0, step=0, limit=None, saved=None, script=None, verify_s=0.0):
        self.config = load_config(DEMO, [*SMALL, *overrides])
        self.dead = set(dead)
        self.hanging: set[int] = set()
        """Prompts whose verdict does not come before ``release``."""
        self.release = threading.Event()
        self.script = script or Script()
        self.fleet = InProcessFleet(self.config, self.script)
        self.fleet.publish(step)
        pool = SimpleNamespace(verify=self.verify)
        self.step = step
        self.scheduler = RolloutScheduler(
            self.config, self, self.fleet, pool, Tokenizer(), saved or {}, position, step, limit, (step * 2, 10)
        )

    def __len__(self) -> int:
        return 12

    def batch(self, position, count):
        return [self.prompt(position + i) for i in range(count)]

    def prompt(self, place):
        return Prompt(str(place), np.array([place], np.int32), "", "digit_sort", {"digits": "12345"})

    def verify(self, trajectories):
        if any(int(t.prompt.token_ids[0]) in self.hanging for t in trajectories):
            self.release.wait(10)
        return [self.verdict(t) for t in trajectories]

    def verdict(self, t):
        return Verdict({"correctness": float(t.sample_index) * (int(t.prompt.token_ids[0]) not in self.dead)})

    def train(self, kv="drain"):
        """A step: its batch, and the weights behind it."""
        self.scheduler.schedule(self.step)
        rollout = self.scheduler.get_batch(self.step)
        self.step += 1
        self.fleet.publish(self.step, kv)
        return rollout

    def submitted(self) -> list[list[int]]:
        return [seeds for engine in self.script.engines for seeds in engine.batches]

    def close(self):
        self.release.set()
        self.scheduler.close()
        self.fleet.close()


@pytest.fixture
def world(monkeypatch):
    without_ray(monkeypatch)
    made = []

    def make(*overrides, **arguments):
        made.append(World(*overrides, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def places(rollout):
    return [int(group.prompt.id) for group in rollout.groups]


def eventually(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


# -- on-policy ---------------------------------------------------------------------------------------------------------


def test_a_synchronous_step_is_submitted_at_once_in_order_with_its_own_seeds(world):
    w = world()
    w.train()
    w.train()
    seeds = [[sample_seed(0, 3 * step + i, j) for i in range(3) for j in range(2)] for step in range(2)]
    assert w.submitted() == seeds


def test_with_several_engines_a_groups_engine_follows_from_its_place_alone(world):
    rng = random.Random(0)
    found = []
    for _ in range(2):
        w = world("policy.generation.engines=2", script=Script(lambda engine, request: rng.random() / 50))
        for _ in range(3):
            w.train()
        found.append([engine.batches for engine in w.script.engines])
    assert found[0] == found[1] and [len(batch) for batch in found[0][0]] == [4, 4, 4]


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
    assert w.scheduler.in_flight == 0 and len(w.submitted()) == 2


def test_dead_groups_are_replaced_by_the_next_prompts_until_there_are_enough(world):
    w = world("gdpo.dynamic_sampling.enabled=true", dead={0, 2, 3})
    rollout = w.train()
    assert places(rollout) == [1, 4, 5]
    assert (rollout.rounds, rollout.dropped_groups, rollout.next_position) == (3, 3, 6)
    assert rollout.dropped == [(0, NO_SIGNAL), (2, NO_SIGNAL), (3, NO_SIGNAL)]
    assert {(t.trainer_state.global_step, t.trainer_state.epoch) for t in rollout.trajectories} == {(0, 0.0)}
    assert places(w.train()) == [6, 7, 8]


def test_a_round_of_a_multiple_is_drawn_whole_and_what_is_not_needed_is_discarded(world):
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
    assert w.scheduler.in_flight == 0 and w.scheduler.get_batch(2) is None


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


def test_validation_draws_the_same_samples_each_time_and_none_of_trainings(world):
    w = world("gdpo.val_temperature=0.5", "gdpo.val_generations_per_prompt=3")
    for _ in range(2):
        groups = w.scheduler.evaluate([w.prompt(0), w.prompt(1)]).result()
        assert [[t.rewards["correctness"] for t in g.trajectories] for g in groups] == [[0, 1, 2]] * 2
    first, second = w.submitted()
    assert first == second and len(set(first)) == 6
    w.train()
    assert not set(w.submitted()[2]) & set(first)


def test_who_watches_a_step_sees_its_samples_and_verdicts_as_they_come(world):
    w = world()
    w.hanging = {1}
    w.scheduler.schedule(0)
    eventually(lambda: w.scheduler.progress() == "6 of 6 samples, 2 of 3 groups judged")
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


# -- ahead of the trainer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [1, 3])
def test_groups_are_admitted_as_far_ahead_as_the_bound_allows_and_no_further(world, staleness):
    w = world(f"rollout.max_staleness={staleness}", f"rollout.depth={3 * (staleness + 1)}", "gdpo.max_num_steps=9")
    for step in range(6):
        w.scheduler.schedule(step)
        assert w.scheduler.in_flight == min(3 * (staleness + 1), 3 * (9 - step))
        rollout = w.scheduler.get_batch(step)
        assert places(rollout) == [3 * step, 3 * step + 1, 3 * step + 2]
        w.fleet.publish(step + 1)


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_no_trained_token_is_older_than_the_bound_whatever_the_delays(world, kv):
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
    assert 0 <= min(ages) and max(ages) <= 2 and 0 < np.mean(ages)
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
    script = Script(lambda engine, request: 9.0 if request.seed == sample_seed(0, 1, 1) else 0.0)
    w = world("rollout.group_timeout_s=0.3", "rollout.min_valid=0.5", "gdpo.num_generations_per_prompt=4",
              script=script)  # fmt: skip
    rollout = w.train()
    late = rollout.groups[1].trajectories
    assert [t.outcome for t in late] == [Outcome.OK, Outcome.ABORTED, Outcome.OK, Outcome.OK]
    assert not late[1].trains and late[1].rewards == {} and "rollout.group_timeout_s" in late[1].detail
    eventually(lambda: len(script.now(0).aborted) == 1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_with_too_few_samples_in_time_is_dropped_and_replaced(world, staleness):
    script = Script(lambda engine, request: 9.0 if int(request.prompt_ids[0]) == 1 else 0.0)
    w = world(f"rollout.max_staleness={staleness}", "rollout.group_timeout_s=0.3", "rollout.min_valid=1.0",
              script=script)  # fmt: skip
    rollout = w.train()
    assert places(rollout) == [0, 2, 3] and rollout.dropped == [(1, LATE)] and rollout.next_position == 4


def test_groups_without_signal_are_dropped_one_by_one_ahead_of_the_trainer(world):
    w = world("rollout.max_staleness=1", "gdpo.dynamic_sampling.enabled=true", "gdpo.max_num_steps=3", dead={1, 4})
    found = [w.train() for _ in range(2)]
    assert [places(rollout) for rollout in found] == [[0, 2, 3], [5, 6, 7]]
    assert sorted(d for rollout in found for d in rollout.dropped) == [(1, NO_SIGNAL), (4, NO_SIGNAL)]
    assert found[1].next_position == 8


def test_a_prompt_without_signal_is_drawn_again_at_a_new_position(world):
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


def test_the_end_of_the_data_ends_the_run_where_drops_have_used_prompts_up(world):
    w = world("rollout.max_staleness=1", "gdpo.dynamic_sampling.enabled=true", limit=7, dead={2, 5})
    assert places(w.train()) == [0, 1, 3]
    w.scheduler.schedule(1)
    assert w.scheduler.get_batch(1) is None


def test_two_passes_over_the_data_in_one_batch_are_told_apart(world):
    w = world("rollout.max_staleness=1")
    w.prompt = lambda place: Prompt(str(place % 2), np.array([place], np.int32), "", "digit_sort", {"digits": "1"})
    found = [w.train(), w.train()]
    assert [[group.prompt.id for group in rollout.groups] for rollout in found] == [
        ["0", "1", "0#2"],
        ["1", "0", "1#2"],
    ]
    assert all(t.prompt.id == group.prompt.id for r in found for group in r.groups for t in group.trajectories)


def test_groups_of_earlier_steps_are_used_again_and_a_resumed_run_draws_the_same(world, monkeypatch):
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
        schedulers, "recorded", lambda run_dir, step, positions: [originals[position] for position in positions]
    )
    resumed = world(*options, step=4, position=9, saved=json.loads(json.dumps(saved)))
    assert resumed.train().again == w.train().again != []


def test_an_engine_that_missed_the_newest_weights_gets_no_group_admitted_under_them(world):
    w = world("rollout.max_staleness=1", "policy.generation.engines=2")
    w.fleet.lanes[0].version = -5
    w.scheduler.schedule(0)
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]
    assert w.script.now(0).batches == []


# -- engines that die --------------------------------------------------------------------------------------------------


def test_killing_one_of_two_engines_draws_its_samples_again_and_no_others(world):
    slow = threading.Event()
    script = Script(lambda engine, request: 0.0 if slow.is_set() else 60.0)
    w = world("rollout.max_staleness=1", "rollout.depth=6", "policy.generation.engines=2", script=script)
    w.scheduler.schedule(0)
    eventually(lambda: sum(map(len, w.submitted())) == 12)
    before = [sum(engine.batches, []) for engine in script.engines]
    slow.set()
    script.now(0).dead = True
    eventually(lambda: sum(map(len, w.submitted())) == 12 + len(before[0]))
    assert sorted(sum(script.engines[1].batches, [])) == sorted(before[0] + before[1])
    eventually(lambda: w.fleet.lanes[0].state == "ready" and w.fleet.lanes[0].version == 0)
    assert any("engine 0" in line for line in w.fleet.take_events())


def test_a_synchronous_steps_samples_are_drawn_again_beside_the_same_ones(world):
    """So that the composition of the engine's batch, and with it the last digits, are those of an undisturbed step."""
    first = sample_seed(0, 0, 0)
    script = Script(lambda engine, request: 0.0 if request.seed == first or len(script.engines) > 1 else 60.0)
    w = world(script=script)
    w.scheduler.schedule(0)
    eventually(lambda: len(w.fleet.lanes[0].pending) == 5)  # one of six is done
    script.now(0).dead = True
    assert places(w.scheduler.get_batch(0)) == [0, 1, 2]
    first, again = w.submitted()
    assert first == again


def test_a_replacement_is_given_the_newest_weights_before_it_samples(world):
    w = world("rollout.max_staleness=1", "gdpo.max_num_steps=9")
    w.train()
    w.script.now(0).dead = True
    rollout = w.train()
    eventually(lambda: len(w.script.engines) == 2 and w.fleet.lanes[0].version == w.script.now(0).version == 2)
    assert {version for t in rollout.trajectories for version, _ in t.spans} <= {0, 1}


def test_an_engine_that_keeps_dying_is_given_up_and_the_others_go_on(world):
    w = world("rollout.max_staleness=1", "policy.generation.engines=2", "gdpo.max_num_steps=9")
    w.script.stillborn = {1}
    w.script.now(1).dead = True
    eventually(lambda: w.fleet.lanes[1].state == "dead")
    assert [places(w.train()) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert any("died 4 times in a row" in line for line in w.fleet.take_events())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_without_any_engine_left_ends_at_once_and_says_why(world, staleness):
    w = world(f"rollout.max_staleness={staleness}", "policy.generation.engines=2", script=Script(lambda *_: 60.0))
    w.scheduler.schedule(0)
    w.script.stillborn = {0, 1}
    for engine in list(w.script.engines):
        engine.dead = True
    start = time.monotonic()
    with pytest.raises(RunError, match="no engine is left: engine .: it died 4 times"):
        w.scheduler.get_batch(0)
    assert time.monotonic() - start < 5


def test_a_node_with_engines_alone_may_be_lost_and_come_back(world, monkeypatch):
    monkeypatch.setattr(lanes, "_NODE_POLL_S", 0.05)
    w = world("rollout.max_staleness=1", "policy.generation.engines=2", "gdpo.max_num_steps=9")
    monkeypatch.setattr(w.fleet, "lost_node", lambda lane: "10.0.0.2")
    w.script.unplaced = {1}
    w.script.now(1).dead = True
    eventually(lambda: w.fleet.lanes[1].state == "lost")
    assert [places(w.train()) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert any("engine 1: its node 10.0.0.2 is no longer in the cluster" in line for line in w.fleet.take_events())
    w.script.unplaced = set()
    eventually(lambda: w.fleet.lanes[1].state == "ready" and w.fleet.lanes[1].version == 2)
    w.train()
    w.train()
    assert w.script.now(1).batches


def test_a_run_ends_when_the_node_of_its_last_engine_is_lost(world, monkeypatch):
    monkeypatch.setattr(lanes, "_NODE_POLL_S", 0.05)
    w = world(script=Script(lambda *_: 60.0))
    monkeypatch.setattr(w.fleet, "lost_node", lambda lane: "10.0.0.2")
    w.scheduler.schedule(0)
    w.script.unplaced = {0}
    w.script.now(0).dead = True
    with pytest.raises(
        RunError, match="no engine is left: engine 0: its node 10.0.0.2 is no longer in the cluster; start"
    ):
        w.scheduler.get_batch(0)
    w.script.unplaced = set()


def test_what_a_verifier_raises_ends_the_run_and_not_the_scheduler_alone(world):
    w = world("rollout.max_staleness=1")

    def broken(trajectories):
        raise RunError("a mistake")

    w.verify = broken
    w.scheduler._maker._pool.verify = broken
    w.scheduler.schedule(0)
    with pytest.raises(RunError, match="a mistake"):
        w.scheduler.get_batch(0)


# -- over a long time --------------------------------------------------------------------------------------------------


def test_memory_stays_within_the_bound_over_500_steps(world):
    w = world("rollout.max_staleness=2", "gdpo.max_num_steps=500")
    process = psutil.Process(os.getpid())
    sizes = []
    for step in range(500):
        w.train()
        scheduler = w.scheduler
        assert scheduler.in_flight <= 9 and len(scheduler._made) <= 9 and len(scheduler._tasks) <= 9
        assert len(w.fleet.lanes[0].pending) <= 18
        if step in (150, 499):
            sizes.append(process.memory_info().rss)
    assert sizes[1] - sizes[0] < 20e6
