"""The component ``well_formed`` of agents' responses, and its options."""

import re

import pytest

from gdpo_nemo.environments.nemo_gym.agent_environment import NemoGymAgent
from gdpo_nemo.environments.nemo_gym.checks import read_checks, well_formed
from gdpo_nemo.utils.errors import ConfigError

BEGIN, END, BAD = 12, 13, 2


def message(text, prompt=(1, BEGIN), written=(5, END, 6)):
    """Create a message with the tokens of its turn."""
    tokens = {"prompt_token_ids": list(prompt), "generation_token_ids": list(written)}
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **tokens}


def reasoning(text):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
FIRST = message("a")
SECOND = message("b", prompt=(1, BEGIN, 5, END, 6, 7, BEGIN), written=(8, END))


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ({"repeated_reasoning": True},
         [[reasoning("x"), message("y")], [reasoning(""), message("")], [message("x"), message("x")]],
         [[reasoning("x"), message(" x ")], [message("y"), reasoning("x"), {**message(""), "content": "x"}]]),
        ({"empty_answer": True},
         [[message("x")], [message(""), CALL], [message("x"), {"type": "function_call_output", "output": "7"}]],
         [[], [message(" ")], [message("x"), message("")], [reasoning("x")]]),
        ({"unwanted_tokens": [BAD]},
         [[FIRST], [], [message("x", prompt=(BAD,))]],
         [[message("x", written=(5, BAD))], [message("x", written=(BAD,)), FIRST]]),
        ({"think_tokens": [BEGIN, END]},
         [[FIRST], [FIRST, SECOND], [message("x", prompt=(1, BEGIN, END), written=(5,))], [message("x", (1,), (5,))]],
         [[message("x", written=(5,))], [message("x", written=(END, 5, END))], [message("x", written=(BEGIN, END))],
          [message("x", prompt=(1,), written=(END,))], [message("x", prompt=(BEGIN, BEGIN))],
          [FIRST, message("b", prompt=(1, BEGIN, 5, END, 6, 7), written=(8, END))]]),
    ],
)  # fmt: skip
def test_each_check_finds_its_fault_only(check, good, bad):
    checks = read_checks(check)
    assert [well_formed(output, checks) for output in good] == [1.0] * len(good)
    assert [well_formed(output, checks) for output in bad] == [0.0] * len(bad)


@pytest.mark.parametrize("item", [None, 3, "x", [], {}, {"content": 3}, {"type": "reasoning", "summary": 3},
                                  {"generation_token_ids": [[]], "prompt_token_ids": {}},
                                  {"generation_token_ids": [[1], {}], "prompt_token_ids": ["x"]}])  # fmt: skip
def test_items_of_any_shape_are_checked(item):
    checks = read_checks(
        {"repeated_reasoning": True, "empty_answer": True, "unwanted_tokens": [BAD], "think_tokens": [BEGIN, END]}
    )
    assert well_formed([reasoning("x"), item], checks) == 0.0
    assert well_formed([item, message("y", (1,), (5,))], checks) == 1.0


AGENTS = {"agents": {"one": "http://127.0.0.1:1"}}


def test_the_agents_environment_adds_the_component_to_each_reply():
    environment = NemoGymAgent({**AGENTS, "well_formed": {"empty_answer": True}})
    assert environment.reward_names == ("reward", "well_formed") and environment.open_rewards
    for text, expected in (("x", 1.0), ("", 0.0)):
        reply = {"reward": 0.5, "response": {"output": [message(text)]}}
        assert environment._read(reply, "one").rewards == {"reward": 0.5, "well_formed": expected}
    assert environment._read({"reward": 0.5, "response": {"output": 3}}, "one").rewards["well_formed"] == 0.0


def test_a_reply_with_evaluations_gives_the_criteria_of_the_episode():
    environment = NemoGymAgent({**AGENTS, "rewards": [{"name": "rubric/*"}]})
    evaluations = [{"criterion_id": "C1", "criteria": "Three sentences?", "score": 1.0}]
    played = environment._read({"reward": 1.0, "response": {}, "rubric_evaluations": evaluations}, "one")
    assert played.rewards == {"rubric/C1": 1.0} and played.criteria["rubric/C1"].text == "Three sentences?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"well_formed": {}}, "well_formed: must have at least one check"),
        ({"well_formed": [1]}, "well_formed: must be a mapping of checks"),
        ({"well_formed": {"empty_anser": True}}, "unknown option 'empty_anser'; did you mean 'empty_answer'"),
        ({"well_formed": {"unwanted_tokens": ["<s>"]}}, "well_formed.unwanted_tokens: must be a list of token ids"),
        ({"well_formed": {"think_tokens": [1]}}, "well_formed.think_tokens: must be [begin, end], not [1]"),
        ({"well_formed": {"empty_answer": True}, "rewards": [{"name": "well_formed"}]},
         "rewards: 'well_formed' is the name of the component of the checks"),
    ],
)  # fmt: skip
def test_invalid_checks_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        NemoGymAgent({**AGENTS, **options})
