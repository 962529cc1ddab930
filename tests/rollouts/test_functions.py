"""``rollout.function`` on scripted engines; `end_to_end/test_run.py` trains an agent of several contexts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scripted_engines import TOKENIZER, ScriptedEngines

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.batches import sample_seed
from gdpo_nemo.rollouts.functions import RolloutKind, RolloutRunner, SamplingJob, needs_verdict, rollout_methods
from gdpo_nemo.utils.errors import ConfigError, RunError

REPOSITORY = Path(__file__).resolve().parents[2]
OWN = Path(__file__).with_name("custom_rollouts.py")
TALK = Conversation(TOKENIZER, chat=True)
SAMPLING = Sampling(1.0, 1.0, -1, 10)


@pytest.fixture
def engines():
    made = ScriptedEngines()
    yield made
    made.close()


def called(engines, function: str, prompts=("hello",), samples=2) -> list[list[Trajectory]]:
    config = load_config(
        REPOSITORY / "configs" / "gdpo_turns_cpu.yaml",
        [f"rollout.function={OWN}:{function}", "policy.max_total_sequence_length=400"],
    )
    runner = RolloutRunner(config, engines, None, TOKENIZER)
    assert runner.kind("digit_turns") is RolloutKind.CALL
    asked = SamplingJob(SAMPLING, samples, lambda i, j, turn: sample_seed(3, i, j, turn))
    return runner.call([prompt(text) for text in prompts], asked, lambda r: engines.generate(r, SAMPLING))


def prompt(say: str) -> Prompt:
    messages = [{"role": "user", "content": say}]
    text, ids = TALK.prompt(messages)
    return Prompt(say, ids, text, "digit_turns", {}, messages)


def test_a_custom_function_makes_trajectories_and_the_environment_verdicts(engines):
    engines.version = 6
    one, other = called(engines, "best_of_hints")[0]
    assert one.turns == other.turns == 2 and one.trains and needs_verdict(one)
    (heard,) = (part for part in np.split(one.completion_ids, np.flatnonzero(np.diff(one.loss_mask)) + 1)[1:2])
    assert "<|start|>user\nagain<|end|>\n<|start|>assistant\n" in TOKENIZER.decode(heard)
    assert one.spans == ((6, one.num_policy_tokens),) and one.policy_version == 6


def test_calls_of_several_threads_have_a_context_each_and_give_the_same(engines):
    """Seeds are of the prompt's place in its call, so each call below is the first prompt of another."""
    (alone,) = called(engines, "best_of_hints", ["a"])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: called(engines, "best_of_hints", ["a"])[0], range(4)))
    for group in found:
        assert [t.completion_ids.tolist() for t in group] == [t.completion_ids.tolist() for t in alone]


@pytest.mark.parametrize(
    "function, fault",
    [
        ("forgets_a_sample", "must return samples 0 to 1 in order"),
        ("drops_logprobs", "must be finite and at most 0"),
        ("masks_everything", "the policy wrote no token"),
        ("claims_other_spans", "the version spans do not add up"),
        ("asks_for_nothing", "requested no completion"),
        ("raises", "raises raised ZeroDivisionError"),
        ("leaves", "leaves raised ExitRaised: SystemExit: it calls os._exit.0."),
    ],
)
def test_violation_of_the_contract_stops_the_run_with_a_sentence(engines, function, fault):
    with pytest.raises(RunError, match=fault):
        called(engines, function)


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.function=nowhere.py:f", "rollout.function: no such file: nowhere.py"),
        ("rollout.function=json.nothing", "rollout.function: json has no 'nothing'"),
        ("rollout.endpoint.enabled=true", "rollout.endpoint: has no effect"),
        (
            "env.agents={plugin: nemo_gym_agent, agents: {a: 'http://127.0.0.1:1'}}",
            "rollout.endpoint.enabled: must be true",
        ),
    ],
)
def test_settings_of_turns_that_cannot_work_are_refused_before_anything_starts(override, message):
    with pytest.raises(ConfigError) as refused:
        rollout_methods(load_config(REPOSITORY / "configs" / "gdpo_turns_cpu.yaml", [override]))
    assert message in str(refused.value)
    with pytest.raises(ConfigError, match="rollout.turns: has no effect"):
        rollout_methods(load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", ["rollout.turns.max_turns=2"]))
