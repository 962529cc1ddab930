"""Reward functions for questions about images: values that NeMo-RL's functions returned at 7ea279ab."""

import pytest
from environment_samples import trajectory

from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.utils.errors import RunError

FORMAT = "boxed_expression"
TAGS = "has_tags"
TEXT = "same_text"
EQUAL = "same_expression"
BOX = "box_overlap"
SQUARE = "[0, 0, 10, 10]"


def rewards(function, *samples, **options):
    path = f"gdpo_nemo.environments.tasks.vision_rewards.{function}"
    environment = load_environment("functions", {"functions": {"it": {"function": path, **options}}})
    found = environment.verify([trajectory(text, answer=answer) for answer, text in samples])
    return [verdict.rewards["it"] for verdict in found]


@pytest.mark.parametrize(
    "function, answer, text, options, reward",
    [
        (TAGS, "", "<think>a</think><answer>4</answer>", {}, 1.0),
        (TAGS, "", "so <answer>4</answer> it is", {}, 0.75),
        (TAGS, "", "<think>\n</think> 4", {}, 0.25),
        (TAGS, "", "</think>4<think><answer>", {}, 0.0),
        (TAGS, "", "<b>a</b><answer>4</answer>", {"think_tag": "b"}, 1.0),
        (TEXT, "Yes", "<think>no</think><answer> yes.\n</answer>", {}, 1.0),
        (TEXT, "yes", "yes", {}, 0.0),
        (TEXT, "", "<answer>!</answer>", {}, 1.0),
        (TEXT, "12", "<answer>1</answer><answer>2</answer>", {}, 0.0),
        (TEXT, "4", "<answer>1 <answer>4</answer>", {}, 0.0),
        (TEXT, "4", "<b>4</b>", {"answer_tag": "b"}, 1.0),
        (TEXT, 4, "<answer>4</answer>", {}, 1.0),
        (EQUAL, "0.5", r"<answer>\frac{1}{2}</answer>", {}, 1.0),
        (EQUAL, r"\boxed{2\sqrt{3}}", r"<answer>\boxed{2\sqrt{3}}</answer>", {}, 1.0),
        (EQUAL, "4", "the answer is 4", {}, 0.0),
        (EQUAL, "4", "<answer>5</answer>", {}, 0.0),
        (EQUAL, "x+1", "<b>1+x</b>", {"tag": "b"}, 1.0),
        (EQUAL, "", "<answer>4</answer>", {}, 0.0),
        (FORMAT, "4", r"a</think> \boxed{3} or \boxed{4}", {}, 1.0),
        (FORMAT, "4", r"\boxed{4}", {}, 0.9),
        (FORMAT, "4", r"</think>\boxed{5}", {}, 0.1),
        (FORMAT, "4", r"</think>\boxed{4", {}, 0.0),
        (FORMAT, r"2\sqrt{3}", r"</think>\boxed{2\sqrt{3}}", {"format_score": 0.3}, 1.0),
        (BOX, SQUARE, "<answer>[0, 0, 10, 5]</answer>", {}, 0.5),
        (BOX, SQUARE, "<answer>[20, 20, 30, 30]</answer>", {}, -0.7777777777777778),
        (BOX, SQUARE, "<answer>5,5,15,15</answer>", {"giou_penalty_thres": 0.1}, 0.14285714285714285),
        (BOX, SQUARE, "<answer>10,10,0,0</answer>", {}, 1.0),
        (BOX, SQUARE, "<answer>[0, 0, 10]</answer>", {}, 0.0),
        (BOX, SQUARE, SQUARE, {}, 0.0),
        (BOX, "[5, 5, 5, 5]", "<answer>[5, 5, 5, 5]</answer>", {}, 0.0),
        (BOX, SQUARE, "<answer>[0, 0, inf, 10]</answer>", {}, 0.0),  # NeMo-RL: NaN
    ],
)
def test_functions_return_the_rewards_of_nemo_rl(function, answer, text, options, reward):
    assert rewards(function, (answer, text), **options) == [pytest.approx(reward, abs=1e-12)]


def test_reward_function_without_a_reference_answer_fails():
    with pytest.raises(RunError, match="no reference answer"):
        rewards(TEXT, ("4", "<answer>4</answer>"), (None, "<answer>None</answer>"))
