import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from character_tokenizer import character_tokenizer
from hypothesis import given, settings, strategies as st

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data import rows as rows_module
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.prompts import PromptSource, check_prompts
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.utils.errors import ConfigError

DIGITS = {"digit_sort": {}}
# A class with a system prompt of its own, found by its place like any plugin.
POLITE = {"polite": {"plugin": f"{__file__}:Polite"}}


class Polite:
    reward_names = ("thanks",)
    system_prompt = "Be polite."

    def __init__(self, options):
        pass

    def verify(self, trajectories):
        return []


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(dataset, environments=DIGITS, tokenizer=None, seed=0, limit=1000, split="train"):
    tokenizer = tokenizer or character_tokenizer()
    built = load_environments(environments)
    return PromptSource(dataset, built, tokenizer, split=split, seed=seed, max_prompt_tokens=limit)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write(
        tmp_path_factory.mktemp("data") / "rows.jsonl", [{"prompt": f"row {i}", "answer": i} for i in range(10)]
    )


def ids(prompts):
    return [prompt.id for prompt in prompts]


MIXED = {**DIGITS, **POLITE}


def test_rows_go_to_the_environment_that_their_column_names(tmp_path):
    rows = [{"prompt": "a", "task": "polite"}, {"prompt": "b", "task": None}, {"prompt": "c"}]
    dataset = DatasetConfig(path=write(tmp_path / "rows.jsonl", rows), environment_key="task", environment="digit_sort")
    prompts = source(dataset, MIXED).head()
    assert [prompt.environment for prompt in prompts] == ["polite", "digit_sort", "digit_sort"]
    assert [prompt.text for prompt in prompts] == ["Be polite.\n\na", "b", "c"]


def test_all_environments_generate_rows_if_the_split_has_neither_a_path_nor_an_environment():
    environments = {**DIGITS, "short": {"plugin": f"{__file__}:Numbered"}, "long": {"plugin": f"{__file__}:Numbered"}}
    prompts = source(DatasetConfig(size=3, split="all"), environments, seed=4).head()
    assert [prompt.environment for prompt in prompts] == ["digit_sort"] * 3 + ["short"] * 3 + ["long"] * 3
    assert ids(prompts)[3:] == ["short/0", "short/1", "short/2", "long/0", "long/1", "long/2"]
    assert {prompt.fields["of"] for prompt in prompts[3:]} == {"all 4"}
    alone = source(DatasetConfig(size=3, split="all", environment="digit_sort"), environments, seed=4).head()
    assert [prompt.text for prompt in alone] == [prompt.text for prompt in prompts[:3]]


class Numbered(Polite):
    def rows(self, split, size, seed):
        return [{"id": index, "prompt": str(index), "of": f"{split} {seed}"} for index in range(size)]


class Foreign(Polite):
    system_prompt = None

    def read_row(self, row):
        return {"prompt": row["question"].upper(), "kept": row}


def test_rows_in_a_form_of_their_environments_own_are_read_by_it_and_no_others(tmp_path):
    rows = [
        {"question": "a", "task": "foreign"},
        {"prompt": "b", "task": "digit_sort"},
        {"question": "c", "task": "foreign"},
    ]
    dataset = DatasetConfig(path=write(tmp_path / "rows.jsonl", rows), environment_key="task")
    prompts = source(dataset, {**DIGITS, "foreign": {"plugin": f"{__file__}:Foreign"}}).head()
    assert [(prompt.text, prompt.environment) for prompt in prompts] == [
        ("A", "foreign"),
        ("b", "digit_sort"),
        ("C", "foreign"),
    ]
    assert prompts[2].fields["kept"] == rows[2]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"task": "polit"}, "row 1: env does not define 'polit'; did you mean 'polite'"),
        ({}, "row 1: the row does not select an environment"),
    ],
)
def test_a_row_that_no_environment_verifies_is_refused(tmp_path, row, message):
    rows = [{"prompt": "a", "task": "polite"}, {"prompt": "b", **row}]
    with pytest.raises(ConfigError, match=f"data.train.environment_key: {message}"):
        source(DatasetConfig(path=write(tmp_path / "rows.jsonl", rows), environment_key="task"), MIXED)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_resuming_at_any_position_deals_the_same_prompts(numbered, cuts, seed):
    once = source(DatasetConfig(path=numbered, size=7), seed=seed)
    whole = [once.batch(position, 1)[0].id for position in range(sum(cuts))]
    position = 0
    dealt = []
    for cut in cuts:
        resumed = source(DatasetConfig(path=numbered, size=7), seed=seed)
        dealt += [prompt.id.partition("#")[0] for prompt in resumed.batch(position, cut)]
        position += cut
    assert dealt == whole


