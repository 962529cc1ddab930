"""The owner of a run folder: ``owner.json`` names one process, and a second process is refused.

The file names host, boot, process id and start of the owner, and is renewed while the owner lives. The owner also holds
a lock on the folder (``flock``), which the kernel drops when the process ends. On the same machine a dead owner is
found at once, so a run that was killed resumes without a wait: nobody holds the lock, and no process has this id and
started at this clock tick since boot. Neither depends on the time of day, which may be set while a run lasts.

On another host, or in another container, an owner is dead when it has not renewed its file for ``STALE_S``. The age is
the difference of two times on the same file system. The file is watched for ``STALE_S / 4`` besides, since the clock of
that file system may be set, too.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Iterator

from gdpo_nemo.config.disk_sync import sync_folder
from gdpo_nemo.config.reading import open_file, parse_json, read_text
from gdpo_nemo.errors import ConfigError, RunError, printable
from gdpo_nemo.phases import phase

FILE = "owner.json"
BEAT_S = 15.0
STALE_S = 120.0
"""Without a sign of life; more than a file system on a network keeps old attributes."""
_LOOK_S = 2.0
_HANDOVER_S = 10.0
"""Longest time for which a new owner holds the lock before its claim is in the file."""
_LARGEST_PID = 1 << 22
_LATEST = 1 << 40
"""Largest start in clock ticks, and largest time in seconds, that a claim may name."""
_LONGEST_NAME = 255
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""What file systems without hard links answer."""


@dataclass(frozen=True)
class Claim:
    """The content of the file."""

    host: str
    machine: str
    """The boot of the kernel and the namespace of its processes: where an id means the same process."""
    process: int
    since: float
    """When the folder was taken, in seconds since the epoch. For people: nothing is compared with it."""
    ticks: int = 0
    """Start of the process in clock ticks since boot; with the id it is the process, whose id may be used again.
    0: unknown, as in files of older versions."""

    @classmethod
    def own(cls) -> Claim:
        """Return the claim of this process, now."""
        return cls(socket.gethostname(), _machine(), os.getpid(), time.time(), _start_ticks(os.getpid()) or 0)

    @property
    def is_near(self) -> bool:
        """True if the owner's process is visible from here when it lives."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """True if the owner belongs to this machine and has ended. Of an owner elsewhere nothing is known."""
        if not self.is_near:
            return False
        ticks = _start_ticks(self.process)
        return ticks is None or (0 not in (ticks, self.ticks) and ticks != self.ticks)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on {printable(self.host)}, since {since}"


class Owner:
    """This process as the owner of a folder. A thread renews the claim until ``release``.

    Args:
        lock: descriptor that holds the lock on the folder; None on a file system without locks.
    """

    def __init__(self, run_dir: Path, claim: Claim, predecessor: str | None, beat_s: float, lock: int | None):
        self.predecessor = predecessor
        """A sentence on the dead owner whose folder this was; None: it had none."""
        self._file = run_dir / FILE
        self._lock = lock
        self._claim = claim
        self._beat_s = beat_s
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RunError: another process has taken the folder, having seen no sign of life of this one."""
        if self._lost:
            raise RunError(self._lost)

    def _renew(self) -> None:
        while not self._stop.wait(self._beat_s):
            # A full disk or a server that is away: the owner tries again, and another host may wait for STALE_S.
            with contextlib.suppress(OSError):
                found = _read(self._file)
                if found is not None and found != self._claim:
                    self._lost = f"{self._file.parent} was taken over by {found}, while this process stood still"
                    return
                _write(self._file, self._claim)

    def release(self) -> None:
        """Give the folder free; it stays another's if it was taken over."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if _read(self._file) == self._claim:
                self._file.unlink()
        _unlock(self._lock)


@contextlib.contextmanager
def owned(run_dir: Path, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> Iterator[Owner]:
    """Own the folder, which is made where it is not there, while the block runs. A folder that was made and in which
    nothing came to be is removed.

    Raises:
        ConfigError: another process owns it. RunError: it cannot be written.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_folder(path.parent)
        owner = _take(run_dir, beat_s, stale_s)
    except OSError as error:
        raise RunError(f"{run_dir} cannot be written: {error.strerror or error}") from None
    try:
        yield owner
    finally:
        owner.release()
        for path in made:
            with contextlib.suppress(OSError):  # it holds something
                path.rmdir()


