"""Bounds of metrics during the run: one alert where a metric leaves its range, with a way out; or the run's end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from demo_run import demo_row

from gdpo_nemo.config.load import load_config
from gdpo_nemo.observe.health import HealthAlerts, live_checks
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metric_registry import metrics
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, RunError


def play(config, rows, before=()) -> list[str]:
    said: list[str] = []
    alerts = HealthAlerts(config, said.append, before)
    for row in rows:
        alerts.update(row)
    return said


def rows(count: int, **changed) -> list[dict]:
    return [
        demo_row(step) | {key.replace("__", "/"): value for key, value in changed.items()}
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    "key, value, wanted",
    [
        (
            "policy/entropy",
            0.001,
            "policy/entropy is 0.001 nats/token over 5 steps, accepted: at least 0.02 (entropy has collapsed",
        ),
        ("grad_norm", 900.0, "grad_norm is 900 over 5 steps, accepted: 0.1 to 2"),
        ("policy/clip_fraction", 0.5, "policy/clip_fraction is 0.5 over 5 steps, accepted: at most 0.3"),
        ("parity/mean_abs", 0.3, "parity/mean_abs is 0.3 nats over 5 steps, accepted: at most 0.001"),
        ("rollout/env_failed", 0.4, "rollout/env_failed is 0.4 over 5 steps, accepted: at most 0.05"),
        ("rollout/truncated", 0.9, "rollout/truncated is 0.9 over 5 steps, accepted: at most 0.5"),
        ("rollout/aborted", 0.3, "rollout/aborted is 0.3 over 5 steps, accepted: at most 0.2"),
        ("advantage/dead_groups", 0.95, "advantage/dead_groups is 0.95 over 5 steps, accepted: at most 0.9"),
    ],
)
def test_metric_outside_its_range_is_reported_once_with_a_remedy(config, key, value, wanted):
    (line,) = play(config, [row | {key: value} for row in rows(30)])
    assert line.startswith(wanted) and "; try " in line


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_sound_run_gives_no_alert(config, noise):
    assert play(config, [demo_row(step, noise) for step in range(1, 200)]) == []


def test_every_bound_of_a_step_has_a_way_out():
    judged = [metric for metric in metrics().values() if metric.is_checked and metric.at == "every"]
    assert len(judged) >= 8 and all(metric.why and metric.remedy for metric in judged)


def test_one_bad_step_gives_no_alert_and_a_relapse_is_reported_again(config):
    def at(*bad: int):
        return [demo_row(step) | ({"policy/entropy": 0.001} if step in bad else {}) for step in range(1, 41)]

    assert play(config, at(20)) == []
    assert len(play(config, at(*range(8, 16), *range(28, 36)))) == 2


def test_a_resumed_run_neither_forgets_nor_repeats(config):
    every = [row | {"policy/entropy": 0.001} for row in rows(12)]
    for done in range(13):
        before, after = every[:done], every[done:]
        assert len(play(config, before)) + len(play(config, after, before)) == 1, done


def test_the_configs_own_bound_takes_the_place_of_the_general_one(config):
    config.health.checks = [
        {"metric": "policy/entropy", "at": "every", "min": 0.0, "window": 1},
        {"metric": "rollout/mean_length", "at": "every", "max": 30, "window": 2},
        {"metric": "reward/format/mean", "at": "end", "min": 2.0},
    ]
    said = play(config, rows(9, policy__entropy=0.001, rollout__mean_length=31.0))
    assert said == ["rollout/mean_length is 31 tokens over 2 steps, accepted: at most 30"]
    assert "reward/format/mean" not in {check.metric for check in live_checks(config)}


def test_alerts_can_be_turned_off_and_stops_stay(config):
    bad = rows(9, policy__entropy=0.001, grad_norm=900.0)
    config.health.alerts = False
    assert play(config, bad) == []
    config.health.stop_on = ["grad_norm"]
    with pytest.raises(RunError, match=r"^health.stop_on: grad_norm is 900 over 5 steps, accepted: 0.1 to 2"):
        play(config, bad)


def test_stop_is_recorded_and_reported_with_its_step(config, run_dir):
    config.health.stop_on = ["policy/entropy"]
    log = RunLog(config, run_dir)
    with pytest.raises(RunError, match="health.stop_on: policy/entropy"):
        for row in rows(9, policy__entropy=0.001):
            log.step(row)
    log.close("failed")
    assert log.history.training[-1]["step"] == 5
    assert [(a["step"], a["level"]) for a in read_alerts(run_dir)] == [(5, "ALERT")]


@pytest.mark.parametrize("name", ["policy/entropie", "reward/correctness/dead_groups", "time/step"])
def test_stop_for_a_metric_without_bounds_is_refused(name):
    config = load_config("configs/gdpo_tiny_cpu.yaml", [f"health.stop_on=[{name}]"])
    with pytest.raises(ConfigError, match=f"health.stop_on: {name} is not checked at every step"):
        validate(config)
    own = [*config.health.checks, {"metric": name, "at": "every", "max": 9}]
    validate(replace(config, health=replace(config.health, checks=own)))
