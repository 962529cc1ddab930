"""One run that trains on the three packages of examples/verifiers at once: real verifiers, engine, rank and tool
server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from launch import REPOSITORY, command_here, rows
from package_venv import venv_with

from gdpo_nemo.observe.metric_registry import unknown_metrics
from gdpo_nemo.observe.samples import read_rollouts, rollout_path

pytestmark = pytest.mark.slow

WARM_UP_STEPS = 100
"""Enough to sort a few digits, to call the tool and to answer in tags now and then."""
REWARDS = {
    "order": {"in_place", "tagged", "worked"},
    "codes": {"right", "right_key", "one_call"},
    "notes": {"largest", "careful", "notes_tagged"},
}
_ANSWER = re.compile(r'"key": "([0-9]{2})"}}</tool_call>>([0-9]{3})=')
"""A call and the result of the tool, in the words of the model's chat template."""
TURNS = {"order": {1}, "codes": {1, 2, 3}, "notes": {3}}


CONFIG = """
run: {dir: FOLDER/run}
gdpo:
  rewards: {WEIGHTS}
  num_prompts_per_step: 12
  num_generations_per_prompt: 4
  max_num_steps: 2
policy:
  model_name: FOLDER/model
  precision: float32
  max_total_sequence_length: 256
  generation: {max_new_tokens: 36}
rollout:
  turns: {max_turns: 3}
  endpoint: {enabled: true, port: 0}
data: {train: {size: 64}, mix: {order: 1, codes: 1, notes: 1}}
env:
  order: {plugin: verifiers, package: digit_order, venv: VENV}
  codes: {plugin: verifiers, package: code_book, venv: VENV}
  notes: {plugin: verifiers, package: digit_notes, venv: VENV, rewards: {notes_tagged: tagged}}
checkpointing: {enabled: false, export_hf: false}
logger: {plot: false, console: plain, tensorboard: {enabled: false}}
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Two steps of four prompts of each package, with a model of seconds. No process of the packages outlives them."""
    folder = tmp_path_factory.mktemp("packages")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_tiny_model as m; "
        "m.make_digit_chat_model(sys.argv[2], 0, int(sys.argv[3]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(REPOSITORY / "examples"), str(folder / "model")]
    subprocess.run([*command, str(WARM_UP_STEPS)], check=True, stdout=subprocess.DEVNULL)
    venv = venv_with("verifiers==0.4.0").parent.parent
    weights = ", ".join(f"{component}: 1" for names in REWARDS.values() for component in sorted(names))
    content = CONFIG.replace("FOLDER", str(folder)).replace("VENV", str(venv)).replace("WEIGHTS", weights)
    (folder / "packages.yaml").write_text(content)
    # The packages are not installed, so that the test plays those of this checkout.
    sources = [str(path.parent) for path in REPOSITORY.glob("examples/verifiers/*/pyproject.toml")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]))
        command_here("train", "--config", str(folder / "packages.yaml"))
    return folder / "run"


def test_every_reward_function_of_the_packages_is_a_component(run_dir):
    assert unknown_metrics(rows(run_dir)) == []
    trained = [row for row in rows(run_dir) if "loss" in row]
    assert [row["step"] for row in trained] == [1, 2]
    for row in trained:
        for environment, names in REWARDS.items():
            assert row[f"rollout/groups/{environment}"] == 4 and row[f"rollout/env_failed/{environment}"] == 0.0
            assert {f"reward/{environment}/{name}/mean" for name in names} <= row.keys()
        assert {f"reward_function/{name}" for name in ("ascending", "calls", "contexts")} <= row.keys()
        assert row["grad_norm"] > 0


def test_tokens_of_the_packages_are_those_that_the_engine_sampled(run_dir):
    for row in (row for row in rows(run_dir) if "loss" in row):
        assert row["parity/max_abs"] < 1e-4 and row["rollout/not_contiguous"] == 0.0


def test_turns_are_one_context_with_tools_and_a_context_each_with_notes(run_dir):
    samples = [sample for step in (1, 2) for sample in read_rollouts(rollout_path(run_dir, step))]
    assert Counter(sample["environment"] for sample in samples) == dict.fromkeys(REWARDS, 32)
    for sample in samples:
        name = sample["environment"]
        assert set(sample["rewards"]) == REWARDS[name] and sample["turns"] in TURNS[name]
        assert sample.get("turn_parents") == ([-1, -1, -1] if name == "notes" else None)
    called = [sample for sample in samples if sample["environment"] == "codes" and sample["turns"] > 1]
    answers = [pair for sample in called for pair in _ANSWER.findall(sample["completion"])]
    assert len(answers) >= 8 and all(int(code) == (int(key) * 617 + 283) % 1000 for key, code in answers)
    assert all(False in sample["loss_mask"] for sample in called)