def test_every_epoch_is_a_permutation_and_no_two_are_equal(numbered):
    prompts = source(DatasetConfig(path=numbered))
    epochs = [ids(prompts.batch(10 * epoch, 10)) for epoch in range(5)]
    assert all(sorted(epoch) == [f"train/{i}" for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_the_seed_decides_the_order_and_not_the_fingerprint(numbered):
    first = source(DatasetConfig(path=numbered), seed=1)
    second = source(DatasetConfig(path=numbered), seed=2)
    assert ids(first.batch(0, 10)) != ids(second.batch(0, 10))
    assert first.fingerprint == second.fingerprint


def test_without_shuffling_the_order_is_that_of_the_file(numbered):
    prompts = source(DatasetConfig(path=numbered, shuffle=False))
    assert ids(prompts.batch(8, 4)) == ["train/8", "train/9", "train/0", "train/1"]
    assert ids(prompts.head(3)) == ["train/0", "train/1", "train/2"] and len(prompts.head()) == 10


def test_a_prompt_met_twice_in_one_batch_gets_another_id(numbered):
    batch = source(DatasetConfig(path=numbered)).batch(5, 25)
    assert len(set(ids(batch))) == 25
    assert max(Counter(prompt.id.partition("#")[0] for prompt in batch).values()) == 3
    assert {prompt.text for prompt in batch if prompt.id.startswith("train/3")} == {"row 3"}


def test_any_change_of_the_data_changes_the_fingerprint(tmp_path):
    rows = [{"prompt": f"row {i}", "answer": i} for i in range(4)]
    changed = [
        rows[:3],
        rows[::-1],
        [*rows[:3], {"prompt": "row 3", "answer": 4}],
        [*rows[:3], {"prompt": "raw 3", "answer": 3}],
    ]
    prints = [
        source(DatasetConfig(path=write(tmp_path / "a.jsonl", each))).fingerprint for each in [rows, rows, *changed]
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 5


def test_columns_become_fields_without_the_prompt_and_the_id(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": 7, "question": "what?", "gold": {"value": "4"}, "level": 2}])
    [prompt] = source(DatasetConfig(path=path, columns={"answer": "gold.value"})).head()
    assert (prompt.id, prompt.text, prompt.environment, prompt.messages) == ("7", "what?", "digit_sort", None)
    assert prompt.fields == {"gold": {"value": "4"}, "level": 2, "answer": "4"}
    assert prompt.token_ids.dtype == np.int32 and len(prompt.token_ids) == 5


def test_a_renamed_column_may_be_the_prompt(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "what?"}])
    assert source(DatasetConfig(path=path, columns={"prompt": "text"})).head()[0].text == "what?"
    assert source(DatasetConfig(path=path, prompt_key="text")).head()[0].text == "what?"


def test_parquet_json_and_saved_datasets_give_the_same_prompts_as_jsonl(tmp_path):
    import datasets

    rows = [{"messages": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(5)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    paths = [write(tmp_path / "a.jsonl", rows), *(str(tmp_path / name) for name in ("a.parquet", "a.json", "saved"))]
    prints = {source(DatasetConfig(path=path), tokenizer=character_tokenizer(chat=True)).fingerprint for path in paths}
    assert len(prints) == 1


def test_prompts_that_are_too_long_are_refused_individually(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * length} for length in (5, 20, 10, 11)])
    prompts = source(DatasetConfig(path=path), limit=10)
    assert len(prompts) == 2 and set(ids(prompts.batch(0, 2))) == {"train/0", "train/2"}
    assert [(refused.id, refused.tokens) for refused in prompts.refused] == [("train/1", 20), ("train/3", 11)]
    assert prompts.left_out() == (
        "data.train: 2 prompts are longer than 10 tokens and are skipped; the first is train/1 with 20 tokens"
    )
    with pytest.raises(ConfigError, match="all 4 prompts are longer than 4 tokens .the shortest has 5."):
        source(DatasetConfig(path=path), limit=4)


CHAT_ROW = {"messages": [{"role": "user", "content": "hi"}]}
OWN_SYSTEM = {"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "row, chat, system, rendered",
    [
        ({"prompt": "hi"}, False, None, "Be polite.\n\nhi"),
        ({"prompt": "hi"}, False, "", "hi"),
        ({"prompt": "hi"}, False, "Be brief.", "Be brief.\n\nhi"),
        ({"prompt": "hi"}, True, None, "[system]Be polite.[user]hi[assistant]"),
        (CHAT_ROW, True, None, "[system]Be polite.[user]hi[assistant]"),
        (CHAT_ROW, True, "", "[user]hi[assistant]"),
        (OWN_SYSTEM, True, None, "[system]Own.[user]hi[assistant]"),
        (OWN_SYSTEM, True, "Be brief.", "[system]Be brief.[user]hi[assistant]"),
        (OWN_SYSTEM, True, "", "[user]hi[assistant]"),
    ],
)
def test_the_system_prompt_is_the_configs_else_the_rows_else_the_environments(tmp_path, row, chat, system, rendered):
    dataset = DatasetConfig(path=write(tmp_path / "a.jsonl", [row]), system_prompt=system)
    [prompt] = source(dataset, POLITE, character_tokenizer(chat=chat)).head()
    assert prompt.text == rendered
    assert (prompt.messages is not None) == ("messages" in row)


def test_special_tokens_come_from_tokenizer_or_template_and_never_twice(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "hi"}])
    [plain] = source(DatasetConfig(path=path), tokenizer=character_tokenizer(bos=True)).head()
    [chat] = source(DatasetConfig(path=path), tokenizer=character_tokenizer(chat=True, bos=True)).head()
    [off] = source(DatasetConfig(path=path, chat=False), tokenizer=character_tokenizer(chat=True, bos=True)).head()
    assert plain.token_ids[0] == off.token_ids[0] == 1 and len(plain.token_ids) == len(off.token_ids) == 3
    assert 1 not in chat.token_ids and len(chat.token_ids) == len(chat.text)


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', r"bad.jsonl:3: not valid JSON: "),
        (b'{"prompt": "a"}\n[1]\n', r"bad.jsonl:2: a row must be a JSON object, got list"),
        (b'{"prompt": "\xff"}\n', r"bad.jsonl:1: not valid JSON: "),
        (b"[" * 100000 + b"\n", r"bad.jsonl:1: not valid JSON: "),
        (b"\n", "has no rows"),
        (b'{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n', "rows 0 and 1 have the same id '1'"),
        (b'{"promt": "a"}\n', "prompt_key: none of messages, prompt, question, problem is a column; columns: promt"),
        (b'{"prompt": "a"}\n{"promt": "a"}\n', "row 1: no column 'prompt'; did you mean 'promt'"),
        (b'{"prompt": ""}\n', "row 0: the column 'prompt' is empty"),
        (b'{"prompt": 3}\n', "row 0: 'prompt' must be text or a list of messages, got int"),
        (b'{"messages": [{"role": "user"}]}\n', r"row 0: 'messages': message 0 \(user\) has no text"),
        (
            b'{"messages": [{"role": "assistant", "content": "x"}]}\n',
            "row 0: 'messages' must not end with an assistant turn",
        ),
        (
            b'{"messages": [{"role": "tool", "content": "x"}]}\n',
            "row 0: the chat template rejected the row: .*no tools here",
        ),
    ],
)
def test_malformed_data_is_refused_in_one_line_with_its_position(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        source(DatasetConfig(path=str(path)), tokenizer=character_tokenizer(chat=True))
    assert "\n" not in str(error.value)


def test_messages_without_a_chat_template_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [CHAT_ROW])
    with pytest.raises(ConfigError, match="require a chat template"):
        source(DatasetConfig(path=path))
    with pytest.raises(ConfigError, match="data.train.chat: the tokenizer has no chat template"):
        source(DatasetConfig(path=path, chat=True))


