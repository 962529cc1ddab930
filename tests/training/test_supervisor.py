"""What starts a run again, and what does not; what reaches the run of the signals that its supervisor gets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.tools.drill.faults import FAULTS
from gdpo_nemo.utils.errors import (
    ConfigError,
    EngineFailed,
    FailureKind,
    NumericsFailed,
    RunError,
    UserCodeFailed,
    kind_of,
)
from gdpo_nemo.utils.waits import WaitExpired
from gdpo_nemo.weights.manifest import PeerLost

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from gdpo_nemo.commands import cli, report
from gdpo_nemo.config.schema import Config
from gdpo_nemo.training import supervisor
from gdpo_nemo.utils.errors import *

supervisor._BACKOFF_S = (0.05, 0.05)
folder = Path(sys.argv[1])
config = Config()
config.run.dir = str(folder)
config.run.max_restarts = int(sys.argv[2])

def gain(step):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 0.0}) + "\\n")

def say(word):
    with open(folder / "said", "a") as file:
        file.write(f"{word}\\n")

def run(attempt):
    number = attempt.restarts
    say(number)
    exec(sys.argv[3], globals(), {"number": number})
    return 0

report.run = lambda arguments: supervisor.supervised(config, run)
sys.exit(cli.main(["report", "x"]))
"""
WAIT_FOR_SIGNALS = """
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, lambda number, frame: say(f"signal {number}"))
say("ready")
while not [line for line in open(folder / "said") if "signal" in line]:
    time.sleep(0.02)
time.sleep(0.3)  # for a second one
sys.exit(128 + int(open(folder / "said").read().split()[-1]))
"""


# A test suite may itself run under nohup, and a hang-up that is ignored stays so in what it starts.
HEEDS_HANGUPS = ["env", "--default-signal=HUP"]


def start(folder: Path, code: str, max_restarts: int = 10, **options) -> subprocess.Popen:
    command = [*HEEDS_HANGUPS, sys.executable, "-c", PROGRAM, str(folder), str(max_restarts), code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **streams)


def run(folder: Path, code: str, max_restarts: int = 10) -> tuple[int, list[str], str]:
    """(status, what the attempts said, stderr)."""
    process = start(folder, code, max_restarts)
    _, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, said(folder), err


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().split("\n")[:-1] if (folder / "said").exists() else []


def wait_until_said(folder: Path, word: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while word not in said(folder):
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.02)


def test_run_whose_process_is_killed_continues_and_every_restart_is_recorded(tmp_path):
    (tmp_path / "status.json").write_text('{"time": 0, "step": 1, "waits": [1]}')
    status, attempts, err = run(tmp_path, "gain(number + 1); number < 2 and os.kill(os.getpid(), signal.SIGKILL)")
    assert (status, attempts) == (0, ["0", "1", "2"]), err
    alerts = read_alerts(tmp_path)
    assert [(alert["step"], "was killed by SIGKILL" in alert["text"]) for alert in alerts] == [(1, True), (2, True)]
    assert "restart 2 of at most 10" in alerts[1]["text"]
    assert err == "".join(f"supervisor: {alert['text']}\n" for alert in alerts)
    left = json.loads((tmp_path / "status.json").read_text())
    assert left["outcome"] == "restarting" and left["reason"] == alerts[1]["text"] and left["waits"] == []


def test_message_about_a_restart_does_not_ask_to_start_the_run_again(tmp_path):
    status, attempts, err = run(
        tmp_path, "gain(number + 1); number or exec(\"raise InfrastructureFailed('x' + START_AGAIN)\")"
    )
    assert (status, attempts) == (0, ["0", "1"]), err
    error, told = err.splitlines()
    assert error.endswith("restart the run to resume from its last checkpoint")
    assert told.startswith("supervisor: x; the run is restarted in ")


@pytest.mark.parametrize(
    "failure",
    [
        "raise ConfigError('x')",
        "raise UserCodeFailed('x')",
        "raise NumericsFailed('x')",
        "raise RunError('x')",
        "raise RunError('x') from ValueError()",
    ],
)
def test_a_failure_that_would_come_again_ends_the_run_at_once(tmp_path, failure):
    status, attempts, err = run(tmp_path, failure)
    assert (status, attempts, err) == (2 if "Config" in failure else 1, ["0"], "error: x\n")
    assert not (tmp_path / "alerts.jsonl").exists()


@pytest.mark.parametrize(
    "failure",
    ["raise InfrastructureFailed('x')", "raise RunError('x') from EngineFailed('y')", "os._exit(1)", "os.abort()"],
)
def test_a_failure_of_infrastructure_starts_the_run_again(tmp_path, failure):
    status, attempts, err = run(tmp_path, f"if number == 0: {failure}")
    assert (status, attempts) == (0, ["0", "1"]), err


