"""Sandbox for Python programs written by a model: Linux namespaces, resource limits and a seccomp filter.

A program that is tested with assertions and the assertions run in two sandboxes, which exchange plain data (JSON).
Therefore the program cannot change the test, its result or the compared values. ``sandbox_script.py`` runs in the
sandbox and isolates itself.

Isolation of a program:

* user, mount, pid, network, IPC and UTS namespaces. The file system contains Python's library and the system libraries,
  both read-only, and an empty ``/tmp`` in memory. Network interfaces and other processes do not exist.
* limits on CPU time, wall time, memory, output, files and threads.
* a seccomp filter that refuses new processes, sockets and memory outside the address space.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Mapping, Sequence

from gdpo_nemo.environments.execution import sandbox_script
from gdpo_nemo.environments.execution.sandbox_script import COMPILED, KILLED, NOBODY, READY, TMP_BYTES

_STATUS_BYTES = 4096


class SandboxError(Exception):
    """Raised if the sandbox cannot be used, or if it failed for another reason than the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    cpu_s: float = 2.0
    """CPU time in seconds, including about 0.1 s to start Python."""
    wall_s: float = 10.0
    """Wall time in seconds."""
    memory_bytes: int = 2**30
    """Address space in bytes."""
    output_bytes: int = 2**20
    """Length of standard output in bytes."""


@dataclass(frozen=True)
class Run:
    """Result of a program."""

    compiled: bool
    """True if the source is valid Python. The program cannot influence this value."""
    succeeded: bool
    """True if the program exited by itself with status 0."""
    stopped: str
    """Reason why the sandbox stopped the program, such as ``cpu time``. Empty if it was not stopped."""
    output: bytes
    cpu_s: float
    """CPU time in seconds, including the start of Python."""


def run_program(source: str, stdin: str, limits: Limits) -> Run:
    """Run a program with the text ``stdin`` as standard input. Raises SandboxError."""
    process = _Process({"mode": "run", "source": source}, limits, stdin=stdin)
    _wait([process], limits)
    return process.result()


def run_tests(
    source: str, setup: str, tests: Sequence[str], names: Sequence[str] | None, limits: Limits
) -> tuple[Run, list[bool]]:
    """Execute the statements of each test on a program. Return the program's run and whether each test passed.

    Args:
        setup: code to execute before the tests.
        names: names that the tests take from the program. If None, the tests take the names that they do not define.

    Raises:
        SandboxError: also if the setup or a test is not valid Python, or the setup raises an exception.
    """
    (requests, to_program), (replies, to_tests) = os.pipe(), os.pipe()
    processes: list[_Process] = []
    try:
        job = {"mode": "test", "setup": setup, "tests": list(tests), "names": names}
        processes.append(_Process({"mode": "serve", "source": source}, limits, (requests, to_tests)))
        processes.append(_Process(job, limits, (replies, to_program)))
    finally:
        for fd in (requests, to_program, replies, to_tests):
            os.close(fd)
        if len(processes) == 1:
            processes[0].kill()
    _wait(processes, limits)
    program, tester = (process.result() for process in processes)
    if tester.stopped or not tester.succeeded:
        return program, [False] * len(tests)
    result = json.loads(tester.output)
    if isinstance(result, str):
        raise SandboxError(result)
    return program, [passed is True for passed in result]


@cache
def mechanism() -> str:
    """Return the mechanism that can run a program here: ``bubblewrap`` or ``namespaces``.

    Raises SandboxError with the reasons if neither can.
    """
    reasons = []
    # For root, bubblewrap maps the program to root, who may start any number of threads.
    candidates = ["bubblewrap", "namespaces"] if shutil.which("bwrap") and os.getuid() else ["namespaces"]
    for candidate in candidates:
        try:
            process = _Process({"mode": "run", "source": ""}, Limits(10.0, 60.0), mechanism=candidate)
            _wait([process], Limits(10.0, 60.0))
            if process.result().succeeded:
                return candidate
            reasons.append(f"{candidate}: the probe did not end normally")
        except (SandboxError, OSError) as error:
            reasons.append(f"{candidate}: {error}")
    raise SandboxError("; ".join(reasons))


