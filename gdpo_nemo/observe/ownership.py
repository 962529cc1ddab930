"""Ownership of a run folder: ``owner.json`` names the process that owns the folder, and other processes are refused.

The file contains host, boot id, process id and start time of the owner, which renews the file regularly. The owner also
holds a lock on the folder (``flock``), which the kernel releases when the process ends. On the same machine, a dead
owner is detected at once, because its lock is free and no process has its id and start time. A killed run thus resumes
without waiting. The start time is in clock ticks since boot, so it does not depend on the wall clock.

On another host or in another container, an owner counts as dead if it has not renewed its file for ``STALE_S``. The age
of the file is the difference of two times on the same file system. The owner file is also watched for ``STALE_S / 4``,
because the clock of the file system may be changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gdpo_nemo.utils.errors import ConfigError, RunError, printable
from gdpo_nemo.utils.files import open_file, parse_json, read_text, sync_folder
from gdpo_nemo.utils.progress import phase

FILE = "owner.json"
BEAT_S = 15.0
STALE_S = 120.0
"""Time in seconds without renewal after which an owner counts as dead.

This time exceeds the time for which network file systems cache file attributes.
"""
_LOOK_S = 2.0
_HANDOVER_S = 10.0
"""Maximum time in seconds for which a new owner holds the lock before it has written its claim."""
_LARGEST_PID = 1 << 22
_LATEST = 1 << 40
"""Upper bound on ``Claim.ticks`` and ``Claim.since``."""
_LONGEST_NAME = 255
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without hard links."""


