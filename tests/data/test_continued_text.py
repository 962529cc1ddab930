"""A text that continues another one is tokenized as a part of the whole text, with tokenizers of every kind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizer_kinds import KINDS, TEXTS, tokenizer_of_kind

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.tokenizer import continued
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reward_model import Scorer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_and_its_continuation_are_the_tokens_of_the_whole_text(kind):
    tokenizer = tokenizer_of_kind(kind)
    rng = random.Random(kind)
    same = 0
    for text in TEXTS * 40:
        cut = rng.randrange(1, len(text))
        first = tokenizer(text[:cut])["input_ids"]
        ids = [*first, *continued(tokenizer, text[:cut], text[cut:])]
        whole = tokenizer(text)["input_ids"]
        assert decoded(tokenizer, ids) == decoded(tokenizer, whole), (text[:cut], text[cut:])
        if whole[: len(first)] == first:
            same += 1
            assert ids == whole
    assert same > 10


def of_a_row(tokenizer):
    rows = [{"id": "0", "prompt": "31524=", "completion": "12345"}]
    source = ExampleSource(
        DatasetConfig(path="rows"), {}, tokenizer, split="train", seed=0, max_prompt_tokens=30, kind="sft", rows=rows
    )
    return source.head()[0].fields["answers"][0].token_ids.tolist()[:-1]


def of_an_observation(tokenizer):
    [*_, last] = tokenizer("31524=")["input_ids"]
    return Conversation(tokenizer, chat=False).continuation(None, "12345", last).tolist()


def of_a_reward_model(tokenizer):
    scorer = Scorer("model")
    scorer._tokenizer = tokenizer
    return scorer._tokens("31524=", "12345")[len(tokenizer("31524=")["input_ids"]) : -1]


def of_a_reference_answer(tokenizer):
    environment = load_environment("ebft", {"model": "model"})
    environment._tokenizer = tokenizer
    prompt = Prompt("0", np.array(tokenizer("31524=")["input_ids"]), "31524=", "ebft", {"answer": "12345"})
    return environment._gold(prompt).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("found", [of_a_row, of_an_observation, of_a_reward_model, of_a_reference_answer])
def test_an_answer_begins_without_a_space_that_the_text_does_not_have(kind, found):
    tokenizer = tokenizer_of_kind(kind)
    written = "".join(tokenizer.convert_ids_to_tokens(found(tokenizer)))
    assert written.replace("##", "") == "12345"


@pytest.mark.parametrize("kind", ["metaspace first", "metaspace always", "llama 2"])
def test_the_text_between_two_turns_is_tokenized_as_in_the_whole_conversation(kind, monkeypatch):
    tokenizer = tokenizer_of_kind(kind)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    history = [{"role": "user", "content": "say hello"}]
    conversation = Conversation(tokenizer, chat=True)
    text, ids = conversation.prompt(history)
    reply = continued(tokenizer, text, "hello world")
    between = conversation.continuation(history, "the sky is blue", reply[-1])
    messages = [
        *history,
        {"role": "assistant", "content": "hello world"},
        {"role": "user", "content": "the sky is blue"},
    ]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
    assert [*ids.tolist(), *reply, *between.tolist()] == whole


def test_an_observation_without_a_turn_before_it_begins_a_text():
    tokenizer = tokenizer_of_kind("metaspace never")
    ids = Conversation(tokenizer, chat=False).continuation(None, "12345", -1).tolist()
    assert tokenizer.decode(ids) == "12345"
