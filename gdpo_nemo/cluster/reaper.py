"""Ends what a dead driver left behind.

The driver starts this file as a small process of its own and holds the other end of its standard input. However the
driver ends, kill -9 included, that end closes; then every process that carries the run's mark in its environment
(Ray's servers and agents, actors, verifiers: all inherit it) gets a moment to end by itself and is killed after that.
It uses the standard library only and reads /proc, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid

MARK = "GDPO_NEMO_RUN"
_GRACE_S = 3.0


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


def marked(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment, other than this one and its parent."""
    wanted, own = f"{MARK}={mark}".encode(), {os.getpid(), os.getppid()}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in own:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and not _is_zombie(name):
                    found.append(int(name))
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def _is_zombie(name: str) -> bool:
    with open(f"/proc/{name}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"


def _watch(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _GRACE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    while left := marked(mark):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    _watch(sys.argv[1])
