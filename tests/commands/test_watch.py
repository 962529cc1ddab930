"""A run watched from outside: what its folder says, also while it is being written, and the end of the view."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_run import demo_row, demo_validation
from rich.console import Console

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.watch import snapshot, view
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.observe.run_files import StatusFile, status_if_whole, write_alert
from gdpo_nemo.utils.waits import waiting

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run of 60 steps that has done 7."""
    run = tmp_path / "some[bold]run"
    run.mkdir()
    save_config(load_config(DEMO), run / "config.yaml")
    log = MetricsLog(run)
    log.append(demo_validation(0))
    for step in range(1, 8):
        log.append(demo_row(step))
    return run


def drawn(run: Path) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    console.print(view(snapshot(run)))
    return console.export_text()


def status_of(run: Path, **said) -> None:
    (run / "status.json").write_text(
        json.dumps({"time": time.time(), "host": os.uname().nodename, "waits": [], **said})
    )


def test_run_is_shown_from_its_folder_only(folder):
    status = StatusFile(folder, lambda: {"step": 7, "queues": {"groups ready": 3}})
    write_alert(folder, 5, "component 'format' is dead")
    with waiting("verdicts of demo", "environments"):
        end = time.monotonic() + 120
        while "verdicts of demo" not in str(status_if_whole(folder)) and time.monotonic() < end:
            time.sleep(0.05)  # the file is renewed every second
    shown = drawn(folder)
    status.close("complete")
    for text in (
        "some[bold]run", "step 7/60", "correctness", "ETA 0:53", "rollout ███░░░ 45%", "groups ready 3",
        f"process {os.getpid()}", "for verdicts of demo (environments)", "ALERT step 5: component 'format' is dead",
    ):  # fmt: skip
        assert text in shown, text
    assert "the run has ended: complete" in drawn(folder) and "waits" not in drawn(folder)


def test_folder_that_is_being_written_is_not_an_error(folder):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "los')
    (folder / "status.json").write_text('{"time": 1')
    assert "step 7/60" in drawn(folder) and "starting" in drawn(folder)
    (folder / "metrics.jsonl").unlink()
    assert "step 0/60" in drawn(folder)


@pytest.mark.parametrize("junk", ["[]", '{"waits": [3, {"since": "x"}], "queues": 1, "driver": "x", "time": null}'])
def test_status_of_another_program_is_not_an_error(folder, junk):
    (folder / "status.json").write_text(junk)
    assert snapshot(folder).outcome is None and "step 7/60" in drawn(folder)


@pytest.mark.slow
def test_a_run_whose_driver_is_gone_is_over_and_one_elsewhere_only_silent(folder):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    status_of(folder, driver=gone.pid)
    assert snapshot(folder).outcome == "killed"
    status_of(folder, driver=gone.pid, host="elsewhere", time=time.time() - 90)
    assert snapshot(folder).outcome is None and "no update for 1:30" in drawn(folder)


@pytest.mark.slow
@pytest.mark.parametrize("outcome, code", [("complete", 0), ("failed", 1)])
def test_the_view_ends_with_the_run_and_leaves_its_last_state(folder, outcome, code):
    status_of(folder, driver=os.getpid())
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "gdpo_nemo", "watch", str(folder), "--every", "0.1"]
    viewer = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(inside)
    shown = b""
    while b"step 7/60" not in shown:
        shown += os.read(terminal, 4096)
    MetricsLog(folder).append(demo_row(8))
    while b"step 8/60" not in shown:
        shown += os.read(terminal, 4096)
    status_of(folder, driver=os.getpid(), outcome=outcome)
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert viewer.wait() == code
    left = shown.decode().split("\x1b[?1049l")  # back from the other screen
    assert len(left) == 2 and f"the run has ended: {outcome}" in left[1] and "step 8/60" in left[1]


def test_run_is_shown_once_without_a_terminal(folder, capsys):
    assert cli.main(["watch", str(folder)]) == 0
    assert "step 7/60" in capsys.readouterr().out


@pytest.mark.parametrize("every", ["0", "nan", "-1", "1e9", "x"])
def test_a_period_that_is_none_is_refused(folder, capsys, every):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["watch", str(folder), "--every", every])
    assert "--every" in capsys.readouterr().err


def test_a_folder_without_a_run_costs_one_line(tmp_path, capsys):
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "does not contain a run" in capsys.readouterr().err
