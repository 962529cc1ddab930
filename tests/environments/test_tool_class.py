"""The environment ``tool_class``: an object for each trajectory, its methods the tools, rewards from the objects."""

from __future__ import annotations

import threading
from pathlib import Path

import counter_for_tests
import numpy as np
import pytest
from environment_samples import REPLIES

from gdpo_nemo.commands.train import _check_one_row
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.episodes import EpisodeStep
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.utils.errors import ConfigError, RunError

FILE = Path(counter_for_tests.__file__)
FUNCTIONS = {"value": f"{FILE}:value", "turns": f"{FILE}:turns"}


def call(name: str, arguments: str) -> dict[str, str]:
    text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    return said(text)


def said(text: str) -> dict[str, object]:
    reply = REPLIES.parse(text, [{"type": "function", "function": {"name": "add"}}])
    return {"role": "assistant", "content": text, "reply": reply}


def prompt(messages=({"role": "user", "content": "Count."},), **fields) -> Prompt:
    text = "Count." if messages is None else "<user>Count.<assistant>"
    return Prompt("p", np.zeros(1, np.int32), text, "counter", fields, messages)


@pytest.fixture
def environment():
    made = []

    def make(**options):
        made.append(load_environment("tool_class", {"make": f"{FILE}:Counter", "functions": FUNCTIONS, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def begin(environment, **fields):
    asked = prompt(**fields)
    return asked, environment.start_step(EpisodeStep(asked, 0, 0)).result()


@pytest.mark.slow
def test_every_trajectory_has_a_separate_object_whose_state_is_rewarded(environment):
    counter = environment()
    players = [begin(counter, start=start) for start in (1, 2)]
    assert players[0][1].observation == [{"role": "user", "content": "Count. It is 1."}]
    for turn in (1, 2):
        for asked, reply in players:
            step = EpisodeStep(asked, 0, turn, reply.state, call("add", '{"amount": 3}'))
            answer = counter.start_step(step).result()
            assert not answer.done and answer.rewards == {"value": None, "turns": None}
            assert answer.observation[0]["role"] == "tool" and answer.observation[0]["name"] == "add"
    ended = [
        counter.start_step(EpisodeStep(asked, 0, 3, reply.state, said("Done."))).result() for asked, reply in players
    ]
    assert [reply.rewards for reply in ended] == [{"value": 7.0, "turns": 5.0}, {"value": 8.0, "turns": 5.0}]
    assert all(reply.done for reply in ended)


def test_an_object_is_reset_and_used_again(environment):
    counter = environment()
    before = len(load_module(counter).MADE)
    for start in (1, 2, 3):
        asked, reply = begin(counter, start=start)
        cut = counter.start_step(EpisodeStep(asked, 0, 1, reply.state)).result()
        assert cut.done and cut.rewards["value"] == start
    assert len(load_module(counter).MADE) == before + 1


def load_module(environment):
    """The module that the environment took its class from."""
    import sys

    return sys.modules[environment._make.__module__]


def test_schemas_are_those_of_the_public_methods(environment):
    row = environment().read_row({"prompt": "Count."})
    assert sorted(tool["function"]["name"] for tool in row["tools"]) == ["add", "leave", "loop", "pour", "wait"]
    with pytest.raises(ConfigError, match="has a column tools"):
        environment().read_row(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("add", '{"amount": 10}', "{'error': 'too much'}"),
        ("subtract", "{}", "{'error': 'Tool subtract not found.'}"),
        ("add", "{}", "{'error': "),
        ("_hidden", "{}", "{'error': 'Tool _hidden not found.'}"),
        ("reset", "{}", "{'error': 'Tool reset not found.'}"),
        ("leave", '{"how": "SystemExit"}', "{'error': 'SystemExit: 3'}"),
        ("leave", '{"how": "KeyboardInterrupt"}', "{'error': 'KeyboardInterrupt: 3'}"),
        ("leave", '{"how": "GeneratorExit"}', "{'error': 'GeneratorExit: 3'}"),
        ("leave", '{"how": "os._exit"}', "{'error': 'SystemExit: it calls os._exit(0)'}"),
        ("pour", '{"characters": 65537}', "{'error': 'The result has 65537 characters"),
    ],
)
def test_a_call_that_fails_is_text_for_the_model(environment, name, arguments, text):
    counter = environment()
    asked, reply = begin(counter, start=1)
    answer = counter.start_step(EpisodeStep(asked, 0, 1, reply.state, call(name, arguments))).result(60)
    assert answer.outcome is Outcome.OK and answer.observation[0]["content"].startswith(text)
    assert counter.start_step(EpisodeStep(asked, 0, 2, answer.state)).result(60).done, "the environment still answers"


@pytest.mark.slow
def test_resets_calls_and_rewards_of_all_episodes_share_one_event_loop(environment):
    """Objects and functions may keep a client, which belongs to the loop that it was first used in."""
    loops = set()
    for counter in (environment(make=f"{FILE}:AsyncCounter", functions={"loop": f"{FILE}:loop"}) for _ in range(2)):
        for start in (1, 2):
            asked, reply = begin(counter, start=start)
            answer = counter.start_step(EpisodeStep(asked, 0, 1, reply.state, call("loop", "{}"))).result(60)
            ended = counter.start_step(EpisodeStep(asked, 0, 2, answer.state)).result(60)
            loops |= {reply.observation[0]["content"].split()[-1], answer.observation[0]["content"]}
            loops.add(str(int(ended.rewards["loop"])))
    assert len(loops) == 1


def test_a_reward_function_that_ends_the_process_is_named(environment):
    counter = environment(functions={"leaves": f"{FILE}:leaves"})
    asked, reply = begin(counter, start=1)
    with pytest.raises(RunError, match="reward function 'leaves' raised ExitRaised: SystemExit: it calls os._exit.0."):
        counter.start_step(EpisodeStep(asked, 0, 1, reply.state)).result(60)


@pytest.mark.slow
def test_a_reset_that_raises_and_a_call_that_hangs_mask_the_trajectory(environment):
    counter = environment(time_limit_s=2)
    _, reply = begin(counter, start=-1)
    assert reply.outcome is Outcome.ENV_FAILED and "starts below zero" in reply.detail
    asked, reply = begin(counter, start=2)
    answer = counter.start_step(EpisodeStep(asked, 0, 1, reply.state, call("wait", "{}"))).result()
    blocked = [thread for thread in threading.enumerate() if thread.name == "tool_class"]
    assert blocked and all(thread.daemon for thread in blocked), "the process can end while the call blocks"
    load_module(counter).RELEASE.set()
    assert answer.outcome is Outcome.ENV_FAILED and "within 2 s" in answer.detail


@pytest.mark.slow
def test_calls_after_the_last_allowed_turn_end_the_episode(environment):
    counter = environment(max_tool_calling_iterations=1)
    asked, reply = begin(counter, start=1)
    for turn in (1, 2):
        answer = counter.start_step(EpisodeStep(asked, 0, turn, reply.state, call("add", '{"amount": 1}'))).result()
    assert answer.done and answer.rewards["value"] == 2.0


def test_a_reward_of_none_does_not_apply_and_a_function_that_raises_stops_the_run(environment):
    counter = environment()
    asked, reply = begin(counter, start=5)
    assert counter.start_step(EpisodeStep(asked, 0, 1, reply.state)).result().rewards["turns"] is None
    counter = environment(functions={"broken": f"{FILE}:broken"})
    asked, reply = begin(counter, start=5)
    with pytest.raises(RunError, match="reward function 'broken' raised"):
        counter.start_step(EpisodeStep(asked, 0, 1, reply.state)).result()


@pytest.mark.parametrize(
    ("start", "rewards", "detail"),
    [
        (1, {"value": 1.0, "rubric/low": 1.0, "rubric/even": 0.0}, ""),
        (7, {}, "rubric/*: reward 'rubric/high' is not a criterion of the row's rubric; did you mean 'rubric/low'?"),
    ],
)
def test_function_of_a_family_rewards_the_criteria_of_the_row(environment, start, rewards, detail):
    counter = environment(functions={"value": f"{FILE}:value", "rubric/*": f"{FILE}:criteria"})
    rubric = [{"id": "low", "criterion": "Is it low?"}, {"id": "even", "criterion": "Is it even?"}]
    asked, reply = begin(counter, start=start, rubric=rubric)
    assert reply.rewards == {"value": None}
    ended = counter.start_step(EpisodeStep(asked, 0, 1, reply.state)).result(60)
    assert (ended.rewards, ended.detail) == (rewards, detail)
    assert (ended.outcome is Outcome.OK) == (not detail)


def test_the_first_row_is_tried_before_the_run(environment):
    environment().preflight([prompt(start=1)])
    with pytest.raises(RunError, match="reset raised"):
        environment().preflight([prompt(start=-1)])


@pytest.mark.parametrize("start, result", [(1, "verified 1 completions for row 0"), (-1, "starts below zero")])
def test_a_dry_run_plays_two_episodes_with_the_first_row(environment, start, result):
    config = load_config("configs/gdpo_turns_cpu.yaml", [])
    config.env = {"counter": {"plugin": "tool_class", "make": f"{FILE}:Counter", "functions": FUNCTIONS}}
    resets = len(load_module(environment()).RESETS)
    row = {"id": "0", "prompt": [{"role": "user", "content": "Count."}], "start": start}
    try:
        found = _check_one_row(config, "counter", environment(), row, None)
    except RunError as error:
        found = str(error)
    assert result in found and (start < 0 or len(load_module(environment()).RESETS) == resets + 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"make": None}, "make: expected a class"),
        ({"functions": {}}, "functions: expected reward functions"),
        ({"functions": {"a": "b"}}, "functions.a: expected a function"),
        ({"time_limit_s": 0}, "time_limit_s: must be greater than 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(environment, options, message):
    with pytest.raises(ConfigError, match=message):
        environment(**options)