class _Process:
    """A started sandbox.

    Args:
        job: instructions for the script.
        pipes: file descriptors for reading from and writing to the other sandbox, or None.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        limits: Limits,
        pipes: tuple[int, int] | None = None,
        stdin: str = "",
        mechanism: str | None = None,
    ):
        self.limits = limits
        self.output = b""
        self.status = b""
        self.stopped = ""
        self._usage: resource.struct_rusage | None = None
        job_file, stdin_file = _sealed(json.dumps(job).encode()), _sealed(stdin.encode("utf-8", "surrogatepass"))
        try:
            chosen = mechanism or globals()["mechanism"]()
            settings = {
                "cpu_s": math.ceil(limits.cpu_s),
                "memory_bytes": limits.memory_bytes,
                "readable": _readable_paths() if chosen == "namespaces" else None,
                "job": job_file,
                "pipes": pipes,
                "parent": os.getpid(),
            }
            self._popen = subprocess.Popen(
                [*_prefix(chosen), *_python(), json.dumps(settings)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(job_file, *(pipes or ())),
                env=_environment(),
                cwd="/",
            )
        finally:
            os.close(job_file)
            os.close(stdin_file)
        self._pidfd = os.pidfd_open(self._popen.pid)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Wait for the output, the status and the end of the process."""
        assert self._popen.stdout and self._popen.stderr
        for stream in (self._popen.stdout, self._popen.stderr, self._pidfd):
            selector.register(stream, selectors.EVENT_READ, self)

    def read(self, stream: Any, selector: selectors.BaseSelector) -> None:
        """Handle an event. A process that writes too much is killed."""
        if stream == self._pidfd:
            _, status, self._usage = os.wait4(self._popen.pid, 0)
            self._popen.returncode = os.waitstatus_to_exitcode(status)
            selector.unregister(stream)
            return
        chunk = os.read(stream.fileno(), 65536)
        if not chunk:
            selector.unregister(stream)
        elif stream is self._popen.stderr:
            self.status = (self.status + chunk)[:_STATUS_BYTES]
        elif len(self.output) + len(chunk) > self.limits.output_bytes:
            self.kill("output")
        else:
            self.output += chunk

    def kill(self, reason: str = "killed") -> None:
        """Kill the process and all processes of its sandbox."""
        self.stopped = self.stopped or reason
        if self._popen.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the file descriptors after the end of the process."""
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        os.close(self._pidfd)

    def result(self) -> Run:
        """Return the result of the ended process. Raises SandboxError if the program was not started."""
        status = self.status.decode(errors="replace")
        if not status.startswith(READY):
            reason = status.strip().splitlines()[-1:] or [self.stopped or f"exit status {self._popen.returncode}"]
            raise SandboxError(f"the sandbox could not be started ({reason[0][:300]})")
        assert self._usage is not None
        cpu_s = self._usage.ru_utime + self._usage.ru_stime
        # The kernel may kill a program shortly before its measured CPU time reaches the limit.
        killed = self._popen.returncode == KILLED and cpu_s > 0.9 * self.limits.cpu_s
        stopped = self.stopped or ("cpu time" if killed or cpu_s > self.limits.cpu_s else "")
        succeeded = not stopped and self._popen.returncode == 0
        return Run(status == READY + COMPILED, succeeded, stopped, self.output, cpu_s)


def _wait(processes: Sequence[_Process], limits: Limits) -> None:
    """Wait until the processes have ended and closed their streams. At the limit of wall time, kill the processes."""
    deadline = time.monotonic() + limits.wall_s
    try:
        with selectors.DefaultSelector() as selector:
            for process in processes:
                process.register(selector)
            while selector.get_map():
                left = deadline - time.monotonic()
                for key, _ in selector.select(max(0.0, left) if deadline < math.inf else None):
                    key.data.read(key.fileobj, selector)
                if left <= 0 and deadline < math.inf:
                    deadline = math.inf
                    for process in processes:
                        process.kill("wall time")
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.close()


def _sealed(content: bytes) -> int:
    """Return a file descriptor of a file in memory that cannot be changed."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return fd


def _environment() -> dict[str, str]:
    """Return the environment variables of a sandbox: those that Python needs to start, and a fixed seed of hashes, so
    that the order of sets does not change between two runs."""
    names = ("LD_LIBRARY_PATH", "PYTHONHOME")
    return {**{name: os.environ[name] for name in names if name in os.environ}, "PYTHONHASHSEED": "0"}


def _python() -> list[str]:
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [executable, "-s", "-S", "-P", "-B", "-X", "utf8", os.path.abspath(sandbox_script.__file__)]


def _readable_paths() -> list[str]:
    """Return the folders that programs can read: the libraries of Python and of the system."""
    paths = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(os.path.realpath(sys.base_prefix), "lib")]
    links = [path for path in paths if os.path.islink(path)]
    folders = [path for path in paths if os.path.isdir(path) and path not in links]
    return links + [p for p in folders if not any(p != other and p.startswith(other + "/") for other in folders)]


def _prefix(mechanism: str) -> list[str]:
    """Return the command that runs the script in the sandbox, without the script's own arguments."""
    if mechanism == "namespaces":
        return []
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    # Without --as-pid-1, bubblewrap does not wait for the program, and its CPU time is unknown.
    # /tmp is mounted first, because Python may be installed below it.
    command += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    for path in _readable_paths():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    for path in (_python()[0], os.path.abspath(sandbox_script.__file__)):
        command += ["--ro-bind", path, path]
    for name, value in _environment().items():
        command += ["--setenv", name, value]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]
