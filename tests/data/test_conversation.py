"""A conversation as tokens: exact, cut to the context from its oldest exchange on."""

from __future__ import annotations

import numpy as np
import pytest
from character_tokenizer import character_tokenizer

from gdpo_nemo.data.conversation import Conversation, Dialogue
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.utils.errors import ConfigError


def dialogue(system=None, context=1000, reply=10, chat=True):
    tokenizer = character_tokenizer(chat=chat)
    return Dialogue(Conversation(tokenizer, chat), system, context, reply), tokenizer


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def text(tokenizer, tokens):
    return "".join(tokenizer.convert_ids_to_tokens(tokens.tolist()))


def test_the_model_reads_system_message_and_every_exchange_in_the_template():
    talk, tokenizer = dialogue("be kind")
    first, forgotten = talk.prompt("one")
    assert text(tokenizer, first) == "[system]be kind[user]one[assistant]" and forgotten == 0
    talk.add("one", ids(tokenizer, "eins"))
    second, _ = talk.prompt("two")
    assert text(tokenizer, second) == "[system]be kind[user]one[assistant]eins[user]two[assistant]"
    talk.reset()
    assert text(tokenizer, talk.prompt("one")[0]) == text(tokenizer, first)


def test_reply_keeps_its_sampled_tokens_even_if_its_text_has_another_tokenisation():
    talk, tokenizer = dialogue()
    sampled = [0, 5, 0, 7]  # 0 is <unk>, which no text becomes again
    talk.add("one", sampled)
    assert sampled == talk.prompt("two")[0][len(ids(tokenizer, "[user]one[assistant]")) :][:4].tolist()


def test_the_oldest_exchanges_make_room_and_the_system_message_stays():
    talk, tokenizer = dialogue("s", context=60, reply=10)
    for number in range(3):
        talk.add(f"ask {number}", ids(tokenizer, "x" * 8))
    tokens, forgotten = talk.prompt("last")
    assert forgotten == 3 - len(talk) > 0 and len(tokens) + 10 <= 60
    assert text(tokenizer, tokens).startswith("[system]s[user]") and text(tokenizer, tokens).endswith(
        "[user]last[assistant]"
    )
    assert "ask 0" not in text(tokenizer, tokens)


def test_a_prompt_without_room_for_a_reply_is_refused():
    talk, _ = dialogue(context=20)
    with pytest.raises(
        ConfigError, match=r"the prompt has 47 tokens, but the model's context is limited to 20 \(policy.max_total"
    ):
        talk.prompt("x" * 30)


def test_a_row_begins_a_conversation_in_the_tokens_of_the_run_and_can_be_followed_up():
    talk, tokenizer = dialogue("be kind")
    talk.add("before", ids(tokenizer, "old"))
    row = Prompt("train/0", np.array(ids(tokenizer, "ROW:"), np.int32), "ROW:", "it")
    assert text(tokenizer, talk.prompt(row)[0]) == "ROW:"
    talk.add(row, ids(tokenizer, "answer"))
    assert text(tokenizer, talk.prompt("why?")[0]) == "ROW:answer[user]why?[assistant]"


def test_without_a_chat_template_every_text_is_continued_by_itself():
    talk, tokenizer = dialogue("be kind", chat=False)
    talk.add("one", ids(tokenizer, "eins"))
    assert text(tokenizer, talk.prompt("two")[0]) == "be kind\n\ntwo" and len(talk) == 0
