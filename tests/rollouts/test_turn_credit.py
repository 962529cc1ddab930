"""Credit by turn: returns, their baselines and the tokens that get them, each against a few lines of NumPy."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from character_tokenizer import character_tokenizer
from hypothesis import given, settings, strategies as st

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.advantage_tables import read_step
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory, UpdateResult, Verdict
from gdpo_nemo.environments.base import checked_verdicts
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.observe.journal import Journal, read_journal
from gdpo_nemo.observe.metric_registry import unknown_metrics
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import read_columns, read_rollouts, write_rollouts
from gdpo_nemo.rollouts.batches import Rollout, recorded_groups
from gdpo_nemo.rollouts.context import Transcript
from gdpo_nemo.rollouts.credit import advantages_of, turn_rows, updates_of
from gdpo_nemo.rollouts.group_signal import has_signal
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.import_path import ImportPath

REPOSITORY = Path(__file__).resolve().parents[2]
TURNS = REPOSITORY / "configs" / "gdpo_turns_cpu.yaml"
ROUNDS = REPOSITORY / "configs" / "gdpo_rounds_cpu.yaml"


def config(*overrides: str) -> Config:
    base = ["gdpo.rewards={a: 1, b: 2}", "gdpo.num_generations_per_prompt=4", "gdpo.credit=turn"]
    return load_config(TURNS, [*base, *overrides])


def by_sequence(settings: Config) -> Config:
    defaults = {"credit": "sequence", "discount": 1.0, "turn_baseline": "turn"}
    return replace(settings, gdpo=replace(settings.gdpo, **defaults))


def played(prompt: Prompt, sample: int, turns: list[dict], start: int = 2) -> Trajectory:
    """A trajectory whose turn t has ``start + t + sample`` tokens and earned ``turns[t]``; two tokens between turns."""
    tokens = [start + place + sample for place in range(len(turns))]
    mask = np.concatenate([np.r_[np.ones(n, bool), np.zeros(2, bool)] for n in tokens])[:-2]
    names = dict.fromkeys(name for earned in turns for name in earned)
    totals = {}
    for name in names:
        given = [earned[name] for earned in turns if earned.get(name) is not None]
        totals[name] = float(sum(given)) if given else None
    return Trajectory(
        prompt=prompt,
        sample_index=sample,
        completion_ids=np.arange(len(mask), dtype=np.int32),
        logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        policy_version=0,
        text="",
        finish_reason="stop",
        rewards=totals,
        loss_mask=mask,
        turns=len(turns),
        turn_tokens=tuple(tokens),
        turn_rewards=tuple(turns),
        spans=((0, sum(tokens)),),
    )


def group(name: str, *samples: list[dict]) -> Group:
    prompt = Prompt(name, np.arange(3, dtype=np.int32), name, "digit_turns")
    return Group(prompt, [played(prompt, place, turns) for place, turns in enumerate(samples)], position=0)


def uneven() -> list[Group]:
    """Two groups; samples of two turns and of three, one component that ends early, one that a sample lacks."""
    one = [{"a": 1.0, "b": 0.0}, {"a": 0.5}]
    two = [{"a": 0.0}, {"a": 2.0}, {"a": 1.0, "b": 3.0}]
    three = [{"a": 3.0, "b": 1.0}, {"a": None}, {"a": 1.0}]
    return [
        group("p", one, two, three, [{"a": 0.0, "b": None}, {"b": None}]),
        group("q", two, one, one, three),
    ]


def discounted(turns: list[dict], name: str, discount: float) -> list[float]:
    if all(earned.get(name) is None for earned in turns):
        return [np.nan] * len(turns)
    rewards = [earned.get(name) or 0.0 for earned in turns]
    return [sum(discount ** (later - t) * rewards[later] for later in range(t, len(turns))) for t in range(len(turns))]


def oracle(groups: list[Group], settings: Config, batch_norm: bool) -> list[list[float]]:
    """GDPO over returns, written out: z by component within the baseline's group, weights, then the batch."""
    gdpo = settings.gdpo
    sums = {}
    live = {}
    for g, members in enumerate(groups):
        for name, weight in gdpo.rewards.items():
            pools: dict = {}
            for i, t in enumerate(members.trajectories):
                for turn, value in enumerate(discounted(list(t.turn_rewards), name, gdpo.discount)):
                    sums.setdefault((g, i, turn), 0.0)
                    if not np.isnan(value):
                        pools.setdefault(turn if gdpo.turn_baseline == "turn" else 0, []).append(((g, i, turn), value))
            for pool in pools.values():
                values = np.array([value for _, value in pool])
                samples = np.array([sample for (_, sample, _), _ in pool])
                if len(set(samples)) < 2 or np.ptp(values) == 0:
                    continue
                if gdpo.turn_baseline == "turn":
                    deviations = values - values.mean()
                else:
                    deviations = np.array([v - values[samples != i].mean() for v, i in zip(values, samples)])
                std = np.sqrt((deviations**2).sum() / (len(values) - 1))
                for place, deviation in zip(pool, deviations):
                    sums[place[0]] += weight * deviation / (std + gdpo.epsilon)
                    live[place[0]] = True
    if batch_norm:
        signal = np.array([value for key, value in sums.items() if key in live])
        mean, std = signal.mean(), signal.std(ddof=1)
        sums = {key: (value - mean) / (std + gdpo.epsilon) if key in live else 0.0 for key, value in sums.items()}
    return [
        [sums[g, i, turn] for turn in range(t.turns)]
        for g, members in enumerate(groups)
        for i, t in enumerate(members.trajectories)
    ]


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("baseline", ["turn", "group"])
def test_advantages_of_turns_are_gdpo_over_the_groups_discounted_returns(baseline, discount, batch_norm):
    settings = config(
        f"gdpo.turn_baseline={baseline}", f"gdpo.discount={discount}", f"gdpo.batch_norm={str(batch_norm).lower()}"
    )
    found = advantages_of(uneven(), settings)
    for ours, theirs in zip(found.by_turn, oracle(uneven(), settings, batch_norm), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_trajectories_of_one_turn_equal_credit_by_sequence_bit_for_bit(data):
    value = st.one_of(st.none(), st.floats(-5, 5, width=32))
    rows = data.draw(st.lists(st.lists(st.tuples(value, value), min_size=2, max_size=5), min_size=1, max_size=4))
    groups = [group(str(g), *([{"a": a, "b": b}] for a, b in members)) for g, members in enumerate(rows)]
    groups[0].trajectories[0].rewards = {"a": 1.0, "b": 2.0}
    groups[0].trajectories[0].turn_rewards = ({"a": 1.0, "b": 2.0},)
    of_turns = config(f"gdpo.discount={data.draw(st.sampled_from([0.0, 0.5, 1.0]))}")
    ours = advantages_of(groups, of_turns)
    theirs = advantages_of(groups, by_sequence(of_turns))
    np.testing.assert_array_equal(ours.values, theirs.values)
    np.testing.assert_array_equal(ours.components, theirs.components)
    assert ours.diagnostics.metrics() == theirs.diagnostics.metrics()
    trajectories = [t for g in groups for t in g.trajectories]
    assert ours.of_sequences(trajectories) == theirs.values.tolist()
    for g in groups:
        assert has_signal(g, of_turns) == has_signal(g, by_sequence(of_turns))


def test_every_token_of_a_turn_gets_its_turns_advantage_and_the_environments_get_0():
    groups = uneven()
    trajectories = [t for g in groups for t in g.trajectories]
    found = advantages_of(groups, config())
    (update,) = updates_of(trajectories, found.of_sequences(trajectories), config())
    for sequence, t, values in zip(update, trajectories, found.by_turn, strict=True):
        expected = np.zeros(len(t.completion_ids), np.float32)
        edges = np.flatnonzero(np.diff(np.r_[False, t.loss_mask, False])).reshape(-1, 2)
        for (start, end), value in zip(edges, values, strict=True):
            expected[start:end] = value
        np.testing.assert_array_equal(sequence.advantage, expected)
        assert sequence.advantage.dtype == np.float32
    assert found.values.numpy()[1] == pytest.approx(update[1].advantage[trajectories[1].loss_mask].mean(), rel=1e-6)


def test_a_masked_trajectory_counts_in_no_baseline_and_trains_no_turn():
    groups = uneven()
    broken = groups[0].trajectories[1]
    broken.outcome = Outcome.ENV_FAILED
    broken.turn_rewards = tuple({"a": 1e9, "b": -1e9} for _ in range(3))
    without = uneven()
    del without[0].trajectories[1]
    found = advantages_of(groups, config()).by_turn
    assert not found[1].any()
    expected = advantages_of(without, config()).by_turn
    for ours, theirs in zip([*found[:1], *found[2:]], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    trajectories = [t for g in groups for t in g.trajectories]
    (update,) = updates_of(trajectories, advantages_of(groups, config()).of_sequences(trajectories), config())
    assert isinstance(update[1].advantage, float) and update[1].advantage == 0.0


def test_rewards_that_no_turn_has_were_earned_by_the_last_one():
    whole = group("p", [{}, {}, {"a": 4.0}]).trajectories[0]
    known = turn_rows([whole], ["a"], 0.5).columns["a"]
    whole.turn_rewards = ()
    np.testing.assert_array_equal(turn_rows([whole], ["a"], 0.5).columns["a"], known)
    np.testing.assert_array_equal(known, [1.0, 2.0, 4.0])
    whole.turn_tokens = ()
    np.testing.assert_array_equal(turn_rows([whole], ["a"], 0.5).columns["a"], [4.0])


def test_a_group_whose_totals_are_equal_has_signal_if_its_turns_are_not():
    level = group("p", [{"a": 1.0}, {"a": 0.0}], [{"a": 0.0}, {"a": 1.0}])
    assert not has_signal(level, by_sequence(config())) and has_signal(level, config())
    assert not has_signal(group("p", [{"a": 1.0}, {"a": 0.0}], [{"a": 1.0}, {"a": 0.0}]), config())


def test_metrics_of_rewards_are_those_of_trajectories_for_every_credit():
    ours = advantages_of(uneven(), config()).diagnostics.metrics()
    theirs = advantages_of(uneven(), by_sequence(config())).diagnostics.metrics()
    for name in ("a", "b"):
        for key in ("mean", "std", "missing", "saturation"):
            assert ours[f"reward/{name}/{key}"] == pytest.approx(theirs[f"reward/{name}/{key}"], rel=1e-12), key
    assert ours["advantage/std"] != theirs["advantage/std"]


# -- where the rewards of turns come from ---------------------------------------------------------------------------


def completion(*ids: int) -> Completion:
    return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), "stop", ())


