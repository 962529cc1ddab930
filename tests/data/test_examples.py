"""Rows of supervised and preference data, in every form that TRL and axolotl have, become tokens and masks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from character_tokenizer import character_tokenizer

from gdpo_nemo.config.algorithm_choice import check_example_type
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.utils.errors import ConfigError

ENDED = "[{{ m.role }}]{{ m.content }}~{{ '\\n' }}"
TEMPLATE = "{% for m in messages %}" + ENDED + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def tokenizer(chat=True):
    """One token per character; a turn ends with ``~``, the end of text, and a line break."""
    made = character_tokenizer()
    made.eos_token = "~"
    made.chat_template = TEMPLATE if chat else None
    return made


def source(tmp_path, rows, kind, chat=True, limit=400, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(path=str(path), **options)
    return ExampleSource(dataset, {}, tokenizer(chat), split="train", seed=0, max_prompt_tokens=limit - 1, kind=kind)


def read(tmp_path, row, kind, **options):
    """(prompt, [(answer, trained part, sign)]) of a row's examples."""
    chosen = source(tmp_path, [row], kind, **options)
    text = tokenizer()
    decode = lambda ids: "".join(text.convert_ids_to_tokens([int(i) for i in ids]))  # noqa: E731
    return [
        (
            decode(prompt.token_ids),
            [
                (decode(a.token_ids), decode(a.token_ids[a.mask] if a.mask is not None else a.token_ids), a.sign)
                for a in prompt.fields["answers"]
            ],
        )
        for prompt in chosen.head()
    ]


def turn(role, content):
    return {"role": role, "content": content}


DIALOGUE = [turn("user", "a?"), turn("assistant", "b"), turn("user", "c?"), turn("assistant", "d")]
PAIR = ("[user]q~\n[assistant]", [("yes~", "yes~", 1), ("no~", "no~", -1)])
BEGUN = [turn("user", "q")]
YES = [turn("assistant", "yes")]
NO = [turn("assistant", "no")]


@pytest.mark.parametrize("train_on, prompt, answer, trained", [
    ("assistant", "[user]a?~\n[assistant]", "b~\n[user]c?~\n[assistant]d~", "b~d~"),
    ("last", "[user]a?~\n[assistant]", "b~\n[user]c?~\n[assistant]d~", "d~"),
    ("all", "[", "user]a?~\n[assistant]b~\n[user]c?~\n[assistant]d~", None),
])  # fmt: skip
def test_trained_tokens_of_a_conversation_follow_train_on(tmp_path, train_on, prompt, answer, trained):
    found = read(tmp_path, {"messages": DIALOGUE}, "sft", train_on=train_on)
    assert found == [(prompt, [(answer, trained or answer, 1)])]


def test_sharegpt_turns_are_read_as_messages(tmp_path):
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]}
    assert read(tmp_path, row, "sft") == [("[user]q~\n[assistant]", [("yes~", "yes~", 1)])]


def test_a_completion_as_text_ends_with_the_end_of_text(tmp_path):
    row = {"prompt": "q=", "answer": "yes"}
    columns = {"completion": "answer"}
    assert read(tmp_path, row, "sft", chat=False, columns=columns) == [("q=", [("yes~", "yes~", 1)])]


def test_the_prompts_column_may_have_another_name(tmp_path):
    row = {"question": "q", "chosen": "yes", "rejected": "no"}
    assert read(tmp_path, row, "pairs", prompt_key="question") == [PAIR]


@pytest.mark.parametrize("row", [
    {"prompt": "q", "chosen": "yes", "rejected": "no"},
    {"prompt": BEGUN, "chosen": YES, "rejected": NO},
    {"chosen": BEGUN + YES, "rejected": BEGUN + NO},
    {"prompt": "q", "chosen": BEGUN + YES, "rejected": BEGUN + NO},
])  # fmt: skip
def test_pairs_in_trls_forms_are_the_same_pair(tmp_path, row):
    assert read(tmp_path, row, "pairs") == [PAIR]


