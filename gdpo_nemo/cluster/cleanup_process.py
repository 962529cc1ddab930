"""Cleanup process, which ends the processes that a dead driver has left running.

The driver runs this file as a small separate process and holds the write end of its standard input. This pipe closes
when the driver ends, even after kill -9. Every process with the run's mark in its environment then gets a few seconds
to exit before it is killed. Ray's servers, agents, actors and the verifiers inherit the mark. Finally, the cleanup
process removes the temporary folder and the named shared memory of these processes. If the cleanup process is killed
too, the next start of a run on this machine does all this (``worker_processes.remove_leftovers``).

An engine's actor also runs this file, as a guard for vLLM's processes. Without the guard, vLLM's processes would
outlive a killed actor, and the actor's replacement could not use their GPU memory. An actor with environment workers
also runs this file, because the workers' semaphores would otherwise remain on the node.

This file uses only the standard library and reads /proc, so it starts in milliseconds.
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
from collections.abc import Callable, Iterable
from glob import glob
from multiprocessing.process import current_process

MARK = "GDPO_NEMO_RUN"
"""Environment variable that marks the processes of a run. Its value is the name of the run's temporary folder."""
OWNER = ".owner"
"""Suffix of a file beside the temporary folder. The driver locks this file, so the lock shows whether it is alive."""
_CLOSED = b"closed"
"""Last input of the cleanup process if the driver closes it and may continue."""
GUARD_MARK = "GDPO_NEMO_GUARDED"
"""Environment variable that marks the descendants of a guarded process."""
_GRACE_S = 3.0
"""Seconds that processes have to exit before they are killed."""
_SCAN_INTERVAL_S = 1.0
_SCANS_PER_MEMORY_SCAN = 10
"""Number of process scans per scan of memory maps, which takes longer."""
_MEMORY_SCANS_OF_NEW = 60
"""Number of consecutive memory scans of a new process, which maps its shared memory some time after its start."""
_SHARED = re.compile(rb"(/dev/shm/(?:sem\.mp-|psm_|vllm_dist_|gdpo_nemo_)\S+)$", re.MULTILINE)
"""Names of shared memory of multiprocessing, vLLM and this project, which remains when its process is killed."""
# -S: Python starts faster without site-packages. -E: Python ignores the user's PYTHON* environment variables.
_COMMAND = (sys.executable, "-S", "-E", os.path.abspath(__file__))


class CleanupProcess:
    """Driver side of the cleanup process.

    The constructor sets the mark for this process and its future children, and starts the cleanup process.

    Args:
        scratch: temporary folder that the cleanup process removes at the end.
    """

    def __init__(self, scratch: str):
        self.mark = os.path.basename(scratch)
        os.environ[MARK] = self.mark
        _name_semaphores(self.mark)
        self._scratch = scratch
        self._lock = threading.Lock()
        self._closed = False
        self._process = self._start()
        threading.Thread(target=self._restart_if_ended, name="cleanup process", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        # The cleanup process must not have the mark, because it would end itself.
        environment = {k: v for k, v in os.environ.items() if k != MARK}
        return subprocess.Popen(
            [*_COMMAND, "run", f"{MARK}={self.mark}", self._scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not end the cleanup process
        )

    def _restart_if_ended(self) -> None:
        """Restart the cleanup process whenever it ends before ``close``."""
        while True:
            self._process.wait()
            with self._lock:
                if self._closed:
                    return
                self._process = self._start()

    def close(self) -> None:
        """Make the cleanup process end the remaining processes, and wait until it has finished."""
        os.environ.pop(MARK, None)
        with self._lock:
            self._closed = True
        while True:
            self._process.communicate(_CLOSED)
            if self._process.returncode != -signal.SIGKILL:
                return
            self._process = self._start()


def _name_semaphores(mark: str) -> None:
    """Put ``mark`` into the names of semaphores that this process and its children create with multiprocessing.

    A semaphore whose process was killed before a scan of its memory can then still be found.
    """
    current_process()._config["semprefix"] = f"/mp-{mark}"  # type: ignore[attr-defined]


def remove_run(scratch: str) -> str:
    """Clean up after a run whose driver and cleanup process were killed, and return a sentence about it."""
    mark = f"{MARK}={os.path.basename(scratch)}"
    known = marked_tree(mark)
    ended = len(known)
    removed = _clean(mark, known, shared_memory(known), _GRACE_S, scratch)
    return f"removed {scratch}, {ended} processes and {removed} segments of shared memory of a killed run"


def guard_children() -> None:
    """Start a guard for this process's future descendants.

    When this process ends, the guard kills its descendants and removes their named shared memory.

    Raises:
        CalledProcessError: if the guard could not be started.
    """
    unique = f"{os.environ.get(MARK, '')}-{uuid.uuid4().hex}"
    mark = f"{GUARD_MARK}={unique}"
    environment = {name: value for name, value in os.environ.items() if name != GUARD_MARK}
    os.environ[GUARD_MARK] = unique
    _name_semaphores(unique)
    pid = os.getpid()
    subprocess.run(
        [*_COMMAND, "guard", mark, str(pid), str(_start_time(pid))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        check=True,
    )


def marked(mark: str) -> set[int]:
    """Return the ids of all processes whose environment contains ``mark`` (NAME=value).

    This process and its parent are excluded.
    """
    variable = mark.encode()
    pids = set()
    for pid in _pids() - {os.getpid(), os.getppid()}:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if variable in file.read().split(b"\0"):
                    pids.add(pid)
        except OSError:
            continue  # the process has ended, or belongs to another user
    return pids


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _stat(pid: int) -> tuple[int, int] | None:
    """Return (parent's id, start time) of a running process, or None if the process has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Split after the last ")", because the command's name is in parentheses and may contain spaces and
            # parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else (int(fields[1]), int(fields[19]))


def _start_time(pid: int) -> int | None:
    """Return a process's start time, or None if it has ended. The start time detects that a process id was reused."""
    stat = _stat(pid)
    return stat and stat[1]


def marked_tree(mark: str) -> dict[int, int]:
    """Return the start times of the marked processes and of all their descendants, by process id.

    Descendants are included because a process may lose the mark: Ray's agents overwrite their environment with their
    title.
    """
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid))}
    members = marked(mark)
    while more := {pid for pid, (parent, _) in stats.items() if parent in members and pid not in members}:
        members |= more
    return {pid: stats[pid][1] for pid in members - {os.getpid()} if pid in stats and not _is_resource_tracker(pid)}


