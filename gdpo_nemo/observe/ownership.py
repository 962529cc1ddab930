"""Who writes a run folder: ``owner.json`` names one process, and a second one is refused.

The file has host, process and start of the owner, and is renewed while that lives. Who is dead on this machine is found
at once, by process id and start time, so a run that was killed resumes without a wait. On another host (or in another
container, whose processes are not seen from here) an owner is dead when it has not renewed its file for ``STALE_S``.
Ages are differences of two files' times on the same file system, which no host's clock can falsify.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Iterator

import psutil

from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.phases import phase

FILE = "owner.json"
BEAT_S = 15.0
STALE_S = 120.0
"""Without a sign of life; more than a file system on a network keeps old attributes."""
_LOOK_S = 2.0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""What file systems without hard links answer."""


@dataclass(frozen=True)
class Claim:
    """What the file says."""

    host: str
    machine: str
    """The boot of the kernel and the namespace of its processes: where an id means the same process."""
    process: int
    started: float
    """Seconds since the epoch; with the id it is the process, whose id may be used again."""
    since: float
    """When the folder was taken."""

    @classmethod
    def own(cls) -> Claim:
        """That of this process, now."""
        return cls(socket.gethostname(), _machine(), os.getpid(), psutil.Process().create_time(), time.time())

    @property
    def is_near(self) -> bool:
        """Whether the owner's process would be seen from here."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Whether no process here is the owner; of one elsewhere nothing is known."""
        if not self.is_near:
            return False
        try:
            return abs(psutil.Process(self.process).create_time() - self.started) > 1.0
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on {self.host}, since {since}"


class Owner:
    """This process as the owner of a folder; a thread renews the claim until ``release``."""

    def __init__(self, run_dir: Path, claim: Claim, predecessor: str | None, beat_s: float):
        self.predecessor = predecessor
        """A sentence on the dead owner whose folder this was; None: it had none."""
        self._file = run_dir / FILE
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
    """Raises ConfigError: a process that is known to live owns the folder. Writes nothing, waits for nobody."""
    with contextlib.suppress(OSError):
        claim = _read(run_dir / FILE)
        if claim is not None and claim.is_near and not claim.is_dead:
            raise _refusal(run_dir, claim)


def _take(run_dir: Path, beat_s: float, stale_s: float) -> Owner:
    file = run_dir / FILE
    mine = Claim.own()
    predecessor = None
    while not _create(file, mine):
        stamp = _stamp(file)
        claim = _read(file)
        if stamp is None or not _is_dead(run_dir, file, claim, stamp, stale_s):
            continue  # it went away meanwhile
        who = f"its owner, {claim}, is gone" if claim else f"its {FILE} cannot be read, and nobody renews it"
        predecessor = f"{run_dir} is taken over: {who}"
        _remove(file, stamp)
    return Owner(run_dir, mine, predecessor, beat_s)


def _is_dead(run_dir: Path, file: Path, claim: Claim | None, stamp: tuple[int, int], stale_s: float) -> bool:
    """Whether nobody owns the folder any more; waits until that is certain. False: the file changed hands or went.
    Raises ConfigError: somebody does."""
    if claim is not None and claim.is_near:
        if claim.is_dead:
            return True
        raise _refusal(run_dir, claim)
    with phase(f"waiting for a sign of life of the owner of {run_dir}"):
        while _age(run_dir, stamp) < stale_s:
            time.sleep(min(_LOOK_S, stale_s / 4))
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
    """The claim; None where the file is gone, or holds something else."""
    try:
        claim = Claim(**parse_json(read_text(file)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    numbers = (claim.started, claim.since)
    sound = isinstance(claim.process, int) and all(isinstance(number, (int, float)) for number in numbers)
    return claim if sound and isinstance(claim.machine, str) else None


def _stamp(file: Path) -> tuple[int, int] | None:
    """What is another one after every renewal; None: the file is gone."""
    try:
        with open(file) as opened:  # a network file system answers stat from its cache, and asks the server here
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
