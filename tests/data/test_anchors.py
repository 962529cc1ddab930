"""Anchors of raw text: each place that has a context and an answer, once, in tokens that are the text's own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from character_tokenizer import character_tokenizer
from hypothesis import given, settings, strategies as st

from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.schema import Config, DatasetConfig, StridedConfig
from gdpo_nemo.data.anchors import AnchorSource, anchors_of, check_texts, prompts_of
from gdpo_nemo.data.examples import source_of
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.utils.errors import ConfigError

ENVIRONMENTS = {"digit_sort": {}}
LENGTHS = st.integers(1, 12)
SECTIONS = st.builds(StridedConfig, stride=LENGTHS, context_length=LENGTHS, generate_max_len=LENGTHS)


def source(texts, strided, *, tokenizer=None, seed=0, extra=(), **how):
    rows = [{"id": f"row{n}", "text": text, **dict(extra)} for n, text in enumerate(texts)]
    dataset = DatasetConfig(path="unread", strided=strided, **how)
    return prompts_of(
        dataset, load_environments(ENVIRONMENTS), tokenizer or character_tokenizer(), split="train", seed=seed,
        max_prompt_tokens=1000, rows=rows,
    )  # fmt: skip


@given(st.integers(0, 100), SECTIONS)
def test_anchors_are_axolotls_from_the_first_whole_context_on(tokens, strided):
    """Its trainer has (tokens - generate_max_len - context_length) // stride + 1 blocks from context_length on."""
    blocks = (tokens - strided.generate_max_len - strided.context_length) // strided.stride + 1
    expected = [strided.context_length + block * strided.stride for block in range(blocks)]
    assert list(anchors_of(tokens, strided)) == expected


@settings(max_examples=60)
@given(st.lists(st.text("abcdef ", min_size=1, max_size=60), min_size=1, max_size=6), SECTIONS)
def test_prompts_and_answers_are_slices_of_their_texts_and_texts_without_are_counted(texts, strided):
    tokenizer = character_tokenizer(bos=True)
    expected = []
    short = []
    for number, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        places = anchors_of(len(ids), strided)
        short += [(f"row{number}", len(ids))] if not places else []
        for place in places:
            context = ids[place - strided.context_length : place]
            expected.append((f"row{number}@{place}", context, ids[place : place + strided.generate_max_len]))
    if not expected:
        with pytest.raises(ConfigError, match=r"data.train.strided: all \d+ texts are shorter than the"):
            source(texts, strided, tokenizer=tokenizer)
        return
    made = source(texts, strided, tokenizer=tokenizer)
    assert len(made) == len(expected)
    assert [(p.id, p.token_ids.tolist(), p.answer_ids.tolist()) for p in made.head()] == expected
    assert [(refused.id, refused.tokens) for refused in made.refused] == short
    assert all(p.token_ids.dtype == p.answer_ids.dtype == np.int32 for p in made.head())
    shortest = next(n for n in range(1000) if anchors_of(n, strided))
    assert made.left_out() == "" if not short else f"shorter than the minimum of {shortest} tokens" in made.left_out()
    firsts = {p.id.rpartition("@")[0]: p.id for p in reversed(made.head())}
    assert [p.id for p in made.one_of_each_row()] == list(reversed(firsts.values()))


def test_an_epoch_deals_each_anchor_of_all_texts_once_in_an_order_of_seed_and_epoch():
    strided = StridedConfig(stride=2, context_length=3, generate_max_len=2)
    texts = ["abcdefghij", "klmnopqrstuvw", "xyz", "0123456789"]
    made = source(texts, strided, seed=3)
    epochs = [[p.id for p in made.batch(start, len(made))] for start in (0, len(made))]
    assert [sorted(epoch) for epoch in epochs] == [sorted(p.id for p in made.head())] * 2
    assert epochs[0] != epochs[1] and epochs[0] != [p.id for p in made.head()]
    assert len({p.id.rpartition("@")[0] for p in made.batch(0, 5)}) > 1  # texts are mixed, not one after the other
    again = source(texts, strided, seed=3)  # as after a resume
    assert [p.id for p in again.batch(2, 3)] == epochs[0][2:5]
    assert [p.id for p in again.batch(len(made) + 1, 4)] == epochs[1][1:5]
    assert [p.id for p in source(texts, strided, shuffle=False).batch(0, 3)] == ["row0@3", "row0@5", "row0@7"]