@pytest.mark.parametrize(
    "dataset, environments, message",
    [
        (DatasetConfig(path="missing.jsonl"), DIGITS, "data.train.path: missing.jsonl not found"),
        (DatasetConfig(path="./missing"), DIGITS, "data.train.path: missing not found"),
        (DatasetConfig(path=__file__), DIGITS, "must end with one of .jsonl, .json, .csv, .parquet"),
        (
            DatasetConfig(),
            POLITE,
            "data.train.path: must be set because the environment 'polite' does not generate prompts",
        ),
        (DatasetConfig(), {}, "data.train.environment: must be set unless env has exactly one"),
        (DatasetConfig(), {**DIGITS, **POLITE}, "data.train.path: must be set because the environment 'polite' does"),
        (DatasetConfig(environment="digitsort"), DIGITS, "env does not define 'digitsort'; did you mean 'digit_sort'"),
    ],
)
def test_a_split_that_cannot_be_had_is_refused(dataset, environments, message):
    with pytest.raises(ConfigError, match=message):
        source(dataset, environments)


def test_a_broken_parquet_file_and_a_missing_column_are_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="a.parquet: not a readable Parquet file"):
        source(DatasetConfig(path=str(tmp_path / "a.parquet")))
    with pytest.raises(ConfigError, match="data.train.columns: row 0 has no column 'anwser'; did you mean 'answer'"):
        source(
            DatasetConfig(path=write(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}]), columns={"gold": "anwser"})
        )


