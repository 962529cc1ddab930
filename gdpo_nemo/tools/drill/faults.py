"""Faults for fault-injection tests, and the processes of a run that they affect."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path

import psutil

from gdpo_nemo.observe import journal, metrics
from gdpo_nemo.observe.run_files import status_if_whole
from gdpo_nemo.training.checkpoints import Checkpoints

DRIVER, RANK, ENGINE = "driver", "policy rank", "engine"
ENGINE_CORE = "vLLM process"
WORKER, RAYLET, GCS, CLEANUP = "environment worker", "raylet", "GCS", "cleanup process"
HOST, FORK_SERVER, WRITER = "rollout host", "fork server", "sample writer"
SUPERVISOR = "supervisor"
ROLES = (SUPERVISOR, DRIVER, RANK, ENGINE, ENGINE_CORE, WORKER, RAYLET, GCS, CLEANUP, HOST, FORK_SERVER, WRITER)
_WORDS = {
    ENGINE_CORE: "EngineCore",
    WORKER: "multiprocessing.spawn",
    CLEANUP: "cleanup_process.py run",
    HOST: "ray::RolloutHost",
    FORK_SERVER: "gdpo_nemo.cluster.fork_server",
    WRITER: "gdpo_nemo.observe.sample_writer",
}
"""Part of a process's command line, by role."""


class RunProcesses:
    """Processes of the run in ``run_dir``, which are descendants of the process ``root``.

    Ray's servers are included only if the run started them instead of joining an existing cluster.
    """

    def __init__(self, root: int, run_dir: Path):
        self.root = root
        self._run_dir = run_dir

    def of(self, role: str) -> list[int]:
        """Return the ids of the live processes with this role."""
        if role == SUPERVISOR:
            return [self.root] if psutil.pid_exists(self.root) else []
        driver = self._driver()
        if driver is None:
            return []
        if role == DRIVER:
            return [driver]
        if role in (RANK, ENGINE):
            return self._reported(role)
        parents = self._reported(ENGINE) if role == ENGINE_CORE else [driver]
        children = chain.from_iterable(map(_children, parents))
        return [pid for pid, words in children if _has_role(words, role)]

    def all(self) -> dict[int, float]:
        """Return every process of the run with its start time in seconds since the epoch."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.root)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[process.pid] = process.create_time()
        return found

    def _driver(self) -> int | None:
        """Return the id of the training process from ``status.json``, or None until the process has written it."""
        driver = status_if_whole(self._run_dir).get("driver")
        run_pids = {self.root, *(pid for pid, _ in _children(self.root, recursive=False))}
        return driver if driver in run_pids else None

    def _reported(self, role: str) -> list[int]:
        this_host = socket.gethostname()
        roles = status_if_whole(self._run_dir).get("roles", {})
        found = []
        for name, (host, pid) in roles.items():
            if name.startswith(f"{role} ") and host == this_host and _is_alive(pid):
                found.append(pid)
        return found


def _has_role(words: str, role: str) -> bool:
    if role in _WORDS:
        return _WORDS[role] in words
    return words.split(" ", 1)[0].endswith({RAYLET: "/raylet", GCS: "/gcs_server"}[role])


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _children(pid: int, recursive: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (id, command line) of the live children or descendants of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    yield child.pid, " ".join(child.cmdline())


PAUSE_S = 5.0
"""Seconds for which a process is paused."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Target:
    """Run in which faults are injected."""

    run_dir: Path
    processes: RunProcesses
    random: random.Random
    """Random number generator that selects one of several processes of a role."""


class Then(StrEnum):
    """Effect of a fault on the run."""

    CONTINUES = "continues"
    REBUILDS = "rebuilds"
    """The driver rebuilds the policy, or the supervisor restarts the whole run."""
    RESTARTS = "restarts"
    """The supervisor restarts the run."""
    ENDS = "ends"
    """The run ends, and the user must restart it."""
    ANY = "any"
    """The run does any of these. If it ends, it must report the reason."""


