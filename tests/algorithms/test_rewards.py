"""Shaping rules: what each does, in which order, and what is refused."""

import numpy as np
import pytest
import yaml

from gdpo_nemo.algorithms import apply_shaping, check_shaping

NAN = np.nan


def shaped(columns, *rules, **context):
    return {name: column.tolist() for name, column in apply_shaping(columns, rules, **context).items()}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"clip": [-1, 1]}, [-1, 0, 1, NAN]),
        ({"scale": 2.0}, [-6, 0, 6, NAN]),
        ({"scale": {"by": 0.5, "offset": 1}}, [-0.5, 1, 2.5, NAN]),
        ({"linear": {"from": [-3, 3]}}, [0, 0.5, 1, NAN]),
        ({"linear": {"from": [0, 2], "to": [1, -1]}}, [1, 1, -1, NAN]),
        ({"truncated": {"value": -9}}, [-3, 0, -9, NAN]),
        ({"overlong": {"buffer": 20}}, [-3, -0.5, 2, NAN]),
        ({"overlong": {"buffer": 20, "thinking": False}}, [-3, 0, 3, NAN]),
        ({"length": {"full": 50, "zero": 100, "thinking": False}}, [1, 0.6, 1, 0]),
        ({"overlong": {"buffer": 20, "penalty": 2, "max_length": 120}}, [-3, 0, 2, NAN]),
        ({"length": {"full": 90}}, [1, 1, 0, 0]),
        ({"length": {"full": 50, "zero": 100}}, [1, 0.2, 0, 0]),
    ],
)
def test_each_transformation(rule, expected):
    context = {
        "lengths": [10, 90, 110, 300],
        "max_length": 100,
        "truncated": [False, False, True, True],
        "thinking": [0, 20, 100, 0],
    }
    result = shaped({"a": [-3, 0, 3, None]}, {"component": "a", **rule}, **context)
    np.testing.assert_allclose(result["a"], expected)


@pytest.mark.parametrize(("operator", "expected"), [
    ("ge", [5, 5, 0]), ("gt", [5, 0, 0]), ("le", [0, 5, 5]), ("lt", [0, 0, 5]), ("eq", [0, 5, 0]),
])  # fmt: skip
def test_conditions_compare_and_missing_stays_missing(operator, expected):
    rule = {"component": "short", "condition": {"on": "correct", operator: 1.0}}
    result = shaped({"short": [5, 5, 5, 5, NAN], "correct": [2, 1, 0, NAN, 2]}, rule)
    np.testing.assert_array_equal(result["short"], [*expected, NAN, NAN])


def test_rules_of_one_component_act_in_order_and_conditions_see_finished_components():
    clip = {"component": "a", "clip": [0, 1]}
    scale = {"component": "a", "scale": 3.0}
    condition = {"component": "b", "condition": {"on": "a", "ge": 3.0, "else": -1.0}}
    columns = {"b": [1, 1], "a": [0.5, 4]}
    assert shaped(columns, condition, clip, scale) == {"b": [-1, 1], "a": [1.5, 3]}
    assert shaped(columns, scale, clip, condition) == {"b": [-1, -1], "a": [1, 1]}


def test_penalties_create_their_component_or_add_to_it():
    rule = {"component": "overlong", "overlong": {"buffer": 10}}
    context = {"lengths": [95, 80], "max_length": 100}
    assert shaped({"a": [1, 1]}, rule, **context) == {"a": [1, 1], "overlong": [-0.5, 0]}
    assert shaped({"a": [1, 1]}, {**rule, "component": "a"}, **context) == {"a": [0.5, 1]}


def test_input_columns_are_not_changed():
    column = np.array([1.0, 5.0])
    apply_shaping(
        {"a": column},
        [{"component": "a", "clip": [0, 1]}, {"component": "a", "truncated": {}}],
        truncated=[True, False],
    )
    assert column.tolist() == [1, 5]