def test_a_transcript_keeps_the_tokens_and_rewards_of_each_turn():
    t = Transcript(Prompt("p", np.array([1], np.int32), "", "e"), 0)
    t.add_rewards({"a": 0.5})  # of the reset: the first turn's
    t.append_policy_tokens(completion(1, 2))
    t.add_rewards({"a": 1.0, "b": None})
    t.append_env_tokens([9])
    t.append_policy_tokens(completion(3))
    t.append_env_tokens([9])
    t.append_policy_tokens(completion())
    t.add_rewards({"b": 2.0})
    t.add_rewards({"b": 1.0})  # of the cut: the last one's
    made = t.trajectory(Conversation(character_tokenizer(), chat=False))
    assert made.turn_tokens == (2, 1, 0)
    assert made.turn_rewards == ({"a": 1.5, "b": None}, {}, {"b": 3.0})
    assert made.rewards == {"a": 1.5, "b": 3.0}


def test_rewards_of_turns_in_a_verdict_must_add_up_to_its_total():
    t = group("p", [{}, {}]).trajectories[0]
    good = Verdict({"a": 1.0, "b": 0.0}, turn_rewards=[{"a": 1}, {"a": float("nan"), "b": 0.0}])
    (checked,) = checked_verdicts(("a", "b"), [t], [good])
    assert checked.turn_rewards == ({"a": 1.0}, {"a": None, "b": 0.0})
    for wrong, said in (
        ([{"a": 1.0}], "turn_rewards for 1 turns of sample 0 of prompt p, which has 2"),
        ([{"a": 1.0}, {"c": 1.0}], "'c', which is not in reward_names"),
        ([{"a": float("inf")}, {}], "reward 'a' of turn 1 of sample 0 of prompt p is infinite"),
        (
            [{"b": 1.0}, {}],
            "turn_rewards of 'b' for sample 0 of prompt p, but the rewards do not contain this component",
        ),
    ):
        with pytest.raises(RunError, match=said):
            checked_verdicts(("a", "b"), [t], [Verdict({"a": 1.0}, turn_rewards=wrong)])


