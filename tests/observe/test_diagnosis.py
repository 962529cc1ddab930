"""Who blocks a run: processes that are lost come first, then those that an open wait is for and that wait for
nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gdpo_nemo.observe import run_files
from gdpo_nemo.observe.diagnosis import ProcessReport, diagnose, examine
from gdpo_nemo.observe.run_files import StatusFile
from gdpo_nemo.utils import waits
from gdpo_nemo.utils.errors import ConfigError

STUCK = 'Thread 7 (active): "MainThread"\n    crunch (mine/model.py:12)\n    train (gdpo_nemo/megatron/policy.py:90)\n'
WAITING = (
    'Thread 8 (idle): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:3168)\n'
    "    forward (gdpo_nemo/megatron/logprobs.py:30)\n"
)


def status(*waiting, **more):
    now = time.time()
    entries = [dict(what=what, owner=owner, since=now - age, deadline=now + 50) for what, owner, age in waiting]
    return {"time": now, "step": 3, "waits": entries, **more}


def test_the_rank_that_is_not_in_the_collective_of_its_peers_is_named():
    ranks = [
        ProcessReport("policy rank 0", 11, "sleeping", WAITING),
        ProcessReport("policy rank 1", 12, "running", STUCK),
    ]
    found = diagnose(status(("training", "policy", 9.0)), ranks)
    assert found.blocked_by == ["policy rank 1"] and not found.lost
    assert "training (policy, 9 of 59 s): policy rank 1 (process 12) is in crunch (mine/model.py:12)" in found.sentence


def test_a_lost_process_is_named_before_those_that_are_waited_for():
    everyone = [ProcessReport("engine 0", 11, "sleeping", STUCK), ProcessReport("policy rank 1", 12, "gone")]
    found = diagnose(status(("sampling", "engine 0", 9.0)), everyone)
    assert (
        found.blocked_by == ["policy rank 1"] and found.lost and "policy rank 1 (process 12) is gone" in found.sentence
    )


def test_wait_of_the_loop_for_its_rollouts_blames_no_process_by_itself():
    found = diagnose(status(("batch 3", "rollouts", 9.0)), [ProcessReport("engine 0", 11, "sleeping", STUCK)])
    assert found.blocked_by == [] and "step 3 is in progress" in found.sentence


def test_a_driver_that_has_fallen_silent_is_the_one(tmp_path):
    old = {**status(), "time": time.time() - 60}
    found = diagnose(old, [ProcessReport("driver", 11, "sleeping", STUCK)])
    assert found.lost and found.blocked_by == ["driver"] and "has not reported for 60 s, in crunch" in found.sentence


def test_the_status_file_tells_of_waits_while_they_last(tmp_path):
    file = StatusFile(tmp_path, lambda: {"step": 5})
    with waits.waiting("a verdict", "environments", 30.0):
        file.write(waits.current())
        (wait,) = json.loads((tmp_path / "status.json").read_text())["waits"]
        assert (wait["what"], wait["owner"], round(wait["deadline"] - wait["since"])) == (
            "a verdict",
            "environments",
            30,
        )
        with waits.waiting("inner", "policy"):
            assert [wait.what for wait in waits.current()] == ["a verdict", "inner"]
            assert waits.WaitExpired("late").waits == waits.current()
        file.close("complete")  # the final status contains no waits
    ended = json.loads((tmp_path / "status.json").read_text())
    assert ended["waits"] == [] and ended["outcome"] == "complete" and ended["step"] == 5


def test_the_status_thread_replaces_no_newer_status(tmp_path, monkeypatch):
    """The thread reads the state of the run. Before it writes, the driver writes an expired wait and an outcome."""
    monkeypatch.setattr(run_files, "_PERIOD_S", 0.0)
    looked, go_on, closing = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def describe():
        if threading.current_thread() is not threading.main_thread():
            looked.release()
            assert closing.is_set() or go_on.acquire(timeout=300)
        return {"step": 5}

    file = StatusFile(tmp_path, describe)
    assert looked.acquire(timeout=300)
    file.write([waits.Wait("a verdict", "environments", 1.0, 2.0)], outcome="failed")
    for _ in range(3):
        found = json.loads((tmp_path / "status.json").read_text())
        assert [wait["what"] for wait in found["waits"]] == ["a verdict"] and found["outcome"] == "failed"
        go_on.release()  # the first status of the thread is older than the one in the file
        assert looked.acquire(timeout=300)
    closing.set()
    go_on.release()
    file.close("failed")


def test_temporary_files_of_a_killed_writer_of_the_status_are_removed(tmp_path):
    for name in ("status.1398", "status.amended", "status.txt"):
        (tmp_path / name).write_text("{")
    StatusFile(tmp_path, lambda: {"step": 5}).close("complete")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json", "status.txt"]


@pytest.mark.slow
def test_stacks_of_live_processes_are_shown_and_stopped_processes_are_reported(tmp_path):
    code = "import time\ndef dawdle():\n    time.sleep(60)\ndawdle()\n"
    (tmp_path / "dawdler.py").write_text(code)
    process = subprocess.Popen([sys.executable, str(tmp_path / "dawdler.py")])
    try:
        roles = {"engine 0": [os.uname().nodename, process.pid]}
        file = StatusFile(tmp_path, lambda: {"step": 1, "roles": roles})
        with waits.waiting("sampling", "engine 0", 60.0):
            file.write(waits.current())
            deadline = time.monotonic() + 600
            while "dawdle" not in (found := examine(tmp_path)).sentence and time.monotonic() < deadline:
                file.write(waits.current())
            assert found.blocked_by == ["engine 0"] and not found.lost
            assert "is in dawdle (" in found.sentence and "dawdler.py:3" in found.sentence, found.sentence
            process.send_signal(signal.SIGSTOP)
            found = examine(tmp_path, tmp_path / "bundle")
            assert found.lost and f"engine 0 (process {process.pid}) is stopped" in found.sentence
            assert found.sentence in (tmp_path / "bundle" / "summary.txt").read_text()
        file.close("complete")
    finally:
        process.kill()
        process.wait()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="status.json not found"):
        examine(tmp_path)
