"""What this process waits for: every blocking wait has a name, an owner and, as a rule, a deadline while it lasts."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from dataclasses import dataclass
from typing import Iterator

from gdpo_nemo.errors import InfrastructureFailed


@dataclass(frozen=True)
class Wait:
    """One wait under way; times are seconds since the epoch."""

    what: str
    owner: str
    """The component that has to answer: ``policy``, ``engine 0``, ``environments``, ``rollouts``."""
    since: float
    deadline: float | None


# Of the whole process, not of one run: the status thread and `doctor` read it without a reference to the run.
_waits: dict[int, Wait] = {}
_numbers = itertools.count()
_lock = threading.Lock()


@contextlib.contextmanager
def waiting(what: str, owner: str, timeout_s: float | None = None) -> Iterator[None]:
    """Make the wait that happens inside the block known."""
    now = time.time()  # wall clock, not monotonic: other processes read these times in status.json
    number = next(_numbers)
    with _lock:
        _waits[number] = Wait(what, owner, now, None if timeout_s is None else now + timeout_s)
    try:
        yield
    finally:
        with _lock:
            del _waits[number]


def current() -> list[Wait]:
    """The waits under way, the longest first."""
    with _lock:
        return sorted(_waits.values(), key=lambda wait: wait.since)


class RunningClock:
    """Seconds for which this process was able to run. Unlike those of a monotonic clock, they stop while it is stopped.

    A process tree or a machine that is suspended stops as a whole. When it continues, a caller that waited for an
    answer must give the other process as much time as before. A thread that does nothing else looks at the time every
    second, so a gap between two looks means that no thread could run.
    """

    GAP_S = 10.0
    """Shortest gap that counts; a busy machine delays a thread by less."""
    LOOK_S = 1.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._stopped_s = 0.0
        self._process: int | None = None

    def now(self) -> float:
        """Return the seconds so far; only differences have a meaning."""
        with self._lock:
            if self._process != os.getpid():  # threads do not outlive a fork
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
"""The clock of every deadline for an answer of another process."""


class Patience:
    """A deadline that is learnt: ``FACTOR`` times the longest that something took, once it was done a few times.

    Args:
        most_s: the deadline before that, and the longest in any case.
        least_s: the shortest; how long a machine may stand still for reasons of its own.
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
        """The deadline for the next time."""
        if self._times < self.ENOUGH:
            return self._most_s
        return min(self._most_s, max(self._least_s, self.FACTOR * self._longest_s))

    def took(self, seconds: float) -> None:
        """It was done, in that time."""
        self._times += 1
        self._longest_s = max(self._longest_s, seconds)


def work_done(pid: int) -> tuple[float, int]:
    """Seconds of CPU, and bytes read and written, by a process and its descendants so far: what tells one that is slow
    from one that is stopped or hangs. Where one waits for a disk, or may not be looked into, another value each time.
    """
    import psutil

    seconds, amount = 0.0, 0
    try:
        own = psutil.Process(pid)
        for process in (own, *own.children(recursive=True)):
            times, io = process.cpu_times(), process.io_counters()
            waits_for_disk = process.status() == psutil.STATUS_DISK_SLEEP
            seconds += times.user + times.system + (time.monotonic() if waits_for_disk else 0.0)
            amount += io.read_chars + io.write_chars
    except psutil.AccessDenied:
        seconds += time.monotonic()
    except psutil.NoSuchProcess:
        pass  # whoever asks is about to find that out
    return seconds, amount


class WaitExpired(InfrastructureFailed):
    """A deadline passed; ``waits`` are the waits under way at that moment."""

    def __init__(self, message: str):
        super().__init__(message)
        # Taken here: by the time somebody handles the error, the ``with`` blocks have removed their waits.
        self.waits = current()