# -- through the algorithm ------------------------------------------------------------------------------------------


def test_a_step_trains_and_records_the_advantages_of_turns():
    written = []
    log = SimpleNamespace(step=lambda row, groups, values: written.append(values), alert=print, note=print)
    algorithm = GDPO(config(), None, None, log)
    rollout = Rollout(uneven(), 2, version=0)
    prepared = algorithm.prepare(rollout)
    expected = advantages_of(uneven(), config())
    (update,) = algorithm.updates(prepared)
    for sequence, value in zip(update, expected.of_sequences(rollout.trajectories), strict=True):
        np.testing.assert_array_equal(sequence.advantage, value)
    algorithm.record({"step": 1}, prepared)
    (values,) = written
    np.testing.assert_array_equal(values.advantages, expected.values)
    for ours, theirs in zip(values.turn_advantages, expected.by_turn, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert set(values.terms) == {"a", "b"} and len(values.terms["a"]) == len(rollout.trajectories)
    result = UpdateResult(0.1, 1.0, 1e-4, False, {"tokens": 9.0}, {})
    row = algorithm.metrics(prepared, [result], 0)
    assert row["reward/total/mean"] == pytest.approx(row["reward/a/mean"] + 2 * row["reward/b/mean"])
    assert unknown_metrics([row]) == []


# -- what is recorded -----------------------------------------------------------------------------------------------


def written(folder: Path, groups: list[Group]) -> Path:
    settings = config()
    save_config(settings, folder / "config.yaml")
    found = advantages_of(groups, settings)
    return write_rollouts(folder, 1, groups, SampleValues(found.values.numpy(), turn_advantages=found.by_turn))


def test_recorded_turns_give_the_same_advantages_in_a_replay_and_in_explain(tmp_path, capsys):
    groups = uneven()
    path = written(tmp_path, groups)
    journal = Journal(tmp_path)
    journal.append(1, groups, position=2, published=0, total_updates=1)
    (entry,) = read_journal(tmp_path)
    replayed = recorded_groups(entry, read_rollouts(path), path.name)
    expected = advantages_of(groups, config())
    read, recorded = read_step(path)
    for again in (read, replayed):
        for ours, theirs in zip(advantages_of(again, config()).by_turn, expected.by_turn, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(recorded, expected.values)
    assert cli.main(["explain-advantages", str(path)]) == 0
    assert "The run recorded the same advantages." in capsys.readouterr().out


def test_samples_hold_the_turns_and_their_advantages_and_those_of_one_turn_nothing(tmp_path):
    groups = [*uneven(), group("r", [{"a": 1.0}], [{"a": 0.0}])]
    records = read_rollouts(written(tmp_path, groups))
    assert records[1]["turn_tokens"] == [3, 4, 5]
    assert records[1]["turn_rewards"] == [{"a": 0.0}, {"a": 2.0}, {"a": 1.0, "b": 3.0}]
    assert records[1]["turn_advantages"] == advantages_of(groups, config()).by_turn[1].tolist()
    assert "turn_tokens" not in records[-1] and "turn_rewards" not in records[-1]
    json.dumps(records)


def test_sample_files_of_older_runs_which_lack_the_columns_of_turns_are_read(tmp_path):
    import pyarrow.parquet as pq

    path = written(tmp_path, uneven())
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["turn_tokens", "turn_rewards", "turn_advantages"]), path)
    assert all("turn_tokens" not in record for record in read_rollouts(path))
    for rows in (None, 3):
        found = read_columns(path, ["turn_rewards", "prompt_id", "turn_tokens"], rows)
        assert found.column_names == ["turn_rewards", "prompt_id", "turn_tokens"]
        assert found.column("turn_tokens").null_count == len(found) == (rows or 8)
    groups, _ = read_step(path)
    assert all(t.turn_tokens == () and t.turn_rewards == () for g in groups for t in g.trajectories)


