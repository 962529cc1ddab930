"""The environment number_answer: what each component is paid for, and splits that do not meet."""

import pytest
from environment_samples import trajectory
from hypothesis import given, strategies as st

from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.number_answer import NumberAnswer, is_held_out
from gdpo_nemo.utils.errors import ConfigError, RunError


def rewards(text, answer="42", finish_reason="stop", **options):
    """(correct, only, ends, brief) of one reply."""
    (verdict,) = NumberAnswer(options).verify([trajectory(text, finish_reason=finish_reason, answer=answer)])
    return tuple(verdict.rewards[name] for name in NumberAnswer.reward_names)


@pytest.mark.parametrize(
    "text, correct, only, ends",
    [
        ("42", 1, 1, 1),
        (" 42.\n", 1, 1, 1),
        ("-42", 0, 1, 1),
        ("The answer is 42.", 1, 0, 1),
        ("17 is smaller than 42", 1, 0, 1),
        ("42 is larger than 17", 0, 0, 1),
        ("42 it is", 1, 0, 0),
        ("50-8 = **42**", 1, 0, 1),
        ("8-42", 1, 0, 1),
        ("forty-two", 0, 0, 0),
        ("", 0, 0, 0),
        ("420", 0, 1, 1),
        ("4 2", 0, 0, 1),
        ("42.0", 1, 1, 1),
        ("4,2", 0, 0, 1),
        ("1,042", 0, 1, 1),
        ("42 and 42%", 1, 0, 1),
    ],
)
def test_each_reward_is_paid_for_itself(text, correct, only, ends):
    assert rewards(text)[:3] == (correct, only, ends)


def test_a_reply_that_was_cut_off_has_not_ended_with_its_answer():
    assert rewards("It is 42", finish_reason="length")[:3] == (1, 0, 0)
    assert rewards("42", finish_reason="length")[:3] == (1, 0, 0)


def test_brief_falls_with_every_character_to_zero_at_the_limit():
    assert [rewards("4" * length)[3] for length in (0, 15, 60, 90)] == [1, 0.75, 0, 0]
    assert rewards("12345", brief_limit=10)[3] == 0.5


def test_brief_gives_no_more_reward_below_the_free_length():
    lengths = (0, 1, 3, 4, 8, 12, 13, 90)
    assert [rewards("4" * length, brief_from=3, brief_limit=13)[3] for length in lengths] == [
        1, 1, 1, 0.9, 0.5, pytest.approx(0.1), 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("gold", ["1,042", 1042, "He earns 40 more.\n#### 1042", " 1042 ", 1042.0])
def test_the_gold_answer_may_be_written_as_data_sets_do(gold):
    assert rewards("so 1042", answer=gold)[0] == rewards("1,042", answer=gold)[0] == 1
    assert rewards("42", answer=gold)[0] == 0


@pytest.mark.parametrize("gold", ["many", "#### ", "3 apples"])
def test_row_whose_answer_is_not_a_number_ends_the_run_with_its_name(gold):
    with pytest.raises(RunError, match="prompt p: answer is not a number"):
        rewards("42", answer=gold)


@given(st.text(max_size=200), st.sampled_from(["stop", "length"]))
def test_any_text_has_rewards_between_0_and_1(text, finish_reason):
    assert all(0 <= value <= 1 for value in rewards(text, finish_reason=finish_reason))


@given(st.integers(-(10**9), 10**9))
def test_bare_number_gets_all_rewards_that_do_not_depend_on_length(number):
    assert rewards(str(number), answer=str(number))[:3] == (1, 1, 1)
    assert rewards(f"{number:,}", answer=str(number))[:3] == (1, 1, 1)


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["larger", "smaller", "sum"])
def test_no_pair_is_in_both_splits_in_any_order(question):
    environment = NumberAnswer({"question": question})
    pairs = {
        split: {frozenset(map(int, row["id"].split("/")[1:])) for row in environment.rows(split, None, 0)}
        for split in ("train", "test")
    }
    assert not pairs["train"] & pairs["test"]
    assert len(pairs["train"]) + len(pairs["test"]) == 89 * 88 // 2
    assert 0.08 < len(pairs["test"]) / (89 * 88 // 2) < 0.12


def test_rows_contain_the_answer_and_depend_on_the_seed_only():
    for question, wanted in (("larger", max), ("smaller", min), ("sum", lambda a, b: a + b)):
        environment = NumberAnswer({"question": question, "numbers": [0, 20]})
        rows = environment.rows("train", 50, 1)
        assert rows == environment.rows("train", 50, 1) != environment.rows("train", 50, 2)
        for row in rows:
            _, a, b = row["id"].split("/")
            assert row["answer"] == str(wanted(int(a), int(b))) and a in row["prompt"][0]["content"]
            assert not is_held_out(int(a), int(b)) and 0 <= int(a) <= 20


def test_the_examples_of_a_row_are_right_and_one_of_them_is_to_the_point():
    environment = load_environment("number_answer")
    row = environment.rows("train", 1, 0)[0]
    alone, sentence = (rewards(text, answer=row["answer"]) for text in environment.examples(row))
    assert alone[:3] == (1, 1, 1) and sentence[:3] == (1, 0, 1) and alone[3] > sentence[3]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"question": "largr"}, "unknown question 'largr'; did you mean 'larger'"),
        ({"numbers": [5]}, "numbers must be the smallest and the largest"),
        ({"numbers": [5, 9]}, "at least 10 integers"),
        ({"numbers": [-5, 9]}, "from 0 on"),
        ({"numbers": ["a", "b"]}, "numbers must be"),
        ({"brief_limit": 0}, "brief_limit must be at least 1 character"),
        ({"brief_from": 60}, "brief_from must be at least 0 and less than brief_limit, 60, not 60"),
        ({"brief_from": -1}, "brief_from must be at least 0 and less than brief_limit, 60, not -1"),
        ({"limit": 3}, "unknown option 'limit'"),
    ],
)
def test_wrong_options_are_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        NumberAnswer(options)
