"""Deadlines that are learnt, and what a process has done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from gdpo_nemo.utils.waits import Patience, RunningClock, work_done


def test_deadline_follows_the_measured_times_within_its_bounds():
    patience = Patience(3600.0, 300.0)
    limits = []
    for seconds in (5.0, 5.0, 5.0, 80.0, 10.0, 900.0):
        patience.took(seconds)
        limits.append(patience.limit_s)
    assert limits == [3600.0, 3600.0, 300.0, 800.0, 800.0, 3600.0]


def test_running_clock_stops_while_the_process_is_stopped(monkeypatch):
    clock = RunningClock()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock._looked, clock._process = now[0], os.getpid()  # no thread: the test looks
    begin = clock.now()
    passed = []
    for seconds in (1.0, 9.0, 300.0, 2.0):
        now[0] += seconds
        passed.append(clock.now() - begin)
    assert passed == [1.0, 10.0, 10.0, 12.0]


def test_running_clock_advances_without_requests_also_in_a_forked_child(monkeypatch):
    """Without its thread, a wait of minutes between two questions would count as a stop."""
    monkeypatch.setattr(RunningClock, "LOOK_S", 0.01)
    clock = RunningClock()
    clock._process = os.getppid()  # as in a child, which has no thread of its parent
    clock.now()
    looked, deadline = clock._looked, time.monotonic() + 300
    while clock._looked == looked:
        assert time.monotonic() < deadline, "no thread looks"
        time.sleep(0.01)


def test_a_deadline_of_the_user_that_is_shorter_stays():
    patience = Patience(60.0, 300.0)
    for _ in range(5):
        patience.took(1.0)
    assert patience.limit_s == 60.0


def test_work_of_a_descendant_counts_and_a_stopped_family_does_none():
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    parent = subprocess.Popen([sys.executable, "-c", busy])
    try:
        deadline = time.monotonic() + 60
        while not (family := psutil.Process(parent.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while "while True: pass" not in family[0].cmdline()[-1:]:  # until exec, the parent waits like one for a disk
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for process in (parent, *family):
            process.send_signal(signal.SIGSTOP)
        # A stopped process may still have to get the processor to notice the signal.
        while {psutil.Process(process.pid).status() for process in (parent, *family)} != {psutil.STATUS_STOPPED}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = work_done(parent.pid)
        time.sleep(0.5)
        assert work_done(parent.pid) == before
        family[0].send_signal(signal.SIGCONT)
        while work_done(parent.pid) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for process in (*family, parent):
            process.kill()
        parent.wait()


@pytest.mark.slow
def test_unreadable_processes_count_as_working(monkeypatch):
    """``/proc/PID/io`` is closed in some containers."""

    def denied(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "io_counters", denied)
    assert work_done(psutil.Process().pid) != work_done(psutil.Process().pid)