# -- the task that is made for it -----------------------------------------------------------------------------------


def test_each_round_of_the_example_is_verified_separately_and_alike_for_a_row():
    config = load_config(ROUNDS)
    assert (config.gdpo.credit, config.gdpo.discount) == ("turn", 0.0) and validate(config) is not None
    environment = ImportPath(str(REPOSITORY / "examples" / "digit_rounds.py") + ":DigitRounds").load()({"rounds": 3})
    games = [environment.episode() for _ in range(2)]
    for game in games:
        game.reset({"digits": "39172"})

    def answer(text: str, reason: str = "stop"):
        return {"role": "assistant", "content": text, "finish_reason": reason}

    second, rewards, done = games[0].step(answer("<t></t><a>12379</a>"))
    assert rewards == {"correctness": 1.0, "format": 1.0} and not done
    assert games[1].step(answer("12379")) == (second, {"correctness": 0.0, "format": 0.0}, False)
    right = "".join(sorted(second.rstrip("=")))
    third, rewards, _ = games[0].step(answer(f"<t></t><a>{right[::-1]}</a>"))
    assert rewards["format"] == 1.0 and third != second
    assert games[0].step(answer("<t></t><a>", "length")) == (None, {"correctness": 0.0, "format": 0.0}, True)


CHOICES = 10


