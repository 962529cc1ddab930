"""Health: a sound run passes, each kind of sickness is found by the threshold meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_run import demo_row

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.arguments import DEFAULT_CONFIG
from gdpo_nemo.config.health import Check, Trail, read_checks
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.observe.health import (
    HealthAlerts,
    check_health,
    config_checks,
    healthy,
    load_thresholds,
    thresholds_of,
)
from gdpo_nemo.observe.metrics import History, MetricsLog
from gdpo_nemo.utils.errors import ConfigError, RunError

DEMO = load_config(Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml")
THRESHOLDS = read_checks(DEMO.health.checks, DEMO.health.window, "demo")


def record(folder: Path, change=lambda row: row, steps: int = 60) -> Path:
    log = MetricsLog(folder)
    for step in range(1, steps + 1):
        log.append(change(demo_row(step)))
    return folder


def failures(folder: Path) -> set[tuple[str, int | str]]:
    return {(f.check.metric, f.check.at) for f in check_health(folder, THRESHOLDS) if f.status == "fail"}


def test_a_run_like_the_reference_passes_every_threshold(tmp_path):
    findings = check_health(record(tmp_path), THRESHOLDS)
    assert {f.status for f in findings} == {"pass"} and healthy(findings)


@pytest.mark.parametrize(
    "change, found",
    [
        ({"reward/correctness/mean": 0.3}, ("reward/correctness/mean", 20)),
        ({"reward/length/mean": 0.5}, ("reward/length/mean", 10)),
        ({"reward/all/mean": 0.1}, ("reward/all/mean", 60)),
        ({"rollout/mean_length": 35.6}, ("rollout/mean_length", 60)),
        ({"advantage/std": 0.93}, ("advantage/std", "every")),
        ({"policy/entropy": 0.01}, ("policy/entropy", "every")),
        ({"grad_norm": 3.0}, ("grad_norm", "every")),
        ({"grad_norm": float("nan")}, ("grad_norm", "every")),
    ],
)
def test_a_sick_run_fails_the_threshold_meant_for_it(tmp_path, change, found):
    late = record(tmp_path, lambda row: {**row, **change} if row["step"] > 5 else row)
    assert found in failures(late)


def test_one_bad_step_fails_a_check_of_single_steps_and_names_the_step(tmp_path):
    record(tmp_path, lambda row: {**row, "advantage/std": 0.9} if row["step"] == 33 else row)
    (finding,) = check_health(tmp_path, [Check("advantage/std", "every", min=0.999, window=1)])
    assert (finding.status, finding.value, finding.detail) == ("fail", 0.9, "at step 33")


def test_every_judges_full_windows_only(tmp_path):
    record(tmp_path, lambda row: {"step": row["step"], "a": 3.0 if row["step"] == 1 else 1.0}, steps=8)
    assert healthy(check_health(tmp_path, [Check("a", "every", max=2.0)]))
    assert not healthy(check_health(tmp_path, [Check("a", "every", max=2.0, window=1)]))


def test_the_trailing_mean_ends_at_the_named_step(tmp_path):
    record(tmp_path, lambda row: {"step": row["step"], "a": float(row["step"])}, steps=12)
    values = {at: check_health(tmp_path, [Check("a", at, min=0)])[0].value for at in ("start", 3, 10, "end")}
    assert values == {"start": 1.0, 3: 2.0, 10: 8.0, "end": 10.0}


def test_an_unfinished_run_leaves_later_thresholds_open(tmp_path):
    findings = check_health(record(tmp_path, steps=25), THRESHOLDS)
    assert {f.status for f in findings if f.check.at in (30, 60)} == {"open"} and healthy(findings)
    assert not healthy([f for f in findings if f.status == "open"])


def test_an_optional_metric_may_be_absent_and_another_may_not(tmp_path):
    missing = {"reward/all/mean", "reward/format/mean"}
    record(tmp_path, lambda row: {k: v for k, v in row.items() if k not in missing})
    assert failures(tmp_path) == {("reward/format/mean", at) for at in (10, 20, 30, 60)}


def test_an_advisory_check_warns_and_does_not_fail(tmp_path):
    record(tmp_path, lambda row: {**row, "reward/correctness/mean": 0.9})
    findings = check_health(tmp_path, THRESHOLDS)
    assert [f.check.at for f in findings if f.status == "warn"] == ["start"] and healthy(findings)


def test_a_folder_without_steps_is_an_error_not_a_verdict(tmp_path):
    with pytest.raises(RunError):
        check_health(tmp_path, THRESHOLDS)


@pytest.mark.parametrize(
    "text, named",
    [
        ("checks: []", "must contain a list of checks"),
        ("checks: [{metric: a, min: 1}]", "check 1: expected the keys metric and at"),
        ("checks: [{metric: a, at: 1, min: 1}, {metric: a, at: 1}]", "check 2: requires min or max"),
        ("checks: [{metric: a, at: late, min: 1}]", "'late'"),
        ("checks: [{metric: a, at: 1, minimum: 1}]", "check 1: expected"),
        ("checks: [", "invalid YAML"),
        ("{window: 0, checks: [{metric: a, at: 1, min: 1}]}", "window must be at least 1"),
    ],
)
def test_a_threshold_file_with_a_mistake_is_refused(tmp_path, text, named):
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="t.yaml") as caught:
        load_thresholds(path)
    assert named in str(caught.value)


def run_folder(folder: Path, change=lambda row: row, steps: int = 60, **rewards: float) -> Path:
    """A recorded run with the demo's config, its rewards replaced where some are named."""
    overrides = [f"gdpo.rewards={{{', '.join(f'{k}: {v}' for k, v in rewards.items())}}}"] if rewards else []
    folder.mkdir(exist_ok=True)
    save_config(load_config(DEFAULT_CONFIG, overrides), folder / "config.yaml")
    return record(folder, change, steps)


