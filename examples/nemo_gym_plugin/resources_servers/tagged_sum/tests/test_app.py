"""The rewards of the server, without serving it. Runs with nemo-gym's Python."""

import pytest
from resources_servers.tagged_sum.app import grade


@pytest.mark.parametrize(
    "text, rewards",
    [
        ("<think>4 and 9</think>\n<answer>13</answer>", (1, 1, 1)),
        ("<think>4 and 9</think>\n<answer>12</answer>", (0, 1, 1)),
        ("<think>4 and 9</think><answer>13.0</answer>", (0, 0, 1)),
        ("It is <answer>13</answer>", (1, 1, 0)),
        ("13", (1, 1, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_each_reward_is_had_for_itself(text, rewards):
    assert tuple(grade(text, 13)[1].values()) == rewards