def learnt(settings: Config, seed: int, rounds: int, steps: int = 30, at_the_end: bool = False) -> float:
    """Share of right answers of a softmax policy after some steps on ``rounds`` unconnected questions.

    A turn is one token out of ten, of which the first is right; ``at_the_end``: their number is known at the end alone.
    """
    draw = np.random.default_rng(seed)
    logits = np.zeros((rounds, CHOICES))
    prompt = Prompt("p", np.arange(3, dtype=np.int32), "", "e")
    for _ in range(steps):
        share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        chosen = [np.stack([draw.choice(CHOICES, size=8, p=p) for p in share], axis=1) for _ in range(4)]
        groups = []
        for answers in chosen:
            turns = [[{"a": float(answer == 0)} for answer in row] for row in answers]
            if at_the_end:
                turns = [[{}] * (rounds - 1) + [{"a": float((row == 0).sum())}] for row in answers]
            members = [played(prompt, i, of_one) for i, of_one in enumerate(turns)]
            for t in members:
                t.completion_ids = np.arange(rounds)
                t.turn_tokens, t.loss_mask = (1,) * rounds, None
            groups.append(Group(prompt, members))
        found = advantages_of(groups, settings)
        trajectories = [t for members in groups for t in members.trajectories]
        values = found.of_sequences(trajectories) if settings.gdpo.credit == "turn" else found.values.tolist()
        for answers, value in zip(np.concatenate(chosen), values, strict=True):
            for turn, weight in enumerate(np.broadcast_to(value, rounds)):
                logits[turn] += weight * 0.5 / 32 * (np.eye(CHOICES)[answers[turn]] - share[turn])
    return float((np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))[:, 0].mean())


