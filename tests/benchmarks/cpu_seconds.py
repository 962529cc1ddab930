"""CPU seconds of a command and of all processes that it starts, over time and by process.

A kernel adds a process's time to its parent only when the parent waits for it, which Ray's raylet does not always do,
and nobody does for a worker that is killed with its parent. So a thread looks at all processes every few hundredths of
a second and remembers the last value of each; what a process computes after the last look is lost.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_LOOK_S = 0.03
_TICKS = os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    """What /proc/PID/stat says of a process."""

    parent: int
    birth: int
    cpu_s: float


class CpuSeconds:
    """CPU seconds of this process's descendants, from ``measured`` on."""

    def __init__(self) -> None:
        self._spent: dict[tuple[int, int], float] = {}
        """Seconds of every process, by (number, start time)."""
        self._names: dict[tuple[int, int], str] = {}
        self._times: list[float] = []
        self._sums: list[float] = []
        self._before = {(pid, stat.birth) for pid, stat in _stats().items()}

    def until(self, when: float) -> float:
        """Return the seconds that were spent before ``when`` (seconds since the epoch)."""
        place = bisect.bisect_right(self._times, when)
        return self._sums[place - 1] if place else 0.0

    def by_process(self) -> dict[str, float]:
        """Return the seconds by the name that processes had last."""
        found: dict[str, float] = defaultdict(float)
        for process, seconds in self._spent.items():
            found[self._names[process]] += seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def look(self) -> None:
        """Take note of what the descendants have spent so far."""
        now = time.time()
        stats = _stats()
        members = {os.getpid()} | {pid for pid, stat in stats.items() if (pid, stat.birth) in self._spent}
        while more := {pid for pid, stat in stats.items() if stat.parent in members and pid not in members}:
            members |= more
        for pid in members - {os.getpid()}:
            process = (pid, stats[pid].birth)
            if process not in self._before:
                self._spent[process] = stats[pid].cpu_s
                self._names[process] = _name(pid) or self._names.get(process, "?")
        self._times.append(now)
        self._sums.append(sum(self._spent.values()))


@contextlib.contextmanager
def measured() -> Iterator[CpuSeconds]:
    """Measure the processes that the block starts, and those that they start."""
    found = CpuSeconds()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            found.look()

    thread = threading.Thread(target=watch, name="CPU seconds", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _stats() -> dict[int, _Stat]:
    found = {}
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # it may have ended meanwhile
                # After the last ")": the command's name is in parentheses and may contain spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
                found[int(pid)] = _Stat(int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS)
    return found


def _name(pid: int) -> str:
    """Return the title of a process without its arguments' values; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0 ").decode(errors="replace").split("\0")
    except OSError:
        return ""
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]  # without the method that it runs now
    shown = [os.path.basename(word) for word in words if word and not word.startswith("-")]
    return " ".join(shown[:2])[:60]
