import json

import pytest
from environment_samples import trajectory

from gdpo_nemo.environments.tasks.tool_calling import ToolCalling, correctness, formatted


def block(*calls):
    return "<think>t</think>\n<tool_call>\n" + "\n".join(json.dumps(call) for call in calls) + "\n</tool_call>"


def call(name="f", /, **parameters):
    return {"name": name, "parameters": parameters}


TWO = call(a=1, b=2)


@pytest.mark.parametrize(
    "gold, made, expected",
    [
        ([TWO], [TWO], 3.0),
        ([TWO], [call(a=1, b=3)], 1.5),
        ([TWO], [call(a=1)], 0.75),
        ([TWO], [call(a=1, b=2, c=3)], 2.5),
        ([TWO], [call("g", a=1, b=2)], -3.0),
        ([TWO], [TWO, call("g")], 2.25),
        ([TWO], [TWO, TWO], 2.25),
        ([call("f", a=1), call("g", b=2)], [call("g", b=2), call("f", a=1)], 3.0),
        ([call("f", a=1), call("g", b=2)], [call("f", a=1)], 0.0),
        ([call()], [call(a=1)], 0.0),
        ([call(a="1")], [call(a=1)], 1.0),
        ([call(b=2), call(a=2, c=2, b=1)], [call(a=1), call(c=2, b=1, a=2)], -1.571),
        ([call(a=1)], [call(a=1.0)], 3.0),
        ([call(a=1)], [call(a=True)], 3.0),
        ([call(a={"x": [1, {"y": 2}]})], [call(a={"x": [1, {"y": 2}]})], 3.0),
        ([call()], [call()], 3.0),
    ],
)
def test_correctness_has_the_published_values(gold, made, expected):
    assert correctness(block(*gold), block(*made)) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<tool_call>",
        "<tool_call>\n\n</tool_call>",
        "<tool_call>\nnot json\n</tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>\n{"parameters": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "parameters": [1]}\n</tool_call>',
        '<tool_call>\n{"name": ["f"], "parameters": {}}\n</tool_call>',
        "<tool_call>\n" + json.dumps(TWO, indent=1) + "\n</tool_call>",
        f"<tool_call>\n{json.dumps(TWO)}\n\n{json.dumps(TWO)}\n</tool_call>",
        "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>",
    ],
)
def test_calls_that_cannot_be_read_are_worth_the_least(text):
    assert correctness(block(TWO), text) == -3.0


def test_only_the_first_block_counts_and_duplicate_keys_keep_the_last():
    first = '<tool_call>\n{"name": "f", "parameters": {"a": 0, "a": 1, "b": 2}}\n</tool_call>'
    assert correctness(block(TWO), first + block(call("g"))) == 3.0


def test_ground_truth_without_calls_pays_nothing_for_any_answer():
    gold = "<think>t</think>\n<response>hi</response>"
    assert correctness(gold, block(TWO)) == correctness(gold, "") == 0.0


def test_a_gold_that_cannot_be_read_makes_correctness_not_applicable():
    gold = "<think>should I use <tool_call> here</think>\n" + block(TWO)
    assert correctness(gold, block(TWO)) is None


CALLS = "<think>t</think>\n<tool_call>\n{}\n</tool_call>"
RESPONSE = "<think>t</think>\n<response>r</response>"
BOTH = CALLS + "\n<response>r</response>"
THOUGHT = "<think>t</think>"


@pytest.mark.parametrize("gold", [CALLS, RESPONSE, BOTH, THOUGHT])
def test_format_wants_the_blocks_of_the_gold(gold):
    # Nothing is asked of a lone thought but its two ends, so the other forms are told apart by their last block only.
    kinds = {CALLS: [CALLS], RESPONSE: [RESPONSE], BOTH: [BOTH], THOUGHT: [THOUGHT]}
    assert [text for text in (CALLS, RESPONSE, BOTH, THOUGHT) if formatted(gold, text)] == kinds[gold]


@pytest.mark.parametrize(
    "gold, text, expected",
    [
        (CALLS, "<think>a\nb</think>\n<tool_call>\nnot json\n</tool_call>", 1.0),
        (CALLS, "<think>t</think> <tool_call>\n{}\n</tool_call>", 0.0),
        (CALLS, "<think>t</think>\n<tool_call>{}</tool_call>", 0.0),
        (CALLS, CALLS + " ", 0.0),
        (CALLS, CALLS[:-5], 0.0),
        (CALLS, CALLS + "\n<tool_call>\n{}\n</tool_call>", 0.0),
        (RESPONSE, "<think>t</think>\n<response>r <tool_call>\n{}\n</tool_call></response>", 1.0),
        (RESPONSE, RESPONSE + RESPONSE, 0.0),
        (RESPONSE, "<think><think>t</think>\n<response>r</response>", 1.0),
    ],
)
def test_format_has_the_published_edges(gold, text, expected):
    assert formatted(gold, text) == expected


def test_the_environment_strips_the_completion_and_reads_the_ground_truth_column():
    [verdict] = ToolCalling().verify([trajectory(f"\n{block(TWO)}\n", ground_truth=block(TWO))])
    assert verdict.rewards == {"correctness": 3.0, "format": 1.0}
