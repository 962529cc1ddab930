"""Rubrics in the formats of public data, and rubrics that are refused."""

import json
import math

import pytest

from gdpo_nemo.algorithms.rubrics import LONGEST_TEXT, MOST_CRITERIA, Criterion, read_rubric
from gdpo_nemo.utils.errors import ConfigError

TINKER = {"rubric_str": "Is it kind?", "extraction_regex": "<score>(.*)</score>"}
FORMATS = {
    "own": (
        [{"criterion": "kind", "weight": 2, "id": "k", "required": True, "scale": [1, 5]}],
        {"k": Criterion("kind", 2.0, True, (1.0, 5.0))},
    ),
    "texts": (["kind", "short"], {"1": Criterion("kind"), "2": Criterion("short")}),
    "HealthBench": (
        [{"criterion": "Names the dose", "points": 7, "tags": ["axis:accuracy"]},
         {"criterion": "Invents a drug", "points": -9.0, "tags": []}],
        {"1": Criterion("Names the dose", 7.0), "2": Criterion("Invents a drug", -9.0)},
    ),
    "tinker-cookbook": (
        [{**TINKER, "grader_output_format_instruction": "Please output a score between 1 and 5 in <score>."},
         {**TINKER, "grader_output_format_instruction": "between 0 and 1"}],
        {"1": Criterion("Is it kind?", scale=(1.0, 5.0)), "2": Criterion("Is it kind?")},
    ),
    "multichallenge": (
        [{"question": "Is it kind?", "pass_criteria": "YES"},
         {"question": "Does it mention nuts?", "pass_criteria": "NO", "weight": 3.0}],
        {"1": Criterion("Is it kind?"), "2": Criterion("Does it mention nuts? (expected answer: NO)", 3.0)},
    ),
    "inverse_if": ([{"id": "C1", "criteria": "Three sentences?"}], {"C1": Criterion("Three sentences?")}),
    "finance_agent_v2": (
        json.dumps([
            {"operator": "op", "criteria": "Revenue", "modifiers": {"severity": 2.0, "category": "must_pass"}},
            {"operator": "op", "criteria": "Margin", "modifiers": {}},
        ]),
        {"1": Criterion("Revenue", 2.0, True), "2": Criterion("Margin")},
    ),
    "Rubrics as Rewards": (
        [{"title": "Dose", "description": "Names the dose", "weight": 5}], {"1": Criterion("Names the dose", 5.0)},
    ),
    "null of a table": (
        [{"criterion": "kind", "points": None, "weight": 2, "note": None}], {"1": Criterion("kind", 2.0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_public_rubrics_are_read_without_changes(name):
    value, expected = FORMATS[name]
    assert read_rubric(value) == expected


KIND = {"criterion": "kind"}
REFUSED = [
    ([{**KIND, "wieght": 2}], "criterion 1: unknown key 'wieght'; did you mean 'weight'?"),
    ([KIND, {**KIND, "importance": 2}], "criterion 2: unknown key 'importance'; known: "),
    ([{**KIND, "weight": 2, "points": 3}], "criterion 1: weight and points have the same meaning; remove one"),
    ([{**KIND, "question": "Is it?"}], "criterion 1: criterion and question have the same meaning; remove one"),
    ([{**TINKER, "grader_output_format_instruction": "a grade"}],
     "criterion 1: grader_output_format_instruction has no range such as 'between 1 and 5'; add the key scale"),
    ([{**KIND, "id": "a"}, {**KIND, "id": "a"}], "criterion 2: id 'a' is not unique"),
    ([KIND, {**KIND, "points": math.nan}], "criterion 2: weight must be a finite number, got 'nan'"),
    ([{**KIND, "points": "7"}], "criterion 1: weight must be a finite number, got '7'"),
    ([{**KIND, "points": 0}], "every criterion has the weight 0"),
    ([{"points": 3}], "criterion 1: criterion must be a text, got 'None'"),
    ([3], "criterion 1: must be a text or a mapping, got int"),
    ([KIND] * (MOST_CRITERIA + 1), "has 1001 criteria, more than 1000"),
    ([KIND] * 10_000, "has 10000 criteria, more than 1000"),
    ([{"criteria": "x" * 1_000_000}], f"criterion 1: criterion has 1000000 characters, more than {LONGEST_TEXT}"),
    ("(Partial)\n 1. Guessed the solution", "must be a list of criteria, got str"),
    ('{"criterion": "kind"}', "must be a list of criteria, got dict"),
    ("[" * 100_000, "must be a list of criteria, got str"),
    (7, "must be a list of criteria, got int"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_an_invalid_rubric_is_refused_in_one_line_that_names_the_criterion(value, message):
    with pytest.raises(ConfigError) as error:
        read_rubric(value)
    assert str(error.value).startswith(message) and "\n" not in str(error.value) and len(str(error.value)) < 400