def renamed(row: dict) -> dict:
    return {key.replace("/format/", "/shape/"): value for key, value in row.items()}


def test_the_command_exits_0_for_a_healthy_run_and_1_for_a_sick_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["health", str(run_folder(tmp_path / "good"))]) == 0
    out = capsys.readouterr().out
    assert "healthy" in out and "health.checks" in out and out.count("reward/") == 18 and "19.5 to 21" in out
    sick = run_folder(tmp_path / "sick", lambda row: {**row, "reward/format/mean": 0.1})
    assert cli.main(["health", str(sick)]) == 1
    assert "fail" in capsys.readouterr().out
    assert cli.main(["health", str(tmp_path / "absent")]) == 1
    assert cli.main(["health", str(sick), "--thresholds", "absent.yaml"]) == 2


@pytest.mark.parametrize("columns", ["80", "120"])
def test_run_with_other_rewards_is_checked_by_the_common_bounds(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    folder = run_folder(tmp_path / "run", renamed, correctness=1.0, shape=1.0, length=1.0)
    assert cli.main(["health", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "checked with the default checks" in out and "names other rewards (format)" in out
    assert "reward/shape/dead_groups" in out and "19.5" not in out


def test_a_reward_of_the_config_that_the_metrics_lack_is_a_miss_and_not_another_run(tmp_path):
    run_folder(tmp_path, lambda row: {key: value for key, value in row.items() if "/format/" not in key})
    checks, _ = thresholds_of(tmp_path)
    assert not healthy(check_health(tmp_path, checks))


@pytest.mark.parametrize(
    "change, found",
    [
        ({"parity/mean_abs": 0.01}, "parity/mean_abs"),
        ({"policy/entropy": 0.01}, "policy/entropy"),
        ({"grad_norm": 500.0}, "grad_norm"),
        ({"grad_norm": float("nan")}, "grad_norm"),
        ({"policy/clip_fraction": 0.4}, "policy/clip_fraction"),
        ({"rollout/env_failed": 0.1}, "rollout/env_failed"),
        ({"reward/one/dead_groups": 1.0, "reward/one/std": 0.2}, "reward/one/dead_groups"),
    ],
)
def test_common_bounds_find_each_sickness_in_a_run_without_thresholds(tmp_path, change, found):
    def row(step: int, ill: bool) -> dict:
        sound = {"grad_norm": 0.5, "policy/entropy": 0.3, "parity/mean_abs": 1e-5, "policy/clip_fraction": 0.1}
        sound |= {
            "rollout/env_failed": 0.0,
            "reward/one/mean": 0.5,
            "reward/one/std": 0.5,
            "reward/one/dead_groups": 0.5,
        }
        return {"step": step, **sound, **(change if ill else {})}

    states = []
    for ill in (False, True):
        folder = run_folder(tmp_path / str(ill), lambda r, ill=ill: row(r["step"], ill and r["step"] > 6), 20, one=1.0)
        checks, _ = thresholds_of(folder)
        states.append({f.check.metric for f in check_health(folder, checks) if f.status == "fail"})
    assert states == [set(), {found}]


@pytest.mark.parametrize(
    "change",
    [{}, {"reward/one/weight": 1.0}, {"reward/one/weight": 0.0, "reward/one/at_least": 0.9},
     {"reward/one/weight": -0.5}, {"reward/one/weight": 0.0, "reward/one/at_most": 0.1}],
)  # fmt: skip
@pytest.mark.parametrize("values, sound", [([0.4, 0.9, 1.0], True), ([1.0, 1.0, 1.0], False), ([0.9, 0.4, 0.0], False)])
def test_a_component_constant_at_its_best_is_solved_and_any_other_is_dead(tmp_path, values, sound, change):
    penalty = change.get("reward/one/weight", 1.0) < 0 or "reward/one/at_most" in change
    values = [1.0 - value for value in values] if penalty else values

    def row(step: int) -> dict:
        value = values[min(step // 5, 2)]
        varies = 0.0 if value in (0.0, 1.0) else 0.3
        return {
            "step": step,
            "grad_norm": 0.5,
            "reward/one/mean": value,
            "reward/one/std": varies,
            "reward/one/dead_groups": float(not varies),
            **change,
        }

    folder = run_folder(tmp_path / "run", lambda r: row(r["step"]), 20, one=1.0)
    assert healthy(check_health(folder, thresholds_of(folder)[0])) is sound


def test_a_component_of_one_environment_has_the_direction_of_the_component():
    history = History.of(
        [{"step": 1, "reward/long/weight": -0.5, "reward/rubric/*/weight": -1.0, "reward/a/weight": 1}]
    )
    found = [history.direction(name) for name in ("long", "math/long", "math/rubric/*", "math/a", "math/other")]
    assert found == [-1, -1, -1, 1, 1]


def test_default_checks_apply_beside_the_configs_checks_until_they_are_disabled(tmp_path, capsys):
    dead = {"reward/length/dead_groups": 1.0, "reward/length/std": 0.0, "reward/length/mean": 0.0}
    for overrides, wanted in (
        (["health.checks=[{metric: grad_norm, at: every, max: 9}]"], 1),
        (["health.checks=[]"], 1),
        (["health.disabled=[reward/length/dead_groups]", "health.checks=[]"], 0),
        (["health.checks=[{metric: reward/length/dead_groups, at: end, max: 1}]"], 0),
    ):
        folder = tmp_path / str(overrides)[:40].replace("/", "_")
        folder.mkdir()
        save_config(load_config(DEFAULT_CONFIG, overrides), folder / "config.yaml")
        record(folder, lambda row: {**row, **dead} if row["step"] > 12 else {**row, "reward/length/dead_groups": 0.2})
        assert cli.main(["health", str(folder)]) == wanted, overrides
        assert ("not healthy: reward/length/dead_groups since step 13" in capsys.readouterr().out) == bool(wanted)
    assert cli.main(["train", "--dry-run", "health.disabled=[reward/size/dead_groups]"]) == 2
    assert "error: health.disabled: reward/size/dead_groups has no default check" in capsys.readouterr().err


@pytest.mark.parametrize("learns", [True, False])
def test_the_rise_of_the_total_reward_excludes_changes_of_the_weights(tmp_path, learns):
    """Learning while the weight falls to a tenth, and no change while the weight grows tenfold."""

    def row(step: int) -> dict:
        mean = (0.1 + 0.8 * step / 20 if learns else 0.5) + 0.01 * (step % 3)
        weight = 1.0 - 0.9 * step / 20 if learns else 0.1 + 0.9 * step / 20
        return {"step": step, "reward/one/mean": mean, "reward/one/weight": weight, "reward/total/mean": weight * mean}

    folder = run_folder(tmp_path / "run", lambda r: row(r["step"]), 20, one=1.0)
    check = Check("reward/total/mean", "every", window=3, of="rise", min=2.5)
    assert [finding.status for finding in check_health(folder, [check])] == ["pass" if learns else "fail"]
    alerts: list[str] = []
    live = HealthAlerts(load_config(DEFAULT_CONFIG, ["health.checks=[]"]), alerts.append)
    live.__dict__["_trails"] = {check: Trail(check)}
    for step in range(1, 21):
        live.update(row(step))
    assert bool(alerts) != learns


def test_a_preset_bounds_no_penalty_from_below():
    config = load_config(DEFAULT_CONFIG, ["gdpo.rewards={one: 1, long: -1}", "health={preset: axolotl, checks: []}"])
    bounded = [check.metric for check in config_checks(config) if check.metric.startswith("reward/")]
    assert bounded == ["reward/one/mean"]


def test_a_mistake_in_health_checks_is_found_before_a_run(capsys):
    assert cli.main(["train", "--dry-run", "health.checks=[{metric: a, at: late, min: 1}]"]) == 2
    assert "health.checks: check 1: at must be a step number" in capsys.readouterr().err
