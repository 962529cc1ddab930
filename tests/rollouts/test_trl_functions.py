"""TRL's rollout functions as ``rollout.function``, with a local server for their environment. Scripted completions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from local_server import JsonHandler, LocalServer
from scripted_engines import TOKENIZER, ScriptedEngines

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import NOT_CONTIGUOUS, Outcome, Prompt
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.batches import apply_verdicts, sample_seed
from gdpo_nemo.rollouts.functions import RolloutRunner, SamplingJob, rollout_methods
from gdpo_nemo.utils.errors import ConfigError, RunError

REPOSITORY = Path(__file__).resolve().parents[2]
TRL = Path(__file__).with_name("trl_rollout_functions.py")
TALK = Conversation(TOKENIZER, chat=True)
SAMPLING = Sampling(1.0, 1.0, -1, 10)


class EchoHandler(JsonHandler):
    """OpenEnv's echo over HTTP: a message comes back, and is worth a tenth of its length."""

    def do_POST(self):
        said = (self._body().get("action") or {}).get("message", "")
        self.server.requests.append(self.path)
        observation = {"echoed_message": said, "message_length": len(said)}
        reply = {"observation": observation, "reward": len(said) / 10, "done": False}
        self._send(200, json.dumps(reply).encode())


@pytest.fixture
def server(monkeypatch):
    made = LocalServer(EchoHandler, "")
    monkeypatch.setenv("OPENENV_URL", made.url)
    yield made
    made.stop()


@pytest.fixture
def engines():
    made = ScriptedEngines()
    made.version = 4
    yield made
    made.close()


def config_of(function: str):
    overrides = [f"rollout.function={TRL}:{function}", "policy.max_total_sequence_length=400"]
    return load_config(REPOSITORY / "configs" / "gdpo_turns_cpu.yaml", overrides)


def called(engines, function: str, prompts=("a", "b")):
    runner = RolloutRunner(config_of(function), engines, None, TOKENIZER)
    asked = SamplingJob(SAMPLING, 2, lambda i, j, turn: sample_seed(3, i, j, turn), version=4)
    return runner.call([prompt(text) for text in prompts], asked, lambda requests: engines.generate(requests, SAMPLING))


def prompt(say: str) -> Prompt:
    messages = [{"role": "user", "content": say}]
    text, ids = TALK.prompt(messages)
    return Prompt(say, ids, text, "digit_turns", {"answer": "7"}, messages)


@pytest.mark.slow
def test_one_turn_keeps_sampled_tokens_and_passes_its_columns_to_the_rewards(engines, server):
    groups = called(engines, "one_turn")
    samples = [t for group in groups for t in group]
    assert [(t.prompt.id, t.sample_index) for t in samples] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len({t.completion_ids.tobytes() for t in samples}) == 4
    for t in samples:
        assert t.trains and t.turns == 1 and t.loss_mask.all() and t.spans == ((4, len(t.completion_ids)),)
        assert t.logprobs.tolist() == (-np.arange(1, len(t.logprobs) + 1, dtype=np.float32) / 8).tolist()
        assert {"answer", "env_reward", "echo", "source"} == set(t.prompt.fields)
    section = {"digit_turns": {"plugin": "functions", "functions": {"env": f"{TRL}:reward_from_env"}}}
    with EnvironmentPool(section, timeout_s=60) as pool:
        apply_verdicts(samples, pool)
    assert [t.rewards["env"] for t in samples] == [len(t.text) / 10 for t in samples]
    assert server.requests == ["/reset"] + ["/step"] * 4


def test_several_turns_are_trained_at_the_sampled_tokens(engines, server):
    groups = called(engines, "several_turns")
    for t in (t for group in groups for t in group):
        assert t.trains and t.turns == 3
        parts = np.split(t.completion_ids, np.flatnonzero(np.diff(t.loss_mask.astype(int))) + 1)
        assert [TOKENIZER.decode(part) for part in parts[1::2]] == [" env:0 ", " env:1 "]  # the last is not needed
        assert t.num_policy_tokens == sum(map(len, parts[::2])) == sum(n for _, n in t.spans)
        assert np.array_equal(np.isnan(t.logprobs), ~t.loss_mask)


def test_equal_calls_give_equal_samples_and_no_seed_comes_twice(engines, server):
    made = [[t.completion_ids.tolist() for g in called(engines, "several_turns") for t in g] for _ in range(2)]
    assert made[0] == made[1]
    seeds = [request.seed for request, _, _ in engines.requests]
    assert len(set(seeds)) == len(seeds) / 2 == 12


def test_shorter_limits_cuts_and_text_prompts_are_accepted(engines):
    for function in ("limited", "shortened"):
        for t in (t for group in called(engines, function) for t in group):
            assert t.trains and 0 < len(t.completion_ids) <= 2 and t.spans == ((4, len(t.completion_ids)),)
    for t in (t for group in called(engines, "by_text") for t in group):
        assert t.prompt.text == "plain text" and t.prompt.id in "ab" and t.trains


@pytest.mark.parametrize("function, place", [("restarts", 0), ("invents", 0)])
def test_tokens_that_were_not_sampled_at_their_position_are_never_trained(engines, function, place):
    """What TRL trains there has other log-probs than what was sampled."""
    for t in (t for group in called(engines, function) for t in group):
        assert t.outcome is Outcome.ENV_FAILED and not t.trains
        assert t.detail.startswith(f"{NOT_CONTIGUOUS}: token {place} of completion_ids was not sampled")


@pytest.mark.parametrize(
    "function, fault",
    [
        ("hotter", "generation setting temperature 1.7: must equal policy.generation; only max_tokens may differ"),
        (
            "once_per_prompt",
            "returned 1 values for prompt_ids, expected a list of 4: each prompt is repeated once per sample",
        ),
        ("no_logprobs", "did not return logprobs"),
        (
            "asks_too_much",
            "TRL's trainer.model_wrapped is not supported; available: max_completion_length, temperature",
        ),
        ("short_mask", "prompt a, sample 0: completion_ids, logprobs and env_mask differ in length"),
    ],
)
def test_unsupported_function_stops_the_run_with_a_sentence(engines, function, fault):
    with pytest.raises(RunError) as stopped:
        called(engines, function)
    assert fault in str(stopped.value) and "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    "function, fault",
    [
        ("of_long_ago", "has the signature (prompts, args, processing_class), which TRL had before 0.25"),
        ("awaited", "must not be a coroutine function"),
        ("Client.reset", "has no 'Client.reset'"),
    ],
)
def test_functions_of_another_signature_are_refused_before_anything_starts(function, fault):
    with pytest.raises(ConfigError, match="rollout.function: ") as refused:
        rollout_methods(config_of(function))
    assert fault in str(refused.value)
