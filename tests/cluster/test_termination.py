"""SIGTERM, which Ray takes for itself while it runs and leaves to the system afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

DRIVER = """
import os, re, signal, sys, threading, time
from pathlib import Path

from gdpo_nemo import cli
from gdpo_nemo.config.schema import ClusterConfig

def caught():
    mask = re.search(r"SigCgt:\\s*(\\w+)", Path("/proc/self/status").read_text())[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

def sleep():
    time.sleep(60)

def wait(arguments):
    from gdpo_nemo.cluster.session import gather, ray, session
    try:
        with session(ClusterConfig()):
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            gather([ray.remote(num_cpus=0)(sleep).remote()], "nothing", 60.0)
    finally:
        print("taken back", caught(), flush=True)

cli.report = wait
sys.exit(cli.main(["report", "x"]))
"""


def test_a_terminated_command_takes_back_what_it_began_and_says_so_in_its_status():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "taken back True\n"), done.stderr