def test_on_unconnected_rounds_credit_by_turn_learns_more_than_by_sequence():
    settings = config("gdpo.rewards={a: 1}", "gdpo.discount=0.0")
    ours = [learnt(settings, seed, rounds=8) for seed in range(4)]
    theirs = [learnt(by_sequence(settings), seed, rounds=8) for seed in range(4)]
    assert min(ours) > 1.5 * max(theirs)


def test_credit_by_turn_gains_nothing_if_rewards_come_only_at_the_end():
    settings = config("gdpo.rewards={a: 1}")
    for seed in range(2):
        ours = learnt(settings, seed, rounds=4, steps=15, at_the_end=True)
        theirs = learnt(by_sequence(settings), seed, rounds=4, steps=15, at_the_end=True)
        # The same but for n - 1 in the batch's deviation, where n are the turns and not the trajectories.
        assert ours == pytest.approx(theirs, rel=0.03)


def expected_gradient(settings: Config, samples: int, rewards: tuple[list[float], list[float]]) -> float:
    """Return the expected gradient per sample of the logit of a choice with equal probabilities in the first turn.

    Args:
        rewards: the rewards of the turns of a sample with either choice.
    """
    gradient = 0.0
    for choices in product((0, 1), repeat=samples):
        drawn = group("p", *([{"a": reward} for reward in rewards[choice]] for choice in choices))
        turns = advantages_of([drawn], settings).by_turn
        gradient += sum((c - 0.5) * turn[0] for c, turn in zip(choices, turns)) / samples / 2**samples
    return gradient


@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize("baseline", ["turn", "group"])
@pytest.mark.parametrize(
    "rewards, truth",
    [
        (([0.0], [-1.0, 1.0]), 0.0),  # the choice decides how many turns there are
        (([0.0], [-1.0, 0.8]), -0.05),
        (([0.0, 0.0], [-0.9, 1.0]), 0.025),  # the choice decides what the second turn returns
    ],
)
def test_gradient_is_exact_with_either_baseline(baseline, samples, rewards, truth):
    settings = config("gdpo.rewards={a: 1}", "gdpo.estimator=rloo", f"gdpo.turn_baseline={baseline}")
    assert expected_gradient(settings, samples, rewards) == pytest.approx(truth, abs=1e-12)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.turns.max_turns=1"], "gdpo.credit: has no effect while rollout.turns.max_turns is 1"),
        (["gdpo.credit=sequence", "gdpo.discount=0.9"], "gdpo.discount: has no effect unless gdpo.credit is turn"),
        (["gdpo.credit=sequence", "gdpo.turn_baseline=group"], "gdpo.turn_baseline: has no effect"),
        (["gdpo.turn_baseline=group", "gdpo.options={leave_one_out: true}"], "already leaves out the sample"),
        (["gdpo.discount=1.5"], "gdpo.discount: must be 0 or more and at most 1, got 1.5"),
        (["gdpo.discount=-1"], "gdpo.discount: must be 0 or more and at most 1, got -1"),
        (["gdpo.shaping=[{component: first, clip: [0, 1]}]"], "which gdpo.shaping requires"),
        (["gdpo.kl_in_reward=0.1"], "which gdpo.kl_in_reward requires"),
        (["loss_fn.type=target_po"], "which loss_fn.type target_po requires"),
        (
            ["loss_fn.off_policy.sequence_mask_threshold=0.5"],
            "which loss_fn.off_policy.sequence_mask_threshold requires",
        ),
    ],
)
def test_settings_that_contradict_credit_by_turn_are_refused_in_one_line(overrides, said):
    with pytest.raises(ConfigError) as refused:
        validate(load_config(TURNS, ["gdpo.credit=turn", *overrides]))
    assert said in str(refused.value) and "\n" not in str(refused.value)
