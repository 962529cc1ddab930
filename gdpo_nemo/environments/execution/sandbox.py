"""Sandbox for Python programs written by a model: Linux namespaces, resource limits and a seccomp filter.

bubblewrap creates the namespaces if it is installed, and otherwise ``sandbox_script.py``. The limits, the filter and
everything that a program can observe are the same.

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

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from gdpo_nemo.environments.execution import sandbox_script
from gdpo_nemo.environments.execution.sandbox_script import NOBODY, TMP_BYTES

MECHANISMS = ("bubblewrap", "namespaces")
"""Programs or calls that create the namespaces, the preferred one first."""
_BOUND_SCRIPT = "/sandbox_script.py"
"""Path of the script in bubblewrap, which is not the path of a checkout below ``/tmp``."""
_ERROR_BYTES = 4096
_END_S = 10.0
"""Maximum time in seconds that the kernel may need to end a killed sandbox."""
_KILL_S = 0.1
"""Seconds between two attempts to kill a sandbox."""
_HEADER_BYTES = 1024
"""More than the length of the line before the output of a run."""


class SandboxError(Exception):
    """Raised if the sandbox cannot be used, or if it failed for another reason than the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    cpu_s: float = 2.0
    """CPU time of one run in seconds."""
    wall_s: float = 10.0
    """Wall time of all runs in seconds."""
    memory_bytes: int = 2**30
    """Address space in bytes."""
    output_bytes: int = 2**20
    """Length of standard output of one run in bytes."""
    total_cpu_s: float = 5.0
    """CPU time in seconds after which no further run is started."""


@dataclass(frozen=True)
class Run:
    """Result of one run of a program."""

    compiled: bool
    """True if the source is valid Python. The program cannot influence this value."""
    succeeded: bool
    """True if the program exited by itself with status 0."""
    stopped: str
    """Reason why the sandbox stopped the program: ``cpu time`` or ``output``. Empty if it was not stopped."""
    output: bytes
    cpu_s: float
    """CPU time in seconds, without the start of Python."""


class Runner(Protocol):
    """Machine that runs programs: this one (``LocalRunner``) or another one (``remote_sandbox.py``)."""

    def run_inputs(self, source: str, inputs: Sequence[str], limits: Limits) -> list[Run]:
        """Run a program once for each text as standard input, each time in a new process with an empty ``/tmp``.

        Returns:
            The runs in order. There are fewer runs than inputs if a run was stopped, the source is not valid Python, or
            the total CPU time was spent.

        Raises:
            SandboxError: also if the runs do not end within the wall time.
        """

    def run_tests(
        self, source: str, setup: str, tests: Sequence[str], names: Sequence[str] | None, limits: Limits
    ) -> tuple[Run, list[bool]]:
        """Execute the statements of each test on a program. Return the program's run and whether each test passed.

        Args:
            setup: code to execute before the tests.
            names: names that the tests take from the program. If None, the tests take the names that they do not
                define.

        Raises:
            SandboxError: also if the tests do not end within the wall time, if the setup or a test is not valid Python
                or ends its process, or if the setup raises an exception without using the program.
        """


class LocalRunner(Runner):
    """Runs programs on this machine.

    Args:
        wanted: ``auto`` or one of ``MECHANISMS``.

    Raises:
        SandboxError: with the reasons if no wanted mechanism works here.
    """

    def __init__(self, wanted: str = "auto"):
        self.mechanism = mechanism(wanted)

    def run_inputs(self, source: str, inputs: Sequence[str], limits: Limits) -> list[Run]:
        """Run a program for each input in one sandbox. See ``Runner.run_inputs``."""
        process = _Process(self.mechanism, {"mode": "run", "source": source, "inputs": list(inputs)}, limits)
        _wait([process], limits)
        return process.runs()

    def run_tests(
        self, source: str, setup: str, tests: Sequence[str], names: Sequence[str] | None, limits: Limits
    ) -> tuple[Run, list[bool]]:
        """Run a program and its tests in two sandboxes. See ``Runner.run_tests``."""
        (requests, to_program), (replies, to_tests) = os.pipe(), os.pipe()
        processes: list[_Process] = []
        try:
            job = {"mode": "test", "setup": setup, "tests": list(tests), "names": names}
            program_job = {"mode": "serve", "source": source}
            processes.append(_Process(self.mechanism, program_job, limits, (requests, to_tests)))
            processes.append(_Process(self.mechanism, job, limits, (replies, to_program)))
        finally:
            for fd in (requests, to_program, replies, to_tests):
                os.close(fd)
            if len(processes) == 1:
                processes[0].kill()
        _wait(processes, limits)
        [program], [tester] = (process.runs() for process in processes)
        if tester.stopped:
            return program, [False] * len(tests)
        try:
            result = json.loads(tester.output)
        except (ValueError, RecursionError):
            result = None
        if isinstance(result, str):
            raise SandboxError(result)
        if not isinstance(result, list) or len(result) != len(tests):  # rows are not trusted
            raise SandboxError("the tests of the row end their process")
        return program, [passed is True for passed in result]


