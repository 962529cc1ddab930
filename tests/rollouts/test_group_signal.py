"""Dynamic sampling drops a group exactly if the estimator gives none of its samples an advantage before the batch norm:
against the advantages of each estimator, without an epsilon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from scheduler_world import places

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.rollouts.credit import advantages_of, trajectory_groups, with_weights
from gdpo_nemo.rollouts.group_maker import MadeGroup
from gdpo_nemo.rollouts.group_signal import InFlight, has_signal, part_with_signal, siblings_of
from gdpo_nemo.rollouts.user_functions import load_estimator

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
PROMPT = "gdpo.group_by=prompt"
VERL = "gdpo.preset=verl"
RAW = "gdpo.options={singleton: raw}"
AGAINST_THE_BATCH = "gdpo.options={minus_baseline: false}"
WEIGHTS = {"correctness": 1.0, "format": 0.5, "logged": 0.0}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Rows = list[dict[str, float | None]]


def config(*overrides: str) -> Config:
    """Two weighted components and one that is only logged."""
    return load_config(DEMO, [f"gdpo.rewards={WEIGHTS}".replace("'", ""), *overrides])


SETTINGS = {
    **{name: config(f"gdpo.estimator={name}") for name in ESTIMATORS},
    "gdpo penalty": config("gdpo.rewards.format=-1"),
    "grpo penalty": config("gdpo.estimator=grpo", "gdpo.rewards.format=-1"),
    "grpo scheduled to 0": with_weights(config("gdpo.estimator=grpo"), {"format": 0.0}),
    "gdpo by prompt": config(PROMPT),
    "grpo by prompt": config("gdpo.estimator=grpo", PROMPT),
    "gdpo leave_one_out": config("gdpo.options={leave_one_out: true}"),
    "mo_grpo raw": config("gdpo.estimator=mo_grpo", RAW, PROMPT),
    "raw": config("gdpo.estimator=reinforce_plus_plus", AGAINST_THE_BATCH),
    "trl": config("gdpo.preset=trl"),
    "squashed": config(f"gdpo.estimator={EXAMPLES}/custom_estimator.py:squashed"),
    "opo": config(f"gdpo.estimator={EXAMPLES}/opo.py:opo"),
}


def group(position: int, prompt: int, rows: Rows) -> Group:
    """A group of the prompt of that number; a row without rewards failed in its environment."""
    of = Prompt(f"{prompt}@{position}", np.array([prompt], np.int32), "", "digit_sort")
    tokens = np.arange(2, dtype=np.int32)
    members = [
        Trajectory(of, j, tokens, tokens.astype(np.float32), 0, "", "stop", rewards=row,
                   outcome=Outcome.OK if row else Outcome.ENV_FAILED)
        for j, row in enumerate(rows)
    ]  # fmt: skip
    return Group(of, members, position)


def expected(one: Group, siblings: list[Group], chosen: Config) -> bool:
    """Return True if the estimator gives a sample of the group an advantage, without an epsilon."""
    gdpo = chosen.gdpo
    members = [t for g in (one, *siblings) for t in g.trajectories]
    valid = np.array([t.trains for t in members])
    columns = {name: np.array([t.rewards.get(name) for t in members], float) for name in WEIGHTS}
    scored = [valid & ~np.isnan(columns[name]) for name in WEIGHTS if gdpo.rewards[name]]
    if not np.any(scored):
        return False
    if gdpo.options.get("minus_baseline") is False:
        return True
    found = compute_advantages(
        columns, np.zeros(len(members), int), weights=gdpo.rewards, valid=valid, lengths=np.full(len(members), 2.0),
        estimator=load_estimator(gdpo) or gdpo.estimator, batch_norm=False, epsilon=0.0, **gdpo.options,
    )  # fmt: skip
    return bool((found.values[: len(one.trajectories)].abs() > 1e-9).any())


graded = st.sampled_from([0.0, 0.5, 1.0])
row = st.one_of(
    st.fixed_dictionaries({name: st.one_of(graded, graded, st.none()) for name in WEIGHTS}),
    st.just({"correctness": 1.0, "format": 1.0, "logged": 0.5}),
    st.just({}),
)
batches = st.lists(st.tuples(st.integers(0, 1), st.lists(row, min_size=1, max_size=4)), min_size=1, max_size=4)
R = {"correctness": 1.0, "format": 1.0, "logged": 0.0}
W = {"correctness": 0.0, "format": 1.0, "logged": 0.0}
N = {"correctness": None, "format": None, "logged": 1.0}


@pytest.mark.parametrize("how", SETTINGS)
@settings(max_examples=15)
@given(batches)
@example([(0, [R, R]), (0, [W, W])])  # alike within each row, and unlike within the prompt
@example([(0, [R])])  # one sample
@example([(0, [R, W]), (0, [N, N])])  # the second has only a logged reward
@example([(0, [{"correctness": 1.0, "format": 0.0}, {"correctness": 0.5, "format": 1.0}])])  # equal sums
@example([(0, [{"correctness": 1.0, "format": 0.0}, {"correctness": 0.0, "format": 1.0}])])  # opposed
@example([(0, [{"correctness": 1.0, "format": 1.0}, {"correctness": 1.0, "format": None}])])  # a missing reward
@example([(0, [{"correctness": 1.0, "format": 1.0}, {"correctness": 0.0, "format": 0.5}])])  # equal up to epsilon
def test_a_group_has_signal_if_and_only_if_the_estimator_gives_it_an_advantage(how, drawn):
    batch = [group(position, prompt, rows) for position, (prompt, rows) in enumerate(drawn)]
    chosen = SETTINGS[how]
    siblings = [siblings_of(one, batch, chosen) for one in batch]
    found = [has_signal(one, chosen, others) for one, others in zip(batch, siblings)]
    assert found == [expected(one, others, chosen) for one, others in zip(batch, siblings)]


def test_prompts_with_equal_tokens_and_different_images_are_not_compared():
    """Two rows with one question about different images, and a repetition of the first row."""
    images = [Image(digest * 64, 56, 56, b"") for digest in "aba"]
    batch = []
    for position, image in enumerate(images):
        made = group(position, 0, [R, W])
        prompt = replace(made.prompt, images=(PlacedImage(image, 0, 1),))
        batch.append(replace(made, prompt=prompt, trajectories=[replace(t, prompt=prompt) for t in made.trajectories]))
    assert [len(siblings_of(one, batch, config(PROMPT))) for one in batch] == [1, 0, 1]
    assert trajectory_groups(batch, "prompt").tolist() == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "overrides, kept", [([], False), ([VERL], True), ([RAW], True), (["gdpo.estimator=reinforce_plus_plus"], False)]
)
def test_group_of_one_sample_has_signal_only_if_its_raw_reward_is_one(overrides, kept):
    one = group(0, 0, [R])
    assert has_signal(one, config(*overrides)) is kept
    plain = config("gdpo.estimator=reinforce_plus_plus", AGAINST_THE_BATCH)
    assert has_signal(one, plain) and not has_signal(group(0, 0, [N]), plain)
    assert not has_signal(group(0, 0, [{}]), plain) and not has_signal(group(0, 0, [{}]), config(VERL))


def test_leave_one_out_compares_a_sample_with_the_siblings_of_its_group():
    """The only wrong answer of its row is one of two of its prompt."""
    chosen = config(PROMPT, "gdpo.dynamic_sampling={enabled: true, leave_one_out: true}")
    one, other = group(0, 0, [R, R, W]), group(1, 0, [W, R])
    alone = part_with_signal(one, chosen)
    beside = part_with_signal(one, chosen, siblings_of(one, [one, other], chosen))
    assert [t.sample_index for t in alone.trajectories] == [0, 1]
    assert [t.sample_index for t in beside.trajectories] == [0, 1, 2]


def test_a_group_that_a_group_in_flight_may_yet_differ_from_is_not_dropped():
    chosen = config(PROMPT, "gdpo.dynamic_sampling.enabled=true")
    one, other = group(0, 7, [R, R]), group(1, 7, [W, W])
    made = [MadeGroup(g, None, 0.0, 1.0, 2.0) for g in (one, other)]
    drawn = InFlight(by_prompt=True)
    for g in (one, other):
        drawn.add(g.position, g.prompt)
    drawn.remove(0)
    assert drawn.may_have_signal(made[0], [], chosen)
    drawn.remove(1)
    assert drawn.may_have_signal(made[1], made[:1], chosen)
    assert not drawn.may_have_signal(made[1], [], chosen)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("by", ["row", "prompt"])
def test_rows_that_are_alike_and_differ_within_their_prompt_are_trained_if_groups_are_by_prompt(world, staleness, by):
    """Three rows a prompt, the first of which is right in both samples and the others wrong."""
    w = world(f"gdpo.group_by={by}", f"rollout.max_staleness={staleness}", "gdpo.dynamic_sampling.enabled=true",
              "gdpo.max_num_steps=1", limit=12)  # fmt: skip
    w.prompt = lambda place: Prompt(str(place), np.array([place // 3], np.int32), "", "digit_sort", {"digits": "1"})
    w.verdict = lambda t: Verdict({"correctness": float(int(t.prompt.id) % 3 == 0)})
    rollout = w.train()
    assert len(places(rollout)) == 3 and (rollout.dropped_groups == 0) == (by == "prompt")
    if by == "prompt":
        assert (
            places(rollout) == [0, 1, 2] and np.unique(np.abs(advantages_of(rollout.groups, w.config).values)).min() > 0
        )


@pytest.mark.parametrize("staleness", [0, 1])
def test_dynamic_sampling_selects_by_the_weights_of_the_step(world, staleness):
    """Correctness differs in the first three prompts only, and style in all others. Step 2 ignores correctness."""
    w = world(
        "gdpo.rewards={correctness: 1, style: 1}", "gdpo.schedules={correctness: [[2, 0.0]]}",
        "gdpo.dynamic_sampling.enabled=true", f"rollout.max_staleness={staleness}", limit=12, step=1,
    )  # fmt: skip

    def verdict(t):
        first = int(t.prompt.id) < 3
        return Verdict({"correctness": float(t.sample_index * first), "style": float(t.sample_index * (not first))})

    w.verdict = verdict
    rollout = w.train()
    assert places(rollout) == [3, 4, 5] and rollout.dropped_groups == 3
