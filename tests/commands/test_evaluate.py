"""What ``gdpo-nemo eval`` looks at, and what it makes of verdicts; the command as a whole is in tests/end_to_end."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.commands.evaluate import SUITES, evaluate, find_subject, scored, table, without_policy
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import GdpoConfig
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.rollouts.metrics import validation_metrics
from gdpo_nemo.training.checkpoints import Checkpoints, RunState
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path):
    """A run with checkpoints of steps 2 and 4, and an exported model, of which nobody knows from what step."""
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder / "checkpoints", 9, 0, None)
    for step in (2, 4):
        checkpoints.save(RunState(step=step), lambda path: None)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.yaml").write_text("")
    return folder


def test_a_run_means_its_newest_checkpoint_and_without_any_its_exported_model(run_dir):
    newest = find_subject(run_dir)
    assert (newest.checkpoint, newest.model, newest.step) == (run_dir / "checkpoints" / "step_4", None, 4)
    assert newest.config == run_dir / "config.yaml"
    shutil.rmtree(run_dir / "checkpoints")
    exported = find_subject(run_dir)
    assert (exported.checkpoint, exported.model, exported.step) == (None, run_dir / "model", None)


def test_a_step_a_checkpoint_and_a_model_mean_themselves(run_dir, tmp_path):
    older = run_dir / "checkpoints" / "step_2"
    assert find_subject(run_dir, step=2) == find_subject(older)
    assert find_subject(older).checkpoint == older and find_subject(older).config == run_dir / "config.yaml"
    assert find_subject(run_dir / "model").model == run_dir / "model"
    assert find_subject(run_dir / "model", tmp_path / "run" / "config.yaml").config == tmp_path / "run" / "config.yaml"


@pytest.mark.parametrize(
    "source, step, message",
    [
        ("run", 3, "--step: .* has no checkpoint of step 3; existing steps: 2, 4"),
        ("run/model", 2, "--step: .* is a model"),
        ("elsewhere", None, "--config: required, because"),
        ("empty", None, "has no checkpoint or exported model yet"),
        ("nowhere", None, "not a run, checkpoint or model folder"),
    ],
)
def test_folder_that_is_not_a_run_or_model_is_refused(run_dir, tmp_path, source, step, message):
    for folder, file in (("elsewhere", "config.json"), ("empty", "config.yaml")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("")
    with pytest.raises(ConfigError, match=message):
        find_subject(tmp_path / source, None, step)


@pytest.mark.parametrize(
    "overrides, out, message",
    [
        (["data.validation=null"], None, "data.validation: eval requires held-out prompts"),
        (["gdpo.val_promts=3"], None, "gdpo.val_promts"),
        ([], ".", "--out: .* exists"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_anything_starts(run_dir, overrides, out, message):
    tiny = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
    with pytest.raises(ConfigError, match=message):
        evaluate(run_dir, tiny, None, overrides, out)


RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs").glob("gdpo_*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_machine_with_room_for_only_the_engines_is_enough(recipe):
    config = load_config(recipe)
    if config.cluster.gpus_per_node:
        config.cluster.num_nodes = 1
        config.cluster.gpus_per_node = config.policy.generation.engines
        config.policy.generation.vllm_cfg.tensor_parallel_size = 2
        with pytest.raises(ConfigError, match=f"the engines require {2 * config.cluster.gpus_per_node} GPUs, found"):
            without_policy(config)
        config.policy.generation.vllm_cfg.tensor_parallel_size = 1
    without_policy(config)
    validate(config)
    assert resolve_layout(config).engines == config.policy.generation.engines


@pytest.mark.parametrize("name", SUITES)
def test_suite_selects_environment_components_and_sampling_for_any_config(name, tmp_path):
    """Also for a config whose validation uses another environment; the last overrides, of the user, win."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    tiny = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
    config = load_config(tiny, [*SUITES[name].overrides, f"data.validation.path={rows}", "gdpo.val_prompts=5"])
    validate(config)
    environment = config.data.validation.environment
    offered = load_environment(environment, config.env[environment]).reward_names
    extra = {"tool_calling": "ast", "bfcl": "ast", "gsm8k": "math_verify", "math_length": "exceed"}[name]
    assert extra in offered and config.gdpo.val_prompts == 5
    gdpo = config.gdpo
    sampling = (gdpo.val_generations_per_prompt, gdpo.val_temperature, gdpo.val_top_p, gdpo.val_pass_at_k)
    assert sampling == ((16, 0.6, 0.95, [1, 4, 16]) if name == "math_length" else (1, 0.0, 1.0, []))


