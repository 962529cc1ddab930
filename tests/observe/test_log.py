"""The facade: one call per event, every file written, and only a metrics failure ends a run."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from demo_run import NASTY, demo_groups, demo_row, demo_validation
from image_samples import FIRST, image_group
from rich.console import Console

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import save_config
from gdpo_nemo.observe import console, html_report as report, log, sample_writer
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import History, read_metrics
from gdpo_nemo.observe.run_files import RESTARTING, read_alerts, write_alert
from gdpo_nemo.observe.sample_images import store_images
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import rollout_files
from gdpo_nemo.utils.errors import RunError


def play(config, steps=range(1, 8), start: int = 0, status: str = "complete") -> None:
    """A run of a few steps. With the status RESTARTING it is not drawn, which takes most of the time."""
    run = RunLog(config, config.run.dir, start)
    if start == 0:
        run.validation(demo_validation(0))
    for step in steps:
        run.step(demo_row(step), demo_groups(step), SampleValues(np.zeros(6)))
        run.span("trainer", "train", step, step + 0.5)
    run.validation(demo_validation(steps[-1]))
    run.close(status)


@pytest.fixture
def patient(monkeypatch):
    """A busy machine's disk is not slow."""
    monkeypatch.setattr(sample_writer, "_SLOW_S", 3600.0)


@pytest.mark.slow
def test_a_run_leaves_every_file_and_a_summary(config, run_dir, capsys, patient):
    play(config)
    assert {p.name for p in run_dir.iterdir()} == {
        "metrics.jsonl",
        "rollouts",
        "tensorboard",
        "trace.json",
        "rewards.png",
        "report.html",
    }
    assert (run_dir / "rewards.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert sum(line.startswith("step ") for line in shown.splitlines()) == 7
    assert "step  3/60  correctness " in shown and "ETA 0:57" in shown and "rollout 45%" in shown
    assert "complete after step 7" in shown and "validation after step 0" in shown and "report.html" in shown


def test_a_resumed_run_leaves_the_rows_of_an_undisturbed_one(config, run_dir, tmp_path):
    play(config, range(1, 6), status=RESTARTING)
    play(config, range(4, 8), start=3, status=RESTARTING)
    resumed = read_metrics(run_dir)
    config.run.dir = str(tmp_path / "undisturbed")
    play(config, status=RESTARTING)
    assert resumed == read_metrics(config.run.dir)
    assert [s for s, _ in rollout_files(run_dir)] == list(range(1, 8))


def test_a_run_that_starts_over_leaves_nothing_of_the_first_try(config, run_dir):
    play(config, range(1, 3), status=RESTARTING)
    play(config, range(1, 3), status=RESTARTING)
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2, 2]


def test_record_of_a_run_that_starts_again_is_archived_and_reported(config, run_dir):
    for end in (4, 3, 2):
        play(config, range(1, end), status=RESTARTING)
        store_images(run_dir / "images", [FIRST] if end == 4 else [])
    kept = {path.name: path for path in (run_dir / "archive").iterdir()}
    assert {name: len(read_metrics(path)) for name, path in kept.items()} == {"0001": 5, "0002": 4}
    assert [step for step, _ in rollout_files(kept["0001"])] == [1, 2, 3]
    assert [step for step, _ in rollout_files(run_dir)] == [1]
    assert len(list((kept["0001"] / "images").iterdir())) == 1 and not (run_dir / "images").exists()
    (note,) = read_alerts(run_dir)
    assert note["level"] == "note" and str(kept["0002"]) in note["text"]


def test_a_run_whose_folder_is_anothers_records_nothing_more(config, run_dir):
    def lost():
        raise RunError("taken over")

    run = RunLog(config, run_dir, guard=lost)
    with pytest.raises(RunError, match="taken over"):
        run.step(demo_row(1))
    assert read_metrics(run_dir) == []


@pytest.mark.parametrize(
    "target",
    [
        (log, "plot_rewards"),
        (log, "write_report"),
        (sample_writer, "write_rollouts"),
        (console.PlainConsole, "step"),
        (log, "_tensorboard"),
        (log, "TraceLog"),
    ],
)
def test_failed_plot_warns_once_and_the_run_continues(config, run_dir, monkeypatch, target):
    def broken(*arguments, **named):
        raise RuntimeError("no font")

    monkeypatch.setattr(*target, broken)
    play(config, status="complete" if target[1] in ("plot_rewards", "write_report") else RESTARTING)
    assert len(read_metrics(run_dir)) == 9
    (alert,) = read_alerts(run_dir)
    assert "no font" in alert["text"]


def test_a_failure_to_write_metrics_ends_the_run(config):
    run = RunLog(config, config.run.dir)
    run._metrics._file = open("/dev/full", "w")
    with pytest.raises(RunError, match="metrics.jsonl"):
        run.step(demo_row(1))