def test_an_anchor_that_comes_twice_in_a_batch_keeps_its_answer():
    made = source(["abcdefgh"], StridedConfig(stride=4, context_length=4, generate_max_len=4))
    first, second = made.batch(0, 2)
    assert (first.id, second.id) == ("row0@4", "row0@4#2")
    assert second.answer_ids.tolist() == first.answer_ids.tolist()
    assert second.token_ids.tolist() == first.token_ids.tolist()


def test_environments_see_the_other_columns_and_the_answer_as_text_but_not_the_whole_text():
    strided = StridedConfig(stride=4, context_length=2, generate_max_len=3)
    (prompt,) = source(["abcdefg"], strided, extra={"topic": "letters", "answer": "of the row"}.items()).head()
    # This tokenizer puts a space between any two tokens that it decodes.
    assert prompt.fields == {"topic": "letters", "answer": "c d e"} and prompt.text == "a b"
    assert prompt.environment == "digit_sort" and prompt.messages is None


def test_no_chat_template_and_no_system_prompt_goes_around_an_anchor():
    strided = StridedConfig(stride=4, context_length=4, generate_max_len=2)
    (prompt,) = source(["abcdef"], strided, tokenizer=character_tokenizer(chat=True)).head()
    assert prompt.token_ids.tolist() == character_tokenizer()("abcd")["input_ids"]


def test_the_fingerprint_knows_text_and_strides():
    base = StridedConfig(stride=4, context_length=4, generate_max_len=4)
    texts = ["abcdefghijklmnop"]
    kinds = [
        source(texts, base),
        source(texts, StridedConfig(stride=2, context_length=4, generate_max_len=4)),
        source(texts, StridedConfig(stride=4, context_length=3, generate_max_len=4)),
        source(texts, StridedConfig(stride=4, context_length=4, generate_max_len=3)),
        source(["abcdefghijklmnoq"], base),
    ]
    assert len({made.fingerprint for made in kinds}) == len(kinds)
    assert source(texts, base).fingerprint == kinds[0].fingerprint


def test_split_is_read_as_texts_or_prompts_according_to_its_config(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "abc", "body": "abcdefgh"}) + "\n")
    config = Config()
    read = source_of(spec_of(config))
    strided = StridedConfig(stride=4, context_length=4, generate_max_len=4)
    how = dict(split="train", seed=0, max_prompt_tokens=100)
    plain = read(DatasetConfig(path=str(path)), load_environments(ENVIRONMENTS), character_tokenizer(), **how)
    assert type(plain) is PromptSource and plain.head()[0].answer_ids is None
    for named in ({"prompt_key": "body"}, {"columns": {"text": "body"}}):
        dataset = DatasetConfig(path=str(path), strided=strided, **named)
        made = read(dataset, load_environments(ENVIRONMENTS), character_tokenizer(), **how)
        assert type(made) is AnchorSource and [p.id for p in made.head()] == ["train/0@4"]


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"txt": "a"}, r"prompt_key: row 1: no column 'text'; did you mean 'txt'\?"),
        ({"text": ""}, "row 1: the column 'text' is empty"),
        ({"text": ["a"]}, "row 1: 'text' must be text for anchors, got list"),
    ],
)
def test_rows_without_a_text_are_refused_before_a_tokenizer_is_there(row, sentence):
    strided = StridedConfig(stride=1, context_length=1, generate_max_len=1)
    with pytest.raises(ConfigError, match=sentence):
        check_texts([{"text": "fine"}, row], DatasetConfig(strided=strided), "train")


class Player:
    reward_names = ("won",)

    def __init__(self, options):
        pass

    def episode(self):
        raise NotImplementedError


def test_episodes_cannot_start_at_an_anchor():
    environments = load_environments({"player": {"plugin": f"{__file__}:Player"}})
    dataset = DatasetConfig(path="unread", strided=StridedConfig(stride=1, context_length=1, generate_max_len=1))
    with pytest.raises(ConfigError, match="not supported with environment 'player'"):
        prompts_of(
            dataset, environments, character_tokenizer(), split="train", seed=0, max_prompt_tokens=9,
            rows=[{"id": "a", "text": "abc"}],
        )  # fmt: skip
