"""Messages and tools of rows reach the prompt in every form that rows of other people have."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import datasets
import pyarrow as pa
import pytest
import transformers.utils.chat_template_utils as rendering
from pyarrow import parquet
from test_replies import FAMILIES, tokenizer_of

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.messages import chat_messages, tool_schemas
from gdpo_nemo.data.prompts import PromptSource, check_prompts
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.utils.errors import ConfigError

ENVIRONMENTS = load_environments({"digit_sort": {}})
TEMPLATES = sorted({name for name in FAMILIES if FAMILIES[name].template.isidentifier()})


def prompts(path, family="qwen3", **options):
    dataset = DatasetConfig(path=str(path), **options)
    limits = {"split": "train", "seed": 0, "max_prompt_tokens": 10_000}
    return PromptSource(dataset, ENVIRONMENTS, tokenizer_of(family), **limits).head()


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def function(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def called(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def user(content="How warm is it?"):
    return {"role": "user", "content": content}


def part(text):
    return {"type": "text", "text": text}


CITY = {"type": "string", "description": "A city."}
WARM = function("warm", city=CITY)
ADD = function("add", x={"type": "integer"}, y={"type": "integer", "default": 3})
ROWS = [
    {
        "messages": [user(), called("warm", {"city": "Oslo"}), {"role": "tool", "name": "warm", "content": "21"}],
        "tools": [WARM],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"messages": [user()], "tools": [function("now"), ADD], "chat_template_kwargs": {"style": "short"}},
    {
        "messages": [user(), called("now", {}), {"role": "tool", "name": "now", "content": "noon"}],
        "tools": [function("now")],
        "chat_template_kwargs": {},
    },
    {"messages": [user("Hello.")]},
]


@pytest.mark.parametrize("family, writer", [*((name, "datasets") for name in TEMPLATES), ("qwen3", "pyarrow")])
def test_rows_in_parquet_render_as_the_same_rows_in_jsonl(tmp_path, family, writer):
    table = pa.Table.from_pylist(ROWS) if writer == "pyarrow" else datasets.Dataset.from_list(ROWS).data.table
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert '"city": null' in json.dumps(parquet.read_table(tmp_path / "rows.parquet").to_pylist())
    wanted = prompts(write(tmp_path / "rows.jsonl", *ROWS), family)
    found = prompts(tmp_path / "rows.parquet", family)
    assert [prompt.text for prompt in found] == [prompt.text for prompt in wanted]
    assert [prompt.messages for prompt in found] == [prompt.messages for prompt in wanted]
    assert [prompt.fields["tools"] for prompt in found] == [*(row["tools"] for row in ROWS[:3]), None]
    assert not any("null" in prompt.text or "None" in prompt.text for prompt in found)


@pytest.mark.parametrize("family", TEMPLATES)
def test_content_in_other_forms_renders_as_its_text(tmp_path, family):
    result = {"degrees": 21, "town": "Ålesund"}
    text = json.dumps(result, ensure_ascii=False)
    call, called_with_text = called("warm", {"city": "Oslo"}), called("warm", '{"city": "Oslo"}')
    system = {"role": "system", "content": "Be brief."}
    plain = [system, user("How warm?"), call, {"role": "tool", "name": "warm", "content": text}]
    forms = [
        {**system, "role": "developer"},
        user([part("How "), part("warm?")]),
        called_with_text,
        {"role": "tool", "name": "warm", "content": {**result, "sky": None}},
    ]
    for index, form in enumerate(forms):
        row, other = ({"messages": [*plain[:index], each, *plain[index + 1 :]], "tools": [WARM]} for each in
                      (plain[index], form))  # fmt: skip
        wanted, found = prompts(write(tmp_path / "rows.jsonl", {**row, "id": 1}, {**other, "id": 2}), family)
        assert found.text == wanted.text and found.messages == wanted.messages


@pytest.mark.parametrize("form", ["text", "list of texts", "one", "one as text", "beside a text prompt"])
def test_tools_in_every_form_reach_the_prompt_and_the_parser(tmp_path, form):
    forms = {
        "text": json.dumps([WARM]),
        "list of texts": [json.dumps(WARM)],
        "one": WARM,
        "one as text": json.dumps(WARM),
        "beside a text prompt": [WARM],
    }
    prompt = "How warm is it?" if form == "beside a text prompt" else [user()]
    [found] = prompts(write(tmp_path / "a.jsonl", {"prompt": prompt, "tools": forms[form]}))
    [wanted] = prompts(write(tmp_path / "b.jsonl", {"prompt": [user()], "tools": [WARM]}))
    assert "warm" in wanted.text and found.text == wanted.text
    assert found.fields["tools"] == [WARM] and found.messages == [user()]


def test_nulls_that_a_schema_accepts_remain():
    optional = {"type": ["string", "null"], "default": None, "enum": ["a", None]}
    schema = function("f", city=CITY, unit=optional, places={"anyOf": [{"type": "array"}, {"type": "null"}]})
    arguments = {"city": None, "unit": None, "places": None, "other": None, "list": [None, {"x": None}]}
    [message] = chat_messages([called("f", arguments)], tool_schemas([schema]))
    given = message["tool_calls"][0]["function"]["arguments"]
    assert given == {"unit": None, "places": None, "list": [None, {}]}
    padded = {**schema, "strict": None, "function": {**schema["function"], "strict": None}}
    padded["function"]["parameters"]["properties"]["city"] = {**CITY, "default": None, "enum": None}
    [found] = tool_schemas(padded)
    assert found == function("f", city=CITY, unit=optional, places={"anyOf": [{"type": "array"}, {"type": "null"}]})


LOST = {
    "system in the middle": (
        "gpt-oss",
        [user(), {"role": "assistant", "content": "yes"}, {"role": "system", "content": "Be brief."}, user()],
        r"message 2 \(system\), which begins with 'Be brief.'",
    ),
    "text before a call": (
        "llama3.1",
        [user(), {**called("warm", {"city": "Oslo"}), "content": "Let me look."}, {"role": "tool", "content": "21"}],
        r"message 1 \(assistant\), which begins with 'Let me look.'",
    ),
    "picture of a tool": ("qwen3", [user([{"type": "image", "url": "x"}])], "contains image, but only text"),
    "number": (
        "qwen3",
        [user(), {"role": "assistant", "content": "no"}, user(3)],
        r"message 2 \(user\) has content other",
    ),
    "call": ("qwen3", [{"role": "assistant", "tool_calls": ["x"]}, user()], r"message 0 \(assistant\) has a tool call"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_row_whose_content_does_not_reach_the_prompt_is_refused(tmp_path, case):
    family, messages, sentence = LOST[case]
    path = write(tmp_path / "rows.jsonl", {"messages": [user()]}, {"messages": messages, "tools": [WARM]})
    with pytest.raises(ConfigError, match=f"data.train: row 1: .*{sentence}") as refused:
        prompts(path, family)
    assert "\n" not in str(refused.value)


def test_a_system_prompt_that_the_template_drops_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"prompt": "Hello."})
    tokenizer = tokenizer_of("qwen3").__class__(tokenizer_object=tokenizer_of("qwen3").backend_tokenizer)
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    dataset = DatasetConfig(path=str(path), system_prompt="Be brief.")
    with pytest.raises(ConfigError, match="row 0: 'prompt': the chat template does not render .* the system prompt"):
        PromptSource(dataset, ENVIRONMENTS, tokenizer, split="train", seed=0, max_prompt_tokens=99)


def test_white_space_and_reasoning_that_a_template_drops_are_not_lost_text(tmp_path):
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes,  \r\n it is."}
    [found] = prompts(write(tmp_path / "rows.jsonl", {"messages": [user("  Is it? \n"), thought, user("So?")]}))
    assert "hm" not in found.text and "Yes," in found.text


@pytest.mark.parametrize("column, value, sentence", [
    ("tools", "hammer, saw", "tools must be a list of JSON schemas"),
    ("tools", [3], "tools must be a list of JSON schemas"),
    ("chat_template_kwargs", "x", "chat_template_kwargs must be a mapping"),
])  # fmt: skip
def test_columns_for_the_template_in_another_form_are_refused_without_a_tokenizer(tmp_path, column, value, sentence):
    path = write(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "a", column: value})
    dataset = DatasetConfig(path=str(path))
    with pytest.raises(ConfigError, match=f"data.train: row 1: {sentence}"):
        check_prompts(load_rows(dataset, ENVIRONMENTS, "train", 0), dataset, "train")


def test_supervised_rows_have_the_same_forms(tmp_path):
    answer = called("warm", {"city": "Oslo"})
    plain = {"messages": [user("How warm?"), answer, {"role": "tool", "name": "warm", "content": "21"}, user(), answer]}
    other = {"messages": [{**message, "name": None} for message in plain["messages"]], "tools": json.dumps([WARM])}
    other["messages"][0] = user([part("How "), part("warm?")])
    other["messages"][1] = called("warm", {"city": "Oslo", "unit": None})
    path = write(tmp_path / "rows.jsonl", {**plain, "tools": [WARM]}, other)
    dataset = DatasetConfig(path=str(path), chat_template_kwargs={"enable_thinking": False}, train_on="last")
    limits = {"split": "train", "seed": 0, "max_prompt_tokens": 10_000}
    wanted, found = ExampleSource(dataset, {}, tokenizer_of("qwen2.5"), kind="sft", **limits).head()
    assert found.text == wanted.text and found.fields["tools"] == [WARM]
    assert found.fields["answers"][0].token_ids.tolist() == wanted.fields["answers"][0].token_ids.tolist()


@pytest.mark.parametrize("family", ["llama3.2", "gpt-oss"])
def test_prompts_and_their_fingerprint_do_not_depend_on_the_day(tmp_path, monkeypatch, family):
    tokenizer_of(family).save_pretrained(tmp_path / "model")
    dataset = DatasetConfig(path=str(write(tmp_path / "rows.jsonl", {"messages": [user()]})))

    def read(days, date):
        class Clock(datetime):
            @classmethod
            def now(cls, *_):
                return datetime(2026, 11, 28, 23, 59) + timedelta(days)

        monkeypatch.setattr(rendering, "datetime", Clock)
        tokenizer = load_tokenizer(None, tmp_path / "model", date)
        source = PromptSource(dataset, ENVIRONMENTS, tokenizer, split="train", seed=0, max_prompt_tokens=9999)
        first, _ = Conversation(tokenizer, chat=True).prompt([user()])
        return source.fingerprint, source.head()[0].text, first

    today, tomorrow = read(0, "2026-11-28"), read(1, "2026-11-28")
    assert today == tomorrow and today[1] == today[2]
    assert "28 Nov 2026" in today[1] or "2026-11-28" in today[1]
    assert today == read(0, None) != read(1, None)
