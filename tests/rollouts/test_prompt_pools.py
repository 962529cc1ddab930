"""Prompts whose components vary are sampled more often; quotas and resume of rollout.selection."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scheduler_world import DEMO, World, places

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Group, Prompt, Trajectory, Verdict
from gdpo_nemo.rollouts.group_signal import fewest, top_variance
from gdpo_nemo.rollouts.ledger import LOW_VARIANCE
from gdpo_nemo.rollouts.prompt_pools import PromptPools, Quotas, signals_of

TWO = ["gdpo.rewards={correct: 1.0, brief: 1.0}", "gdpo.num_prompts_per_step=4", "gdpo.num_generations_per_prompt=4"]
ON = "rollout.selection={enabled: true, memory: 0.5, min_rate: 0.1}"
BOTH, ONE, NONE = ({"correct": (a, 0.5), "brief": (b, 0.5)} for a, b in ((True, True), (True, False), (False, False)))


def config(*overrides):
    return load_config(DEMO, [*TWO, *overrides])


class Rows:
    """Prompts whose order is another permutation in each epoch."""

    def __init__(self, count, environment=lambda index: "digit_sort", **columns):
        self.prompts = []
        for index in range(count):
            fields = {name: column(index) for name, column in columns.items()}
            self.prompts.append(Prompt(str(index), np.array([index], np.int32), "", environment(index), fields))

    def __len__(self):
        return len(self.prompts)

    def order(self, epoch):
        return np.random.default_rng(epoch).permutation(len(self))

    def head(self):
        return self.prompts


def group(index, *samples, position=None):
    """A group whose samples have these rewards, (correct, brief) each."""
    prompt = Prompt(str(index), np.array([index], np.int32), "", "digit_sort", {})
    made = []
    for number, rewards in enumerate(samples):
        tokens = np.array([1], np.int32), np.zeros(1, np.float32)
        named = dict(zip(("correct", "brief"), rewards))
        made.append(Trajectory(prompt, number, *tokens, 0, "", "stop", rewards=named))
    return Group(prompt, made, index if position is None else position)


def ids(rollout):
    return [group.prompt.id for group in rollout.groups]


def measured(rollout):
    return rollout.measured["selection/skipped"], rollout.measured["selection/rate"]


def through_json(state):
    return json.loads(json.dumps(state))


def test_prompts_are_sampled_by_the_share_of_components_that_vary():
    rows = Rows(30)
    pools = PromptPools(config(ON), rows)
    for index in range(30):
        for _ in range(8):
            pools.update(index, (BOTH, ONE, NONE)[index % 3])
    rates = [pools.probability(index) for index in range(3)]
    assert rates == pytest.approx([1.0, 0.502, 0.1], abs=0.001)
    drawn = Counter(pools.index(pools.draw()) % 3 for _ in range(3000))
    expected = np.array(rates) / sum(rates)
    assert [drawn[kind] / 3000 for kind in range(3)] == pytest.approx(expected, abs=0.03)


def test_first_epoch_samples_each_prompt_once_in_the_order_of_the_run():
    rows = Rows(20)
    pools = PromptPools(config(ON), rows, start=40)
    assert [pools.draw() for _ in range(20)] == list(range(40, 60))


def test_constant_prompts_are_sampled_again_and_can_recover():
    pools = PromptPools(config("rollout.selection={enabled: true, memory: 0, min_rate: 0.05}"), Rows(2))
    pools.update(0, NONE)
    drawn = [pools.index(pools.draw()) for _ in range(400)]
    assert 5 <= drawn.count(0) <= 40
    pools.update(0, BOTH)
    assert pools.probability(0) == 1.0


def test_component_that_does_not_apply_counts_as_constant_and_weights_count():
    pools = PromptPools(config("gdpo.rewards={correct: -3.0, brief: 1.0, unused: 0.0}",
                               "rollout.selection={enabled: true, memory: 0}"), Rows(2))  # fmt: skip
    pools.update(0, {"correct": (True, 0.5)})
    pools.update(1, {"brief": (True, 0.5), "unused": (True, 0.5)})
    assert [pools.probability(index) for index in (0, 1)] == [0.75, 0.25]


def test_signals_are_those_of_trained_samples_with_rewards():
    made = group(0, (1.0, 0.3), (0.0, 0.3 + 1e-12), (0.0, None))
    assert signals_of(made, config()) == {"correct": (True, pytest.approx(1 / 3)), "brief": (False, pytest.approx(0.3))}
    assert signals_of(replace(made, trajectories=[]), config()) == {}


@pytest.mark.parametrize("seed", range(20))
def test_turns_differ_from_the_quotas_by_less_than_1_after_any_number_of_turns(seed):
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    shares = [rng.choice([rng.uniform(0.05, 5), rng.uniform(0, 0.05), rng.randint(1, 9)]) for _ in range(count)]
    turns = Quotas(shares)
    taken = [0] * count
    for number in range(1, 500):
        taken[turns.turn(range(count))] += 1
        worst = max(abs(taken[i] - number * share / sum(shares)) for i, share in enumerate(shares))
        assert worst <= 1 - 1 / (2 * count - 2) + 1e-9


def test_absent_names_give_their_turns_to_the_others_and_do_not_catch_up():
    turns = Quotas([2.0, 1.0, 1.0])
    first = Counter(turns.turn([0, 2]) for _ in range(300))
    assert (first[0], first[2]) == (200, 100)
    then = Counter(turns.turn([0, 1, 2]) for _ in range(8))
    assert then == {0: 4, 1: 2, 2: 2}


@pytest.mark.parametrize("seed", range(5))
def test_sampled_prompts_keep_the_quotas_of_sources_for_all_signals(seed):
    rng = random.Random(seed)
    rows = Rows(60, dataset=lambda index: "abc"[min(index // 10, 2)])
    pools = PromptPools(config(ON, "data={mix: {a: 0.5, b: 0.3, c: 0.2}, mix_key: dataset}"), rows)
    drawn = Counter()
    for number in range(1, 300):
        index = pools.index(pools.draw())
        source = rows.prompts[index].fields["dataset"]
        drawn[source] += 1
        pools.update(index, NONE if source == "a" else rng.choice([BOTH, ONE, NONE]))
        assert all(abs(drawn[name] - number * share) < 1 for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)))


def test_sampled_prompts_keep_the_quotas_of_difficulties_that_have_prompts():
    quotas = "{new: 1, hard: 1, medium: 2, easy: 1}"
    pools = PromptPools(config("gdpo.rewards={correct: 1.0}",
                               f"rollout.selection={{enabled: true, difficulties: {quotas}}}"), Rows(40))  # fmt: skip
    means = [(0.0, 0.5, 1.0)[index % 3] for index in range(40)]
    for index in range(0, 40, 2):
        pools.update(index, {"correct": (True, means[index])})
    levels = pools.difficulties()
    assert levels[:6].tolist() == [1, 0, 3, 0, 2, 0]
    drawn = Counter(int(levels[pools.index(pools.draw())]) for _ in range(500))
    assert drawn == {0: 100, 1: 100, 2: 200, 3: 100}


def test_difficulty_follows_the_weights_sign_and_ignores_components_without_a_range():
    pools = PromptPools(config("gdpo.rewards={correct: 1.0, brief: -2.0}",
                               "rollout.selection={enabled: true, difficulties: "
                               "{new: 1, hard: 1, medium: 1, easy: 1}}"), Rows(4))  # fmt: skip
    pools.update(0, {"correct": (False, 1.0)})
    assert pools.difficulties().tolist() == [2, 0, 0, 0]
    pools.update(1, {"correct": (False, 0.0), "brief": (False, 10.0)})
    pools.update(2, {"correct": (False, 0.0), "brief": (False, -10.0)})
    pools.update(3, {"correct": (False, 0.0), "brief": (False, -2.0)})
    assert pools.difficulties().tolist() == [3, 1, 3, 2]


LEVELS = "rollout.selection.difficulties={new: 1, hard: 2, medium: 3, easy: 1}"


@pytest.mark.parametrize("quotas", [[], ["data={mix: {a: 3, b: 1}, mix_key: dataset}"], [LEVELS],
                                    ["data={mix: {a: 1, b: 1}, mix_key: dataset}", LEVELS]])  # fmt: skip
def test_restored_pools_choose_the_same_prompts(quotas):
    rows = Rows(25, dataset=lambda index: "ab"[index % 2])
    settings = config("rollout.selection.enabled=true", *quotas)
    rng = random.Random(1)
    pools = PromptPools(settings, rows)

    def turn(which):
        index = which.index(place := which.draw())
        varies = (rng.random() < index / 25, rng.random() < 0.3)
        which.update(index, {"correct": (varies[0], rng.random()), "brief": (varies[1], rng.choice([0.1, 0.2]))})
        return place

    for _ in range(90):
        turn(pools)
    again = PromptPools(settings, rows, through_json(pools.state()))
    assert again.state() == pools.state()
    state = rng.getstate()
    expected = [turn(pools) for _ in range(120)]
    rng.setstate(state)
    assert [turn(again) for _ in range(120)] == expected
    assert again.state() == pools.state()


def test_restored_state_keeps_the_known_components_after_a_change_of_the_rewards():
    pools = PromptPools(config(ON), Rows(3))
    pools.draw()
    pools.update(1, {"correct": (False, 0.25), "brief": (True, 0.5)})
    changed = config("gdpo.rewards={other: 1.0, correct: 1.0}", ON)
    again = PromptPools(changed, Rows(3), through_json(pools.state()))
    assert (again.probability(1), again.probability(0), again.draw()) == (0.75, 1.0, 1)


class Selecting(World):
    """A world with prompts in an order by epoch."""

    def order(self, epoch):
        return np.roll(np.arange(12), epoch)

    def head(self):
        return [self.prompt(index) for index in range(12)]

    def prompt(self, place):
        epoch, offset = divmod(place, 12)
        return super().prompt(int(self.order(epoch)[offset]))


@pytest.fixture
def selecting(world):
    return partial(world, kind=Selecting)


@pytest.mark.parametrize("more", [[], ["gdpo.dynamic_sampling.enabled=true"]], ids=["all groups", "dynamic sampling"])
def test_synchronous_run_resumes_with_the_same_prompts_and_state(selecting, more):
    options = ["rollout.selection={enabled: true, min_rate: 0.05}", "gdpo.max_num_steps=12", *more]
    dead = {0, 1, 2, 3, 4, 5, 6}
    whole = selecting(*options, dead=dead)
    found, states = [], []
    for step in range(11):
        whole.scheduler.schedule(step)
        states.append((through_json(whole.scheduler.ledger()), found[-1].next_position if found else 0))
        found.append(whole.train())
    skipped, rates = zip(*map(measured, found))
    assert skipped[0] == 0 and sum(skipped) > 0 and all(0.05 < rate <= 1.0 for rate in rates) and rates[9] < 0.8
    for step in (3, 7):
        saved, position = states[step]
        part = selecting(*options, dead=dead, step=step, position=position, saved=saved)
        for later in range(step, 10):
            rollout = part.train()
            assert ids(rollout) == ids(found[later]) and rollout.dropped == found[later].dropped
            assert measured(rollout) == measured(found[later])
            part.scheduler.schedule(later + 1)
            assert through_json(part.scheduler.ledger()) == states[later + 1][0]
    if not more:
        later = Counter(int(name.partition("#")[0]) for rollout in found[5:] for name in ids(rollout))
        alive = sum(count for index, count in later.items() if index not in dead)
        assert alive >= 10  # of 18; in the order of the data, 7 or 8


def test_run_ahead_of_the_trainer_learns_from_trained_and_dropped_groups_once(selecting):
    options = ["rollout.selection={enabled: true}", "rollout.max_staleness=2", "gdpo.dynamic_sampling.enabled=true",
               "gdpo.max_num_steps=20"]  # fmt: skip
    w = selecting(*options, dead={0, 1, 2, 3})
    for _ in range(6):
        w.train()
    w.scheduler.schedule(w.step)
    tracker = w.scheduler._tracker
    saved = through_json(w.scheduler.ledger())
    rates = {index: rate[0] for index, rate, _ in saved["pools"]["prompts"]}
    assert all(rates[index] < 1.0 for index in range(4)) and all(rates[index] == 1.0 for index in rates if index > 3)
    assert set(tracker._signals) <= {p for p, _, _ in saved["deal"]["dealt"]}
    again = selecting(*options, dead={0, 1, 2, 3}, step=w.step, position=saved["position"], saved=saved)
    assert again.scheduler._tracker.state()["pools"] == saved["pools"]
    dealt = {position: row for position, row, _ in saved["deal"]["dealt"]}
    again.scheduler.schedule(again.step)
    after = {position: row for position, row, _ in again.scheduler.ledger()["deal"]["dealt"]}
    assert dealt.items() <= after.items()


# -- groups by variance ------------------------------------------------------------------------------------------------


def test_fewest_values_reach_the_share_and_none_fewer_do():
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.choice([0.0, 0.1, 0.1, 1.0, 3.0], size=rng.integers(1, 9)) * rng.random()
        share = float(rng.uniform(0.05, 1.0))
        chosen = fewest(values, share)
        total = values.sum()
        assert values[chosen].sum() >= share * total - 1e-12 and all(values[chosen] > 0)
        assert not chosen or values[chosen[:-1]].sum() < share * total
    assert fewest(np.zeros(3), 0.9) == [] and fewest(np.array([]), 1.0) == []
    assert sorted(fewest(np.array([1.0, 0.0, 2.0]), 1.0)) == [0, 2]


def test_groups_are_selected_by_component_and_not_by_the_sum():
    """The sum of group 1 does not vary, and that of group 2 hardly, but one of their components does."""
    groups = [
        group(0, (10.0, 0.0), (0.0, 0.0)),
        group(1, (5.0, 0.0), (0.0, 5.0)),
        group(2, (0.0, 4.0), (0.0, 0.0)),
        group(3, (3.0, 3.0), (3.0, 3.0)),
        group(4, (1.0, 0.0), (0.0, 0.0)),
    ]
    assert top_variance(groups, config(), 0.6) == {0, 1}
    assert top_variance(groups, config(), 0.9) == {0, 1, 2}
    assert top_variance(groups, config(), 1.0) == {0, 1, 2, 4}
    assert top_variance(groups, config("gdpo.rewards={correct: 1.0, brief: 0.0}"), 0.9) == {0, 1}
    scaled = [group(g.position, *((t.rewards["correct"], 1e4 * t.rewards["brief"] - 7) for t in g.trajectories))
              for g in groups]  # fmt: skip
    assert top_variance(scaled, config(), 0.9) == {0, 1, 2}


def test_synchronous_step_replaces_groups_with_little_variance(world):
    w = world("gdpo.dynamic_sampling.enabled=true", "rollout.selection.variance_top_p=0.9")
    w.verdict = lambda t: Verdict({"correctness": t.sample_index * (0.1 if int(t.prompt.token_ids[0]) == 1 else 1.0)})
    rollout = w.train()
    assert places(rollout) == [0, 2, 3] and rollout.dropped == [(1, LOW_VARIANCE)]