@pytest.mark.parametrize("row", [
    {"chosen": "the sky is blue", "rejected": "the sky is green"},
    {"chosen": "abc", "rejected": "abd"},
    {"chosen": BEGUN + YES, "rejected": BEGUN + NO},
])  # fmt: skip
def test_an_implicit_prompt_is_cut_where_trl_cuts_it(tmp_path, row):
    from trl.data_utils import maybe_extract_prompt  # with all of TRL

    theirs = maybe_extract_prompt(row)
    if isinstance(row["chosen"], str):
        ours = read(tmp_path, row, "pairs", chat=False)[0]
        assert (ours[0], ours[1][0][0]) == (theirs["prompt"], theirs["chosen"] + "~")
    else:
        assert theirs["prompt"] == BEGUN and read(tmp_path, row, "pairs") == [PAIR]


AXOLOTL = {
    "argilla": {"instruction": "q", "chosen_response": "yes", "rejected_response": "no"},
    "argilla_chat": {"chosen": BEGUN + YES, "rejected": BEGUN + NO},
    "icr": {"input": "q", "chosen": "yes", "rejected": "no"},
    "intel": {"question": "q", "chosen": "yes", "rejected": "no"},
    "prompt_pairs": {"prompt": "q", "chosen": "yes", "rejected": "no"},
    "ultra": {"prompt": "q", "chosen": BEGUN + YES, "rejected": BEGUN + NO},
}


@pytest.mark.parametrize("form", AXOLOTL)
def test_axolotls_forms_of_pairs_are_the_same_pair(tmp_path, form):
    assert read(tmp_path, AXOLOTL[form], "pairs", type=f"chat_template.{form}") == [PAIR]
    prompt, answers = read(tmp_path, {**AXOLOTL[form], "system": "s"}, "pairs", type=f"chatml.{form}")[0]
    start = "<|im_start|>"
    assert prompt == f"{start}system\ns<|im_end|>\n{start}user\nq<|im_end|>\n{start}assistant\n"
    assert [answer for answer, _, _ in answers] == ["yes<|im_end|>~", "no<|im_end|>~"]
    prompt, answers = read(tmp_path, AXOLOTL[form], "pairs", type=f"llama3.{form}")[0]
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert prompt == head.format("user") + "q<|eot_id|>" + head.format("assistant")
    assert answers[0][0] == "yes<|eot_id|>~"


def test_axolotls_conversation_with_two_next_turns_is_a_pair(tmp_path):
    row = {"messages": BEGUN, "chosen": YES[0], "rejected": NO[0]}
    assert read(tmp_path, row, "pairs", type="chat_template.default") == [PAIR]


def test_columns_and_formats_of_the_users_own_are_written_out(tmp_path):
    row = {"ask": "q", "good": "yes", "bad": "no", "who": "s"}
    how = {
        "field_prompt": "ask", "field_system": "who", "field_chosen": "good", "field_rejected": "bad",
        "prompt_format": "{system}: {prompt}\n", "chosen_format": "> {chosen}",
    }  # fmt: skip
    found = read(tmp_path, row, "pairs", type=how)
    assert found == [("s: q\n", [("> yes~", "> yes~", 1), ("no~", "no~", -1)])]


def test_single_answers_have_their_label_and_pairs_become_two(tmp_path):
    row = {"prompt": "q", "completion": "yes", "label": True}
    one = ("[user]q~\n[assistant]", [("yes~", "yes~", 1)])
    assert read(tmp_path, row, "single") == [one]
    other = (one[0], [("no~", "no~", -1)])
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    assert read(tmp_path, pair, "single") == [one, other]
    spoken = {"question": "q", "completion": "no", "label": False}
    assert read(tmp_path, spoken, "single", type="chat_template.intel") == [other]


def test_rows_too_long_with_their_answers_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": "q", "completion": "y" * n} for n in (3, 30, 5)]
    made = source(tmp_path, rows, "sft", limit=30)
    assert [prompt.id for prompt in made.head()] == ["train/0", "train/2"]
    assert [refused.id for refused in made.refused] == ["train/1"] and made.refused[0].tokens > 30
    with pytest.raises(ConfigError, match="all 3 rows are longer than"):
        source(tmp_path, rows, "sft", limit=23)


