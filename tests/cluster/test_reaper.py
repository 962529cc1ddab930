"""What a driver leaves when it is killed, and what is left of that a moment later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DRIVER = """
import multiprocessing, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory

from gdpo_nemo.cluster.reaper import Reaper

def hold(pipe):
    memory = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(memory._name, "shared_memory")  # as vLLM's readers do: nobody else tidies up
    pipe.send((__import__("os").getpid(), memory._name))
    time.sleep(600)

if __name__ == "__main__":
    scratch = tempfile.mkdtemp()
    Reaper(scratch)
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=hold, args=(theirs,)).start()
    print(scratch, *ours.recv(), flush=True)
    time.sleep(600)
"""


def test_processes_temporary_files_and_shared_memory_of_a_killed_driver_are_gone(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    repository = Path(__file__).resolve().parents[2]
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    scratch, pid, name = driver.stdout.readline().split()
    things = [Path(scratch), Path("/proc", pid), Path("/dev/shm", name.lstrip("/"))]
    assert all(thing.exists() for thing in things)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 240
    while (left := [thing for thing in things if thing.exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