@pytest.mark.slow
def test_samples_are_written_only_if_requested(config, run_dir):
    config.rollout.save_samples = False
    config.logger.plot = False
    play(config)
    assert not (run_dir / "rollouts").exists() and not (run_dir / "rewards.png").exists()


@pytest.mark.slow
def test_the_report_is_one_page_without_anything_active_in_it(config, run_dir):
    save_config(config, run_dir / "config.yaml")
    run = RunLog(config, run_dir)
    run.step(demo_row(1), demo_groups(1), SampleValues(np.linspace(-1, 1, 6)))
    run.step(demo_row(2), [image_group()], SampleValues(np.zeros(2)))
    run.alert("slow <engine>")
    run.close("complete")
    page = (run_dir / "report.html").read_text()
    assert NASTY[:9] == "a<script>" and "<script" not in page and "&lt;script&gt;" in page
    assert "slow &lt;engine&gt;" in page and "max_num_steps: 60" in page and "39172=&lt;b&gt;" in page
    assert page.count("data:image/png;base64,") == 2 and "http" not in page
    assert "A [image 64×48 " in page and "image_pad" not in page


@pytest.mark.slow
def test_console_and_report_give_the_reason_for_a_weight(config, capsys, run_dir):
    run = RunLog(config, run_dir)
    for step, weight in ((1, 0.5), (2, 0.3149)):
        goal = {"reward/length/at_least": 0.95, "reward/length/samples": 64.0, "reward/length/weight": weight}
        goal["reward/length/factor"] = 0.5
        schedule = {"reward/correctness/weight": 0.1 * step}
        fixed = {"reward/format/weight": 0.5}
        run.step({**demo_row(step), **goal, **schedule, **fixed, "reward/length/mean": 0.91})
    run.close("complete")
    shown = capsys.readouterr().out
    why = "constraint at_least 0.95, mean 0.91 over 64 samples, gdpo.weighting with the factor 0.5"
    change = "schedule or changed config, last changed in step 2"
    assert f"weights  correctness 0.2: {change}; length 0.315: {why}\n" in shown
    assert "weights  length 0.5: constraint" in shown and shown.count("  weights  ") == 2
    row = f"<td>length</td><td>0.500</td><td>0.315</td><td>{why}</td>"
    assert row in (run_dir / "report.html").read_text()


@pytest.mark.slow
def test_the_report_command_redraws_a_run_from_its_files(config, run_dir, capsys):
    play(config)
    (run_dir / "report.html").unlink()
    capsys.readouterr()
    assert cli.main(["report", str(run_dir)]) == 0
    assert Path(capsys.readouterr().out.strip()) == run_dir / "report.html" and (run_dir / "report.html").exists()
    assert cli.main(["report", str(run_dir / "rollouts")]) == 1
    assert "has no metrics" in capsys.readouterr().err


@pytest.mark.slow
def test_plot_and_report_are_renewed_during_the_run(config, run_dir, patient):
    config.logger.report_period = 2
    run = RunLog(config, run_dir)
    for step in (1, 2, 3):
        run.step(demo_row(step), demo_groups(step))
    assert run._redraw._process.wait() == 0
    assert (run_dir / "rewards.png").read_bytes().startswith(b"\x89PNG")
    steps = re.search(r"<p class=dim>not finished · (\d) steps", (run_dir / "report.html").read_text())
    assert steps and steps[1] in "23"
    run.close("stopped")
    assert " · 3 steps" in (run_dir / "report.html").read_text()
    assert read_alerts(run_dir) == [] and not list(run_dir.glob("*partial*"))


