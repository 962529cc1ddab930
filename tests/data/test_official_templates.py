"""Which tokens are trained with official chat templates, compared with TRL's templates for training."""

from __future__ import annotations

import re

import pytest
from official_templates import (
    OFFICIAL,
    ROWS,
    THOUGHT,
    answers_of,
    folder,
    official_tokenizer,
    prompt_of,
    source_of,
    turn,
)

from gdpo_nemo.utils.errors import ConfigError

EMPTY = "<think>\n\n</think>\n\n"
FINAL = "<|channel|>final<|message|>"
NEMOTRON = ("</think>yes", "</think>b", "hm\n</think>\n\nyes", "truncate_history_thinking: false")
PLAIN = ("yes", "b", THOUGHT + "yes", None)
TRAINED = {
    "glm4moe": ("\n<think></think>\nyes", "\n<think></think>\nb", "\n<think>hm</think>\nyes", "train_on: last"),
    "qwen3": (EMPTY + "yes", "b", THOUGHT + "yes", "train_on: last"),
    "qwen3_5_think": ("\n</think>\n\nyes", "b", "hm\n</think>\n\nyes", "train_on: last"),
    "qwen3_5_nothink": ("yes", "b", "hm\n</think>\n\nyes", "train_on: last"),
    "gptoss": (FINAL + "yes", FINAL + "b", FINAL + THOUGHT + "yes", None),
    "deepseekv3": ("yes", "b", "hm\n</think>\n\nyes", "train_on: last"),
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
}
"""Trained text of the last turn, of an earlier turn and of a turn with reasoning, without the end of a turn. Last, the
key that keeps the reasoning of earlier turns, if the template drops it. ``PLAIN`` without an entry."""
ADDED = re.compile(r"(<\|start\|>assistant|<｜Assistant｜>|\n)?(<think>\n?(\n</think>\n\n)?)?")
"""Text that TRL's templates train, but that ours take from the prompt or do not write."""


def without_end(name, text):
    """The text without the whitespace and special tokens at its end."""
    ends = {"<eos>", *(str(token) for token in official_tokenizer(name).added_tokens_decoder.values())}
    while (shorter := next((text.removesuffix(end) for end in ends if text.endswith(end)), text.rstrip())) != text:
        text = shorter
    return text


def trained_of(name, row, **options):
    """The trained texts of each answer, without the ends of turns."""
    pieces = [re.findall("«(.*?)»", text, re.DOTALL) for text in answers_of(name, row, **options)]
    return [[without_end(name, piece) for piece in each] for each in pieces]


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_templates_train_the_text_of_the_assistant(name):
    last, earlier, reasoning, key = TRAINED.get(name, PLAIN)
    assert trained_of(name, ROWS["one turn"]) == [[last]]
    assert trained_of(name, ROWS["two turns"]) == [[earlier, last]]
    assert trained_of(name, ROWS["reasoning"]) == [[reasoning]]
    assert trained_of(name, ROWS["pair"]) == [[reasoning], [last.replace("yes", "no")]]
    row = ROWS["two turns with reasoning"]
    if key is None:
        assert trained_of(name, row) == [[reasoning.replace("yes", "b"), reasoning]]
        return
    with pytest.raises(
        ConfigError, match=f"does not write all of 'content' of an assistant turn; set data.train.*{key}"
    ):
        prompt_of(name, row)
    if key.startswith("train_on"):
        assert trained_of(name, row, train_on="last") == [[reasoning]]
    else:
        kept = trained_of(name, row, chat_template_kwargs={"truncate_history_thinking": False})
        assert kept == [[reasoning.replace("yes", "b"), reasoning]]