def judged(rows: list[list[float | None]]) -> list[Group]:
    """Groups whose samples have one component, or None."""
    groups = []
    for number, row in enumerate(rows):
        prompt = Prompt(str(number), np.array([1], np.int32), "", "e", {}, None)
        made = [
            Trajectory(prompt, j, np.array([1, 2], np.int32), np.zeros(2, np.float32), 0, "", "stop")
            for j in range(len(row))
        ]
        for trajectory, value in zip(made, row):
            trajectory.rewards = {"it": value}
            trajectory.outcome = Outcome.OK
        groups.append(Group(prompt, made))
    return groups


values = st.one_of(st.none(), st.floats(-10, 10))


@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=6)),
    st.sampled_from([1.0, 0.0, -0.5]),
)
def test_scores_and_validation_metrics_give_each_prompt_the_same_weight(rows, weight):
    best = min if weight < 0 else max
    gdpo = GdpoConfig(rewards={"it": weight}, val_pass_at_k=[1])
    found = scored(judged(rows), gdpo, "m", 3)
    validated = validation_metrics(judged(rows), [1], directions(gdpo.rewards, {}, {}))
    present = [[v for v in row if v is not None] for row in rows if any(v is not None for v in row)]
    if not present:
        assert found.scores == {} and "validation/it" not in validated
        return
    score = found.scores["it"]
    assert score.judged == sum(map(len, present))
    assert score.best == pytest.approx(np.mean([best(row) for row in present]), abs=1e-9)
    means = [sum(row) / len(row) for row in present]
    for value in (score.mean, score.pass_at[1], validated["validation/it"], validated["validation/it/pass_at/1"]):
        assert value == pytest.approx(sum(means) / len(means), abs=1e-9)
    if len(means) < 2:
        assert score.error is None
    else:
        centre = sum(means) / len(means)
        variance = sum((m - centre) ** 2 for m in means) / (len(means) - 1)
        assert score.error == pytest.approx((variance / len(means)) ** 0.5, abs=1e-9)


def test_truncated_and_failed_samples_are_counted():
    groups = judged([[1.0, 0.0], [None, 1.0]])
    samples = [t for group in groups for t in group.trajectories]
    samples[1].outcome = Outcome.TRUNCATED
    samples[2].outcome = Outcome.ENV_FAILED
    found = scored(groups, GdpoConfig(rewards={}), "m", None)
    assert (found.truncated, found.env_failed, found.mean_length, found.prompts) == (0.25, 0.25, 2.0, 2)


def test_an_evaluation_reports_pass_at_every_k_that_is_asked_for(capsys):
    gdpo = GdpoConfig(rewards={"it": 1.0}, val_generations_per_prompt=4, val_pass_at_k=[1, 2, 4])
    found = scored(judged([[1.0, 0.0, 0.0, 0.0], [0.0, None, 0.0, 1.0]]), gdpo, "m", None)
    score = found.scores["it"]
    assert score.pass_at == pytest.approx({1: (1 / 4 + 1 / 3) / 2, 2: (1 / 2 + 2 / 3) / 2, 4: 1.0})
    Console(width=120).print(table(found))
    printed = capsys.readouterr().out
    assert "pass@2" in printed and "0.583" in printed
