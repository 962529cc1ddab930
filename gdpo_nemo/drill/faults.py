"""What can be done to a run: one function for each kind of fault, and how the run has to answer."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Callable

from gdpo_nemo.checkpoints import Checkpoints
from gdpo_nemo.drill.run_processes import (
    DRIVER,
    ENGINE,
    ENGINE_CORE,
    GCS,
    RANK,
    RAYLET,
    REAPER,
    SUPERVISOR,
    WORKER,
    RunProcesses,
)
from gdpo_nemo.errors import present
from gdpo_nemo.observe import journal, metrics

PAUSE_S = 5.0
"""How long a stopped process stands still."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Target:
    """The run that is disturbed."""

    run_dir: Path
    processes: RunProcesses
    random: random.Random
    """Draws the process, where there are several of a role."""


class Then(StrEnum):
    """What becomes of the run."""

    GOES_ON = "goes on"
    REBUILDS = "rebuilds"
    """Its driver starts the policy again, or the supervisor all of it."""
    RESTARTS = "restarts"
    """Its supervisor starts it again."""
    ENDS = "ends"
    """It has to be started again by whoever started it."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    what: str
    """What is done, for people."""
    act: Callable[[Target], str | None]
    """Does it and returns to what it was done; None: there is nothing of the kind in this run."""
    says: str | None
    """What the run has to say, a regular expression; None: nothing, because what was disturbed goes on by itself, or
    nobody is left to speak."""
    then: Then = Then.GOES_ON


def _signalled(role: str, number: int) -> Callable[[Target], str | None]:
    def act(target: Target) -> str | None:
        found = target.processes.of(role)
        with contextlib.suppress(ProcessLookupError):
            if found:
                pid = target.random.choice(found)
                os.kill(pid, number)
                return f"{role} {pid}"
        return None

    return act


def _both(*acts: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
    def act(target: Target) -> str | None:
        done = [one(target) for one in acts]
        return ", ".join(map(str, done)) if all(done) else None

    return act


def _paused(role: str) -> Callable[[Target], str | None]:
    stop = _signalled(role, signal.SIGSTOP)

    def act(target: Target) -> str | None:
        stopped = stop(target)
        if stopped:
            time.sleep(PAUSE_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(stopped.rpartition(" ")[2]), signal.SIGCONT)
        return stopped

    return act


def _no_space(target: Target) -> str | None:
    """Let no file of the driver grow, as a full disk does, which nobody's disk has to be filled for."""
    for pid in target.processes.of(DRIVER):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))
            return f"{DRIVER} {pid}"
    return None


def _after_death(spoil: Callable[[Path], str | None], checkpoints: int = 1) -> Callable[[Target], str | None]:
    """Kill the driver once there are so many checkpoints, and spoil files before it is started again."""
    kill = _signalled(DRIVER, signal.SIGKILL)

    def act(target: Target) -> str | None:
        while len(_steps(target.run_dir)) < checkpoints:
            if not target.processes.of(DRIVER):
                return None
            time.sleep(_LOOK_S)
        killed = kill(target)
        return killed and spoil(target.run_dir)

    return act


def _steps(run_dir: Path) -> list[int]:
    return Checkpoints(run_dir / "checkpoints", 0, 0, None).steps()


def _newest(run_dir: Path) -> Path | None:
    steps = _steps(run_dir)
    return run_dir / "checkpoints" / f"step_{steps[-1]}" if steps else None


def _cut_checkpoint(run_dir: Path) -> str:
    """Leave half of the largest file of the newest checkpoint."""
    newest = present(_newest(run_dir), "the newest checkpoint")
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return str(largest.relative_to(run_dir))


def _lost_checkpoint(run_dir: Path) -> str:
    """Remove the newest checkpoint."""
    newest = present(_newest(run_dir), "the newest checkpoint")
    shutil.rmtree(newest)
    return str(newest.relative_to(run_dir))


