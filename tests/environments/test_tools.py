"""The environment ``tools``: what the policy is shown, how its calls are answered, what reward functions get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from character_tokenizer import character_tokenizer
from environment_samples import trajectory
from tokenizers import decoders

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.episodes import advance
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.tools import MAX_RESULT_CHARACTERS, call_tools, load_tools
from gdpo_nemo.generation.requests import Completion, Sampling
from gdpo_nemo.rollouts.batches import apply_verdicts
from gdpo_nemo.rollouts.functions import needs_verdict
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

PLACE = str(Path(__file__).with_name("tools_for_tests.py"))
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def environment(*tools, **options):
    functions = options.pop("functions", {"right": f"{PLACE}:right", "called": f"{PLACE}:called"})
    return load_environment(
        "calculator",
        {"plugin": "tools", "tools": [f"{PLACE}:{name}" for name in tools], "functions": functions, **options},
    )


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tokenizer():
    made = character_tokenizer(chat=True)
    made.backend_tokenizer.decoder = decoders.Fuse()
    made.chat_template = TEMPLATE
    return made


def prompts_of(environment, tmp_path, row, tokenizer, **dataset):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = DatasetConfig(path=str(path), environment="calculator", **dataset)
    environments = {"calculator": environment}
    rows = load_rows(config, environments, "train", 0)
    source = PromptSource(config, environments, tokenizer, split="train", seed=0, max_prompt_tokens=400, rows=rows)
    return source.head()


def outcome_of(coroutine):
    """What a coroutine returns that waits for nothing; without an event loop, as a worker has none either."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    return stopped.value.value


def play(environment, prompt, tokenizer, *turns, max_turns=8, max_tokens=400):
    """The trajectory in which the policy writes these turns, judged; every step runs as in a worker."""
    said = iter(turns)

    async def sample(request):
        ids = np.array(tokenizer(next(said))["input_ids"], np.int32)[: request.max_tokens]
        return Completion(ids, np.full(len(ids), -1.0, np.float32), "stop", ((0, len(ids)),))

    async def step(asked):
        return advance(environment, asked)

    class Here:
        def verify(self, trajectories):
            return environment.verify(trajectories)

    job = EpisodeJob(Sampling(1.0, 1.0, -1, 200), lambda turn: turn, sample, step)
    limits = Limits(max_turns, max_tokens, 200, 2000)
    made = outcome_of(play_episode(prompt, 0, job, limits, Conversation(tokenizer, chat=True)))
    if needs_verdict(made):
        apply_verdicts([made], Here())
    return made


def test_prompts_show_schemas_when_rows_hold_text(tmp_path):
    env = environment("add", "fetch", system_prompt="Be brief.")
    (prompt,) = prompts_of(env, tmp_path, {"prompt": "2+3?", "answer": 5}, tokenizer())
    assert prompt.text == "<add><fetch>[system]Be brief.[user]2+3?[assistant]"
    assert prompt.messages[-1] == {"role": "user", "content": "2+3?"}
    schema = prompt.fields["tools"][0]["function"]
    assert schema["description"] == "Adds two numbers." and schema["parameters"]["required"] == ["a", "b"]
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}


@pytest.mark.slow
def test_episode_answers_calls_until_a_turn_has_none(tmp_path):
    env = environment("add", "fetch")
    words = tokenizer()
    (prompt,) = prompts_of(env, tmp_path, {"prompt": "2+3?", "answer": 5}, words)
    made = play(env, prompt, words, "I add. " + call("add", a=2, b=3), call("fetch", city="Oslo"), "It is 5.")
    assert made.turns == 3 and made.outcome is Outcome.OK
    assert made.rewards == {"right": 1.0, "called": 2.0}
    heard = "".join(words.decode([token]) for token in made.completion_ids[~made.loss_mask].tolist())
    assert heard == "[tool]5[assistant][tool]{'city': 'Oslo', 'sky': 'blue'}[assistant]"
    assert made.metrics == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.0}


@pytest.mark.slow
def test_reward_functions_get_the_conversation_in_the_form_of_trl(tmp_path):
    env = environment("add", functions={"names": f"{PLACE}:names"})
    words = tokenizer()
    (prompt,) = prompts_of(env, tmp_path, {"prompt": "2+3?"}, words)
    made = play(env, prompt, words, "I add. " + call("add", a=2, b=3) + call("add", a=1, b=1), "5")
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    other = {"name": "add", "arguments": {"a": 1, "b": 1}}
    assert made.extra["talk"] == [
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"type": "function", "function": function}, {"type": "function", "function": other}],
        },
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "5"},
    ]