@dataclass(frozen=True)
class Claim:
    """Content of the owner file."""

    host: str
    machine: str
    """Boot id of the kernel and PID namespace. Process ids are unique only within one boot and one namespace."""
    process: int
    since: float
    """Time at which the process took the folder, in seconds since the epoch.

    This time is only displayed, never compared.
    """
    ticks: int = 0
    """Start time of the process in clock ticks since boot, which distinguishes processes that reuse an id.

    0 means an unknown start time, as in files of older versions.
    """

    @classmethod
    def of_this_process(cls) -> Claim:
        """Return a claim for this process with the current time."""
        return cls(socket.gethostname(), _machine(), os.getpid(), time.time(), _start_ticks(os.getpid()) or 0)

    @property
    def is_near(self) -> bool:
        """True if this process can see whether the owner is alive: both have the same kernel and PID namespace."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """True if the owner ran on this machine and has ended.

        False if the owner runs elsewhere, because its state is unknown.
        """
        if not self.is_near:
            return False
        ticks = _start_ticks(self.process)
        return ticks is None or (0 not in (ticks, self.ticks) and ticks != self.ticks)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on {printable(self.host)}, since {since}"


class Owner:
    """Ownership of a folder by this process. A thread renews the claim until ``release``.

    Args:
        predecessor: message about the dead previous owner. None if the folder had no previous owner.
        beat_s: interval in seconds between renewals.
        lock: file descriptor that holds the lock on the folder. None if the file system does not support locks.
    """

    def __init__(self, run_dir: Path, claim: Claim, predecessor: str | None, beat_s: float, lock: int | None):
        self.predecessor = predecessor
        """Message about the dead previous owner. None if the folder had no previous owner."""
        self._file = run_dir / FILE
        self._lock = lock
        self._claim = claim
        self._beat_s = beat_s
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still owns the folder.

        Raises:
            RunError: if another process has taken over the folder because this process did not renew its claim.
        """
        if self._lost:
            raise RunError(self._lost)

    def _renew(self) -> None:
        while not self._stop.wait(self._beat_s):
            # If the disk is full or the file server is unreachable, the next renewal is tried after ``beat_s``.
            with contextlib.suppress(OSError):
                found = _read(self._file)
                if found is not None and found != self._claim:
                    self._lost = f"{self._file.parent} was taken over by {found} while this process was suspended"
                    return
                _write(self._file, self._claim)

    def release(self) -> None:
        """Release the folder, unless another process has taken it over."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if _read(self._file) == self._claim:
                self._file.unlink()
        _unlock(self._lock)


@contextlib.contextmanager
def owned(run_dir: Path, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> Iterator[Owner]:
    """Own a run folder while the block runs, and create the folder if it does not exist.

    Folders created by this call are removed at the end if they are still empty.

    Raises:
        ConfigError: if another process owns the folder.
        RunError: if the folder cannot be written.
    """
    created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in created:
            sync_folder(path.parent)
        owner = _take(run_dir, beat_s, stale_s)
    except OSError as error:
        raise RunError(f"{run_dir} cannot be written: {error.strerror or error}") from None
    try:
        yield owner
    finally:
        owner.release()
        for path in created:
            with contextlib.suppress(OSError):  # The folder is not empty.
                path.rmdir()


def check_free(run_dir: Path) -> None:
    """Check that no living process owns the folder, without writing or waiting.

    Raises:
        ConfigError: if a living process owns the folder.
    """
    with contextlib.suppress(OSError):
        _check_regular(run_dir / FILE)
        claim = _read(run_dir / FILE)
        if claim is None or claim.is_dead:
            return
        if claim.is_near:
            raise _refusal(run_dir, claim)
        try:
            _unlock(_lock(run_dir, fcntl.LOCK_SH))
        except BlockingIOError:
            raise _refusal(run_dir, claim) from None


def _take(run_dir: Path, beat_s: float, stale_s: float) -> Owner:
    file = run_dir / FILE
    lock = _lock_or_refuse(run_dir)
    try:
        claim_of_process = Claim.of_this_process()
        predecessor = None
        while not _create(file, claim_of_process):
            _check_regular(file)
            stamp = _stamp(file)
            claim = _read(file)
            if stamp is None or not _is_dead(run_dir, file, claim, stamp, stale_s):
                continue  # Another process has changed or removed the file.
            who = (
                f"its owner ({claim}) no longer runs"
                if claim
                else f"its {FILE} cannot be read and is no longer renewed"
            )
            predecessor = f"taking over {run_dir}: {who}"
            _remove(file, stamp)
        return Owner(run_dir, claim_of_process, predecessor, beat_s, lock)
    except BaseException:
        _unlock(lock)
        raise


def _lock(run_dir: Path, kind: int) -> int | None:
    """Lock the folder and return the file descriptor that holds the lock.

    The lock is on the folder itself, so that renewals can replace the owner file and a killed owner leaves no lock file
    behind. Returns None if the file system does not support locks on folders (NFS).

    Raises:
        BlockingIOError: if a living process holds the lock.
    """
    try:
        opened = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # This process may write to the folder but not list it.
        return None
    try:
        fcntl.flock(opened, kind | fcntl.LOCK_NB)
        return opened
    except BlockingIOError:
        os.close(opened)
        raise
    except OSError:
        os.close(opened)
        return None


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _lock_or_refuse(run_dir: Path) -> int | None:
    """Lock the folder and return the file descriptor that holds the lock.

    If the lock is held but the file names no living owner, wait up to ``_HANDOVER_S``. A new owner may not have written
    its claim yet, and ``check_free`` holds the lock for a moment.

    Raises:
        ConfigError: if another process holds the lock. The message names the process if it is known.
    """
    deadline = time.monotonic() + _HANDOVER_S
    while True:
        try:
            return _lock(run_dir, fcntl.LOCK_EX)
        except BlockingIOError:
            _check_regular(run_dir / FILE)
            claim = _read(run_dir / FILE)
        if claim is not None and not claim.is_dead:
            raise _refusal(run_dir, claim)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run.dir: {run_dir} is locked by a process that is not listed in {FILE}; end that process first, or "
                "use another run.name"
            )
        time.sleep(0.05)


def _is_dead(run_dir: Path, file: Path, claim: Claim | None, stamp: tuple[int, int], stale_s: float) -> bool:
    """Wait until it is certain whether the owner of the folder is dead.

    Returns:
        True if the owner is dead. False if the file was replaced by another owner or removed.

    Raises:
        ConfigError: if the owner is alive.
    """
    if claim is not None and claim.is_near:
        if claim.is_dead:
            return True
        raise _refusal(run_dir, claim)
    with phase(f"waiting for a heartbeat of the owner of {run_dir}"):
        begin = time.monotonic()
        # The age of the file is not reliable, because the clock of the file system may have been changed.
        while (watched := time.monotonic() - begin) < stale_s:
            if watched >= stale_s / 4 and _age(run_dir, stamp) >= stale_s:
                break
            time.sleep(min(_LOOK_S, stale_s / 8))
            if _stamp(file) == stamp:
                continue
            if claim is not None and _read(file) == claim:
                raise _refusal(run_dir, claim)
            return False
    return True


def _refusal(run_dir: Path, claim: Claim) -> ConfigError:
    return ConfigError(
        f"run.dir: {run_dir} belongs to an active run ({claim}); end that run first, or use another run.name"
    )


def _create(file: Path, claim: Claim) -> bool:
    """Create the owner file atomically with its full content. Return False if the file already exists."""
    partial = file.with_name(f".{FILE}.{claim.process}.new")
    try:
        partial.write_text(json.dumps(asdict(claim), indent=1))
        try:
            os.link(partial, file)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with open(file, "x") as new:
                new.write(partial.read_text())
        return True
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)


def _remove(file: Path, stamp: tuple[int, int]) -> None:
    """Remove the file of a dead owner.

    If two processes remove it at the same time, the second process may move the file of the new owner. It then restores
    the file.
    """
    aside = file.with_name(f".{FILE}.{os.getpid()}.gone")
    with contextlib.suppress(FileNotFoundError):
        os.rename(file, aside)
        if _stamp(aside) != stamp:
            os.link(aside, file)
        aside.unlink()


def _write(file: Path, claim: Claim) -> None:
    partial = file.with_name(f".{FILE}.{claim.process}.beat")
    partial.write_text(json.dumps(asdict(claim), indent=1))
    os.replace(partial, file)


def _read(file: Path) -> Claim | None:
    """Read a claim. Return None if the file does not exist or is invalid. Raises OSError like ``open_file``."""
    try:
        return _claim(parse_json(read_text(file)))
    except (FileNotFoundError, ValueError):
        return None


def _claim(content: Any) -> Claim | None:
    """Convert JSON content to a claim. Return None if a value is invalid. Unknown keys are ignored."""
    if not isinstance(content, dict):
        return None
    known = {field.name: content[field.name] for field in fields(Claim) if field.name in content}
    try:
        claim = Claim(**known)
    except TypeError:  # A key is missing.
        return None
    names = (claim.host, claim.machine)
    numbers = (type(claim.process), type(claim.ticks)) == (int, int) and type(claim.since) in (int, float)
    if not numbers or not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in names):
        return None
    # Comparisons with NaN are False, so NaN is also rejected.
    sound = 0 < claim.process <= _LARGEST_PID and 0 <= claim.ticks < _LATEST and 0 <= claim.since < _LATEST
    return claim if sound else None


def _check_regular(file: Path) -> None:
    """Raise ConfigError if the path exists but is not a regular file, for example a pipe, folder or link."""
    try:
        mode = os.lstat(file).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(f"run.dir: {file} is not a regular file; remove this file, or use another run.name")


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return inode and modification time, which change with every renewal. Return None if the file does not exist.

    Raises OSError like ``open_file``.
    """
    try:
        # Network file systems may cache the result of stat, but ask the server when a file is opened.
        with open_file(file) as opened:
            found = os.fstat(opened.fileno())
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _age(run_dir: Path, stamp: tuple[int, int]) -> float:
    """Return the time in seconds since ``stamp``, by the clock of the file system."""
    probe = run_dir / f".{FILE}.{os.getpid()}.now"
    probe.write_bytes(b"")
    try:
        return (probe.stat().st_mtime_ns - stamp[1]) / 1e9
    finally:
        probe.unlink()


def _machine() -> str:
    """Return an identifier of this kernel boot and the PID namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_ticks(process: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. It does not depend on the wall clock.

    Returns:
        None if the process does not exist or is a zombie. 0 if the start time of the process is unknown.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0 if _exists(process) else None
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(numbers[18])


def _exists(process: int) -> bool:
    """Return True if the process exists. This also works if /proc does not show the process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
