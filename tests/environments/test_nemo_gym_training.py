"""A run with real NeMo Gym as the user starts it, and the ends it comes to when its server is not what the config
says."""

import json
import subprocess
import sys

import pytest
from real_nemo_gym import REPOSITORY

from gdpo_nemo.commands.cli import main
from gdpo_nemo.observe.metric_registry import unknown_metrics
from gdpo_nemo.observe.samples import read_rollouts, rollout_path

pytestmark = pytest.mark.slow

CONFIG = str(REPOSITORY / "configs" / "gdpo_nemo_gym_multireward.yaml")
TOOLS = "example_tool_call_multireward"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tool_calls"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_tiny_model as m; "
        "m.make_tool_calling_model(sys.argv[2], 42, 90)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(REPOSITORY / "examples"), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_three_steps_on_three_named_rewards(real_gym, tool_model, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    overrides = (
        f"run.dir={tmp_path / 'run'}",
        f"policy.model_name={tool_model}",
        f"env.tools.servers.{TOOLS}={real_gym.urls[TOOLS]}",
        "gdpo.num_prompts_per_step=4",
        "gdpo.num_generations_per_prompt=4",
        "logger.console=plain",
        "logger.plot=false",
        "logger.tensorboard.enabled=false",
        "checkpointing.export_hf=false",
    )
    assert main(["train", "--config", CONFIG, *overrides]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert unknown_metrics(rows) == []
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {f"reward/{name}/mean" for name in ("correctness", "schema_valid", "format")} <= row.keys()
        assert row["rollout/env_failed/tools"] == 0.0 and row["reward/format/missing"] == 0.0
        assert row["parity/max_abs"] < 1e-3
    assert rows[0]["reward/format/std"] > 0 and rows[0]["grad_norm"] > 0
    for sample in read_rollouts(rollout_path(tmp_path / "run", 1)):  # the verdicts are of these very completions
        calls = sample["completion"].count("<tool_call>{") == sample["completion"].count("}</tool_call>") == 1
        alone = sample["completion"].startswith("<tool_call>") and sample["completion"].endswith("</tool_call>")
        assert not sample["rewards"]["format"] or (calls and alone), sample["completion"]
        assert not sample["rewards"]["correctness"] or sample["rewards"]["schema_valid"]


@pytest.mark.parametrize(
    "url, rewards, status, message",
    [
        ("nobody", [], 1, f"env.tools: server {TOOLS} at http://127.0.0.1:9: connection: "),
        ("real", ["env.tools.rewards=[{name: style}]"], 2, "missing_reward: reward_components.style is not in the "
                                                           "reply; the reply has reward, "),
        ("real", ["env.tools.rewards=null", "gdpo.rewards={style: 1.0}"], 2,
         "gdpo.rewards.style: no environment returns this component; available: correctness, format, "),
    ],
)  # fmt: skip
def test_preflight_ends_the_run_before_anything_is_started(
    real_gym, tool_model, tmp_path, monkeypatch, capsys, url, rewards, status, message
):
    monkeypatch.chdir(REPOSITORY)
    where = "http://127.0.0.1:9" if url == "nobody" else real_gym.urls[TOOLS]
    options = [f"env.tools.servers.{TOOLS}={where}", "env.tools.retries=0", f"policy.model_name={tool_model}"]
    assert main(["train", "--config", CONFIG, f"run.dir={tmp_path / 'run'}", *options, *rewards]) == status
    error = capsys.readouterr().err
    assert [message in line for line in error.splitlines() if line.startswith("error: ")] == [True], error
    assert not (tmp_path / "run").exists()
