"""Ends what a dead driver left behind.

The driver starts this file as a separate small process and holds the other end of its standard input. However the
driver ends, kill -9 included, that end closes; then every process with the run's mark in its environment (Ray's
servers and agents, actors, verifiers: all inherit it) gets a few seconds to exit and is then killed. Finally the
watcher removes their temporary folder and their named shared memory.

An engine's actor starts it, too, as a guard of vLLM's own processes: they would outlive an actor that is killed, and
keep the memory of the GPUs from its replacement. So does an actor with environment workers, whose semaphores would stay
on its node.

It uses the standard library only and reads /proc, so it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable

MARK = "GDPO_NEMO_RUN"
GUARD_MARK = "GDPO_NEMO_GUARDED"
"""Variables that tell whose the processes are: of which run, of which guarded process."""
_GRACE_S = 3.0
_LOOK_S = 1.0
_LOOKS_AT_MEMORY = 10
"""Scans of the processes per scan of their memory maps, which are long."""
_SHARED = re.compile(rb"(/dev/shm/(?:sem\.mp-|psm_|vllm_dist_|gdpo_nemo_)\S+)$", re.MULTILINE)
"""Names that multiprocessing, vLLM and this project use; the kernel keeps such memory when its process is killed."""
# -S -E: no site-packages, so that it starts at once and no environment variable of the user can break it.
_THIS = (sys.executable, "-S", "-E", os.path.abspath(__file__))


class Reaper:
    """The driver's side: marks this process and its future children, and starts the watcher.

    Args:
        scratch: folder to remove in the end.
    """

    def __init__(self, scratch: str):
        self.mark = uuid.uuid4().hex
        os.environ[MARK] = self.mark
        self._scratch = scratch
        self._lock = threading.Lock()
        self._closed = False
        self._process = self._started()
        threading.Thread(target=self._keep, name="reaper", daemon=True).start()

    def _started(self) -> subprocess.Popen[bytes]:
        # The watcher is not one of the processes to end.
        environment = {k: v for k, v in os.environ.items() if k != MARK}
        return subprocess.Popen(
            [*_THIS, "run", f"{MARK}={self.mark}", self._scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must reach the driver only
        )

    def _keep(self) -> None:
        """Start the watcher again where it ends before the driver: without one a killed driver leaves all behind."""
        while True:
            self._process.wait()
            with self._lock:
                if self._closed:
                    return
                self._process = self._started()

    def close(self) -> None:
        """Let the watcher end the processes that are left, and wait for it."""
        os.environ.pop(MARK, None)
        with self._lock:
            self._closed = True
            process = self._process
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def guard_children() -> None:
    """See to it that processes which this one starts from now on, and those that they start, end when it does, and that
    their named shared memory is removed.

    Raises:
        CalledProcessError: the guard could not be started.
    """
    mark = f"{GUARD_MARK}={uuid.uuid4().hex}"
    environment = {name: value for name, value in os.environ.items() if name != GUARD_MARK}
    os.environ[GUARD_MARK] = mark.partition("=")[2]
    own = os.getpid()
    subprocess.run(
        [*_THIS, "guard", mark, str(own), str(_birth(own))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        check=True,
    )


def marked(mark: str) -> set[int]:
    """Processes with ``mark`` (NAME=value) in their environment, other than this one and its parent."""
    wanted = mark.encode()
    own = {os.getpid(), os.getppid()}
    found = set()
    for pid in _pids() - own:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.add(pid)
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
    return found


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process that runs; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the last ")": the command's name stands in parentheses and may hold spaces and parentheses itself.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else (int(fields[1]), int(fields[19]))


def _birth(pid: int) -> int | None:
    """Start time, which tells a process from a later one that got its number; None when it is gone."""
    stat = _stat(pid)
    return stat and stat[1]


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
    """Whether this is multiprocessing's resource tracker, which cleans up after its last user and then exits."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def shared_memory(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(path, inode) of the named shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                paths = {path.decode() for path in _SHARED.findall(file.read())}
        except OSError:
            continue  # it ended meanwhile
        found |= {(path, inode) for path in paths if (inode := _inode(path))}
    return found


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _remove(shared: set[tuple[str, int]]) -> None:
    for path, inode in shared:
        if _inode(path) == inode:  # still there, and not a newer one of the same name
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _watch(mark: str, scratch: str) -> None:
    known: dict[int, int] = {}
    shared: set[tuple[str, int]] = set()
    looks = 0
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        known.update(family(mark))
        looks += 1
        if looks % _LOOKS_AT_MEMORY == 0:
            shared |= shared_memory(known)
    known.update(family(mark))
    shared |= shared_memory(known)
    _end(mark, known, _GRACE_S)
    _remove(shared)
    shutil.rmtree(scratch, ignore_errors=True)


def _guard(mark: str, pid: int, born: int) -> None:
    # Its parent goes, so that it is no child of the guarded process: Ray kills those of an actor that it ends.
    if os.fork():
        os._exit(0)
    known: dict[int, int] = {}
    shared: set[tuple[str, int]] = set()
    looks = 0
    while _birth(pid) == born:
        new = family(mark)
        # Of new ones at once: Ray kills them with an actor, and what they had mapped can no longer be seen.
        if new.keys() - known.keys() or looks % _LOOKS_AT_MEMORY == 0:
            shared |= shared_memory(new)
        known.update(new)
        looks += 1
        time.sleep(_LOOK_S)
    _end(mark, known, 0.0)
    _remove(shared)


def _end(mark: str, known: dict[int, int], grace_s: float) -> None:
    """Wait for the marked processes, and those known (number and start time), to exit; then kill what is left."""

    def left() -> list[int]:
        known.update(family(mark))
        return [pid for pid, born in known.items() if _birth(pid) == born]

    deadline = time.monotonic() + grace_s
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    while pids := left():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _main(what: str, mark: str, *of: str) -> None:
    # A signal to the whole process group must not end the watcher before the watched.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if what == "run":
        _watch(mark, of[0])
    else:
        _guard(mark, int(of[0]), int(of[1]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