@pytest.mark.slow
def test_failed_calls_are_text_for_the_model_and_no_reward(tmp_path):
    env = environment("add", "leave", time_limit_s=5)
    words = tokenizer()
    (prompt,) = prompts_of(env, tmp_path, {"prompt": "2+3?", "answer": 5}, words)
    made = play(
        env,
        prompt,
        words,
        call("add", a="2", b=3),
        call("multiply", a=2, b=3),
        call("leave", status=3),
        '<tool_call>{"name": "add", "arguments": {"a": 2}</tool_call>',
        "<tool_call>add(2, 3)</tool_call>",
        "no idea",
    )
    heard = [message["content"] for message in made.messages if message["role"] == "tool"]
    assert heard == [
        str({"error": 'can only concatenate str (not "int") to str'}),
        "{'error': 'Tool multiply not found.'}",
        "{'error': '3'}",
        "{'error': 'The tool call has no valid name and JSON arguments.'}",
        "{'error': 'The tool call has no valid name and JSON arguments.'}",
    ]
    assert made.outcome is Outcome.OK and made.rewards == {"right": 0.0, "called": 0.0}
    assert made.metrics["tools/failure_frequency"] == 1.0


def test_calls_end_at_their_time_limit_even_if_they_catch_exceptions():
    tools = load_tools([f"{PLACE}:hang", f"{PLACE}:add"])
    calls = [("hang", '{"seconds": 1}'), ("add", '{"a": 1, "b": 1}')]
    assert [message["content"] for message in call_tools(tools, calls, 0.05)] == [
        "{'error': 'hang exceeded the time limit of 0.05 s.'}",
        "{'error': 'add exceeded the time limit of 0.05 s.'}",
    ]
    assert call_tools(tools, calls[1:], 5.0)[0]["content"] == "2"


def test_calls_of_async_tools_share_one_event_loop_also_after_a_time_limit():
    tools = load_tools([f"{PLACE}:{name}" for name in ("where", "later", "block")])
    calls = [("where", "{}"), ("block", "{}"), ("later", "{}"), ("where", "{}")]
    first, *_ = call_tools(tools, calls[:1], 5.0)
    assert "exceeded the time limit" in call_tools(tools, calls[1:2], 0.05)[0]["content"]
    assert [message["content"] for message in call_tools(tools, calls[2:], 5.0)] == [first["content"]] * 2


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "GeneratorExit", "BaseException", "SystemExit"])
def test_call_that_raises_a_base_exception_is_text_for_the_model(kind):
    tools = load_tools([f"{PLACE}:interrupt"])
    [message] = call_tools(tools, [("interrupt", f'{{"how": "{kind}"}}')], 5.0)
    assert message["content"] == "{'error': 'over'}"


def test_results_are_bounded_and_hold_whole_characters():
    tools = load_tools([f"{PLACE}:pour", f"{PLACE}:surrogate"])
    most = f'{{"characters": {MAX_RESULT_CHARACTERS}}}'
    contents = [m["content"] for m in call_tools(tools, [("surrogate", "{}"), ("pour", most), ("pour", most)], 5.0)]
    assert contents[0] == "?"
    assert contents[1].startswith("{'error': 'The result has 65536 characters, of which at most 65535")
    assert contents[2].startswith("{'error': 'The result has 65536 characters")


