"""What a driver leaves when it is killed, and what is left of that a moment later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gdpo_nemo.cluster.cleanup_process import GUARD_MARK, MARK, OWNER
from gdpo_nemo.cluster.worker_launcher import FOLDER
from gdpo_nemo.commands.cli import main

pytestmark = pytest.mark.slow

DRIVER = """
import multiprocessing, os, sys, time
from multiprocessing import resource_tracker, shared_memory

from gdpo_nemo.cluster.worker_processes import worker_processes
from gdpo_nemo.config.schema import ClusterConfig

def hold(pipe):
    memory = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(memory._name, "shared_memory")  # as vLLM's readers do: nobody else tidies up
    pipe.send((__import__("os").getpid(), memory._name))
    time.sleep(600)

if __name__ == "__main__":
    with worker_processes(ClusterConfig()):
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        context.Process(target=hold, args=(theirs,)).start()
        semaphore = context.Lock()
        print(os.environ["TMPDIR"], *ours.recv(), "/sem." + semaphore._semlock.name[1:], flush=True)
        time.sleep(600)
"""


HOLDER = """
import sys, time
from multiprocessing import resource_tracker, shared_memory

sys.stdin.readline()
memory = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory._name, flush=True)
time.sleep(600)
"""
GUARDED = """
import os, subprocess, sys, time

from gdpo_nemo.cluster.cleanup_process import GUARD_MARK, guard_children

CHILD = "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
LOST = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(601)'])"

if __name__ == "__main__":
    before = subprocess.Popen(["sleep", "602"])
    guard_children()
    child = subprocess.Popen([sys.executable, "-c", CHILD + "time.sleep(600)"], start_new_session=True)
    subprocess.run([sys.executable, "-c", LOST], start_new_session=True)  # its parent is gone when we go
    holder = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
    print(before.pid, holder.pid, os.environ[GUARD_MARK], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("guard_looked", [False, True])
def test_children_of_a_killed_guarded_process_end_in_seconds(tmp_path, guard_looked):
    """The guard ends children, grandchildren and descendants whose parent has ended, but no process that was started
    before the guard.

    The guard also removes shared memory that a process mapped some time after its start, even if this process is killed
    first. Ray kills an actor's children together with the actor.
    """
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)
    repository = Path(__file__).resolve().parents[2]
    guarded = subprocess.Popen(
        [sys.executable, str(script), HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    pid, holder, mark = guarded.stdout.readline().split()
    earlier = psutil.Process(int(pid))
    deadline = time.monotonic() + 240
    while len(theirs := _marked(mark)) < 4:  # the last of them starts after its parent has
        assert time.monotonic() < deadline, theirs
        time.sleep(0.05)
    memory = None
    if guard_looked:
        wait_until_guard_looked(guarded.pid)
        guarded.stdin.write("\n")
        guarded.stdin.flush()
        memory = Path("/dev/shm", guarded.stdout.readline().strip().lstrip("/"))
        # The guard ends after it has removed the memory.
        theirs.append(wait_until_guard_looked(guarded.pid))
        assert memory.exists()
        os.kill(int(holder), signal.SIGKILL)
    guarded.send_signal(signal.SIGKILL)
    guarded.wait()
    (_, left) = psutil.wait_procs(theirs, timeout=240)
    assert left == [] and earlier.is_running()
    earlier.kill()
    assert not memory or not memory.exists()


def wait_until_guard_looked(pid: int) -> psutil.Process:
    """Wait until the guard of a process has listed all processes again, and return the guard.

    The guard sleeps after every list, which is a voluntary context switch.
    """
    deadline = time.monotonic() + 240
    while not (guards := [p for p in psutil.process_iter() if _guards(p, pid)]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sleeps = guards[0].num_ctx_switches().voluntary
    # The first sleep may end a list that began before this call.
    while guards[0].num_ctx_switches().voluntary < sleeps + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return guards[0]


def _guards(process: psutil.Process, pid: int) -> bool:
    command = _command(process)
    return "guard" in command and str(pid) in command and process.pid != pid


def _marked(mark: str, name: str = GUARD_MARK) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _environment(process).get(name) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _watcher(driver: subprocess.Popen, other_than: int = 0) -> int:
    """Its process, as soon as there is one."""
    deadline = time.monotonic() + 240
    while True:
        children = [
            c for c in psutil.Process(driver.pid).children() if "cleanup_process.py run" in " ".join(_command(c))
        ]
        for child in children:
            if child.pid != other_than:
                return child.pid
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("killed", ["driver", "watcher, driver", "all before a scan", "driver and watcher"])
def test_processes_temporary_files_and_shared_memory_of_a_killed_driver_are_gone(tmp_path, killed, capsys):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    repository = Path(__file__).resolve().parents[2]
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository), FOLDER: "none"},
    )
    scratch, pid, memory, semaphore = driver.stdout.readline().split()
    things = [
        Path(scratch),
        Path(scratch + OWNER),
        Path("/proc", pid),
        *(Path(f"/dev/shm/{n}") for n in (memory, semaphore)),
    ]
    assert all(thing.exists() for thing in things)
    watcher = _watcher(driver)
    if killed == "watcher, driver":  # and another takes its place
        os.kill(watcher, signal.SIGKILL)
        _watcher(driver, other_than=watcher)
    elif killed != "driver":
        os.kill(watcher, signal.SIGSTOP)
    if killed == "all before a scan":
        things = [thing for thing in things if memory[1:] not in thing.name]
        Path(f"/dev/shm/{memory}").unlink()  # nothing but a scan finds this one
        for process in _marked(Path(scratch).name, MARK):
            process.kill()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    if killed == "all before a scan":
        os.kill(watcher, signal.SIGCONT)
    if killed == "driver and watcher":
        os.kill(watcher, signal.SIGKILL)
        assert main(["doctor", "--clean"]) == 0 and f"removed {scratch}, " in capsys.readouterr().out
    deadline = time.monotonic() + 240
    while (left := [thing for thing in things if thing.exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
