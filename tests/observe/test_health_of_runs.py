"""Rules of health on metrics of real runs: what is sound is not spoken of, and each way to break one is named."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from demo_run import demo_row

from gdpo_nemo.config.health import BEFORE, PRESETS, Check, Trail, preset_checks, read_checks
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.health import (
    DRIFTS,
    HealthAlerts,
    advice,
    check_health,
    findings_table,
    general_checks,
    thresholds_of,
    unknown_stops,
)
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.utils.errors import ConfigError, RunError

RUNS = Path(__file__).parent / "runs"
REWARDS = ["correctness", "format", "length"]


def rows_of(name: str) -> list[dict]:
    with open(RUNS / f"{name}.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [{**row, "step": int(row["step"])} for row in rows]


@pytest.fixture
def config() -> Config:
    config = Config()
    config.gdpo.rewards = dict.fromkeys(REWARDS, 1.0)
    config.policy.precision = "float32"
    return config


def alerts_of(config, rows, before=()) -> list[str]:
    said: list[str] = []
    alerts = HealthAlerts(config, said.append, before)
    for row in rows:
        alerts.update(row)
    return said


def named(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines}


def write(folder, rows):
    log = MetricsLog(folder)
    for row in rows:
        log.append(row)
    log.close()


@pytest.mark.parametrize("name", ["sound_0", "sound_1", "sound_2", "sound_stale"])
def test_sound_run_gives_no_finding(config, tmp_path, name):
    rows = rows_of(name)
    assert len(rows) == 60 and alerts_of(config, rows) == []
    write(tmp_path, rows)
    found = check_health(tmp_path, general_checks(config, REWARDS))
    assert [(f.check.metric, f.check.of, f.status) for f in found if f.status not in ("pass", "open", "skip")] == []


@pytest.mark.parametrize("name", ["uncorrected_0", "uncorrected_1", "uncorrected_2"])
def test_a_run_that_falls_apart_is_named_while_it_does(config, name):
    assert "reward/total/mean" in named(alerts_of(config, rows_of(name)))


def test_a_learning_rate_a_hundred_times_too_large_is_named_within_ten_steps(config):
    rows = rows_of("lr_100")
    early = {"policy/entropy", "rollout/duplicates", "rollout/truncated", "advantage/dead_groups"}
    assert named(alerts_of(config, rows[:10])) == early
    assert named(alerts_of(config, rows)) == early | {"reward/total/mean"}


BROKEN = {
    "off_by_one": {"parity/mean_abs"},
    "truncated": {"rollout/truncated"},
    "hung_verifier": {"rollout/env_failed"},
    "duplicates": {"policy/entropy", "rollout/duplicates"},
    "wrong_sign": {"reward/total/mean", "rollout/truncated", "advantage/dead_groups"},
    "noise_reward": {"reward/total/mean"},
    "shuffled_advantages": {"reward/total/mean"},
    "only_short": {"reward/total/mean", "rollout/mean_length", "advantage/dead_groups"},
    "lr_10": {"reward/total/mean", "rollout/mean_length", "advantage/dead_groups", "rollout/duplicates"},
}
"""What is said of the runs of ``broken_runs``, and of nothing else."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_broken_in_one_way_is_named_for_that(config, tmp_path, name):
    rows = rows_of(name)
    lines = alerts_of(config, rows)
    assert named(lines) == BROKEN[name] and all("; try " in line for line in lines)
    write(tmp_path, rows)
    missed = [f for f in check_health(tmp_path, general_checks(config, REWARDS)) if f.status in ("fail", "warn")]
    assert BROKEN[name] <= {f.check.metric for f in missed}


def test_a_component_that_never_pays_is_missed_by_health_and_no_other_is(config, tmp_path):
    """While the run goes on ``ComponentAlerts`` names it, from all samples, which are not recorded here."""
    rows = rows_of("dead_component")
    assert alerts_of(config, rows) == []
    write(tmp_path, rows)
    missed = [f for f in check_health(tmp_path, general_checks(config, REWARDS)) if f.status in ("fail", "warn")]
    assert [f.check.metric for f in missed] == ["reward/format/dead_groups"]


