"""Registry of blocking waits in this process, and clocks and timeouts for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from gdpo_nemo.utils.errors import InfrastructureFailed


@dataclass(frozen=True)
class Wait:
    """A wait in progress. ``since`` and ``deadline`` are in seconds since the epoch."""

    what: str
    """Description of the awaited result."""
    owner: str
    """Component that must respond: ``policy``, ``engine 0``, ``environments``, ``rollouts``."""
    since: float
    deadline: float | None
    """Time at which the wait expires, or None without a timeout."""


# Waits are registered per process rather than per run, so that the status thread can read them without the run.
_waits: dict[int, Wait] = {}
_numbers = itertools.count()
_lock = threading.Lock()


@contextlib.contextmanager
def waiting(what: str, owner: str, timeout_s: float | None = None) -> Iterator[None]:
    """Register a wait for the duration of the block. The timeout is only recorded, and the caller must enforce it."""
    now = time.time()  # wall-clock time, because other processes read these times in status.json
    number = next(_numbers)
    with _lock:
        _waits[number] = Wait(what, owner, now, None if timeout_s is None else now + timeout_s)
    try:
        yield
    finally:
        with _lock:
            del _waits[number]


def current() -> list[Wait]:
    """Return the waits in progress, sorted from longest to shortest."""
    with _lock:
        return sorted(_waits.values(), key=lambda wait: wait.since)


class RunningClock:
    """Clock that stops while the process, or the whole machine, is suspended.

    Deadlines on this clock are extended by the duration of a suspension, during which the awaited process could not
    respond either. A separate thread reads the time every second. A long gap between two reads shows that the process
    was suspended.
    """

    GAP_S = 10.0
    """Minimum gap in seconds that counts as a suspension. A busy machine delays a thread by less than this gap."""
    LOOK_S = 1.0
    """Seconds between two clock reads of the separate thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._stopped_s = 0.0
        self._process: int | None = None

    def now(self) -> float:
        """Return the time of this clock in seconds. Only differences between two times are meaningful."""
        with self._lock:
            if self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._looked = time.monotonic()
                threading.Thread(target=self._look, name="clock", daemon=True).start()
            now = time.monotonic()
            if now - self._looked > self.GAP_S:
                self._stopped_s += now - self._looked
            self._looked = now
            return now - self._stopped_s

    def _look(self) -> None:
        for_ever = threading.Event()
        while not for_ever.wait(self.LOOK_S):
            self.now()


running = RunningClock()
"""Clock for deadlines of waits for other processes."""


class Patience:
    """Adaptive timeout of a repeated operation.

    After ``ENOUGH`` operations, the timeout is ``FACTOR`` times the longest duration so far, within the bounds.

    Args:
        most_s: initial and maximum timeout in seconds.
        least_s: minimum timeout in seconds, which should cover stalls of a busy machine.
    """

    FACTOR = 10.0
    ENOUGH = 3

    def __init__(self, most_s: float, least_s: float):
        self._most_s = most_s
        self._least_s = least_s
        self._longest_s = 0.0
        self._times = 0

    @property
    def limit_s(self) -> float:
        """Timeout of the next operation in seconds."""
        if self._times < self.ENOUGH:
            return self._most_s
        return min(self._most_s, max(self._least_s, self.FACTOR * self._longest_s))

    def took(self, seconds: float) -> None:
        """Record the duration of a completed operation."""
        self._times += 1
        self._longest_s = max(self._longest_s, seconds)


def work_done(pid: int) -> tuple[float, int]:
    """Return (seconds of CPU time, bytes read and written) of a process and its descendants so far.

    If the result does not change between two calls, the process is stopped or stuck. For a process that waits for a
    disk or may not be inspected, the result changes with every call, so that the process counts as working.
    """
    import psutil

    seconds, amount = 0.0, 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            times, io = process.cpu_times(), process.io_counters()
            waits_for_disk = process.status() == psutil.STATUS_DISK_SLEEP
            seconds += times.user + times.system + (time.monotonic() if waits_for_disk else 0.0)
            amount += io.read_chars + io.write_chars
    except psutil.AccessDenied:
        seconds += time.monotonic()
    except psutil.NoSuchProcess:
        pass  # the caller detects the end of the process
    return seconds, amount


def in_daemon_thread[Result](call: Callable[[], Result], name: str) -> Future[Result]:
    """Run ``call`` in a daemon thread. Unlike the threads of an executor, a daemon thread does not delay the exit of
    the process."""
    answer: Future[Result] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # Any exception is passed to the waiting caller.
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return answer


class WaitExpired(InfrastructureFailed):
    """A wait reached its deadline. ``waits`` contains all waits that were in progress at this time."""

    def __init__(self, message: str):
        super().__init__(message)
        # The waits are recorded here, because the ``with`` blocks remove them before the error is handled.
        self.waits = current()