def test_training_and_validation_rows_of_an_environment_do_not_meet():
    train, held_out = (source(DatasetConfig(), split=split) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (90_000, 10_000)
    assert not {prompt.text for prompt in train.head()} & {prompt.text for prompt in held_out.head()}


def test_data_does_not_import_the_environments_above_it():
    code = "import sys, gdpo_nemo.data.prompts; sys.exit(any(name.startswith('gdpo_nemo.env') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("row", [{"prompt": "2 {x}"}, {"messages": [{"role": "user", "content": "2 {x}"}]}])
def test_a_template_stands_around_each_prompt_and_only_its_own_mark_counts(tmp_path, row):
    path = write(tmp_path / "rows.jsonl", [row])
    dataset = DatasetConfig(path=path, prompt_template="Solve {y}: {prompt}!", system_prompt="")
    [prompt] = source(dataset, tokenizer=character_tokenizer(chat=True)).head()
    assert prompt.text == "[user]Solve {y}: 2 {x}![assistant]"


def write_files(folder, **files):
    for name, rows in files.items():
        write(folder / f"{name}.jsonl", rows)
    return folder


def test_a_pattern_takes_its_files_by_name_and_a_list_one_after_the_other(tmp_path):
    write_files(tmp_path, b=[{"prompt": "b0"}, {"prompt": "b1"}], a=[{"prompt": "a0"}], c=[{"prompt": "c0"}])
    (tmp_path / "more.tsv").write_text('prompt\tanswer\n"t\n0"\t3\n')

    def read(path, **more):
        rows = load_rows(DatasetConfig(path=path, **more), load_environments(DIGITS), "train", 0)
        return [(row["id"], row["prompt"]) for row in rows]

    wanted = [("train/0", "a0"), ("train/1", "b0"), ("train/2", "b1"), ("train/3", "c0")]
    assert read(f"{tmp_path}/*.jsonl") == wanted
    assert read([f"{tmp_path}/[ab].jsonl", f"{tmp_path}/c.jsonl"]) == wanted
    assert read([f"{tmp_path}/c.jsonl", f"{tmp_path}/more.tsv"]) == [("train/0", "c0"), ("train/1", "t\n0")]
    assert read(f"{tmp_path}/*.jsonl", size=2) == wanted[:2]
    # A folder whose own name has the characters of a pattern is no pattern.
    odd = tmp_path / "odd[1]"
    odd.mkdir()
    write_files(odd, a=[{"prompt": "here"}])
    assert read(f"{odd}/a.jsonl") == [("train/0", "here")]


def test_the_same_files_are_the_same_data_however_they_are_named(tmp_path):
    write_files(tmp_path, a=[{"prompt": "a0"}], b=[{"prompt": "b0"}])

    def fingerprint(path):
        tokenizer = character_tokenizer()
        dataset = DatasetConfig(path=path)
        return PromptSource(
            dataset, load_environments(DIGITS), tokenizer, split="train", seed=0, max_prompt_tokens=99
        ).fingerprint

    assert fingerprint(f"{tmp_path}/*.jsonl") == fingerprint([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"])
    assert fingerprint(f"{tmp_path}/*.jsonl") != fingerprint([f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"])


def test_a_function_gives_rows(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows():\n    return ({'prompt': str(i)} for i in range(3))\n\ndef broken():\n    return [1 / 0]\n"
    )
    dataset = DatasetConfig(path=f"{tmp_path}/mine.py:rows", size=2)
    assert [row["prompt"] for row in load_rows(dataset, load_environments(DIGITS), "train", 0)] == ["0", "1"]
    with pytest.raises(ConfigError, match="mine.py:broken returned no rows: ZeroDivisionError"):
        load_rows(DatasetConfig(path=f"{tmp_path}/mine.py:broken"), load_environments(DIGITS), "train", 0)


@pytest.mark.parametrize(
    "body, limit_s, message",
    [
        ("import os; os.kill(os.getpid(), 9)", 300.0, "mine.py:rows returned no rows: its process ended"),
        ("import threading; threading.Event().wait()", 0.1, "mine.py:rows does not return within 0.1 s"),
    ],
)
def test_function_that_ends_or_blocks_its_process_does_not_do_that_to_a_dry_run(
    tmp_path, monkeypatch, body, limit_s, message
):
    monkeypatch.setattr(rows_module, "_CALL_S", limit_s)
    (tmp_path / "mine.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(ConfigError, match=message):
        load_rows(DatasetConfig(path=f"{tmp_path}/mine.py:rows"), load_environments(DIGITS), "train", 0, at_most=2)


@pytest.mark.parametrize(
    "path, message",
    [
        ("nowhere-*.jsonl", "data.train.path: no file matches nowhere-*.jsonl"),
        ([], "data.train.path: must not be an empty list"),
        ([3], "data.train.path: must be a path or a list of paths, got 3"),
        ({"a": 1}, "data.train.path: must be a path or a list of paths, got {'a': 1}"),
        ("nowhere.py:rows", "data.train.path: nowhere.py not found"),
        (["nowhere.tsv"], "data.train.path: nowhere.tsv not found"),
    ],
)
def test_a_path_that_names_no_data_is_refused(path, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_rows(DatasetConfig(path=path), load_environments(DIGITS), "train", 0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "image": "cat.png"},
        {"prompt": "a", "images": [{"bytes": "x"}]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]},
    ],
)
def test_a_row_with_images_is_refused_in_one_line(tmp_path, row):
    path = write(tmp_path / "a.jsonl", [{"prompt": "fine", "image": None, "images": []}, row])
    rows = load_rows(DatasetConfig(path=str(path)), load_environments(DIGITS), "train", 0)
    with pytest.raises(ConfigError, match="row 1: contains images?, but only text is supported"):
        check_prompts(rows, DatasetConfig(), "train")


class TemplateThatTells:
    """Shows what its template was given."""

    chat_template = "x"

    def __call__(self, texts, **how):
        ids = [[ord(character) for character in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def apply_chat_template(self, messages, **given):
        return json.dumps(
            [messages, {k: v for k, v in given.items() if k not in ("tokenize", "add_generation_prompt")}]
        )


def test_chat_template_kwargs_of_the_config_and_of_the_row_reach_the_template(tmp_path):
    path = write(tmp_path / "a.jsonl", [{**CHAT_ROW, "chat_template_kwargs": {"style": "own"}}, CHAT_ROW])
    dataset = DatasetConfig(path=str(path), chat_template_kwargs={"style": "ours", "enable_thinking": False})
    source = PromptSource(
        dataset, load_environments(DIGITS), TemplateThatTells(), split="train", seed=0, max_prompt_tokens=999
    )
    given = [json.loads(prompt.text)[1] for prompt in source.head()]
    assert given == [{"style": "own", "enable_thinking": False}, {"style": "ours", "enable_thinking": False}]


def test_later_turns_are_rendered_with_the_same_arguments():
    conversation = Conversation(TemplateThatTells(), True, {"enable_thinking": False})
    text, _ = conversation.prompt("hello", tools=[{"name": "f"}])
    assert json.loads(text)[1] == {"enable_thinking": False, "tools": [{"name": "f"}]}


def test_without_chat_texts_go_as_they_are_and_messages_are_rendered(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "text"}, {"prompt": CHAT_ROW["messages"]}])
    source = PromptSource(
        DatasetConfig(path=path, chat=False), load_environments(DIGITS), TemplateThatTells(), split="train", seed=0,
        max_prompt_tokens=999,
    )  # fmt: skip
    plain, chat = source.head()
    assert (plain.text, plain.messages) == ("text", None)
    assert json.loads(chat.text)[0] == CHAT_ROW["messages"] and chat.messages == CHAT_ROW["messages"]