@pytest.mark.slow
def test_episode_ends_whole_when_its_rounds_of_calls_are_used_up(tmp_path):
    env = environment("add", max_tool_calling_iterations=1)
    words = tokenizer()
    (prompt,) = prompts_of(env, tmp_path, {"prompt": "2+3?", "answer": 5}, words)
    made = play(env, prompt, words, call("add", a=2, b=3), call("add", a=9, b=9))
    assert (made.turns, made.outcome) == (2, Outcome.OK) and made.rewards["called"] == 1.0
    cut = play(environment("add"), prompt, words, call("add", a=2, b=3), call("add", a=9, b=9), max_turns=2)
    assert cut.outcome is Outcome.TRUNCATED and cut.rewards["called"] == 1.0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tools": []}, "tools: expected a list of functions such as [file.py:function], got []"),
        ({"tools": "add"}, "option tools must be of type list"),
        ({"tools": ["add"]}, "tools[0]: expected a function such as file.py:function, got 'add'"),
        ({"tools": [f"{PLACE}:ad"]}, "has no 'ad'; did you mean 'add'?"),
        ({"tools": [f"{PLACE}:add", f"{PLACE}:add"]}, "tools[1]: the name 'add' is already"),
        ({"functions": {}}, "at least one reward function"),
        ({"time_limit_s": 0}, "time_limit_s: must be greater than 0 (0)"),
        ({"max_tool_calling_iterations": 0}, "max_tool_calling_iterations: must be a positive integer or null (0)"),
    ],
)
def test_options_are_refused_in_one_line_when_malformed(options, message):
    whole = {"plugin": "tools", "tools": [f"{PLACE}:add"], "functions": {"right": f"{PLACE}:right"}, **options}
    with pytest.raises(ConfigError) as refused:
        load_environment("calculator", whole)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["undocumented", "untyped"])
def test_tools_are_refused_when_they_have_no_schema(name, tmp_path):
    with pytest.raises(
        ConfigError, match=f"the schema of {name} cannot be generated .*; write type hints and a docstring with Args"
    ):
        prompts_of(environment(name), tmp_path, {"prompt": "2+3?"}, tokenizer())


def test_tools_are_refused_when_the_policy_would_not_see_them(tmp_path):
    row = {"prompt": "2+3?"}
    with pytest.raises(ConfigError, match="env.calculator: the tokenizer's chat template does not show tools"):
        prompts_of(environment("add"), tmp_path, row, character_tokenizer(chat=True))
    for words, options in ((character_tokenizer(), {}), (tokenizer(), {"chat": False})):
        with pytest.raises(ConfigError, match="env.calculator: tools require a chat template and data.train.chat"):
            prompts_of(environment("add"), tmp_path, row, words, **options)
    with pytest.raises(ConfigError, match="row 0 has a column tools.*remove_columns"):
        prompts_of(environment("add"), tmp_path, {**row, "tools": [{}]}, tokenizer())


def test_dry_run_refuses_tools_that_cannot_be_found_or_answered():
    config = load_config("configs/gdpo_turns_cpu.yaml", [])
    config.gdpo.rewards = {"right": 1.0}
    config.data.train.environment = config.data.validation.environment = "calculator"
    config.data.train.path = config.data.validation.path = PLACE + ":rows"
    config.env = {
        "calculator": {"plugin": "tools", "tools": [f"{PLACE}:add"], "functions": {"right": f"{PLACE}:right"}}
    }
    validate(config)
    config.rollout.turns.max_turns = 1
    with pytest.raises(ConfigError, match="rollout.turns.max_turns: must be at least 2 .*env.calculator"):
        validate(config)
    config.rollout.turns.max_turns = 3
    config.env["calculator"]["time_limit_s"] = 60
    with pytest.raises(ConfigError, match="env.calculator.time_limit_s: must be below rollout.env_timeout_s, 30 .60."):
        validate(config)
    config.env["calculator"]["tools"] = [f"{PLACE}:ad"]
    with pytest.raises(ConfigError, match=r"env.calculator.tools\[0\]: .* has no 'ad'; did you mean 'add'"):
        validate(config)


@pytest.mark.slow
def test_env_check_plays_the_conversation_and_verifies_it(tmp_path):
    """One worker process: calls run there, and the state between turns is pickled."""
    from gdpo_nemo.commands.env.check import check_environment

    options = {"plugin": "tools", "tools": [f"{PLACE}:add"], "functions": {"called": f"{PLACE}:called"}}
    env = load_environment("calculator", options)
    row = {"id": "0", "prompt": "2+3?"}
    check = check_environment("calculator", options, env, [row], [call("add", a=2, b=3)])
    assert [dict(verdict.rewards) for verdict in check.verdicts] == [{"called": 0.0}, {"called": 8.0}]
    assert check.repeated and not check.failed


def test_verdict_of_one_turn_without_messages_is_that_of_the_text():
    (verdict,) = environment("add").verify([trajectory("5", answer=5)])
    assert verdict.rewards == {"right": 1.0, "called": 0.0}
