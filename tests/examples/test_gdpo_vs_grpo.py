"""The comparison's own arithmetic: raw flags, goals, pairing of seeds, and what its report may not leave out."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.training.validation import validate

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_spec = importlib.util.spec_from_file_location("gdpo_vs_grpo", EXAMPLES / "gdpo_vs_grpo.py")
comparison = sys.modules["gdpo_vs_grpo"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(comparison)

STEPS = comparison.STEPS
DEMO = EXAMPLES.parent / "configs" / "gdpo_tiny_cpu.yaml"


def every_run(out: Path, seeds=(0, 1)) -> list:
    return comparison.plan(list(comparison.SETTINGS), set(comparison.METHODS), list(seeds), out, 1)


def write(run, flags: np.ndarray) -> None:
    """Metrics of a run whose raw flags are ``flags``, as the trainer would have written them."""
    run.folder.mkdir(parents=True)
    rows = []
    for step, (c, f, short, a) in enumerate(flags.tolist(), start=1):
        row = {"step": step, "loss": 0.0, "reward/format/mean": f, "reward/all/mean": a}
        if run.setting == "scaled":
            row |= {
                "reward/correctness/mean": 6 * c - 3,
                "reward/length/mean": c * short,
                "reward/length_flag/mean": short,
            }
        else:
            row |= {"reward/correctness/mean": c, "reward/length/mean": short}
        rows.append(json.dumps(row))
    (run.folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")


def rising(rate: float) -> np.ndarray:
    return np.clip(np.linspace(0.0, rate, STEPS)[:, None] * np.ones(4), 0, 1)


def test_runs_of_the_comparison_are_valid_and_differ_only_in_the_declared_keys(tmp_path):
    runs = every_run(tmp_path)
    configs = {run: load_config(EXAMPLES.parent / "configs" / "gdpo_tiny_cpu.yaml", run.overrides()) for run in runs}
    for run, config in configs.items():
        validate(config)
        assert config.run.seed == run.seed and config.gdpo.max_num_steps == STEPS
        assert config.policy.model_name == str(tmp_path / "models" / f"small_{run.seed}")
        assert config.data.train.size >= STEPS * config.gdpo.num_prompts_per_step  # no prompt comes twice
        assert config.gdpo.rewards == {
            "correctness": 1 / 6 if run.method == "control" else 1.0,
            "format": 1.0,
            "length": 1.0,
        }
    assert len({str(run.folder) for run in runs}) == len(runs) == 14


def test_raw_flags_are_shown_for_every_training(tmp_path):
    for run in every_run(tmp_path, [0]):
        write(run, rising(0.9))
        np.testing.assert_allclose(comparison.flags_of(run), rising(0.9), atol=1e-12)


def test_a_goal_is_reached_by_the_mean_of_five_steps_or_one_past_the_end():
    curves = np.zeros((1, STEPS, 4))
    curves[0, 9:, 0] = 0.5  # a mean of 0.5 needs five such steps: 10 to 14
    curves[0, :, 1] = 1.0
    assert comparison.steps_to(curves).tolist() == [[14, 5, STEPS + 1, STEPS + 1]]


def test_only_seeds_that_all_methods_of_a_setting_have_finished_are_compared(tmp_path):
    runs = every_run(tmp_path)
    for run in runs:
        write(run, rising(0.9)[: 20 if (run.setting, run.method, run.seed) == ("equal", "grpo", 1) else STEPS])
    curves, complete = comparison.collect(runs)
    assert complete == {"scaled": [0, 1], "equal": [0]}
    assert {len(values) for (setting, _), values in curves.items() if setting == "equal"} == {1}


def test_differences_are_taken_within_a_seed(tmp_path):
    runs = every_run(tmp_path)
    for run in runs:
        write(run, rising(0.4 * run.seed + 0.1 * (run.method == "gdpo")))
    table = comparison.differences_table(comparison.collect(runs)[0])
    assert table.count("+0.050 ± 0.000") == 5 * 4  # the seeds differ by far more than the methods


def test_the_report_has_the_tie_the_control_and_the_limits_beside_the_win(tmp_path, monkeypatch, capsys):
    runs = every_run(tmp_path)
    for run in runs:
        write(run, rising(0.7 + 0.1 * run.seed + 0.2 * (run.method == "gdpo")))
    monkeypatch.setattr(sys, "argv", ["gdpo_vs_grpo.py", "--report", "--seeds", "2", "--out", str(tmp_path)])
    assert comparison.main() == 0
    text = (tmp_path / "comparison.md").read_text()
    assert text in capsys.readouterr().out
    for must in (
        "manually chosen weights",
        "equal scale",
        "does not learn correctness faster",
        "learning rate has more effect",
        "seeds 0, 1",
    ):
        assert must in text.replace("\n", " "), must
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_compare_gives_the_table_of_the_study_cell_for_cell(tmp_path, capsys):
    """On the runs' own files: end values, steps to the goals, and the differences within each seed."""
    runs = [run for run in every_run(tmp_path, (0, 1, 2)) if run.setting == "equal" and run.method != "dr_grpo"]
    random = np.random.default_rng(1)
    for run in runs:
        rate = 0.9 if run.method == "gdpo" else 0.8
        write(run, np.clip(rising(rate) + random.normal(0, 0.03, (STEPS, 4)), 0, 1))
        save_config(load_config(DEMO, run.overrides()), run.folder / "config.yaml")
    flags = {"correctness": "C", "format": "F", "length": "L", "all": "All"}
    metrics = [f"--metric=reward/{name}/mean" for name in flags]
    goals = [f"--goal=reward/{name}/mean={comparison.GOALS[flag]}" for name, flag in flags.items()]
    folders = sorted((str(run.folder) for run in runs), key=lambda name: "_gdpo_" in name)
    assert cli.main(["compare", *folders, *metrics, *goals, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "compare.html").read_text()
    curves, complete = comparison.collect(runs)
    assert complete == {"equal": [0, 1, 2]}
    ends = comparison.ends_table(curves).splitlines()[2:]
    gaps = comparison.differences_table(curves).splitlines()[2:]
    cells = [cell for line in (*ends, *gaps) for cell in line.strip("| ").split(" | ")[2:]]
    assert len(cells) == 2 * 8 + 4 and [cell for cell in cells if f">{cell}<" not in page] == []
    assert "reaches" in capsys.readouterr().out


@pytest.mark.parametrize("goal", ["reward/format/mean", "=0.5", "reward/format/mean=nan", "reward/none/mean=0.5"])
def test_a_goal_that_is_none_costs_one_line(tmp_path, capsys, goal):
    run = every_run(tmp_path)[0]
    write(run, rising(0.5))
    save_config(load_config(DEMO, run.overrides()), run.folder / "config.yaml")
    assert cli.main(["compare", str(run.folder), "--goal", goal, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--goal" in error and not (tmp_path / "out").exists()


def test_report_without_runs_states_this(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gdpo_vs_grpo.py", "--report", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no seed of the first setting is finished"):
        comparison.main()