@pytest.mark.slow
def test_running_plot_process_is_not_restarted_and_ends_with_the_run(run_dir, monkeypatch):
    program = (
        "import sys, time; from gdpo_nemo.utils.files import whole_file; "
        "unfinished = whole_file(sys.argv[1] + '/report.html'); unfinished.__enter__(); "
        "open(sys.argv[1] + '/started', 'a').write('x'); time.sleep(600)"
    )
    monkeypatch.setattr(report, "_COMMAND", (sys.executable, "-c", program))
    run_dir.mkdir()
    drawing = report.Redraw(run_dir, 1, plot=True)
    drawing.step(1)
    process = drawing._process
    deadline = time.monotonic() + 300
    while not (run_dir / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for step in range(2, 20):
        drawing.step(step)
    assert drawing._process is process
    drawing.close()
    assert process.returncode == -9 and (run_dir / "started").read_text() == "x"
    assert [path.name for path in run_dir.iterdir()] == ["started"]


@pytest.mark.slow
def test_a_drawing_that_fails_is_an_alert_and_no_end(config, run_dir, monkeypatch, patient):
    monkeypatch.setattr(report, "_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    config.logger.report_period = 1
    run = RunLog(config, run_dir)
    run.step(demo_row(1))
    run._redraw._process.wait()
    run.step(demo_row(2))
    run.close("complete")
    (alert,) = read_alerts(run_dir)
    assert "exited with status 3" in alert["text"] and (run_dir / "report.html").exists()


def test_report_of_one_bare_row_has_a_plot(run_dir):
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/a/mean": -2.5}\n')
    assert "-2.500" in report.write_report(run_dir).read_text()


@pytest.mark.parametrize(
    "steps, heads, change", [(1, "first step", "-"), (2, "first step", "+1.000"), (7, "first 3 steps", "+4.000")]
)
def test_first_and_last_steps_of_a_short_run_do_not_overlap(steps, heads, change):
    history = History.of({"step": step, "reward/a/mean": float(step)} for step in range(1, steps + 1))
    titles, ((name, first, last, difference, *_),) = console.reward_table(history)
    assert (titles[1], name, difference) == (heads, "a", change)
    assert (last == "-") == (steps == 1)


@pytest.mark.slow
def test_report_names_status_model_algorithm_and_rewards_on_any_screen(config, run_dir):
    log = RunLog(config, run_dir)
    log.step(demo_row(1))
    log.close("complete")
    save_config(config, run_dir / "config.yaml")
    page = report.write_report(run_dir).read_text()
    head = page.partition("<h2>")[0]
    for text in (
        "not finished · 1 step ·",
        config.policy.model_name,
        "gdpo",
        "1.0 correctness",
        "name=viewport",
        "prefers-color-scheme",
    ):
        assert text in head


def live(history: History, mode: str = "live", terminal: bool = True) -> tuple[console.Console, io.StringIO]:
    text = io.StringIO()
    rich = Console(file=text, force_terminal=terminal, width=120)
    return console.make_console(mode, "demo", 60, history, rich), text


def test_the_live_panel_shows_rewards_trend_speed_and_time_left(run_dir):
    history = History()
    shown, text = live(history)
    for step in range(1, 31):
        history.add(demo_row(step))
        shown.step(history.training[-1])
    history.add(demo_validation(30))
    shown.validation(history.validation[-1])
    shown.tell("ALERT", "engine [0] is slow")
    shown.close("complete", run_dir)
    for part in (
        "step 30/60",
        "ETA 0:30",
        "correctness",
        "2,900 tokens/s",
        "rollout ",
        "staleness 0",
        "parity 2.0e-05",
        "█",
        "engine [0] is slow",
    ):
        assert part in text.getvalue(), part


@pytest.mark.parametrize(
    "mode, terminal, kind",
    [("auto", True, console.LiveConsole), ("auto", False, console.PlainConsole), ("plain", True, console.PlainConsole)],
)
def test_auto_is_live_on_a_terminal_only(mode, terminal, kind, run_dir):
    shown, _ = live(History(), mode, terminal)
    shown.close("complete", run_dir)
    assert type(shown) is kind


def test_line_shows_only_measured_values(run_dir):
    history = History()
    shown, text = live(history, "plain", False)
    history.add({"step": 1, "reward/a/mean": 0.5})
    shown.step(history.training[-1])
    assert text.getvalue() == "step  1/60  a 0.500 | ETA ?\n"


@pytest.mark.parametrize("values, expected", [([], ""), ([1.0], "▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([2.0] * 40, "▁" * 30)])
def test_sparklines_run_from_lowest_to_highest(values, expected):
    assert console.sparkline(values) == expected


@pytest.mark.slow
def test_reason_of_a_restart_remains_in_the_alerts_of_a_run_that_starts_again(config, run_dir, capsys, patient):
    play(config, range(1, 3), status="failed")
    write_alert(run_dir, 2, "driver killed; started again")
    RunLog(config, run_dir, 0, restarted="driver killed; started again").close("stopped")
    texts = [alert["text"] for alert in read_alerts(run_dir)]
    assert texts[-1] == "driver killed; started again" and "archive" in texts[0]


def test_an_alert_that_a_full_disk_cut_short_does_not_spoil_the_next(run_dir):
    run_dir.mkdir(exist_ok=True)
    write_alert(run_dir, 1, "first")
    with open(run_dir / "alerts.jsonl", "a") as file:
        file.write('{"time": 3, "st')
    write_alert(run_dir, 2, "second")
    assert [alert["text"] for alert in read_alerts(run_dir)] == ["first", "second"]


def test_groups_that_a_checkpoint_counts_as_trained_are_on_disk_in_the_journal(config, run_dir, monkeypatch, patient):
    run = RunLog(config, run_dir)
    run._journal.append(1, [], position=4, published=0, total_updates=1)
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    run.flush(1)
    run.close("complete")
    journal = (run_dir / "journal.jsonl").stat()
    assert (journal.st_ino, journal.st_size) in [(found.st_ino, found.st_size) for found in synced]