CHANGES = {
    "entropy explodes": ("policy/entropy", lambda row: row["policy/entropy"] * 1.08 ** row["step"]),
    "entropy collapses": ("policy/entropy", lambda row: row["policy/entropy"] * 0.9 ** row["step"]),
    "one gradient is a spike": ("grad_norm", lambda row: row["grad_norm"] * (40 if row["step"] == 33 else 1)),
    "gradients explode": ("grad_norm", lambda row: row["grad_norm"] * 1.2 ** row["step"]),
    "length grows": ("rollout/mean_length", lambda row: row["rollout/mean_length"] * 1.03 ** row["step"]),
    "length shrinks": ("rollout/mean_length", lambda row: row["rollout/mean_length"] * 0.96 ** row["step"]),
    "rewards are noise": ("reward/total/mean", lambda row: 1.3 + 0.1 * ((row["step"] * 7919) % 11 - 5) / 5),
    "rewards fall": ("reward/total/mean", lambda row: 1.3 - row["step"] / 100),
    "rewards are constant": ("reward/total/mean", lambda row: 1.3),
    "log-probs of the sampler drift": ("parity/mean_abs", lambda row: row["parity/mean_abs"] * 1.1 ** row["step"]),
    "log-probs are off by one": ("parity/mean_abs", lambda row: 0.7),
    "most groups are dead": ("advantage/dead_groups", lambda row: 0.95),
    "the starting model is left": ("policy/reference_kl", lambda row: row["step"] / 20),
    "the lower clip takes much": ("policy/clip_low", lambda row: 0.25),
    "the upper clip takes much": ("policy/clip_high", lambda row: 0.25),
    "a clip takes a third": ("policy/clip_fraction", lambda row: 0.4),
    "a ratio is enormous": ("policy/ratio_max", lambda row: 1e3),
    "a ratio is next to nothing": ("policy/ratio_min", lambda row: 1e-6),
    "the correction drops most": ("policy/importance_masked", lambda row: 0.6),
    "answers have no end": ("rollout/truncated", lambda row: row["step"] / 60),
    "samples are copies": ("rollout/duplicates", lambda row: 0.99),
    "the verifier fails": ("rollout/env_failed", lambda row: 0.1),
    "stragglers are cut": ("rollout/aborted", lambda row: 0.3),
    "the trainer waits": ("idle/trainer", lambda row: 0.97),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_sickness_is_named_with_a_remedy(config, tmp_path, change):
    key, sick = CHANGES[change]
    rows = [{**row, key: sick(row)} for row in rows_of("sound_1")]
    lines = alerts_of(config, rows)
    assert named(lines) == {key} and all("(" in line and "; try " in line for line in lines)
    write(tmp_path, rows)
    missed = [f for f in check_health(tmp_path, general_checks(config, REWARDS)) if f.status in ("fail", "warn")]
    assert {f.check.metric for f in missed} == {key}


def test_a_resumed_run_compares_with_the_start_of_the_whole_run(config):
    key, sick = CHANGES["length grows"]
    rows = [{**row, key: sick(row)} for row in rows_of("sound_1")]
    for done in (0, 3, 25, 59):
        before, after = rows[:done], rows[done:]
        assert len(alerts_of(config, before)) + len(alerts_of(config, after, before)) == 1, done


def judged(check: Check, values) -> list[float | None]:
    trail = Trail(check)
    return [trail.add(value) for value in values]


def test_check_computes_values_relative_to_start_and_earlier_steps():
    def check(of, window):
        return Check("m", "every", window=window, of=of, max=1.0)

    assert judged(check("value", 2), [1.0, 3.0, 5.0]) == [None, 2.0, 4.0]
    assert judged(check("start", 2), [1.0, 3.0, 5.0]) == [None, 1.0, 2.0]
    assert judged(check("start", 1), [0.0, 3.0]) == [None, None]
    spike = judged(check("before", 1), [1.0] * 10 + [7.0] + [2.0] * (2 * BEFORE))
    assert spike[:10] == [None] * 10 and spike[10] == 7.0 and spike[11] == 2.0 and spike[-1] == 1.0
    rise = judged(check("rise", 3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert rise[:5] == [None] * 5 and rise[5] == pytest.approx(3 / (2 / 3) ** 0.5)
    assert judged(check("rise", 2), [1.0] * 4)[-1] == 0.0


def test_drift_of_a_config_replaces_the_default_drift_and_keeps_the_bound(config):
    config.health.checks = [{"metric": "policy/entropy", "at": "every", "of": "start", "max": 100.0}]
    key, sick = CHANGES["entropy explodes"]
    assert alerts_of(config, [{**row, key: sick(row)} for row in rows_of("sound_1")]) == []
    key, sick = CHANGES["entropy collapses"]
    assert named(alerts_of(config, [{**row, key: sick(row)} for row in rows_of("sound_1")])) == {key}


def test_drift_ends_a_run_only_if_the_config_declares_it_as_a_check(config):
    key, sick = CHANGES["one gradient is a spike"]
    rows = [{**row, key: sick(row)} for row in rows_of("sound_1")]
    config.health.stop_on = [key]
    assert named(alerts_of(config, rows)) == {key}
    config.health.checks = [{"metric": key, "at": "every", "of": "before", "window": 1, "max": 10.0}]
    with pytest.raises(
        RunError, match="grad_norm is [0-9.]+ times the earlier median, accepted: at most 10 times the median"
    ):
        alerts_of(config, rows)
    config.health.stop_on = ["reward/total/mean"]
    assert unknown_stops(config) == ["reward/total/mean"]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"of": "end"}, "of must be one of value, start, before, rise"),
        ({"of": "rise", "at": 20}, "requires at: every"),
        ({"of": "rise", "window": 1}, "requires a window of at least 2"),
    ],
)
def test_drift_that_cannot_be_checked_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        read_checks([{"metric": "grad_norm", "at": "every", "max": 2, **change}], 5, "health.checks")