def test_a_client_of_rays_that_ends_the_process_at_once_is_heard(tmp_path):
    """The last line of its log, if that is a warning; and only that of the process."""
    say_last = """
logs = folder / "logs"
logs.mkdir(exist_ok=True)
(folder / "status.json").write_text(json.dumps(dict(time=1.0, host="here", driver=1, waits=[], logs=str(logs))))
place = "[2026-11-23 14:24:04,673 %s 24192 24192] connection.cc:216: "
last = [place % "I" + "all is well", place % "W" + "the store is gone. \\x1b[1mEnd.", "no line of a log"][number % 3]
(logs / f"python-core-driver-01_{os.getpid()}.log").write_text(place % "W" + "an old one\\n" + last + "\\n")
(logs / f"python-core-driver-01_{os.getpid() + 1}.log").write_text(place % "W" + "another's\\n")
gain(number + 1)
number == 3 or os.kill(os.getpid(), 9)
"""
    status, attempts, err = run(tmp_path, say_last)
    assert (status, attempts) == (0, ["0", "1", "2", "3"]), err
    texts = [alert["text"] for alert in read_alerts(tmp_path)]
    said = "was killed by SIGKILL; last message of its Ray client: the store is gone. \\x1b[1mEnd.; the run is"
    assert [said in text for text in texts] == [False, True, False], texts
    assert all("was killed by SIGKILL; the run is restarted" in text for text in (texts[0], texts[2]))
    assert all(re.search(FAULTS["driver-kill"].says, text) for text in texts), "the drill recognises all of them"


def test_the_budget_of_restarts_ends(tmp_path):
    status, attempts, err = run(tmp_path, "gain(number + 1); raise InfrastructureFailed('x')", 3)
    assert (status, attempts) == (1, ["0", "1", "2", "3"])
    assert "it was restarted 3 times, the limit of run.max_restarts" in err.splitlines()[-1]


def test_a_run_that_gains_no_step_twice_is_not_started_a_third_time(tmp_path):
    status, attempts, err = run(tmp_path, "gain(7 - number); raise InfrastructureFailed('x')")
    assert (status, attempts) == (1, ["0", "1", "2"])
    assert "2 attempts in a row did not get beyond step 7" in err.splitlines()[-1]


def test_an_attempt_starts_when_nothing_of_the_one_before_is_left(tmp_path):
    left_over = (
        "if number == 0: subprocess.Popen(['sh', '-c', 'sleep 1; echo over >> ' + str(folder / 'said')]); os._exit(9)"
    )
    assert run(tmp_path, left_over)[:2] == (0, ["0", "over", "1"])


@pytest.mark.parametrize("to_the_group", [False, True])
@pytest.mark.parametrize(
    "number, arrives",
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGHUP, signal.SIGHUP),
        (signal.SIGUSR1, signal.SIGTERM),
    ],
)
def test_a_run_gets_each_signal_once_and_its_status_is_the_commands(tmp_path, number, arrives, to_the_group):
    """``timeout`` and Ray's jobs signal a whole group, Slurm's script one process."""
    process = start(tmp_path, WAIT_FOR_SIGNALS)
    wait_until_said(tmp_path, "ready")
    (os.killpg if to_the_group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said(tmp_path)) == (128 + arrives, ["0", "ready", f"signal {arrives}"]), err


def test_ctrl_c_and_a_lost_terminal_reach_the_run_once(tmp_path):
    for folder, keys, number in ((tmp_path / "c", b"\x03", signal.SIGINT), (tmp_path / "h", b"", signal.SIGHUP)):
        folder.mkdir()
        master, terminal = os.openpty()
        command = [*HEEDS_HANGUPS, "setsid", "--ctty", sys.executable, "-c", PROGRAM, str(folder), "10"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        process = subprocess.Popen([*command, WAIT_FOR_SIGNALS], env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams)
        os.close(terminal)
        wait_until_said(folder, "ready")
        os.write(master, keys) if keys else os.close(master)
        assert process.wait(LIMIT_S) == 128 + number
        assert said(folder) == ["0", "ready", f"signal {int(number)}"]


def test_a_run_ends_with_its_supervisor_however_that_ends(tmp_path):
    process = start(tmp_path, "say('ready'); time.sleep(1000)")
    wait_until_said(tmp_path, "ready")
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    assert psutil.wait_procs([child], timeout=LIMIT_S)[1] == []
    process.communicate()


def test_errors_have_the_kind_that_decides_on_a_restart():
    wrapped = RunError("checkpoint")
    wrapped.__cause__ = PeerLost("gone")
    kinds = {error: kind_of(error) for error in (WaitExpired("x"), EngineFailed("x"), PeerLost("x"), wrapped)}
    assert set(kinds.values()) == {FailureKind.INFRASTRUCTURE}, kinds
    found = [kind_of(error) for error in (ConfigError("x"), UserCodeFailed("x"), NumericsFailed("x"), RunError("x"))]
    assert found == [FailureKind.CONFIG, FailureKind.USER_CODE, FailureKind.NUMERICS, None]