def check_free(run_dir: Path) -> None:
    """Raise ConfigError if a process that is known to live owns the folder. Writes nothing and does not wait."""
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
        mine = Claim.own()
        predecessor = None
        while not _create(file, mine):
            _check_regular(file)
            stamp = _stamp(file)
            claim = _read(file)
            if stamp is None or not _is_dead(run_dir, file, claim, stamp, stale_s):
                continue  # it went away meanwhile
            who = f"its owner, {claim}, is gone" if claim else f"its {FILE} cannot be read, and nobody renews it"
            predecessor = f"{run_dir} is taken over: {who}"
            _remove(file, stamp)
        return Owner(run_dir, mine, predecessor, beat_s, lock)
    except BaseException:
        _unlock(lock)
        raise


def _lock(run_dir: Path, kind: int) -> int | None:
    """Lock the folder, and return the descriptor that holds the lock.

    The folder itself and no file in it: nothing is left behind when the owner is killed, and the renewals replace their
    file. Returns None if the file system has no locks, or none on folders (NFS). Raises BlockingIOError: a living
    process holds it.
    """
    try:
        opened = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder that may be written and not listed
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
    """Lock the folder. Raises ConfigError that names the process which holds the lock.

    A process that has just taken the folder may not have written its claim, and ``check_free`` holds the lock for a
    moment: an absent or a dead owner is waited for.
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
                f"run.dir: {run_dir} is locked by a process that {FILE} does not name; end that process first, or use "
                "another run.name"
            )
        time.sleep(0.05)


def _is_dead(run_dir: Path, file: Path, claim: Claim | None, stamp: tuple[int, int], stale_s: float) -> bool:
    """Return whether the folder has no owner any more; waits until that is certain. False if the file changed or went.

    Raises:
        ConfigError: the owner lives.
    """
    if claim is not None and claim.is_near:
        if claim.is_dead:
            return True
        raise _refusal(run_dir, claim)
    with phase(f"waiting for a sign of life of the owner of {run_dir}"):
        begin = time.monotonic()
        # By its age alone, an owner would be dead, or live for ever, after the file system's clock was set.
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
        f"run.dir: {run_dir} belongs to a run under way ({claim}); end that one first, or use another run.name"
    )


def _create(file: Path, claim: Claim) -> bool:
    """Make the file unless it is there, whole from the start."""
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
    """Remove a dead owner's file. Of two processes that do so at once one moves the file, and the other its new owner's
    file: that one is put back."""
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
    """Return the claim; None if the file is gone, or its content is not a claim. Raises OSError as ``open_file``."""
    try:
        return _claim(parse_json(read_text(file)))
    except (FileNotFoundError, ValueError):
        return None


def _claim(content: Any) -> Claim | None:
    """Return the claim if every value is one that a claim can have. Keys of other versions are ignored."""
    if not isinstance(content, dict):
        return None
    known = {field.name: content[field.name] for field in fields(Claim) if field.name in content}
    try:
        claim = Claim(**known)
    except TypeError:  # a key is missing
        return None
    names = (claim.host, claim.machine)
    numbers = (type(claim.process), type(claim.ticks)) == (int, int) and type(claim.since) in (int, float)
    if not numbers or not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in names):
        return None
    # A comparison with NaN is false.
    sound = 0 < claim.process <= _LARGEST_PID and 0 <= claim.ticks < _LATEST and 0 <= claim.since < _LATEST
    return claim if sound else None


def _check_regular(file: Path) -> None:
    """Raise ConfigError if something else has the place of the file: a pipe, a folder, a link."""
    try:
        mode = os.lstat(file).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(f"run.dir: {file} is not a regular file; remove it, or use another run.name")


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return a value that changes with every renewal; None if the file is gone. Raises OSError as ``open_file``."""
    try:
        # A network file system answers stat from its cache, and asks the server when a file is opened.
        with open_file(file) as opened:
            found = os.fstat(opened.fileno())
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _age(run_dir: Path, stamp: tuple[int, int]) -> float:
    """Seconds since then, by the clock of the file system."""
    probe = run_dir / f".{FILE}.{os.getpid()}.now"
    probe.write_bytes(b"")
    try:
        return (probe.stat().st_mtime_ns - stamp[1]) / 1e9
    finally:
        probe.unlink()


def _machine() -> str:
    """This boot of this kernel, and the namespace of this process's id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_ticks(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot. No setting of the clock changes it.

    None if the process does not exist, or has ended and only its parent has not asked how. 0 if that is unknown.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0 if _exists(process) else None
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(numbers[18])


def _exists(process: int) -> bool:
    """Return whether the process exists, where /proc does not show it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