def test_every_drift_has_a_reason_and_a_remedy():
    assert all(advice(drift.check) == (drift.why, drift.remedy) and drift.why and drift.remedy for drift in DRIFTS)
    table = findings_table([])
    assert table.columns[3].header == "accepted"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_passes_a_sound_run_and_fails_a_dead_one(config, tmp_path, preset):
    checks = preset_checks(preset, REWARDS)
    assert {f"reward/{name}/mean" for name in REWARDS} <= {check.metric for check in checks}
    write(tmp_path / "sound", rows_of("sound_0"))
    assert {f.status for f in check_health(tmp_path / "sound", checks)} == {"pass"}
    dead = [
        {**row, "policy/entropy": 0.001, "advantage/dead_groups": 1.0, "grad_norm": 0.0} for row in rows_of("sound_0")
    ]
    write(tmp_path / "dead", dead)
    missed = {(f.check.metric, f.status) for f in check_health(tmp_path / "dead", checks) if f.status != "pass"}
    assert ("policy/entropy", "fail") in missed and ("advantage/dead_groups", "fail") in missed
    assert ("grad_norm", "warn") in missed


def test_a_config_names_a_preset_and_may_replace_its_checks(tmp_path):
    own = "health.checks=[{metric: grad_norm, at: every, max: 3}]"
    overrides = ["gdpo.rewards={correctness: 1, format: 1, length: 1}", "health.preset=axolotl", own]
    config = load_config(None, overrides)
    save_config(config, tmp_path / "config.yaml")
    write(tmp_path, [demo_row(step) for step in range(1, 31)])
    checks, origin = thresholds_of(tmp_path)
    assert "its config" in origin and {(c.metric, c.at, c.max) for c in checks} > {
        (c.metric, c.at, 3 if (c.metric, c.at) == ("grad_norm", "every") else c.max)
        for c in preset_checks("axolotl", REWARDS)
    }
    assert [
        check.max for check in checks if check.metric == "grad_norm" and check.of == "value" and check.at == "every"
    ] == [3]
    with pytest.raises(ConfigError, match="health.preset: 'axolotol' .* did you mean axolotl"):
        load_config(None, ["health.preset=axolotol"])
