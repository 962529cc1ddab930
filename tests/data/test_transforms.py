"""Rows go through a function of the user's own as they would through ``map`` of Hugging Face's ``datasets``."""

from __future__ import annotations

import json

import pytest

from gdpo_nemo.config.algorithm_choice import is_transform
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data import row_formats
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath

ROWS = [{"question": f"{n}+{n}?", "answer": f"so\n#### {2 * n}", "note": "x"} for n in range(3)]
FUNCTIONS = """
def whole(row):
    return {"prompt": row["question"].upper(), "answer": row["answer"].split("#### ")[1]}

def factory(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": cfg.split or "none"}
    return transform, {"remove_columns": ["question"]}

def bare(cfg):
    return whole

def nothing(row): pass

def broken(row): return {"prompt": row["qestion"]}

def numbered(row): return {1: 2}

def no_function(cfg): return 3

def other_option(cfg): return whole, {"batched": True}

def no_names(cfg): return whole, {"remove_columns": "question"}

def everything(cfg): return (lambda row: {"prompt": row["question"]}), {"remove_columns": "__all__"}

def absent(cfg): return (lambda row: {"prompt": row["question"]}), {"remove_columns": ["note", "gone"]}

def needs_more(row, tokenizer): return row

number = 3
"""


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def load(name, **options):
        how = name and f"{tmp_path}/mine.py:{name}"
        return load_rows(DatasetConfig(path=str(tmp_path / "rows.jsonl"), type=how, **options), {}, "train", 0)

    return load


@pytest.mark.parametrize("removed", [[], ["note"], ["question", "answer"]])
def test_function_of_a_row_equals_map_of_datasets(removed, rows):
    def whole(row):
        return {"prompt": row["question"].upper(), "answer": row["answer"].split("#### ")[1]}

    import datasets

    expected = datasets.Dataset.from_list(ROWS).map(whole, remove_columns=removed).to_list()
    found = rows("whole", remove_columns=removed)
    assert [{name: value for name, value in row.items() if name != "id"} for row in found] == expected


def test_function_of_cfg_is_called_like_axolotls_and_removes_its_columns(rows):
    found = rows("factory", split="test")
    assert found[1].keys() == {"prompt", "answer", "note", "id"} and found[1]["answer"] == "test"
    assert found[1]["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert rows("bare")[2]["prompt"] == "2+2?"


def test_columns_are_removed_without_a_function_and_renamed_after_it(rows):
    assert rows(None, remove_columns=["note"])[0].keys() == {"question", "answer", "id"}
    assert rows("whole", columns={"gold": "answer"}, size=1) == [
        {"question": "0+0?", "note": "x", "prompt": "0+0?", "gold": "0", "id": "train/0"}
    ]


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("nothing", {}, "mine.py:nothing: row 0: the function must return a mapping of columns, got None"),
        ("broken", {}, "mine.py:broken: row 0: KeyError: 'qestion'"),
        ("numbered", {}, "the function must return a mapping of columns, got {1: 2}"),
        ("no_function", {}, "a function with the parameter cfg must return a function of a row"),
        ("other_option", {}, "the function returns an unknown option 'batched'; known: remove_columns"),
        ("no_names", {}, "remove_columns must be a list of names, got 'question'"),
        ("needs_more", {}, "row 0: TypeError: needs_more() missing 1 required positional argument: 'tokenizer'"),
        ("number", {}, "mine.py has no function number"),
        ("wholl", {}, "data.train.type: "),
        ("whole", {"remove_columns": ["notes"]}, "column 'notes' not found; did you mean 'note'?"),
    ],
)
def test_error_of_a_transform_is_one_line_with_its_row(name, options, sentence, rows):
    with pytest.raises(ConfigError) as refused:
        rows(name, **options)
    assert str(refused.value).startswith("data.train.") and sentence in str(refused.value)


def test_module_functions_are_found_beside_the_run_as_axolotl_writes_them(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_as_axolotl.py").write_text(FUNCTIONS)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "deeper.py").write_text(FUNCTIONS)
    for how in ("rows_as_axolotl.factory", "inner.deeper.factory"):
        found = load_rows(DatasetConfig(path="rows.jsonl", type=how), {}, "train", 0)
        assert found[1].keys() == {"prompt", "answer", "note", "id"}
    for how, why in (
        ("rows_as_axolotl.factori", "rows_as_axolotl has no 'factori'; did you mean 'factory'"),
        ("rows_as_axoltl.factory", "cannot import rows_as_axoltl: ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=f"data.train.type: {why}"):
            load_rows(DatasetConfig(path="rows.jsonl", type=how), {}, "train", 0)


@pytest.mark.parametrize(
    "how, transform",
    [
        ("rewards_gdpo.oai_gsm8k_transform", True),
        ("file.py:function", True),
        ("chatml.argilla", False),
        ("chatm.argilla", False),
        ("chatml.argila", False),
        ("chat_template", False),
        ("alpaca", False),
        ({"field_prompt": "a.b"}, False),
        (None, False),
    ],
)
def test_transforms_are_distinguished_from_forms_even_if_misspelt(how, transform):
    assert is_transform(how) is transform


def test_columns_of_axolotls_functions_are_removed_if_they_are_there(rows):
    assert rows("everything")[0].keys() == {"prompt", "id"}
    assert rows("absent")[0].keys() == {"prompt", "question", "answer", "id"}


@pytest.mark.parametrize(
    "before, name",
    [
        ("gdpo_nemo.interop.axolotl.data:alpaca", "alpaca"),  # version 0.1
        ("gdpo_nemo.interop.nemo_rl.rows:squad", "squad"),
        ("gdpo_nemo.tools.interop.axolotl.data:alpaca_chat", "alpaca_chat"),
        ("gdpo_nemo.tools.interop.nemo_rl.rows.helpsteer3", "helpsteer3"),
        ("gdpo_nemo.environments.tasks.gsm8k.solved_row", "gsm8k"),
    ],
)
def test_row_function_of_a_saved_config_loads_by_its_earlier_name(before, name):
    assert ImportPath(before).load() is getattr(row_formats, name)


def test_gsm8k_rows_have_a_completion_in_the_strict_format():
    row = row_formats.gsm8k({"question": "2+998?", "answer": "Add: <<2+998=1000>>1000\n#### 1,000"})
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["completion"] == "<think>Add: <<2+998=1000>>1000</think>\n<answer>1000</answer>"


def test_rows_of_image_datasets_become_prompts_with_answers():
    row = {"image": b"", "problem": "How many?", "solution": "so <answer> 3 </answer>"}
    assert row_formats.clevr(row) == {"prompt": "How many?", "answer": "3"}
    assert row_formats.clevr({**row, "solution": " 3\n"})["answer"] == "3"
    row = {"images": ["first", "second"], "problem": "<image>Find x.", "answer": 7}
    assert row_formats.geometry3k(row) == {"prompt": "Find x.", "images": ["first"], "answer": "7"}


class Encoded(bytes):
    def __str__(self):
        raise AssertionError("an encoded image was converted to text")


def test_check_of_converted_rows_does_not_read_encoded_images(tmp_path):
    path = tmp_path / "module_with_image.py"
    path.write_text("def rows():\n    return [{'problem': 'How many?', 'solution': '3', 'image': IMAGE}]\n")
    ImportPath(f"{path}:rows").load().__globals__["IMAGE"] = Encoded(b"x")
    data = DatasetConfig(path=f"{path}:rows", type="gdpo_nemo.data.row_formats:clevr")
    assert load_rows(data, {}, "train", 0)[0]["answer"] == "3"
