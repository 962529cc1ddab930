"""The environment reasoning_gym and its library, an extra of the project because its solver comes as C source."""

import re

import pytest
from environment_samples import trajectory

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reasoning_gym import ReasoningGym
from gdpo_nemo.utils.errors import ConfigError


def rewards(environment, text, **fields):
    [verdict] = environment.verify([trajectory(text, **fields)])
    return dict(verdict.rewards)


def test_it_makes_the_prompts_that_it_scores():
    env = ReasoningGym({"task": "chain_sum", "task_options": {"max_terms": 3}})
    rows = env.rows("train", 5, 1)
    assert rows == env.rows("train", 5, 1) and rows != env.rows("validation", 5, 1) and len(rows) == 5
    fields = {name: value for name, value in rows[0].items() if name != "prompt"}
    text = f"<think>x</think>\n<answer>{rows[0]['answer']}</answer>"
    assert rewards(env, text, **fields) == {"correctness": 1.0, "format": 1.0}
    assert rewards(env, "<answer>no</answer>", **fields) == {"correctness": 0.0, "format": 0.0}


def test_names_unknown_to_the_library_are_refused():
    with pytest.raises(ConfigError, match="has no task 'chain_sun'; did you mean 'chain_sum'"):
        ReasoningGym({"task": "chain_sun"}).rows("train", 1, 0)
    with pytest.raises(ConfigError, match="chain_sum rejected its options: TypeError: .*'term'"):
        ReasoningGym({"task": "chain_sum", "task_options": {"term": 1}}).rows("train", 1, 0)
    with pytest.raises(ConfigError, match=re.escape("env.reasoning_gym: task: must be set")):
        load_environment("reasoning_gym", {})


def test_it_names_its_rewards():
    assert tuple(load_environment("reasoning_gym", {"task": "chain_sum"}).reward_names) == ("correctness", "format")


def test_a_scorer_that_stumbles_over_an_answer_is_a_failure_and_no_reward():
    env = ReasoningGym({"task": "chain_sum"})
    env.prepare()
    env._scorer = None.__class__  # has no score_answer
    [verdict] = env.verify([trajectory("1", answer="1", metadata={})])
    assert verdict.outcome is Outcome.ENV_FAILED and "the scorer of chain_sum failed" in verdict.detail