@cache
def mechanism(wanted: str = "auto") -> str:
    """Return the first mechanism that can run a program here.

    Args:
        wanted: ``auto`` or one of ``MECHANISMS``.

    Raises:
        SandboxError: with the reasons if there is none.
    """
    reasons = []
    limits = Limits(10.0, 60.0)
    for candidate in MECHANISMS if wanted == "auto" else (wanted,):
        try:
            process = _Process(candidate, {"mode": "run", "source": ""}, limits)
            _wait([process], limits)
            if process.runs()[0].succeeded:
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

    def __init__(self, mechanism: str, job: Mapping[str, Any], limits: Limits, pipes: tuple[int, int] | None = None):
        self._output = b""
        self._errors = b""
        job_file = sandbox_script.sealed(json.dumps(job).encode())
        (reports, report), (waits, release) = os.pipe(), os.pipe()
        # The kernel does not limit the threads of root, so programs of root run as another user. Only a process outside
        # the user namespace may map two users.
        maps = None if os.getuid() else (report, waits)
        settings = {
            "cpu_s": math.ceil(limits.cpu_s),
            "total_cpu_s": limits.total_cpu_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "readable": _readable_paths() if mechanism == "namespaces" else None,
            "job": job_file,
            "pipes": pipes,
            "maps": maps,
        }
        try:
            self._popen = subprocess.Popen(
                [*_prefix(mechanism, maps), *_python(mechanism), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(job_file, *(pipes or ()), *(maps or ())),
                env=_environment(),
                cwd="/",
            )
            os.close(report)
            if maps:
                _map_users(reports)
        finally:
            for fd in (job_file, reports, waits, release):
                os.close(fd)
        self._pidfd = os.pidfd_open(self._popen.pid)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Wait for the output, the errors and the end of the process."""
        assert self._popen.stdout and self._popen.stderr
        for stream in (self._popen.stdout, self._popen.stderr, self._pidfd):
            selector.register(stream, selectors.EVENT_READ, self)

    def read(self, stream: Any, selector: selectors.BaseSelector) -> None:
        """Handle an event."""
        if stream == self._pidfd:
            self._popen.wait()
            selector.unregister(stream)
            return
        chunk = os.read(stream.fileno(), 65536)
        if not chunk:
            selector.unregister(stream)
        elif stream is self._popen.stderr:
            self._errors = (self._errors + chunk)[:_ERROR_BYTES]
        else:
            self._output += chunk

    def kill(self) -> None:
        """Kill the sandbox. Its first process is killed if it exists: the kernel reports the end of this process only
        after all other processes of the namespace have ended, and the process outside then exits."""
        if self._popen.returncode is not None:
            return
        try:
            with open(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children", encoding="ascii") as file:
                first = list(map(int, file.read().split()))
            for pid in first:
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            first = []
        if not first:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the file descriptors after the end of the process."""
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        os.close(self._pidfd)

    def runs(self) -> list[Run]:
        """Return the runs of the ended process, at least one. Raises SandboxError if the sandbox failed."""
        runs = []
        rest = memoryview(self._output)
        while rest:
            header, _, _ = bytes(rest[:_HEADER_BYTES]).partition(b"\n")
            report = json.loads(header)
            start = len(header) + 1
            output, rest = bytes(rest[start : start + report["length"]]), rest[start + report["length"] :]
            if "i" not in report["reached"]:
                break
            succeeded = not report["stopped"] and report["code"] == 0
            runs.append(Run("c" in report["reached"], succeeded, report["stopped"], output, report["cpu_s"]))
        if not runs or rest or self._popen.returncode:
            lines = self._errors.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit status {self._popen.returncode}"
            raise SandboxError(f"the sandbox could not be started ({reason[:300]})")
        return runs


def _wait(processes: Sequence[_Process], limits: Limits) -> None:
    """Wait until the processes have ended and closed their streams.

    Raises SandboxError at the limit of wall time, which says more about the machine than about the program, because a
    program that computes reaches a limit of CPU time first.
    """
    deadline, late = time.monotonic() + limits.wall_s, False
    end = deadline + _END_S
    try:
        with selectors.DefaultSelector() as selector:
            for process in processes:
                process.register(selector)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    key.data.read(key.fileobj, selector)
                if time.monotonic() < deadline:
                    continue
                if deadline >= end:
                    break
                for process in processes:  # repeatedly, because a sandbox that is starting has no first process yet
                    process.kill()
                deadline, late = min(time.monotonic() + _KILL_S, end), True
    finally:
        for process in processes:
            process.kill()
            process.close()
    if late:
        raise SandboxError(
            f"the program did not end within {limits.wall_s:.3g} s of wall time: it waits without computing, or the "
            "machine is too busy"
        )


def _environment() -> dict[str, str]:
    """Return the environment variables of a sandbox: those that Python needs to start, and a fixed seed of hashes, so
    that the order of sets does not change between two runs."""
    names = ("LD_LIBRARY_PATH", "PYTHONHOME")
    return {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONHASHSEED": "0"}


def _python(mechanism: str) -> list[str]:
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    script = _BOUND_SCRIPT if mechanism == "bubblewrap" else os.path.abspath(sandbox_script.__file__)
    return [executable, "-s", "-S", "-P", "-B", "-X", "utf8", script]


def _readable_paths() -> list[str]:
    """Return the folders that programs can read: the libraries of Python and of the system."""
    paths = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(os.path.realpath(sys.base_prefix), "lib")]
    links = [path for path in paths if os.path.islink(path)]
    folders = [path for path in paths if os.path.isdir(path) and path not in links]
    parents = tuple(folder + "/" for folder in folders)
    return links + [folder for folder in folders if not folder.startswith(parents)]


def _map_users(reports: int) -> None:
    """Map the users 0 and 65534 to themselves in the user namespace of the process that a sandbox reports.

    A sandbox that ends before it reports has its own message. Without the maps, its script cannot change the user, so
    it fails and its message contains the reason.
    """
    text = b""
    while b"}" not in text and (chunk := os.read(reports, 4096)):
        text += chunk
    if b"}" not in text:
        return
    pid = json.loads(text)["child-pid"]
    for name in ("uid_map", "gid_map"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
            file.write(f"0 0 1\n{NOBODY} {NOBODY} 1")


def _prefix(mechanism: str, maps: tuple[int, int] | None) -> list[str]:
    """Return the command that runs the script in the sandbox, without the script's own arguments."""
    if mechanism == "namespaces":
        return []
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    # Without --as-pid-1, bubblewrap does not wait for the program, and its CPU time is unknown.
    command = [program, "--unshare-all", "--unshare-user", "--as-pid-1", "--new-session", "--die-with-parent"]
    command += ["--cap-add", "ALL"]  # until the script gives them up
    if maps:
        command += ["--info-fd", str(maps[0]), "--userns-block-fd", str(maps[1])]
    else:
        command += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    # /tmp is mounted first, because Python may be installed below it.
    command += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    for path in _readable_paths():
        for parent in list(Path(path).parents)[-2::-1]:  # bubblewrap would copy the mode of a home folder
            command += ["--dir", str(parent)]
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    executable = _python(mechanism)[0]
    command += ["--ro-bind", executable, executable]
    command += ["--ro-bind", os.path.abspath(sandbox_script.__file__), _BOUND_SCRIPT]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]
