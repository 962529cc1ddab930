"""Reward functions are called here with what TRL's own code calls them with."""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl_functions
from environment_samples import trajectory

from gdpo_nemo.data.records import Group, Outcome, TrainerState, Verdict
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.observe.samples import read_rollouts, write_rollouts
from gdpo_nemo.rollouts.batches import apply_verdicts
from gdpo_nemo.rollouts.metrics import rollout_metrics, validation_metrics
from gdpo_nemo.utils.errors import ConfigError, RunError

PLACE = str(Path(trl_functions.__file__))
STATE = TrainerState(global_step=3, max_steps=12, epoch=0.5)
FORMS = {
    "anything": "anything", "by_name": "by_name", "awaited": "awaited", "Object": "instance",
    "AsyncObject": "async_instance", "partial": "partial",
}  # fmt: skip
"""Under which name each form notes its call -> its name in the file."""


def rewards_of_trl(functions, rows, completions, ids):
    """What TRL's trainer calculates, which has nothing but what that reads.

    TRL is imported here, as its trainer imports vLLM: seconds of every process that collects this file.
    """
    from transformers import TrainerState as HfTrainerState
    from trl import GRPOTrainer
    from trl.trainer.utils import start_event_loop_in_daemon

    trainer = object.__new__(GRPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    trainer.args = SimpleNamespace(report_to=[])
    trainer.reward_funcs = functions
    trainer.reward_func_names = [str(place) for place in range(len(functions))]
    trainer.reward_processing_classes = [None] * len(functions)
    trainer.state = HfTrainerState(global_step=3, max_steps=12, epoch=0.5)
    trainer.environments = None
    trainer._pending_extra_logs = defaultdict(list)
    trainer._pending_metrics = defaultdict(list)
    _, trainer.async_loop, ready = start_event_loop_in_daemon("rewards")
    ready.wait()
    return trainer._calculate_rewards(rows, [row["prompt"] for row in rows], completions, ids)


def rows(chat):
    """Two rows with two samples each, as TRL repeats them; one column has no value in the second."""
    asked = [[{"role": "user", "content": text}] if chat else f"prompt {text}" for text in ("p0", "p1")]
    made = [
        {"prompt": prompt, "answer": answer, "meta": {"n": [place]}, "chat_template_kwargs": {}, "tools": None}
        for place, (prompt, answer) in enumerate(zip(asked, ("42", None)))
    ]
    return [made[0], made[0], made[1], made[1]]


def samples(chat, texts):
    made = []
    for place, (row, text) in enumerate(zip(rows(chat), texts)):
        columns = {name: value for name, value in row.items() if name != "prompt"}
        messages = row["prompt"] if chat else None
        made.append(trajectory(text, prompt_id=f"p{place // 2}", index=place % 2, messages=messages, **columns))
        made[-1].trainer_state = STATE
    return made


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_every_form_of_function_sees_the_arguments_that_trls_own_code_gives_it(chat):
    texts = ["42", "no", "", "x"]
    ours = samples(chat, texts)
    verdicts = Functions({"functions": {name: f"{PLACE}:{FORMS[name]}" for name in FORMS}}).verify(ours)
    # A file named by its place is a module of its own.
    seen_here = Functions({"functions": {"x": f"{PLACE}:anything"}})._functions[0].call.__globals__["SEEN"]
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    ids = [t.completion_ids.tolist() for t in ours]
    theirs = rewards_of_trl([getattr(trl_functions, FORMS[name]) for name in FORMS], rows(chat), completions, ids)
    assert [[verdict.rewards[name] for name in FORMS] for verdict in verdicts] == theirs.tolist()
    loggers = ("trainer_state", "log_extra", "log_metric")
    for name in FORMS:
        wanted = dict(trl_functions.SEEN[name])
        given = dict(seen_here[name])
        assert given.keys() == wanted.keys()
        assert {k: v for k, v in given.items() if k not in loggers} == {
            k: v for k, v in wanted.items() if k not in loggers
        }
        for field in ("global_step", "max_steps", "epoch"):
            assert getattr(given["trainer_state"], field) == getattr(wanted["trainer_state"], field)


@pytest.mark.slow
def test_a_reward_that_does_not_apply_is_missing_as_in_trl():
    found = Functions({"functions": {"a": f"{PLACE}:none_for_some"}}).verify(samples(False, ["a", "b", "c", "d"]))
    trl = rewards_of_trl([trl_functions.none_for_some], rows(False), ["a", "b", "c", "d"], [[1]] * 4)
    assert [verdict.rewards["a"] for verdict in found] == [1.0, 1.0, None, None]
    assert np.isnan(trl[:, 0].tolist()).tolist() == [False, False, True, True]


@pytest.mark.slow
def test_values_logged_by_a_function_reach_the_samples_and_metrics_of_the_step(tmp_path):
    section = {"env": {"plugin": "functions", "functions": {"progress": f"{PLACE}:logging"}}}
    made = [trajectory(text, prompt_id=f"p{place // 2}", index=place % 2, answer="a") for place, text in
            enumerate(["a", "b", "a", "a", "b", "b"])]  # fmt: skip
    with EnvironmentPool(section, workers=3) as pool:
        apply_verdicts(made, pool, STATE)
    assert {t.rewards["progress"] for t in made} == {3 / 12}
    # Three calls in three processes of two samples each, logging 1/2, 1 and 0.
    row = rollout_metrics(made, version=0)
    assert row["reward_function/accuracy"] == 0.5 and row["reward_function/step_seen"] == 3.0
    groups = [Group(made[i].prompt, made[i : i + 2]) for i in (0, 2, 4)]
    assert validation_metrics(groups)["validation/reward_function/accuracy"] == 0.5
    records = read_rollouts(write_rollouts(tmp_path, 1, groups))
    assert [record["extra"]["golden_answer"] for record in records] == ["a"] * 6
    assert records[0]["extra"]["shape"] == {"length": 1, "nan": None, "kind": "<class 'object'>"}
    assert json.loads(json.dumps(records)) == records


def test_samples_without_anything_logged_are_written_as_before(tmp_path):
    [record] = read_rollouts(write_rollouts(tmp_path, 1, [Group(trajectory("a").prompt, [trajectory("a")])]))
    assert "extra" not in record and not any(key.startswith("reward_function") for key in rollout_metrics(
        [trajectory("a")], 0))  # fmt: skip


def test_a_metric_counts_its_calls_by_their_samples():
    made = [trajectory(str(i)) for i in range(4)]
    verdicts = [Verdict({}, metrics={"m": 0.0})] * 3 + [Verdict({}, metrics={"m": 1.0})]
    apply_verdicts(made, SimpleNamespace(verify=lambda _: verdicts))
    assert rollout_metrics(made, 0)["reward_function/m"] == 0.25


@pytest.mark.parametrize(
    "function, message",
    [
        ("short_log", "log_extra('column') got 1 values for 2 completions"),
        ("double_log", "log_extra('column') was already called for these completions"),
        ("wordy_metric", "the value of log_metric('accuracy') is 'good', which is not a number"),
        ("endless_metric", "the value of log_metric('accuracy') is infinite (inf)"),
        ("asks_history", "trainer_state.log_history is not supported; supported: global_step, max_steps, epoch"),
    ],
)
def test_unsupported_log_value_ends_the_run_with_the_functions_name(function, message):
    with pytest.raises(RunError) as error:
        Functions({"functions": {"mine": f"{PLACE}:{function}"}}).verify([trajectory("a"), trajectory("b", index=1)])
    assert str(error.value).startswith(f"reward function 'mine' ({PLACE}:{function})") and message in str(error.value)


def test_a_function_that_needs_trls_environments_is_refused_before_the_run():
    with pytest.raises(
        ConfigError, match="requires the argument environments, which is not supported: .*environment_factory"
    ):
        load_environment("env", {"plugin": "functions", "functions": {"a": f"{PLACE}:wants_environments"}})


def test_failed_sample_keeps_its_logged_values():
    env = Functions({"functions": {"progress": f"{PLACE}:logging", "down": "http://127.0.0.1:9/score"}})
    sample = trajectory("a", answer="a")
    sample.trainer_state = STATE
    [verdict] = env.verify([sample])
    assert verdict.outcome is Outcome.ENV_FAILED and verdict.rewards == {}
    assert verdict.extra["golden_answer"] == "a" and verdict.metrics["accuracy"] == 1.0