@pytest.mark.parametrize("name", [name for name in OFFICIAL if (folder() / f"{name}_training.jinja").exists()])
@pytest.mark.parametrize("kind", ["one turn", "two turns", "reasoning"])
def test_trained_tokens_are_those_of_trls_templates_for_training(name, kind):
    tokenizer = official_tokenizer(name, training=True)
    messages = ROWS[kind]["messages"]
    if name == "deepseekv3" and kind == "reasoning":
        messages = ROWS["one turn"]["messages"]  # TRL's template drops the reasoning
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    marked = "".join(
        tokenizer.decode([token]) if trained else "\0"
        for token, trained in zip(found["input_ids"], found["assistant_masks"])
    )
    theirs = [without_end(name, text) for text in re.split("\0+", marked) if text]
    [ours] = trained_of(name, {"messages": messages})
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert other.endswith(mine) and ADDED.fullmatch(other.removesuffix(mine)), (mine, other)


TEXT_TEMPLATES = [
    path.stem
    for path in sorted(folder().glob("*.jinja"))
    if not path.stem.endswith("_training") and path.stem not in ("idefics3", "llava_next", "smolvlm")
]
"""All but those that accept only messages with parts."""


@pytest.mark.parametrize("kind", ["one turn", "two turns"])
def test_tokens_of_a_row_are_the_conversation_as_the_template_renders_it(kind):
    assert len(TEXT_TEMPLATES) > 30
    for name in TEXT_TEMPLATES:
        tokenizer = official_tokenizer(name)
        prompt = prompt_of(name, ROWS[kind])
        ids = [*prompt.token_ids.tolist(), *prompt.fields["answers"][0].token_ids.tolist()]
        whole = tokenizer.apply_chat_template(ROWS[kind]["messages"], tokenize=False)
        assert without_end(name, tokenizer.decode(ids)) == without_end(name, whole), name
        assert ids[:-2] == tokenizer(whole, add_special_tokens=False)["input_ids"][: len(ids) - 2], name


def test_the_end_of_an_earlier_turn_is_not_trained_if_the_last_turn_ends_differently():
    [text] = answers_of("gptoss", ROWS["two turns"])
    assert f"«{FINAL}b»<|end|><|start|>user" in text and text.endswith(f"«{FINAL}yes<|return|>»")


THINKS = {**turn("assistant", "b"), "reasoning_content": "hm"}
CALLS = {**turn("assistant", ""), "tool_calls": [{"function": {"name": "warm", "arguments": {}}}]}
MORE = ROWS["two turns"]["messages"][2:]


@pytest.mark.parametrize("name, messages, sentence", [
    ("llama3", [THINKS], "all of 'reasoning_content' of an assistant turn; change the row"),
    ("phi3", [CALLS, *MORE], "all of 'tool_calls' of an assistant turn; change the row"),
    ("qwen3", [THINKS, *MORE], "set data.train.train_on: last"),
])  # fmt: skip
def test_a_row_is_refused_if_the_template_drops_a_part_of_an_answer(name, messages, sentence):
    with pytest.raises(ConfigError, match=sentence):
        prompt_of(name, {"messages": [turn("user", "q"), *messages]})


def test_a_pair_with_turns_that_the_template_rewrites_is_refused_with_its_remedy():
    several = ROWS["two turns with reasoning"]["messages"][1:]
    row = {"prompt": [turn("user", "q")], "chosen": several, "rejected": [turn("assistant", "no")]}
    with pytest.raises(ConfigError, match="keep only the last turn in the answer, and move the turns before it into"):
        prompt_of("qwen3", row)


@pytest.mark.parametrize("name, kind, key", [
    ("nemotron_3_nano", "one turn", "{enable_thinking: false} to keep"),
    ("qwen3_5_nothink", "reasoning", "{enable_thinking: true} to keep"),
    ("deepseekv3", "one turn", "the first is train/0"),
    ("qwen3", "one turn", ""),
])  # fmt: skip
def test_prompts_that_end_before_the_beginning_of_a_reply_are_reported_with_the_key_that_keeps_them(name, kind, key):
    message = source_of(name, ROWS[kind]).left_out()
    assert key in message and bool(message) is bool(key)
