"""Credit by span: characters to tokens, advantages of tokens and learning, each against a few lines of NumPy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.data.records import Group, Prompt, Trajectory, Verdict
from gdpo_nemo.data.replies import ReplyParser
from gdpo_nemo.environments.base import SpanReward, checked_verdicts
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.observe.journal import Journal, read_journal
from gdpo_nemo.observe.samples import read_rollouts, write_rollouts
from gdpo_nemo.rollouts.batches import Rollout, apply_verdicts, recorded_groups
from gdpo_nemo.rollouts.credit import advantages_of, by_span
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.utils.errors import ConfigError, RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
PROMPT = Prompt("p", np.arange(3, dtype=np.int32), "", "e")


@cache
def config(*overrides: str) -> Config:
    return load_config(DEMO, ["gdpo.rewards={a: 1, b: 2}", "gdpo.credit=span", *overrides])


def sample(rewards: dict, ranges: dict, tokens: int = 6, index: int = 0, prompt: Prompt = PROMPT) -> Trajectory:
    logprobs = np.full(tokens, -0.5, np.float32)
    ids = np.arange(tokens, dtype=np.int32)
    return Trajectory(prompt, index, ids, logprobs, 0, "x" * tokens, "stop", rewards, reward_tokens=ranges)


# -- characters to tokens ---------------------------------------------------------------------------------------------

TEXT = "aé€😀 b"
PIECES = sorted({piece for n in (1, 2, 3, 5) for i in range(len(TEXT.encode())) if (piece := TEXT.encode()[i : i + n])})


def byte_tokenizer() -> tuple[ReplyParser, int]:
    """A tokenizer with all pieces of the bytes of TEXT, and the id of its special token."""
    letters = dict(zip(range(256), pre_tokenizers.ByteLevel.alphabet()))
    assert len(letters) == 256
    order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in order}
    table |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in order)}
    vocabulary = {"".join(table[byte] for byte in piece): n for n, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return ReplyParser(wrapped, "none"), wrapped.eos_token_id


PARSER, END = byte_tokenizer()


@st.composite
def sampled_text(draw):
    """Tokens that cut the bytes of a text anywhere, with special tokens between them, and the bytes of each token."""
    content = TEXT.encode() * draw(st.integers(1, 2))
    ids, covered, at = [], [], 0
    while at < len(content):
        fitting = [n for n in (1, 2, 3, 5) if content[at : at + n] in PIECES and len(content) >= at + n]
        size = draw(st.sampled_from(fitting))
        if draw(st.booleans()):
            ids, covered = [*ids, END], [*covered, range(0)]
        ids, covered = [*ids, PIECES.index(content[at : at + size])], [*covered, range(at, at + size)]
        at += size
    return content.decode(), [*ids, END], [*covered, range(0)]


@settings(max_examples=60, deadline=None)
@given(sampled_text(), st.data())
def test_a_span_covers_the_tokens_that_contain_a_byte_of_its_characters(made, data):
    text, ids, covered = made
    assert PARSER.text(ids) == text
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    wanted = set(range(len(text[:start].encode()), len(text[:end].encode())))
    ranges = PARSER.token_ranges(ids, text, [(start, end)])
    found = {token for a, b in ranges for token in range(a, b)}
    assert found == {token for token, places in enumerate(covered) if wanted & set(places)}


def test_a_text_that_was_not_decoded_from_the_tokens_has_no_spans():
    with pytest.raises(RunError, match="the text of the completion was not decoded from its tokens"):
        PARSER.token_ranges([0, END], "other", [(0, 1)])


# -- advantages of tokens ---------------------------------------------------------------------------------------------

VALUES = st.sampled_from([0.0, 0.5, 1.0, None])
RANGES = st.none() | st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple), max_size=2)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(VALUES, VALUES, RANGES, RANGES), min_size=2, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_terms_of_a_component_act_on_its_tokens_and_the_others_on_all(batch, batch_norm):
    groups = []
    for members in batch:
        made = [
            sample({"a": a, "b": b}, {name: tuple(r) for name, r in (("a", x), ("b", y)) if r is not None}, index=index)
            for index, (a, b, x, y) in enumerate(members)
        ]
        groups.append(Group(PROMPT, made))
    samples = [t for group in groups for t in group.trajectories]
    if all(value is None for t in samples for value in t.rewards.values()):
        return
    chosen = config(f"gdpo.batch_norm={batch_norm}")
    advantages = advantages_of(groups, chosen)
    found = by_span(advantages, samples)

    terms = np.zeros((len(samples), 2))
    live = np.zeros(len(samples), bool)
    row = 0
    for group in groups:
        rows = np.arange(row, row + len(group.trajectories))
        row = rows[-1] + 1
        for k, (name, weight) in enumerate({"a": 1.0, "b": 2.0}.items()):
            values = np.array([np.nan if (r := t.rewards[name]) is None else r for t in group.trajectories])
            if (~np.isnan(values)).sum() > 1 and np.nanmax(values) > np.nanmin(values):
                z = (values - np.nanmean(values)) / (np.nanstd(values, ddof=1) + 1e-6)
                terms[rows, k] = weight * np.nan_to_num(z)
                live[rows[~np.isnan(values)]] = True
    total = terms.sum(axis=1)
    scale, mean = 1.0, np.zeros(len(samples))
    if batch_norm and live.any():
        spread = total[live].std(ddof=1)
        cancelled = spread < 1e-5
        scale = 0.0 if cancelled else 1 / (spread + 1e-6)
        mean[live] = total[live].mean()
    for i, t in enumerate(samples):
        for token in range(6):
            about = [
                name not in t.reward_tokens or any(start <= token < end for start, end in t.reward_tokens[name])
                for name in "ab"
            ]
            wanted = scale * (terms[i] @ np.array(about, float) - mean[i])
            value = found[i] if isinstance(found[i], float) else found[i][token]
            assert value == pytest.approx(wanted, abs=2e-6)
        if not t.reward_tokens:
            assert found[i] == advantages.values[i].item()


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_the_kl_and_the_mean_of_the_batch_act_on_all_tokens_of_a_sample_with_spans(unit):
    """Samples of unlike lengths, so that the mean over the tokens of the batch is not 0."""
    a, b = np.array([0.0, 1.0, 1.0, 0.0]), np.array([1.0, 0.0, 3.0, 4.0])
    kl, lengths = np.array([0.1, -0.2, 0.4, 0.9]), np.array([3, 4, 6, 9])
    members = [
        sample({"a": x, "b": y}, {"a": ((0, 2),)} if i else {}, tokens=n, index=i)
        for i, (x, y, n) in enumerate(zip(a, b, lengths.tolist()))
    ]
    chosen = config("gdpo.kl_in_reward=0.5", f"gdpo.options={{batch_unit: {unit}}}")
    found = by_span(advantages_of([Group(PROMPT, members)], chosen, kl), members)
    terms = [weight * (r - r.mean()) / (r.std(ddof=1) + 1e-6) for r, weight in ((a, 1.0), (b, 2.0))]
    penalty = 0.5 * (kl - kl.mean())
    counted = np.repeat(sum(terms) - penalty, lengths if unit == "token" else 1)
    scale = 1 / (counted.std(ddof=1) + 1e-6)
    for i, (values, n) in enumerate(zip(found, lengths)):
        of_a = np.arange(n) < 2 if i else np.ones(n, bool)
        wanted = scale * (terms[0][i] * of_a + terms[1][i] - penalty[i] - counted.mean())
        np.testing.assert_allclose(np.broadcast_to(values, n), wanted, rtol=0, atol=2e-6)


def test_noise_of_rounding_and_tokens_of_the_environment_get_no_advantage():
    members = [sample({"a": 0.1 * i, "b": 0.3}, {"a": ((0, 2),)}, index=i) for i in range(3)]
    members[2].loss_mask = np.array([False, True, True, True, True, True])
    found = by_span(advantages_of([Group(PROMPT, members)], config()), members)
    assert [(values != 0).tolist() for values in found] == [
        [True, True, False, False, False, False],
        [False] * 6,  # the mean of its group
        [False, True, False, False, False, False],
    ]


def test_rewards_that_cancel_have_no_advantage_in_their_spans():
    members = [sample({"a": float(i), "b": -float(i)}, {"a": ((0, 2),)}, index=i) for i in range(3)]
    found = by_span(advantages_of([Group(PROMPT, members)], config("gdpo.rewards={a: 1, b: 1}")), members)
    assert not np.any(found)


def test_the_sequences_of_an_update_carry_the_advantages_of_their_tokens():
    members = [sample({"a": float(i), "b": float(i % 2)}, {"a": ((1, 4),)} if i else {}, index=i) for i in range(4)]
    groups = [Group(PROMPT, members)]
    policy, log = SimpleNamespace(), SimpleNamespace()
    prepared = GDPO(config(), policy, None, log).prepare(Rollout(groups, 1, version=0))
    advantages = advantages_of(groups, config())
    for sequence, wanted in zip(prepared.updates[0], by_span(advantages, members), strict=True):
        np.testing.assert_array_equal(sequence.token_advantages(), np.float32(wanted) * np.ones(6, np.float32))
    whole = GDPO(config("gdpo.credit=sequence"), policy, None, log).prepare(Rollout(groups, 1, version=0))
    assert [s.advantage for s in whole.updates[0]] == advantages.values.tolist()


# -- verdicts and files -----------------------------------------------------------------------------------------------


def test_spans_of_a_verdict_become_tokens_that_the_samples_record_and_a_replay_reads(tmp_path):
    ids = [PIECES.index(piece) for piece in (b"a", b"\xc3", b"\xa9", "€".encode())]
    t = replace(sample({}, {}, tokens=4), completion_ids=np.array(ids, np.int32), text="aé€")
    group = Group(PROMPT, [t, sample({"a": 1.0}, {}, index=1)], 0)
    verdict = Verdict({"a": 1.0, "b": 0.0}, reward_spans={"a": [(1, 2)], "b": []})
    pool = SimpleNamespace(verify=lambda trajectories: checked_verdicts(("a", "b"), trajectories, [verdict]))
    apply_verdicts([t], pool, replies=PARSER)
    assert t.reward_tokens == {"a": ((1, 3),), "b": ()}
    path = tmp_path / "rollouts" / "step_0001.parquet"
    write_rollouts(tmp_path, 1, [group])
    Journal(tmp_path).append(1, [group], position=1, published=0, total_updates=1)
    records = read_rollouts(path)
    assert records[0]["reward_tokens"] == {"a": [[1, 3]], "b": []} and "reward_tokens" not in records[1]
    [again] = recorded_groups(read_journal(tmp_path)[0], records, "f")
    assert [sample.reward_tokens for sample in again.trajectories] == [t.reward_tokens, {}]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"c": [(0, 1)]}, "reward_spans of 'c' for sample 0 of prompt p, but no reward of this component"),
        ({"a": [(0, 7)]}, r"reward_spans of 'a' for sample 0 of prompt p: \[0, 7\] is not a range of the 6 characters"),
        ({"a": [(True, 2)]}, r"\[True, 2\] is not a range"),
        ({"a": [3]}, r"expected a list of \[start, end\], got \[3\]"),
    ],
)
def test_an_invalid_span_is_refused_with_component_and_sample(spans, message):
    with pytest.raises(RunError, match=message):
        checked_verdicts(("a",), [sample({}, {})], [Verdict({"a": 1.0}, reward_spans=spans)])


def test_reward_functions_return_spans(tmp_path):
    from gdpo_nemo.environments.tasks.reward_functions import Functions

    def tagged(completions, **columns):
        return [SpanReward(float("nan"), [(0, 2)]), 0.5]

    environment = Functions({"functions": {"a": "length"}})
    environment._functions = [replace(environment._functions[0], call=tagged, parameters=None)]
    first, second = environment.verify([sample({}, {}), sample({}, {}, index=1)])
    assert first.rewards == {"a": None} and first.reward_spans == {"a": [(0, 2)]}
    assert second.rewards == {"a": 0.5} and second.reward_spans == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss_fn.type=target_po"], "gdpo.credit: span has no single advantages of whole trajectories"),
        (["algorithm.type=ppo"], "gdpo.credit: span conflicts with algorithm ppo; use sequence or turn"),
        (["gdpo.discount=0.5"], "gdpo.discount: has no effect unless gdpo.credit is turn"),
    ],
)
def test_settings_that_need_one_advantage_per_sample_are_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        validate(config(*overrides))
    assert message in str(error.value)


# -- learning ---------------------------------------------------------------------------------------------------------

FIELDS, CHOICES, SAMPLES = 16, 10, 8


def steps_to(threshold: float, credit: str, seed: int, lr: float = 0.1) -> int:
    """Steps of Adam until a softmax policy fills a threshold of 16 unconnected fields right.

    A field is one token with ten choices, and one component, which is about its token.
    """
    chosen = config(f"gdpo.credit={credit}", f"gdpo.rewards={{{', '.join(f'f{k}: 1' for k in range(FIELDS))}}}")
    draw = np.random.default_rng(seed)
    logits, first, second = (np.zeros((FIELDS, CHOICES)) for _ in range(3))
    for step in range(1, 1000):
        share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        if share[:, 0].mean() >= threshold:
            return step - 1
        answers = np.stack([draw.choice(CHOICES, size=SAMPLES, p=p) for p in share], axis=1)
        samples = [
            sample(
                {f"f{k}": float(answer == 0) for k, answer in enumerate(row)},
                {f"f{k}": ((k, k + 1),) for k in range(FIELDS)},
                FIELDS,
                i % 8,
            )
            for i, row in enumerate(answers)
        ]
        groups = [Group(PROMPT, samples[i : i + 8]) for i in range(0, SAMPLES, 8)]
        found = advantages_of(groups, chosen)
        values = by_span(found, samples) if credit == "span" else found.values.tolist()
        tokens = np.stack([np.broadcast_to(value, FIELDS) for value in values])
        gradient = np.einsum("nk,nkc->kc", tokens, np.eye(CHOICES)[answers] - share) / tokens.size
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        logits += lr * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-12)
    raise AssertionError("not learnt")


def test_unconnected_fields_are_learnt_twice_as_fast_by_span_as_by_sequence():
    for seed in range(3):
        assert 2 * steps_to(0.9, "span", seed) <= steps_to(0.9, "sequence", seed)


def test_each_field_of_a_form_is_scored_at_its_digit():
    form = load_environment("form", {"plugin": f"{DEMO.parents[1]}/examples/digit_fields.py:Form"})
    right = "".join(label + digit for label, digit in form._right.items())
    wrong = right[0] + str((int(right[1]) + 1) % 10) + right[2:]
    samples = [replace(sample({}, {}), text=text) for text in (right, wrong, right[:-2])]
    complete, other, short = form.verify(samples)
    assert set(complete.rewards.values()) == {1.0} and complete.reward_spans["b"] == [(3, 4)]
    assert [name for name, value in other.rewards.items() if value != 1.0] == ["a", "share"]
    assert short.rewards["format"] == short.rewards["p"] == 0.0 and short.reward_spans["p"] == []