def _torn_lines(run_dir: Path) -> str:
    """Leave half a line at the end of the files that grow by lines."""
    for name in (metrics.FILE, journal.FILE):
        with open(run_dir / name, "ab") as file:
            file.write(b'{"step": 1')
    return f"{metrics.FILE}, {journal.FILE}"


_KILLED = "was killed by SIGKILL; the run is started again"
_DIED = "a worker process died"
_RAY = f"Ray's (raylet|gcs_server|client)|{_DIED}"

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("driver-kill", "the process that trains is killed", _signalled(DRIVER, signal.SIGKILL), _KILLED,
              Then.RESTARTS),
        Fault("rank-kill", "a policy rank is killed", _signalled(RANK, signal.SIGKILL), _DIED, Then.REBUILDS),
        Fault("engine-kill", "an engine's actor is killed", _signalled(ENGINE, signal.SIGKILL), r"^engine \d+"),
        Fault("worker-kill", "an environment worker is killed", _signalled(WORKER, signal.SIGKILL), "^environments: "),
        Fault("raylet-kill", "Ray's raylet is killed", _signalled(RAYLET, signal.SIGKILL), _RAY, Then.RESTARTS),
        Fault("gcs-kill", "Ray's GCS is killed", _signalled(GCS, signal.SIGKILL), _RAY, Then.RESTARTS),
        Fault("engine-pause", f"an engine stands still for {PAUSE_S:.0f} s", _paused(ENGINE), None),
        # A run whose checkpoints are all damaged is refused.
        Fault("torn-checkpoint", "killed, and the newest checkpoint is cut short",
              _after_death(_cut_checkpoint, checkpoints=2), "is damaged", Then.RESTARTS),
        Fault("no-space", "no file of the driver can grow", _no_space, "could not be written|cannot be written",
              Then.ENDS),
        Fault("terminate", "SIGTERM, as from a scheduler", _signalled(SUPERVISOR, signal.SIGTERM), None, Then.ENDS),
        Fault("vllm-kill", "vLLM's own process is killed", _signalled(ENGINE_CORE, signal.SIGKILL), r"^engine \d+"),
        Fault("supervisor-kill", "the process that was started is killed", _signalled(SUPERVISOR, signal.SIGKILL),
              None, Then.ENDS),
        Fault("reaper-kill", "what would clean up is killed", _signalled(REAPER, signal.SIGKILL), None),
        Fault("driver-pause", f"the driver stands still for {PAUSE_S:.0f} s", _paused(DRIVER), None),
        Fault("rank-pause", f"a policy rank stands still for {PAUSE_S:.0f} s", _paused(RANK), None),
        Fault("worker-pause", f"a worker stands still for {PAUSE_S:.0f} s", _paused(WORKER), None),
        Fault("engine-stop", "an engine stands still for good", _signalled(ENGINE, signal.SIGSTOP), r"^engine \d+"),
        # One that had no task is not missed: the others take what comes.
        Fault("worker-stop", "a worker stands still for good", _signalled(WORKER, signal.SIGSTOP), None),
        Fault("rank-stop", "a policy rank stands still for good", _signalled(RANK, signal.SIGSTOP), "policy rank",
              Then.RESTARTS),
        Fault("rank-and-engine-kill", "a policy rank and an engine are killed together",
              _both(_signalled(RANK, signal.SIGKILL), _signalled(ENGINE, signal.SIGKILL)), _DIED, Then.REBUILDS),
        Fault("lost-checkpoint", "killed, and the newest checkpoint is gone", _after_death(_lost_checkpoint), _KILLED,
              Then.RESTARTS),
        Fault("torn-lines", "killed, and the last lines are torn", _after_death(_torn_lines), _KILLED, Then.RESTARTS),
    )
}  # fmt: skip
TEN = tuple(FAULTS)[:10]
"""Those of a drill, unless others are asked for."""
SLOW = ("engine-stop", "worker-stop", "rank-stop")
"""Those that a deadline finds out, after minutes. That of the ranks is learnt from three updates of the same start."""
