"""Fractions of the environments in the sampled prompts (data.mix): exact counts, own epochs, resume, and bad input."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scheduler_world import World

from gdpo_nemo.config.sections import DataConfig
from gdpo_nemo.data.mix import check_mix
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.rollouts.prompt_pools import PromptPools
from gdpo_nemo.utils.errors import ConfigError

SOURCES = "math code chat".split()
SIZES = (24, 5, 1)
"""Rows of each source."""
OWNER = np.repeat(np.arange(3), SIZES)
"""Source of each row."""
FRACTIONS = (0.5, 0.3, 0.2)
MIX = "data={mix: {math: 0.5, code: 0.3, chat: 0.2}, mix_key: dataset}"
TEN = ["gdpo.num_prompts_per_step=10", "gdpo.max_num_steps=12"]


class Mixed(World):
    """A world with 30 rows of three sources, in another order in each epoch."""

    def __init__(self, *overrides, **arguments):
        self.asked = []
        """(place, row) of each sampled prompt."""
        super().__init__(*overrides, **arguments)

    def __len__(self):
        return len(OWNER)

    def order(self, epoch):
        return np.random.default_rng(epoch).permutation(len(OWNER))

    def head(self):
        return [self.row(index) for index in range(len(OWNER))]

    def row(self, index):
        fields = {"dataset": SOURCES[OWNER[index]], "digits": "12345"}
        return Prompt(str(index), np.array([index], np.int32), "", "digit_sort", fields)

    def prompt(self, place):
        epoch, offset = divmod(place, len(OWNER))
        row = int(self.order(epoch)[offset])
        self.asked.append((place, row))
        return self.row(row)


@pytest.fixture
def mixed(world):
    return partial(world, MIX, *TEN, kind=Mixed)


def rows_of(rollout):
    return [int(group.prompt.id.partition("#")[0]) for group in rollout.groups]


def counts_of(rollout):
    counts = Counter(OWNER[rows_of(rollout)].tolist())
    return [counts[source] for source in range(3)]


def through_json(state):
    return json.loads(json.dumps(state))


def sequence(world, steps):
    return [row for _ in range(steps) for row in rows_of(world.train())]


def test_each_step_has_the_fractions_and_each_source_its_own_epochs(mixed):
    found = sequence(mixed(), 10)
    for number in range(1, 101):
        taken = np.bincount(OWNER[found[:number]], minlength=3)
        assert np.abs(taken - number * np.array(FRACTIONS)).max() < 1
    assert [np.bincount(OWNER[found[at : at + 10]]).tolist() for at in range(0, 100, 10)] == [[5, 3, 2]] * 10
    for source, size in enumerate(SIZES):
        own = [row for row in found if OWNER[row] == source]
        epochs = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == sorted(np.flatnonzero(source == OWNER)) for epoch in epochs) and len(epochs) >= 2
        assert size == 1 or epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "options",
    [["rollout.max_staleness=2"], ["rollout.max_staleness=1", "policy.generation.engines=3"],
     ["policy.generation.engines=2"]],
)  # fmt: skip
def test_prompts_do_not_depend_on_staleness_or_engines(mixed, options):
    assert sequence(mixed(*options), 6) == sequence(mixed(), 6)


MODES = {
    "synchronous": [],
    "ahead": ["rollout.max_staleness=2"],
    "dynamic sampling": ["gdpo.dynamic_sampling.enabled=true"],
    "rerolls": ["gdpo.dynamic_sampling={enabled: true, reroll_after: 1}"],
    "selection": ["rollout.selection={enabled: true, min_rate: 0.1}"],
    "replay": ["rollout.replay_buffer.groups=3", "loss_fn.old_logprobs=trainer"],
}


@pytest.mark.parametrize("mode", ["synchronous", "ahead", "dynamic sampling", "rerolls", "selection"])
def test_resumed_run_has_the_prompts_of_an_uninterrupted_run(mixed, mode):
    dead = {0, 1, 2, 3, 24} if mode in ("dynamic sampling", "rerolls", "selection") else ()
    whole = mixed(*MODES[mode], dead=dead)
    found, states = [], []
    for step in range(8):
        whole.scheduler.schedule(step)
        states.append((through_json(whole.scheduler.ledger()), found[-1].next_position if found else 0))
        found.append(whole.train())
    for step in (1, 4):
        saved, position = states[step]
        again = mixed(*MODES[mode], dead=dead, step=step, position=position, saved=saved)
        assert [rows_of(again.train()) for _ in range(step, 8)] == [rows_of(rollout) for rollout in found[step:]]


@pytest.mark.parametrize("mode", MODES)
def test_all_sampled_prompts_have_the_fractions(mixed, mode):
    """Including the groups that are dropped, and without those that are sampled or trained again."""
    w = mixed(*MODES[mode], dead=range(12))
    trained = [counts_of(w.train()) for _ in range(6)]
    asked = dict.fromkeys(w.asked) if mode == "rerolls" else w.asked
    rows = [row for _, row in asked]
    assert len(rows) > (60 if "dynamic" in mode else 40)
    for number in range(1, len(rows) + 1):
        taken = np.bincount(OWNER[rows[:number]], minlength=3)
        assert np.abs(taken - number * np.array(FRACTIONS)).max() < 1
    if mode in ("synchronous", "ahead", "selection"):
        assert trained == [[5, 3, 2]] * 6


def pools_of(mix, saved=None, **world):
    """Pools over the rows of ``Mixed``, without a scheduler."""
    rows = Mixed.__new__(Mixed)
    selection = SimpleNamespace(enabled=False, difficulties={})
    config = SimpleNamespace(
        data=DataConfig(mix=mix, mix_key="dataset"),
        rollout=SimpleNamespace(selection=selection),
        run=SimpleNamespace(seed=1),
        gdpo=SimpleNamespace(rewards={"correctness": 1.0}),
    )
    return PromptPools(config, rows, saved, **world)


def drawn(pools, count):
    return [pools.index(pools.draw()) for _ in range(count)]


def test_changed_fractions_apply_from_the_resumed_step_and_sources_continue_in_their_order():
    pools = pools_of({"math": 9, "code": 1, "chat": 0})
    first = drawn(pools, 20)
    assert Counter(OWNER[first].tolist()) == {0: 18, 1: 2}
    again = pools_of({"math": 1, "code": 1, "chat": 2}, through_json(pools.state()))
    then = drawn(again, 12)
    assert Counter(OWNER[then].tolist()) == {0: 3, 1: 3, 2: 6}
    own = [[row for row in first + then if OWNER[row] == source] for source in (0, 1)]
    assert [len(set(rows)) for rows in own] == [len(rows) for rows in own] == [21, 5]


def test_mix_that_begins_in_a_resumed_run_continues_behind_the_earlier_prompts():
    order = Mixed.order(None, 0)
    pools = pools_of({"math": 1, "code": 1, "chat": 0}, start=7)
    rest = order[7:]
    found = drawn(pools, 2)
    assert found == [rest[OWNER[rest] == 0][0], rest[OWNER[rest] == 1][0]]


def test_fraction_of_0_leaves_a_source_out_and_small_fractions_get_prompts_over_steps():
    found = OWNER[drawn(pools_of({"math": 0.99, "code": 0.01, "chat": 0}), 300)]
    assert np.bincount(found).tolist() == [297, 3] and np.flatnonzero(found == 1)[0] < 100


@pytest.mark.parametrize(
    "mix, key, words",
    [
        ({"a": 1}, None, ["data.mix: row '1' of data.train has the environment 'b', which is not listed"]),
        ({"a": 1, "b": 1, "c": 1}, None, ["data.mix.c: no row of data.train has the environment 'c'", "known: a, b"]),
        ({"gsm8k": 1, "math": 1}, "dataset", ["data.mix.math: no row of data.train has the dataset 'math'"]),
        ({"gsm8k": 1}, "datasets", ["data.mix_key: row '0'", "no text in the column 'datasets'; did you mean 'data"]),
    ],
)
def test_fractions_and_rows_must_name_the_same_sources(mix, key, words):
    rows = [("0", "a", {"dataset": "gsm8k"}), ("1", "b", {"dataset": "gsm8k"})]
    with pytest.raises(ConfigError) as error:
        check_mix(DataConfig(mix=mix, mix_key=key), rows)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_environments_that_verify_the_rows_are_counted():
    rows = [(str(index), "ab"[index % 2], {}) for index in range(5)]
    assert check_mix(DataConfig(mix={"a": 1, "b": 3, "c": 0}), rows) == {"a": 3, "b": 2}
    assert check_mix(DataConfig(mix={"a": 1, "b": 3, "c": 2}), rows, complete=False) == {"a": 3, "b": 2}
