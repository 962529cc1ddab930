"""A conversation as tokens: exact, cut to the context from its oldest exchange on."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_vision
from character_tokenizer import character_tokenizer

from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.conversation import Conversation, Dialogue
from gdpo_nemo.data.image_reader import ImageReader
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.utils.errors import ConfigError, RunError


def dialogue(system=None, context=1000, reply=10, chat=True):
    tokenizer = character_tokenizer(chat=chat)
    return Dialogue(Conversation(tokenizer, chat), system, context, reply), tokenizer


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def text(tokenizer, tokens):
    return "".join(tokenizer.convert_ids_to_tokens(tokens.tolist()))


def test_the_model_reads_system_message_and_every_exchange_in_the_template():
    talk, tokenizer = dialogue("be kind")
    first, _, forgotten = talk.prompt("one")
    assert text(tokenizer, first) == "[system]be kind[user]one[assistant]" and forgotten == 0
    talk.add("one", ids(tokenizer, "eins"))
    second, *_ = talk.prompt("two")
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
    tokens, _, forgotten = talk.prompt("last")
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


def test_images_of_all_exchanges_are_at_their_placeholders(tmp_path):
    from transformers import AutoProcessor, AutoTokenizer

    folder = tiny_vision.write_tiny_vision(tmp_path / "model", "qwen3_vl")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = ImageReader(ImagesConfig(), folder, tokenizer)
    pictures = [tiny_vision.picture(*size, seed) for seed, size in enumerate([(64, 64), (128, 64), (96, 96)])]
    images = [reader.read(picture) for picture in pictures]

    def question(text, *chosen):
        parts = [{"type": "image", "image": image} for image in chosen]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    talk = Dialogue(Conversation(tokenizer, True, images=reader), "be kind", 4000, 10)
    asked = [question("what?", *images[:2]), "why?", question("and here?", images[2])]
    # The policy samples a placeholder, which is text.
    replies = [ids(tokenizer, "one<|image_pad|><|im_end|>"), ids(tokenizer, "two")]
    for message, reply in zip(asked, replies):
        talk.add(message, reply)
    tokens, placed, _ = talk.prompt(asked[2])
    processor = AutoProcessor.from_pretrained(folder)
    history = [{"role": "system", "content": "be kind"}]
    for message, reply in zip(asked, ["ONE", "TWO", None]):
        history.append({"role": "user", "content": message} if isinstance(message, str) else message)
        history += [] if reply is None else [{"role": "assistant", "content": reply}]
    text = processor.apply_chat_template(history, add_generation_prompt=True)
    wanted = processor(text=[text], images=pictures)["input_ids"][0]
    shown = tokenizer.decode(tokens.tolist())
    assert shown.replace("one<|image_pad|>", "ONE").replace("two", "TWO") == tokenizer.decode(wanted)
    assert [each.image for each in placed] == images
    places = np.flatnonzero(tokens == tiny_vision.token_id("<|image_pad|>")).tolist()
    inside = [index for each in placed for index in range(each.start, each.stop)]
    assert len(places) == len(inside) + 1 and set(inside) < set(places)


def test_image_for_a_model_without_a_chat_template_is_refused():
    talk, _ = dialogue(chat=False)
    with pytest.raises(RunError, match="an image requires a tokenizer with a chat template"):
        talk.prompt({"role": "user", "content": [{"type": "image"}]})
