"""Calls match by BFCL's rules. ``call_pairs.json`` has hand-made pairs of calls and answers with their verdicts.

The verdicts were written from the rules and then compared with BFCL's own checker (ShishirPatil/gorilla at 6ea57973),
which gave the same verdict on every pair. ``values`` has [type, type of the items, acceptable values, value, verdict]
of a function's only parameter, and ``calls`` has [functions, answers, calls, verdict].
"""

import json
from pathlib import Path

import pytest
from environment_samples import trajectory

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.tasks.bfcl import Bfcl
from gdpo_nemo.environments.tasks.call_match import calls_match
from gdpo_nemo.environments.tasks.tool_calling import ToolCalling, ast_match
from gdpo_nemo.utils.errors import ConfigError

PAIRS = json.loads(Path(__file__).with_name("call_pairs.json").read_text(encoding="utf-8"))


def test_calls_match_as_in_bfcl_on_hand_made_pairs():
    wrong = []
    for kind, items, acceptable, value, verdict in PAIRS["values"]:
        described = {"type": kind} if items is None else {"type": kind, "items": {"type": items}}
        function = {"name": "f", "parameters": {"properties": {"p": described}, "required": ["p"]}}
        if calls_match([function], [("f", {"p": value})], [{"f": {"p": acceptable}}]) != bool(verdict):
            wrong.append((kind, items, acceptable, value))
    for functions, answers, calls, verdict in PAIRS["calls"]:
        if calls_match(functions, [(name, parameters) for name, parameters in calls], answers) != bool(verdict):
            wrong.append((answers, calls))
    assert wrong == []
    verdicts = [pair[-1] for pair in PAIRS["values"] + PAIRS["calls"]]
    assert len(verdicts) == 242 and sum(verdicts) == 102


def block(*calls):
    lines = "\n".join(json.dumps({"name": name, "parameters": parameters}) for name, parameters in calls)
    return f"<think>t</think>\n<tool_call>\n{lines}\n</tool_call>"


@pytest.mark.parametrize(
    "gold, made, verdict",
    [
        ([("f", {"a": 1})], [("f", {"a": 1})], 1),
        ([("f", {"a": 1})], [("f", {"a": 1.0})], 0),  # correctness accepts this value
        ([("f", {"a": 1.0})], [("f", {"a": 1})], 1),
        ([("f", {"a": "New York"})], [("f", {"a": "new-york"})], 1),
        ([("f", {"a": "x", "b": ""})], [("f", {"a": "x"})], 1),
        ([("f", {"a": [{"k": "X"}]})], [("f", {"a": [{"k": "x"}]})], 1),
        ([("f", {"a": [1, "x"]})], [("f", {"a": [1, "X"]})], 1),
        ([("f", {"a": None})], [("f", {"a": None})], 1),
        ([("f", {"a": {"k": {"l": 1}}})], [("f", {"a": {"k": {"l": 1}}})], 1),
        ([("f", {"a": 1}), ("f", {"b": "x"})], [("f", {"b": "x"}), ("f", {"a": 1})], 1),
        ([("f", {"a": 1}), ("g", {})], [("f", {"a": 1})], 0),
    ],
)
def test_ast_match_takes_types_from_the_ground_truth(gold, made, verdict):
    assert ast_match(block(*gold), block(*made)) == verdict


def test_ast_match_expects_no_call_without_calls_in_the_ground_truth():
    assert ast_match("<think>t</think>\n<response>r</response>", "<think>t</think>\n<response>other</response>") == 1
    assert ast_match("<think>t</think>\n<response>r</response>", block(("f", {}))) == 0
    assert ast_match(block(("f", {})), "") == 0
    assert ast_match("the tag <tool_call> in reasoning", block(("f", {}))) is None


def test_tool_calling_returns_ast_only_if_asked():
    text = block(("f", {"a": "X"}))
    gold = block(("f", {"a": "x"}))
    (verdict,) = ToolCalling({"ast": True}).verify([trajectory(text, ground_truth=gold)])
    assert verdict.rewards == {"correctness": 1.0, "format": 1.0, "ast": 1.0}
    assert ToolCalling().reward_names == ("correctness", "format")
    assert ToolCalling({"ast": True}).reward_names == ("correctness", "format", "ast")


FUNCTION = {
    "name": "area",
    "description": "Compute an area.",
    "parameters": {"type": "dict", "properties": {"base": {"type": "integer"}}, "required": ["base"]},
}


def bfcl_row(**columns):
    return {"id": "simple_0", "question": [[{"role": "user", "content": "Area?"}]], "function": [FUNCTION]} | columns


def test_bfcl_rows_join_the_answers_and_are_scored(tmp_path):
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.json"
    rows.write_text("\n".join(json.dumps(bfcl_row(id=name)) for name in ("simple_0", "irrelevance_0")))
    answers.write_text(json.dumps({"id": "simple_0", "ground_truth": [{"area": {"base": ["", 10]}}]}))
    environment = Bfcl({"answers": str(answers)})
    data = DatasetConfig(path=str(rows), environment="bfcl")
    simple, irrelevant = load_rows(data, {"bfcl": environment}, "validation", 0)
    assert '{"base": {"type": "integer"}}' in simple["prompt"][0]["content"] and simple["prompt"][1]["role"] == "user"

    def scored(row, text):
        columns = {key: row[key] for key in ("function", "ground_truth")}
        return dict(environment.verify([trajectory(text, **columns)])[0].rewards)

    (right,) = environment.examples(simple)
    assert scored(simple, right) == {"ast": 1, "format": 1}
    assert scored(simple, block(("area", {"base": "10"}))) == {"ast": 0, "format": 1}
    reply = "<think>t</think>\n<response>r</response>"
    assert scored(irrelevant, reply) == {"ast": 1, "format": 1} and scored(irrelevant, right)["ast"] == 0
    assert scored(simple, reply) == {"ast": 0, "format": 0}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"id": "a"}, "must have the columns"),
        (bfcl_row(question=[[], []]), "has several turns"),
        (bfcl_row(), "has no answer .simple_0.; set the option answers"),
    ],
)
def test_bfcl_refuses_rows_that_it_cannot_score(row, message):
    with pytest.raises(ConfigError, match=message):
        Bfcl().read_row(row)


@pytest.mark.parametrize("content", [None, "[]", '{"id": 1}', "{"])
def test_bfcl_refuses_a_file_that_has_no_answers(tmp_path, content):
    file = tmp_path / "answers.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="answers: .*answers.json is not a file of BFCL's answers"):
        Bfcl({"answers": str(file)}).read_row(bfcl_row())
