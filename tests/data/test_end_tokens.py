"""The end of a turn is that of the chat template, and notes say where tokenizer, model and engine disagree about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trl
from character_tokenizer import character_tokenizer

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.end_tokens import end_token_notes, turn_end
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.environments.tasks.reward_model import Scorer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = {
    "gemma": ("<end_of_turn>", "<eos>"),
    "gemma3": ("<end_of_turn>", "<eos>"),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "qwen2_5": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>"),
}
"""(end of a turn, end of text) by TRL's name of the template."""
DIALOGUE = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "d"},
]


def tokenizer_of(family: str, special: bool = True):
    """Return a tokenizer of characters with the family's template and end tokens."""
    end, eos = FAMILIES[family]
    made = character_tokenizer()
    made.add_special_tokens({"eos_token": eos})
    made.add_tokens([end], special_tokens=special)
    made.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return made


def model_with(folder: Path, **generation_config) -> Path:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
    if generation_config:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def trained_text(folder: Path, tokenizer, messages) -> str:
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    data = DatasetConfig(path=str(folder / "rows.jsonl"))
    source = ExampleSource(data, {}, tokenizer, split="train", seed=0, max_prompt_tokens=999, kind="sft")
    (answer,) = source.head()[0].fields["answers"]
    ids = answer.token_ids if answer.mask is None else answer.token_ids[answer.mask]
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_ends_with_the_end_token_of_the_template(tmp_path, family, special):
    tokenizer = tokenizer_of(family, special)
    end, _ = FAMILIES[family]
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids(end)
    assert trained_text(tmp_path, tokenizer, DIALOGUE[:2]) == f"b{end}"
    if family != "phi3":  # its template writes the end of text only after the last turn
        assert trained_text(tmp_path, tokenizer, DIALOGUE) == f"b{end}d{end}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_reads_no_end_token_after_that_of_the_template(family):
    tokenizer = tokenizer_of(family)
    scorer = object.__new__(Scorer)
    scorer._tokenizer = tokenizer
    written = tokenizer.apply_chat_template(DIALOGUE[:2], tokenize=False)
    assert scorer._tokens("a?", "b") == tokenizer(written, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_note_reports_that_engines_do_not_stop_at_the_end_of_a_turn(tmp_path, family):
    tokenizer = tokenizer_of(family)
    end, eos = FAMILIES[family]
    ids = tokenizer.convert_tokens_to_ids([eos, end])
    (note,) = end_token_notes(tokenizer, model_with(tmp_path), [], {})
    assert repr(end) in note and f"stop only at {eos!r};" in note
    assert not end_token_notes(tokenizer, tmp_path, [end], {})
    assert not end_token_notes(tokenizer, tmp_path, [], None)
    for stops in (ids, ids[1]):
        assert not end_token_notes(tokenizer, model_with(tmp_path, eos_token_id=stops), [], {})


def test_note_reports_that_generation_ends_at_an_ordinary_token(tmp_path):
    tokenizer = tokenizer_of("gemma")
    ends = tokenizer.convert_tokens_to_ids(["<end_of_turn>", "7"])
    (note,) = end_token_notes(tokenizer, model_with(tmp_path, eos_token_id=ends), [], {})
    assert f"eos_token_id {ends[1]} is the ordinary token '7'" in note
    (note,) = end_token_notes(tokenizer, model_with(tmp_path, eos_token_id=[ends[0], 10**6]), [], {})
    assert "eos_token_id 1000000 is not in the tokenizer's vocabulary" in note


def test_note_reports_that_a_template_writes_the_end_of_a_turn_as_plain_text(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
    (note,) = end_token_notes(tokenizer, model_with(tmp_path), [], {})
    assert "ends a turn with '<|im_end|>'" in note
