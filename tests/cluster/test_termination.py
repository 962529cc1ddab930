"""SIGTERM and SIGHUP around a Ray session. Ray takes SIGTERM for itself while it runs and leaves it to the system
afterwards; a terminal that goes away sends SIGHUP to Ray's processes, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DRIVER = """
import os, re, signal, sys, threading, time
from pathlib import Path

from gdpo_nemo.commands import cli, report
from gdpo_nemo.config.schema import ClusterConfig

NUMBER, SENT = signal.Signals[sys.argv[1]], sys.argv[2:]

def caught():
    mask = re.search(r"SigCgt:\\s*(\\w+)", Path("/proc/self/status").read_text())[1]
    return bool(int(mask, 16) >> (NUMBER - 1) & 1)

def work(seconds):
    time.sleep(seconds)
    return "done"

def wait(arguments):
    from gdpo_nemo.cluster.session import gather, ray, session
    try:
        with session(ClusterConfig()):
            worker = ray.remote(num_cpus=0)(work)
            gather([worker.remote(0)], "a worker", 600.0)
            threading.Timer(1.0, eval(SENT[0])).start()
            print(*gather([worker.remote(float(SENT[1]))], "nothing", 600.0), flush=True)
    finally:
        print("taken back", caught(), flush=True)
    return 0

report.run = wait
sys.exit(cli.main(["report", "x"]))
"""
TO_US = "lambda: os.kill(os.getpid(), NUMBER)"
TO_THE_GROUP = "lambda: os.killpg(0, NUMBER)"


def drive(number: signal.Signals, sent: str, seconds: int, *before: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    # A test suite may itself run under nohup, and a hang-up that is ignored stays so in what it starts.
    command = ["env", "--default-signal=HUP", *before, sys.executable, "-c", DRIVER, number.name, sent, str(seconds)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_command_cleans_up_and_exits_with_its_signal_status(number):
    done = drive(number, TO_US, 600)
    assert (done.returncode, done.stdout) == (128 + number, "taken back True\n"), done.stderr


def test_under_nohup_a_terminal_that_goes_away_changes_nothing():
    done = drive(signal.SIGHUP, TO_THE_GROUP, 3, "nohup")
    assert (done.returncode, done.stdout) == (0, "done\ntaken back False\n"), done.stderr


LATE = """
import os, sys, threading
import psutil
from ray._private.node import Node
from ray._private import services
from gdpo_nemo.cluster import local_ray
from gdpo_nemo.cluster import session as started
from gdpo_nemo.config.schema import ClusterConfig
from gdpo_nemo.utils.errors import RunError

how, folder = sys.argv[1:]
silent, is_silent, connect = [], threading.Event(), Node._init_gcs_client
attempt, attempts, executable = local_ray._attempt, [], services.GCS_SERVER_EXECUTABLE

def connect_to_the_suspended(node):
    if not silent:
        (gcs,) = [child for child in psutil.Process().children() if "gcs_server" in child.name()]
        gcs.suspend()
        silent.append(gcs)
        is_silent.set()
    connect(node)

class Timer(threading.Timer):
    def run(self):
        is_silent.wait()  # however long the start of the GCS takes
        super().run()

def first_is_silent(*arguments):
    attempts.append(how)
    sleeps = how == "never" or how == "before its port is known" and len(attempts) == 1
    services.GCS_SERVER_EXECUTABLE = folder + "/sleeping_gcs" if sleeps else executable
    os.environ["RAY_gcs_server_port_wait_time_s"] = "1" if sleeps else "300"
    local_ray._START_LIMIT_S = 1 if how == "when it is asked" and len(attempts) == 1 else 900
    return attempt(*arguments)

with open(folder + "/sleeping_gcs", "w") as file:
    file.write("#!/bin/sh\\nexec sleep 1000\\n")
os.chmod(file.name, 0o755)
local_ray._attempt = first_is_silent
if how == "when it is asked":
    Node._init_gcs_client = connect_to_the_suspended
    threading.Timer = Timer
try:
    with started.session(ClusterConfig()):
        print(started.ray.is_initialized(), len(attempts), [child.is_running() for child in silent])
except RunError as error:
    print(error)
"""


def start_late(how: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    environment["RAY_py_gcs_connect_timeout_s"] = "2"  # of one of many attempts to connect
    done = subprocess.run(
        [sys.executable, "-c", LATE, how, str(folder)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("how, running", [("before its port is known", []), ("when it is asked", [False])])
def test_a_ray_session_whose_gcs_falls_silent_is_started_once_more(tmp_path, how, running):
    """Where the port is known, Ray would ask for hours."""
    assert start_late(how, tmp_path) == f"True 2 {running}\n"


def test_a_ray_session_that_never_comes_up_is_one_sentence(tmp_path):
    line = start_late("never", tmp_path)
    assert line.startswith("Ray did not start on this machine in 3 attempts (") and line.count("\n") == 1, line
