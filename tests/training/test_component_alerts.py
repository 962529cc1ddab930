"""Components that train nothing: an alert, unless what is constant is solved."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.training.gdpo import PATIENCE, ComponentAlerts

CONSTANT = "component 'one' is constant in every group (mean {:.4g}), so it has no training signal"


@pytest.fixture
def follow(config, run_dir, capsys):
    """Plays a component's values, [samples] a step, as a run would; returns what the alerts file and the console
    have."""

    def play(*steps: list[float], weight: float = 1.0) -> tuple[list[tuple[int, str, str]], str]:
        log = RunLog(config, run_dir)
        alerts = ComponentAlerts(log)
        for step, values in enumerate(steps, 1):
            mean = sum(values) / len(values)
            varies = float(len(set(values)) > 1)
            row = {"mean": mean, "std": varies, "dead_groups": 1 - varies, "weight": weight}
            log.step({"step": step, **{f"reward/one/{key}": value for key, value in row.items()}})
            alerts.update(
                SimpleNamespace(
                    alerts=[] if varies else [CONSTANT.format(mean)],
                    names=("one",),
                    low=np.array([min(values)]),
                    high=np.array([max(values)]),
                )
            )
        log.close("complete")
        return [(a["step"], a["level"], a["text"]) for a in read_alerts(run_dir)], capsys.readouterr().out

    return play


def test_a_component_that_is_solved_is_one_note_however_often_it_stumbles(follow):
    solved = [1.0] * 4
    nearly = [1.0, 1.0, 1.0, 0.0]
    told, shown = follow(nearly, *[solved] * 5, nearly, *[solved] * 5)
    assert told == [(4, "note", "component 'one' is solved: for 3 steps every sample has had the best value so far")]
    assert "note step 4: component 'one' is solved" in shown and "ALERT" not in shown


def test_penalty_that_no_sample_gets_is_solved_and_one_that_all_samples_get_is_an_alert(follow):
    told, _ = follow([1.0, 0.0], *[[0.0] * 4] * 3, [1.0, 0.0], *[[1.0] * 4] * 3, weight=-0.5)
    solved = (4, "note", "component 'one' is solved: for 3 steps every sample has had the best value so far")
    assert told == [solved, (8, "ALERT", f"for 3 steps, {CONSTANT.format(1.0)}")]


@pytest.mark.parametrize(
    "before, constant",
    [([], 1.0), ([[0.0, 1.0]], 0.0), ([[-3.0, 3.0]], 0.0), ([[-3.0, -2.0, 3.0]], -1.0)],
    ids=["from the start", "at the worst", "at the mean", "below a sample"],
)
def test_any_other_constant_component_is_an_alert(follow, before, constant):
    told, shown = follow(*before, *[[constant] * 4] * 5)
    step = len(before) + PATIENCE
    assert told == [(step, "ALERT", f"for 3 steps, {CONSTANT.format(constant)}")]
    assert f"ALERT step {step}: for 3 steps, component 'one' is constant" in shown


def test_the_report_names_the_step_of_an_alert_once_and_a_note_is_not_red(follow, run_dir):
    follow([0.0, 1.0], *[[0.0] * 4] * 3, [0.0, 1.0], *[[1.0] * 4] * 3)
    page = (run_dir / "report.html").read_text()
    assert "<p class=alert>step 4: for 3 steps" in page and "<p class=dim>step 8: component" in page