def test_conditioned_components_can_form_a_chain():
    rules = [
        {"component": "c", "condition": {"on": "b", "gt": 0}},
        {"component": "b", "condition": {"on": "a", "gt": 0}},
    ]
    assert shaped({"a": [1, 0], "b": [1, 1], "c": [1, 1]}, *rules) == {"a": [1, 0], "b": [1, 0], "c": [1, 0]}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"component": "lenght", "clip": [0, 1]}], "unknown component 'lenght'; did you mean 'length'"),
        ([{"component": "length", "clp": [0, 1]}], "unknown key 'clp'; did you mean 'clip'"),
        ([{"component": "length"}], "exactly one transformation"),
        ([{"clip": [0, 1]}], "exactly one transformation"),
        ([{"component": "length", "clip": [0, 1], "scale": 2}], "exactly one transformation"),
        ([{"component": "length", "clip": [1, 0]}], "limits must be ascending"),
        ([{"component": "length", "clip": 3}], r"shaping rule \{'component': 'length', 'clip': 3\}"),
        ([{"component": "length", "scale": {"bye": 2}}], "unknown option 'bye'; did you mean 'by'"),
        ([{"component": "length", "linear": {"from": [1, 1]}}], "`from` must be ascending"),
        ([{"component": "length", "overlong": {}}], "positive `buffer`"),
        ([{"component": "length", "length": {"full": 9, "zero": 5}}], "`zero` above it"),
        ([{"component": "length", "condition": {"on": "corect", "ge": 1}}], "did you mean 'correct'"),
        ([{"component": "length", "condition": {"ge": 1}}], "requires `on`"),
        ([{"component": "length", "condition": {"on": "correct", "ge": 1, "lt": 2}}], "one of ge, gt"),
        (
            [{"component": "length", "condition": {"on": "correct", "gee": 1}}],
            "unknown option 'gee'; did you mean 'ge'",
        ),
        ([{"component": "length", "condition": {"on": "length", "ge": 1}}], "form a cycle"),
        (
            [
                {"component": "length", "condition": {"on": "correct", "ge": 1}},
                {"component": "correct", "condition": {"on": "length", "ge": 1}},
            ],
            "form a cycle: (length -> correct -> length|correct -> length -> correct)",
        ),
    ],
)
def test_bad_rules_are_refused_before_any_reward_exists(rules, message):
    assert check_shaping([{"component": "tokens", "length": {"full": 5}}], ["length"]) == ["length", "tokens"]
    with pytest.raises(ValueError, match=message):
        check_shaping(rules, ["length", "correct"])


def test_rule_without_its_input_column_is_refused():
    for rule, name in (({"length": {"full": 5}}, "lengths"), ({"truncated": {}}, "truncated")):
        with pytest.raises(ValueError, match=f"requires {name}, which was not given"):
            apply_shaping({"a": [1.0]}, [{"component": "a", **rule}])
    with pytest.raises(ValueError, match="requires max_length"):
        apply_shaping({"a": [1.0]}, [{"component": "a", "overlong": {"buffer": 5}}], lengths=[1])


def test_a_condition_reads_the_same_from_yaml_which_takes_the_bare_word_on_for_true():
    rules = yaml.safe_load("[{component: short, condition: {on: right, ge: 1.0, else: -1.0}}]")
    assert True in rules[0]["condition"]
    assert apply_shaping({"right": [0.0, 1.0], "short": [1.0, 1.0]}, rules)["short"].tolist() == [-1.0, 1.0]


SHORTEST = {"on": "correct", "ge": 1.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0, NAN, -0.5, NAN, 0, 0, NAN]),
        ({"score": "best"}, [1, 0, NAN, 0, NAN, 1, 1, NAN]),
        ({"thinking": False}, [-1 / 3, -1 / 3, NAN, 2 / 3, NAN, 0, 0, NAN]),
    ],
)
def test_shortest_compares_the_correct_samples_of_a_group(options, expected):
    columns = {"correct": [1, 1, 0, 1, NAN, 1, 1, 1]}
    context = {
        "lengths": [10, 20, 5, 30, 1, 7, 7, 9],
        "thinking": [0, 10, 0, 25, 0, 0, 0, 0],
        "groups": [4, 4, 4, 4, 1, 1, 1, 0],  # the correct sample of group 0 has no other to be compared with
    }
    rule = {"component": "brevity", "shortest": {**SHORTEST, **options}}
    np.testing.assert_allclose(shaped(columns, rule, **context)["brevity"], expected)
    order = np.random.default_rng(0).permutation(8)
    mixed = shaped(
        {"correct": np.array(columns["correct"])[order]},
        rule,
        **{name: np.array(value)[order] for name, value in context.items()},
    )
    np.testing.assert_allclose(mixed["brevity"], np.array(expected, float)[order])


def test_shortest_reads_the_other_component_after_its_rules_and_replaces_its_own():
    rules = [
        {"component": "brevity", "shortest": {"on": "correct", "gt": 0.0}},
        {"component": "correct", "scale": {"by": 1.0, "offset": -1.0}},
    ]
    found = shaped({"brevity": [9, 9], "correct": [3, 2]}, *rules, lengths=[4, 2], groups=[0, 0])
    assert found == {"brevity": [-0.5, 0.5], "correct": [2, 1]}
    assert check_shaping(rules, ["correct", "brevity"]) == ["correct", "brevity"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ge": 1.0}, "a condition requires `on` and one of"),
        ({"on": "corect", "ge": 1.0}, "unknown component 'corect'; did you mean 'correct'"),
        ({"on": "rubric/*", "ge": 1.0}, "'rubric/*' is not a single reward"),
        ({**SHORTEST, "scor": "best"}, "unknown option 'scor'; did you mean 'score'"),
        ({**SHORTEST, "else": 0.0}, "unknown option 'else'"),
        ({**SHORTEST, "score": "bset"}, "`score` must be linear or best, got 'bset'"),
        ({"on": "brevity", "ge": 1.0}, "conditions form a cycle"),
    ],
)
def test_shortest_with_invalid_options_is_refused(options, message):
    with pytest.raises(ValueError) as error:
        check_shaping([{"component": "brevity", "shortest": options}], ["correct", "rubric/*"])
    assert message in str(error.value)