@dataclass(frozen=True)
class Fault:
    """Kind of fault."""

    name: str
    what: str
    """Description for users."""
    act: Callable[[Target], str | None]
    """Function that injects the fault and returns its target, or None if the run has no such target."""
    says: str | None
    """Regular expression for the alert that the run must write.

    None if no alert is expected, because the run recovers by itself or no process remains to write it.
    """
    then: Then = Then.CONTINUES


def _send_signal(role: str, number: int) -> Callable[[Target], str | None]:
    def act(target: Target) -> str | None:
        found = target.processes.of(role)
        with contextlib.suppress(ProcessLookupError):
            if found:
                pid = target.random.choice(found)
                os.kill(pid, number)
                return f"{role} {pid}"
        return None

    return act


def kill_together(*roles: str) -> Fault:
    """Return a fault that kills a process of each role, if the run has one."""

    def act(target: Target) -> str | None:
        # Find all before killing the first: other processes are found by their driver.
        victims = {role: target.random.choice(found) for role in roles if (found := target.processes.of(role))}
        for pid in victims.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ", ".join(f"{role} {pid}" for role, pid in victims.items()) or None

    names = " and ".join(roles)
    return Fault(f"{names.replace(' ', '-')}-kill", f"kill {names} at the same time", act, None, Then.ANY)


def _combine(*acts: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
    def act(target: Target) -> str | None:
        results = [inject(target) for inject in acts]
        return ", ".join(map(str, results)) if all(results) else None

    return act


def _pause(role: str) -> Callable[[Target], str | None]:
    stop = _send_signal(role, signal.SIGSTOP)

    def act(target: Target) -> str | None:
        stopped = stop(target)
        if stopped:
            time.sleep(PAUSE_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(stopped.rpartition(" ")[2]), signal.SIGCONT)
        return stopped

    return act


def _no_space(target: Target) -> str | None:
    """Prevent the driver's files from growing, as on a full disk."""
    for pid in target.processes.of(DRIVER):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))
            return f"{DRIVER} {pid}"
    return None


def _kill_and_damage(
    damage_files: Callable[[Path], str | None], checkpoints: int = 1
) -> Callable[[Target], str | None]:
    """Return a fault that kills the driver after ``checkpoints`` checkpoints and damages files before its restart."""
    kill = _send_signal(DRIVER, signal.SIGKILL)

    def act(target: Target) -> str | None:
        while len(_steps(target.run_dir)) < checkpoints:
            if not target.processes.of(DRIVER):
                return None
            time.sleep(_LOOK_S)
        killed = kill(target)
        return killed and damage_files(target.run_dir)

    return act


def _steps(run_dir: Path) -> list[int]:
    return Checkpoints(run_dir / "checkpoints", 0, 0, None).steps()


def _newest(run_dir: Path) -> Path:
    """Return the newest checkpoint. ``_kill_and_damage`` waits until a checkpoint exists."""
    return run_dir / "checkpoints" / f"step_{_steps(run_dir)[-1]}"


def _truncate_checkpoint(run_dir: Path) -> str:
    """Truncate the largest file of the newest checkpoint to half its size."""
    newest = _newest(run_dir)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return str(largest.relative_to(run_dir))


def _delete_checkpoint(run_dir: Path) -> str:
    """Delete the newest checkpoint."""
    newest = _newest(run_dir)
    shutil.rmtree(newest)
    return str(newest.relative_to(run_dir))


def _torn_lines(run_dir: Path) -> str:
    """Append an incomplete line to metrics and journal."""
    for name in (metrics.FILE, journal.FILE):
        with open(run_dir / name, "ab") as file:
            file.write(b'{"step": 1')
    return f"{metrics.FILE}, {journal.FILE}"


