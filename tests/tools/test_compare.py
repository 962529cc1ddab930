"""Runs side by side: what is one variant, what equal effort means, and that differences are taken seed by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demo_run import NASTY, demo_row
from hypothesis import given, strategies as st

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.tools.compare.comparison import (
    RunRecord,
    band,
    common_effort,
    differences,
    gaps,
    sign_flip_p,
    values_at,
    variants_of,
)

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
KEY = "reward/format/mean"


def record(folder: Path, *overrides: str, steps: int = 12, shift: float = 0.0, seconds: float = 1.0) -> RunRecord:
    """A run whose reward is its step over 100, and ``shift``."""
    folder.mkdir()
    save_config(load_config(DEMO, list(overrides)), folder / "config.yaml")
    log = MetricsLog(folder)
    for step in range(1, steps + 1):
        log.append(demo_row(step) | {KEY: step / 100 + shift, "time/step": seconds})
    return RunRecord.read(folder)


def seeds(tmp_path: Path, name: str, *overrides: str, shifts=(0.0, 0.1, 0.2)) -> list[RunRecord]:
    return [
        record(tmp_path / f"{name}_{seed}", f"run.seed={seed}", *overrides, shift=shift)
        for seed, shift in enumerate(shifts)
    ]


def test_runs_that_differ_only_in_their_seed_are_one_variant(tmp_path):
    grpo = seeds(tmp_path, "grpo", "gdpo.estimator=grpo")
    gdpo = seeds(tmp_path, "gdpo", "run.name=other", "logger.plot=false", "checkpointing.save_period=7")
    variants = variants_of([*grpo, *gdpo[::-1], gdpo[0]])
    assert [v.label for v in variants] == ["estimator=grpo", "estimator=gdpo"]
    assert [[run.seed for run in v.runs] for v in variants] == [[0, 1, 2], [0, 1, 2]]
    assert differences([*grpo, *gdpo]) == ["gdpo.estimator"]


def test_settings_that_follow_the_seed_make_no_variant_if_other_runs_show_this(tmp_path):
    def all_of(name, *overrides):
        return [
            record(tmp_path / f"{name}_{s}", f"run.seed={s}", f"policy.model_name={'ab'[s]}", *overrides)
            for s in (0, 1)
        ]

    one = all_of("one")
    assert [len(v.runs) for v in variants_of(one + all_of("two", "gdpo.epsilon=0.1"))] == [2, 2]
    assert differences(one) == ["policy.model_name"]  # here it may as well be what is compared
    named = seeds(tmp_path, "named")
    assert [run.settings["policy.model_name"][-2:] for run in named] == ["_0", "_1", "_2"]
    assert len(variants_of(named)) == 1


def test_a_setting_that_a_version_did_not_know_is_its_default(tmp_path):
    new = record(tmp_path / "new")
    old = tmp_path / "old"
    record(old, "run.seed=5")
    text = (old / "config.yaml").read_text()
    (old / "config.yaml").write_text("".join(line for line in text.splitlines(True) if "kl_input_clamp" not in line))
    assert "loss_fn.kl_input_clamp_value" in new.settings and len(variants_of([new, RunRecord.read(old)])) == 1


def test_an_ignored_setting_makes_no_variant(tmp_path):
    runs = [record(tmp_path / "a"), record(tmp_path / "b", "run.seed=1", "cluster.cpus_per_node=1", "rollout.depth=9")]
    assert len(variants_of(runs)) == 2
    assert len(variants_of(runs, ["cluster.", "rollout.depth"])) == 1


def test_runs_of_equal_settings_and_seed_count_as_one_seed(tmp_path):
    runs = [record(tmp_path / name) for name in ("before", "after")]
    assert [v.label for v in variants_of(runs)] == ["before", "after"]


def test_a_name_that_folders_have_in_common_does_not_end_in_half_a_number(tmp_path):
    rule = "{component: %s, condition: {on: correctness, ge: 1.0}}"
    conditioned = f"gdpo.shaping=[{rule % 'format'}, {rule % 'length'}]"  # too long to be a label itself
    runs = [record(tmp_path / f"plain_v2_4{seed}", f"run.seed=4{seed}") for seed in (2, 3)]
    runs += [record(tmp_path / f"conditioned{seed}", f"run.seed={seed}", conditioned) for seed in (9, 10)]
    runs += [record(tmp_path / "step_12", "run.seed=1", "gdpo.estimator=grpo")]
    assert [v.label for v in variants_of(runs)] == ["plain_v2", "conditioned", "step_12"]


def test_equal_effort_is_the_smallest_effort_of_all_runs(tmp_path):
    slow = record(tmp_path / "slow", steps=12, seconds=3.0)
    fast = record(tmp_path / "fast", "run.seed=1", "gdpo.num_prompts_per_step=8", steps=30, seconds=1.0)
    variants = variants_of([slow, fast])
    assert [common_effort(variants, axis) for axis in ("steps", "samples", "time")] == [12, 12 * 16 * 8, 30]

    def means(axis):
        return [round(float(values_at(v, KEY, axis, common_effort(variants, axis))[0]) * 100, 6) for v in variants]

    # Trailing means of five steps that end with the last finished one.
    assert means("steps") == [10, 10] and means("samples") == [10, 22] and means("time") == [8, 28]


def test_the_band_is_mean_and_standard_error_as_far_as_all_runs_go(tmp_path):
    runs = seeds(tmp_path, "run")
    runs.append(record(tmp_path / "longer", "run.seed=3", steps=20, shift=0.1))
    effort, mean, error = band(variants_of(runs)[0], KEY, "steps")
    assert effort.tolist() == list(range(1, 13)) and mean[-1] == pytest.approx(0.10 + 0.1)
    assert error == pytest.approx(np.std([0, 0.1, 0.2, 0.1], ddof=1) / 2)


@pytest.mark.slow
def test_differences_are_taken_within_a_seed(tmp_path):
    """The seeds differ by far more than the variants."""
    base = seeds(tmp_path, "base", shifts=(0.0, 0.5, -0.4))
    better = seeds(tmp_path, "better", "gdpo.epsilon=0.1", shifts=(0.01, 0.51, -0.39))
    alone = record(tmp_path / "alone", "run.seed=9", "gdpo.epsilon=0.1", shift=7.0)
    (gap,) = gaps(variants_of([*base, *better, alone]), [KEY])
    assert gap.seeds == (0, 1, 2) and gap.variant == "epsilon=0.1"
    assert gap.at_end == pytest.approx([0.01] * 3) and gap.over_run == pytest.approx([0.01] * 3)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.integers(0, 7))
def test_the_randomisation_test_is_symmetric_and_bounded_by_the_seeds(values, place):
    gap = np.array(values)
    p = sign_flip_p(gap)
    assert 2 / 2 ** len(gap) <= p <= 1 and sign_flip_p(-gap) == p
    assert sign_flip_p(np.abs(gap)) <= p
    assert sign_flip_p(np.roll(gap, place)) == p


def test_the_randomisation_test_of_known_differences():
    assert sign_flip_p(np.array([0.1, 0.2, 0.3])) == 0.25 and sign_flip_p(np.array([1.0, -1.0])) == 1
    assert sign_flip_p(np.array([3.0, 2.0, -1.0])) == 0.5  # 4 of 8 sums: +-(3+2+1), +-(3+2-1)
    assert np.isnan(sign_flip_p(np.array([1.0])))


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_picture_and_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for name, value in (("a", 1e-6), ("b", 0.5)):
        seeds(tmp_path, name, f"gdpo.epsilon={value}")
    runs = [str(folder) for folder in sorted(tmp_path.iterdir())]
    assert cli.main(["compare", *runs, "--out", str(tmp_path / "out"), "--metric", KEY, "--over", "time"]) == 0
    shown = capsys.readouterr().out
    wanted = (
        "gdpo.epsilon",
        "After 12 optimizer steps",
        "After 12 seconds",
        "0.200 ± 0.058",
        "A 95% interval is ± 4.3 (of 3 runs) standard errors.",
        "Differences from",
        "0.25",
    )
    for text in wanted:
        assert text in shown, text
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "data:image/png;base64," in page and "epsilon=0.5" in page and str(tmp_path / "b_2") in page


def test_content_of_a_config_is_escaped_in_the_page(tmp_path, capsys):
    runs = [record(tmp_path / "a"), record(tmp_path / "b", "run.seed=1")]
    for run in runs:
        with open(run.folder / "config.yaml", "a") as file:
            file.write(f"strange: {{key: {NASTY[:28]!r}, of: {run.folder.name}}}\n")
    assert cli.main(["compare", *(str(run.folder) for run in runs), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<script" not in page and "strange.of" in page


def _no_config(folder):
    (folder / "config.yaml").unlink()


def _no_rows(folder):
    (folder / "metrics.jsonl").write_text("")


def _not_yaml(folder):
    (folder / "config.yaml").write_bytes(b"a: [\xff")


def _a_list(folder):
    (folder / "config.yaml").write_text("- 1\n")


def _no_rewards(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, options, status, line",
    [
        (_no_config, [], 2, "does not contain a run (config.yaml: No such file or directory)"),
        (_not_yaml, [], 2, "config.yaml is not valid YAML"),
        (_a_list, [], 2, "config.yaml is not a config"),
        (_no_rows, [], 1, ": no training steps to compare"),
        (_no_rewards, [], 2, "specify a metric with --metric KEY"),
        (None, ["--metric", "no/such"], 2, "--metric: no run has the metric no/such"),
        (None, ["--out", "/proc/none"], 1, "cannot be written"),
    ],
)
def test_incomparable_runs_are_refused_in_one_line(tmp_path, capsys, damage, options, status, line):
    folder = record(tmp_path / "run").folder
    if damage:
        damage(folder)
    assert cli.main(["compare", str(folder), "--out", str(tmp_path / "out"), *options]) == status
    said = capsys.readouterr().err.strip()
    assert line in said and "\n" not in said
