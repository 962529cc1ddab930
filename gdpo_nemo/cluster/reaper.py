"""Ends what a dead driver left behind.

The driver starts this file as a small process of its own and holds the other end of its standard input. However the
driver ends, kill -9 included, that end closes; then every process that carries the run's mark in its environment
(Ray's servers and agents, actors, verifiers: all inherit it) gets a moment to end by itself and is killed after that.
It uses the standard library only and reads /proc, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid

MARK = "GDPO_NEMO_RUN"
_GRACE_S = 3.0
_LOOK_S = 1.0


class Reaper:
    """The driver's side: marks this process and its future children, and starts the watcher."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        os.environ[MARK] = self.mark
        environment = {k: v for k, v in os.environ.items() if k != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", os.path.abspath(__file__), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the driver
        )

    def close(self) -> None:
        """Let the watcher end what is still there, and wait for it."""
        os.environ.pop(MARK, None)
        self._process.stdin.close()
        self._process.wait()


def marked(mark: str) -> set[int]:
    """Processes with ``mark`` in their environment, other than this one and its parent."""
    wanted, own = f"{MARK}={mark}".encode(), {os.getpid(), os.getppid()}
    found = set()
    for pid in _pids() - own:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.add(pid)
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process that runs; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else (int(fields[1]), int(fields[19]))


def family(mark: str) -> dict[int, int]:
    """Start times of the marked processes and all their descendants.

    Descendants, because a process that writes its title over its environment, as Ray's agents do, loses the mark.
    """
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid))}
    members = marked(mark)
    while more := {pid for pid, (parent, _) in stats.items() if parent in members and pid not in members}:
        members |= more
    return {pid: stats[pid][1] for pid in members - {os.getpid()} if pid in stats and not _ends_with_its_users(pid)}


def _ends_with_its_users(pid: int) -> bool:
    """Whether this is multiprocessing's resource tracker: it tidies up after its last user and ends by itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _watch(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: dict[int, int] = {}
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        known.update(family(mark))

    def left() -> list[int]:
        known.update(family(mark))
        return [pid for pid, born in known.items() if (stat := _stat(pid)) and stat[1] == born]

    deadline = time.monotonic() + _GRACE_S
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    while pids := left():
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    _watch(sys.argv[1])