def test_an_epoch_deals_every_row_once_with_its_answers(tmp_path):
    rows = [{"prompt": f"q{n}", "completion": f"y{n}"} for n in range(7)]
    dealt = source(tmp_path, rows, "sft").batch(0, 7)
    assert sorted(p.id for p in dealt) == [f"train/{n}" for n in range(7)]
    assert all(isinstance(p.fields["answers"][0].token_ids, np.ndarray) for p in dealt)


WRONG = {
    "no rejected": ("pairs", {"prompt": "q", "chosen": "yes"}, "no column 'rejected'"),
    "empty chosen": ("pairs", {"prompt": "q", "chosen": "", "rejected": "no"}, "the column 'chosen' is empty"),
    "a number": (
        "pairs",
        {"prompt": "q", "chosen": 3, "rejected": "no"},
        "the column 'chosen' must be text or messages, got int",
    ),
    "mixed": ("pairs", {"prompt": "q", "chosen": YES, "rejected": "no"}, "must both be text or both be messages"),
    "the same": ("pairs", {"chosen": "yes", "rejected": "yes"}, "chosen and rejected are equal"),
    "unlike": ("pairs", {"chosen": "yes", "rejected": "no"}, "have no common beginning"),
    "user's answer": (
        "pairs",
        {"prompt": BEGUN, "chosen": BEGUN, "rejected": NO},
        "must begin with an assistant turn, got 'user'",
    ),
    "no role": ("pairs", {"prompt": BEGUN, "chosen": [{"content": "x"}], "rejected": NO}, "has no role"),
    "no label": ("single", {"prompt": "q", "completion": "yes"}, "'label' must be true or false, got empty"),
    "odd label": (
        "single",
        {"prompt": "q", "completion": "yes", "label": "good"},
        "'label' must be true or false, got str",
    ),
    "silent": ("sft", {"messages": BEGUN}, "no assistant turn"),
    "alone": ("sft", {"messages": YES}, "no assistant turn"),
    "no answer": ("sft", {"prompt": "q"}, "no column 'completion'"),
    "null turn": ("sft", {"messages": [*BEGUN, turn("assistant", None)]}, "has no text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused_in_one_sentence_with_its_number(tmp_path, case):
    kind, row, sentence = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        source(tmp_path, [row], kind)
    assert str(refused.value).startswith("data.train: row 0: ") and sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_one_turn_is_trained(tmp_path):
    forgetful = tokenizer()
    rewritten = "{{ '...' if m.role == 'assistant' and not loop.last else m.content }}"
    forgetful.chat_template = TEMPLATE.replace("{{ m.content }}", rewritten)
    options = {
        "split": "train",
        "seed": 0,
        "max_prompt_tokens": 99,
        "kind": "sft",
        "rows": [{"id": "train/0", "messages": DIALOGUE}],
    }
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(
        ConfigError, match="row train/0: the chat template does not write.*; set data.train.train_on: last"
    ):
        ExampleSource(DatasetConfig(path=path), {}, forgetful, **options)
    [prompt] = ExampleSource(DatasetConfig(path=path, train_on="last"), {}, forgetful, **options).head()
    [answer] = prompt.fields["answers"]
    written = "".join(forgetful.convert_ids_to_tokens(answer.token_ids.tolist()))
    assert written == "...~\n[user]c?~\n[assistant]d~" and answer.mask.nonzero()[0].tolist() == [
        len(written) - 2,
        len(written) - 1,
    ]


@pytest.mark.parametrize("how, kind, sentence", [
    ("chatml.intell", "pairs", "did you mean 'chatml.intel'"),
    (3, "pairs", "unknown format 3"),
    ({"field_chose": "a"}, "pairs", "type.field_chose: unknown"),
    ({"field_prompt": 3}, "pairs", "must be text"),
    ("chatml.intel", "sft", "remove the key"),
])  # fmt: skip
def test_a_type_that_there_is_not_is_refused(how, kind, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_example_type("train", how, kind)