def _is_resource_tracker(pid: int) -> bool:
    """Return whether a process is the resource tracker of Python's multiprocessing.

    The tracker must not be killed: it cleans up after its last user and then exits.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def shared_memory(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return (path, inode) of the named shared memory that these processes have mapped."""
    shared = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                paths = {path.decode() for path in _SHARED.findall(file.read())}
        except OSError:
            continue  # the process has ended
        shared |= {(path, inode) for path in paths if (inode := inode_of(path))}
    return shared


def inode_of(path: str) -> int | None:
    """Return the inode of a file, or None if it does not exist."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _observe(mark: str, ended: Callable[[], bool]) -> tuple[dict[int, int], set[tuple[str, int]]]:
    """Return the processes with ``mark`` (start times by process id) and their shared memory, seen until ``ended``."""
    known: dict[int, int] = {}
    first_scan: dict[int, int] = {}
    shared: set[tuple[str, int]] = set()
    scans = 0
    while True:
        running = marked_tree(mark)
        for child in running:
            first_scan.setdefault(child, scans)
        # Scan the memory of new processes every time. Ray kills these processes with their actor, and their mappings
        # are then lost.
        new = [child for child in running if scans - first_scan[child] < _MEMORY_SCANS_OF_NEW]
        shared |= shared_memory(running if scans % _SCANS_PER_MEMORY_SCAN == 0 else new)
        known.update(running)
        scans += 1
        if ended():
            return known, shared


def _clean(
    mark: str,
    known: dict[int, int],
    shared: set[tuple[str, int]],
    grace_s: float,
    scratch: str | None = None,
    dead: bool = True,
) -> int:
    """End the marked and the known processes, remove shared memory and the temporary folder.

    Args:
        dead: True if the process that set the mark has ended, so that it uses no semaphore with the mark in its name.

    Returns:
        Number of segments of shared memory that were removed.
    """
    known.update(marked_tree(mark))
    shared |= shared_memory(known)
    _end(mark, known, grace_s)
    if dead:
        named = glob(f"/dev/shm/*{mark.partition('=')[2]}*")
        shared |= {(path, inode) for path in named if _SHARED.match(path.encode()) and (inode := inode_of(path))}
    removed = 0
    for path, inode in shared:
        if inode_of(path) == inode:  # still the same file, not a newer file with this name
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                removed += 1
    if scratch is not None:
        if os.path.lexists(scratch) and os.lstat(scratch).st_uid == os.geteuid():
            shutil.rmtree(os.path.realpath(scratch), ignore_errors=True)
            if os.path.islink(scratch):  # a short path to a folder in a long TMPDIR
                os.unlink(scratch)
        with contextlib.suppress(FileNotFoundError):  # last, because the next start finds everything else by this file
            os.unlink(scratch + OWNER)
    return removed


def _watch(mark: str, scratch: str) -> None:
    seen = _observe(mark, lambda: bool(select.select([sys.stdin], [], [], _SCAN_INTERVAL_S)[0]))
    _clean(mark, *seen, _GRACE_S, scratch, dead=sys.stdin.buffer.read() != _CLOSED)


def _guard(mark: str, pid: int, start_time: int) -> None:
    # When Ray ends an actor, it kills the actor's children. Fork and exit the parent, so that the guard is not a child
    # of the actor.
    if os.fork():
        os._exit(0)

    def ended() -> bool:
        time.sleep(_SCAN_INTERVAL_S)
        return _start_time(pid) != start_time

    _clean(mark, *_observe(mark, ended), 0.0)


def _end(mark: str, known: dict[int, int], grace_s: float) -> None:
    """Wait for the marked and the known processes to exit, and kill those that remain.

    Args:
        known: start times by process id; updated in place.
        grace_s: maximum wait in seconds before processes are killed.
    """

    def remaining() -> list[int]:
        known.update(marked_tree(mark))
        return [pid for pid, start_time in known.items() if _start_time(pid) == start_time]

    deadline = time.monotonic() + grace_s
    while remaining() and time.monotonic() < deadline:
        time.sleep(0.1)
    while pids := remaining():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _main(mode: str, mark: str, *arguments: str) -> None:
    # A signal to the process group must not end the cleanup process before the watched processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if mode == "run":
        _watch(mark, arguments[0])
    else:
        _guard(mark, int(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