# Between these two phrases, the supervisor may quote the last warning of the process's Ray client.
_KILLED = r"was killed by SIGKILL\b.*; the run is restarted"
_DIED = "a worker process died"
# Ray's processes notice a lost server at different times, so the reason for the restart varies.
_RAY = f"Ray's (raylet|gcs_server)|its Ray client|{_DIED}|; the run is restarted"

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("driver-kill", "kill the training process", _send_signal(DRIVER, signal.SIGKILL), _KILLED,
              Then.RESTARTS),
        Fault("rank-kill", "kill a policy rank", _send_signal(RANK, signal.SIGKILL), _DIED, Then.REBUILDS),
        Fault("engine-kill", "kill an engine's actor", _send_signal(ENGINE, signal.SIGKILL), r"^engine \d+"),
        Fault("worker-kill", "kill an environment worker", _send_signal(WORKER, signal.SIGKILL), "^environments: "),
        Fault("raylet-kill", "kill Ray's raylet", _send_signal(RAYLET, signal.SIGKILL), _RAY, Then.RESTARTS),
        Fault("gcs-kill", "kill Ray's GCS", _send_signal(GCS, signal.SIGKILL), _RAY, Then.RESTARTS),
        Fault("engine-pause", f"pause an engine for {PAUSE_S:.0f} s", _pause(ENGINE), None),
        # This fault needs two checkpoints, because a run with only damaged checkpoints cannot resume.
        Fault("torn-checkpoint", "kill the driver and truncate the newest checkpoint",
              _kill_and_damage(_truncate_checkpoint, checkpoints=2), "is damaged", Then.RESTARTS),
        Fault("no-space", "prevent the driver's files from growing", _no_space,
              "could not be written|cannot be written", Then.ENDS),
        Fault("terminate", "send SIGTERM, as a scheduler does", _send_signal(SUPERVISOR, signal.SIGTERM), None,
              Then.ENDS),
        Fault("vllm-kill", "kill vLLM's process", _send_signal(ENGINE_CORE, signal.SIGKILL), r"^engine \d+"),
        Fault("supervisor-kill", "kill the supervising process", _send_signal(SUPERVISOR, signal.SIGKILL),
              None, Then.ENDS),
        Fault("cleanup-kill", "kill the cleanup process", _send_signal(CLEANUP, signal.SIGKILL), None),
        Fault("driver-pause", f"pause the driver for {PAUSE_S:.0f} s", _pause(DRIVER), None),
        Fault("rank-pause", f"pause a policy rank for {PAUSE_S:.0f} s", _pause(RANK), None),
        Fault("worker-pause", f"pause a worker for {PAUSE_S:.0f} s", _pause(WORKER), None),
        Fault("engine-stop", "pause an engine permanently", _send_signal(ENGINE, signal.SIGSTOP), r"^engine \d+"),
        # The run does not notice the loss of an idle worker, because other workers take its tasks.
        Fault("worker-stop", "pause a worker permanently", _send_signal(WORKER, signal.SIGSTOP), None),
        Fault("rank-stop", "pause a policy rank permanently", _send_signal(RANK, signal.SIGSTOP), "policy rank",
              Then.RESTARTS),
        Fault("rank-and-engine-kill", "kill a policy rank and an engine together",
              _combine(_send_signal(RANK, signal.SIGKILL), _send_signal(ENGINE, signal.SIGKILL)), _DIED, Then.REBUILDS),
        kill_together(DRIVER, CLEANUP),
        kill_together(HOST),
        kill_together(FORK_SERVER),
        kill_together(WRITER),
        Fault("lost-checkpoint", "kill the driver and delete the newest checkpoint",
              _kill_and_damage(_delete_checkpoint), _KILLED, Then.RESTARTS),
        Fault("torn-lines", "kill the driver and append incomplete lines", _kill_and_damage(_torn_lines), _KILLED,
              Then.RESTARTS),
    )
}  # fmt: skip
TEN = tuple(FAULTS)[:10]
"""Default faults of a test."""
SLOW = ("engine-stop", "worker-stop", "rank-stop")
"""Faults that only a timeout detects, after several minutes.

The timeout of a rank adapts to its first three updates.
"""
