"""``gdpo-nemo explain-advantages`` on a small recorded step: the numbers are the run's, and what a sum hides is
named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.advantage_tables import read_step
from gdpo_nemo.commands.replay import _print_other_objective
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import write_rollouts
from gdpo_nemo.rollouts.credit import advantages_of
from gdpo_nemo.training.replay import Segment
from gdpo_nemo.utils.errors import RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


def group(name: str, *rows: tuple[float | None, float | None, float | None]) -> Group:
    prompt = Prompt(name, np.arange(6, dtype=np.int32), f"{name}=", "digit_sort")
    trajectories = []
    for sample, row in enumerate(rows):
        rewards = dict(zip(("correctness", "format", "length"), row), all=0.0)
        tokens = np.arange(4, dtype=np.int32)
        logprobs = np.full(4, -0.25, np.float32)
        trajectories.append(Trajectory(prompt, sample, tokens, logprobs, 6, "<t>[/b]</t>", "stop", rewards))
    return Group(prompt, trajectories)


def recorded(tmp_path: Path, groups: list[Group]) -> Path:
    """The file of one step, in a run folder with its config."""
    config = load_config(DEMO, ["run.name=recorded"])
    save_config(config, tmp_path / "config.yaml")
    return write_rollouts(tmp_path, 7, groups, SampleValues(advantages_of(groups, config).values.numpy()))


def two_groups() -> list[Group]:
    """In the first group 0 and 1 got one reward each, 2 and 3 two each, of rewards that are not equally rare there."""
    return [
        group("first", (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)),
        group("second", (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0)),
    ]


def shown(capsys, *arguments: object) -> str:
    assert cli.main(["explain-advantages", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def test_a_recorded_step_reads_back_with_the_advantages_of_the_run(tmp_path, capsys):
    path = recorded(tmp_path, two_groups())
    groups, advantages = read_step(path)
    again = advantages_of(groups, load_config(tmp_path / "config.yaml")).values.numpy()
    np.testing.assert_array_equal(again, advantages)
    out = shown(capsys, path)
    assert "step_0007.parquet: 2 groups, 8 samples; 1 correctness + 1 format + 1 length by gdpo" in out
    assert "The run recorded the same advantages." in out
    assert all(f"{value:+.4f}" in out for value in advantages)


def test_a_step_is_explained_with_the_weight_that_a_constraint_had_then(tmp_path, capsys):
    path = recorded(tmp_path, two_groups())
    save_config(load_config(DEMO, ["gdpo.constraints={length: {at_least: 0.9}}"]), tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "lr": 0.1, "reward/length/weight": 0.25}\n')
    assert "1 correctness + 1 format + 0.25 length by gdpo" in shown(capsys, path)
    assert "1 correctness + 1 format + 2 length by gdpo" in shown(capsys, path, "gdpo.rewards.length=2")
    save_config(load_config(DEMO, ["gdpo.weighting={rule: ctwa, target: 0.1}"]), tmp_path / "config.yaml")
    assert "1 correctness + 1 format + 0.25 length by gdpo" in shown(capsys, path)
    assert cli.main(["explain-advantages", str(path), "gdpo.weighting={rule: saw}"]) == 2
    assert "gdpo.weighting: depends on earlier steps; use gdpo-nemo replay --instead" in capsys.readouterr().err


def test_command_lists_the_samples_that_a_sum_would_merge(tmp_path, capsys):
    out = shown(capsys, recorded(tmp_path, two_groups()))
    assert "the same advantage to 2 pairs of samples that these advantages distinguish, in 1 of 2 groups" in out
    line = next(
        line for line in out.splitlines() if line.startswith("  samples 0 (correctness 1, format 0, length 0) and 1")
    )
    ours, summed = line.split(": ")[1].split("; summed, both ")
    assert len(set(ours.split(" and "))) == 2 and float(summed) < 0
    assert out.index("prompt first") < out.index("prompt second")  # the one with something to see comes first


def test_the_diagnosis_of_the_step_is_there_with_its_alerts(tmp_path, capsys):
    dead = [group("a", (1, 0, 1), (0, 0, 1)), group("b", (1, 0, 1), (0, 0, 1))]
    out = shown(capsys, recorded(tmp_path, dead))
    assert "distinct advantages" in out and "component 'format' is constant in every group" in out
    assert "would distinguish the same pairs of samples" in out


def test_overrides_recompute_advantages_and_report_the_difference_from_the_run(tmp_path, capsys):
    path = recorded(tmp_path, two_groups())
    out = shown(capsys, path, "gdpo.estimator=grpo")
    assert "by grpo" in out and "The advantages recorded by the run differ" in out
    assert "would distinguish the same pairs of samples" in out
    conditioned = "gdpo.shaping=[{component: length, condition: {on: correctness, ge: 1}}]"
    assert "prompt first" in shown(capsys, path, conditioned, "--groups", "1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gdpo.kl_in_reward=0.1", "gdpo.kl_in_reward: requires log-probs of the initial model"),
        ("algorithm.type=ppo", "algorithm.type: ppo's advantages come from a value head, which rollouts do not record"),
        ("algorithm.type=distillation", "algorithm.type: distillation's advantages come from a teacher"),
    ],
)
def test_advantages_of_a_model_are_refused_because_rollouts_do_not_record_them(tmp_path, capsys, override, expected):
    assert cli.main(["explain-advantages", str(recorded(tmp_path, two_groups())), override]) == 2
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1


def test_a_missing_reward_is_shown_as_missing_and_not_as_0(tmp_path, capsys):
    missing = [group("a", (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, None))]
    out = shown(capsys, recorded(tmp_path, missing))
    assert "nan" not in out and "length missing" in out


def test_failed_sample_is_shown_and_not_compared(tmp_path, capsys):
    groups = two_groups()
    groups[0].trajectories[0].outcome = Outcome.ENV_FAILED
    out = shown(capsys, recorded(tmp_path, groups))
    assert "env_failed" in out and "would distinguish the same pairs of samples" in out


def test_prompt_sampled_twice_in_a_step_gives_two_groups(tmp_path):
    path = recorded(tmp_path, [two_groups()[0], two_groups()[0]])
    assert [len(g.trajectories) for g in read_step(path)[0]] == [4, 4]


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "cannot be read"),
        ("{", "not a rollout file"),
        ('{"a": 1}\n', "not a rollout file"),
        ("", "contains no trajectories"),
    ],
)
def test_a_file_that_is_none_of_rollouts_costs_one_line(tmp_path, capsys, content, expected):
    path = tmp_path / "rollouts" / "step_0001.jsonl"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    assert cli.main(["explain-advantages", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and expected in error


def test_without_a_config_beside_it_one_is_asked_for(tmp_path, capsys):
    path = recorded(tmp_path, two_groups())
    (tmp_path / "config.yaml").unlink()
    assert cli.main(["explain-advantages", str(path)]) == 2
    assert "specify a file with --config" in capsys.readouterr().err
    assert "prompt first" in shown(capsys, path, "--config", DEMO)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["gdpo.estimator=MINE:estimator", "gdpo.shaping=[{component: length, MINE:rule: {}}]"])
def test_explain_runs_code_of_a_config_only_if_the_user_names_it(tmp_path, capsys, key):
    path = recorded(tmp_path, two_groups())
    code = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    (tmp_path / "mine.py").write_text(code + "from gdpo_nemo.algorithms.estimators import gdpo as estimator\n")
    with open(tmp_path / "mine.py", "a") as file:
        file.write("def rule(values): return values\n")
    key = key.replace("MINE", str(tmp_path / "mine.py"))
    config = load_config(DEMO, [key])
    save_config(config, tmp_path / "config.yaml")
    assert cli.main(["explain-advantages", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"pass --config {tmp_path}/config.yaml to run it" in error
    assert not (tmp_path / "ran").exists()
    cli.main(["explain-advantages", str(path), "--config", str(tmp_path / "config.yaml")])
    assert (tmp_path / "ran").exists()


def test_a_replay_with_another_objective_compares_the_advantages_of_each_step(tmp_path, capsys):
    path = recorded(tmp_path, two_groups())
    other = load_config(tmp_path / "config.yaml", ["gdpo.estimator=grpo", "gdpo.rewards.length=-1"])
    groups, before = read_step(path)
    after = advantages_of(groups, other).values.numpy()
    # A constraint had moved the weight from 0 in this step.
    other.gdpo.rewards["length"], other.gdpo.constraints = 0.0, {"length": {"at_most": 0.1}}
    for folder, norm in ((tmp_path, 0.25), (tmp_path / "out", 0.5)):
        folder.mkdir(exist_ok=True)
        trained = {"step": 7, "lr": 0.1, "grad_norm": norm, "reward/length/weight": -1.0}
        rows = [trained, {"step": 7, "validation/correctness": 0.5}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = SimpleNamespace(
        run_dir=tmp_path, out=tmp_path / "out", segments=[Segment(7, 7, other, 9)], last=7, original=None,
        gradients=np.array([[0.0625, -0.1], [-0.1, 0.25]]),
    )  # fmt: skip
    assert _print_other_objective(plan) == 0
    told = capsys.readouterr().out
    row = next(line for line in told.splitlines() if line.startswith("│ 7"))
    cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
    changed = np.mean(np.sign(before.round(6)) != np.sign(after.round(6)))
    assert 0.1 < changed < 1 and cosine < 0.999
    assert row.replace("│", " ").split() == ["7", f"{cosine:.3f}", f"{changed:.1%}", "0.25", "0.5"]
    assert "at the weights before step 7 have the cosine -0.800" in " ".join(told.split())
    assert "may train other groups" not in told
    other.gdpo.dynamic_sampling.enabled = True
    assert _print_other_objective(plan) == 0 and "may train other groups" in capsys.readouterr().out
    plan.gradients[1, 1] = 0.3  # not the square of the replay's grad_norm
    with pytest.raises(RunError, match=r"norms 0.25 and 0.5477, but the updates had grad_norm 0.25 and 0.5"):
        _print_other_objective(plan)
    listed = [json.loads(line) for line in (tmp_path / "out" / "sign_changes.jsonl").read_text().splitlines()]
    samples = [t for group in groups for t in group.trajectories]
    expected = [i for i in range(len(samples)) if np.sign(before[i].round(6)) != np.sign(after[i].round(6))]
    assert [(line["prompt_id"], line["sample"]) for line in listed] == [
        (samples[i].prompt.id, samples[i].sample_index) for i in expected
    ]
    assert [(line["advantage"], line["instead"]) for line in listed] == [(before[i], after[i]) for i in expected]


def test_names_with_brackets_are_shown_and_not_read_as_styles(tmp_path, capsys):
    file = tmp_path / "1.jsonl"
    rows = [{"input": "a", "output": "x", "[/b]r[red]": value, ":smile:": value} for value in (1, 0)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["explain-advantages", "--from", "verl", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "[/b]r[red]" in shown and ":smile:" in shown
