"""Worker process of an environment pool. The process is spawned without importing the parent's main module."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, checked_verdicts
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep, advance
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.utils.errors import GdpoError, first_line
from gdpo_nemo.utils.exits import exit_status_marked, exits_contained

STARTUP_LIMIT_S = 300.0
"""Maximum time in seconds in which a worker must build its environments."""
_GRACE_S = 10.0
"""Delay in seconds between the time limit and the exit of a worker whose driver has not killed it."""
_POLL_S = 0.5
_CHECKS_AFTER_DEATH = 5
"""Number of checks in which pebble finds a dead worker alive. See ``_Process``."""
EXIT_CALLED = 96
"""Exit status of a worker whose verifier called ``os._exit(0)``.

The pool treats a worker that exits with status 0 as idle, so the worker's task would only end at the time limit.
"""
# Signals whose handlers a verifier may change. For example, math-verify uses SIGALRM for its time limit.
_SIGNALS = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Fault:
    """Error in an environment's code or configuration. A fault stops the run."""

    message: str
    """Error message for the user, in one line."""


_environments: dict[str, Environment | Fault] = {}


def start(section: Mapping[str, Mapping[str, Any]], driver: int) -> None:
    """Build the environments of the config section ``env`` in this process, and exit when the driver dies.

    If an environment cannot be built, a ``Fault`` is stored instead, and the first task of this environment returns the
    fault. An exception would break the pool, and its message would be lost.

    Args:
        section: options by environment name.
        driver: process id of the driver.
    """
    os.setpgid(0, 0)  # processes that verifiers start are in this group, and end with this process
    threading.Thread(target=_exit_with_driver, args=(driver,), daemon=True).start()
    # A closing terminal sends SIGHUP to the whole process group. The driver handles this signal and stops the workers.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.dup2(2, 1)  # send prints of reward functions to stderr, so that they do not mix with the driver's output
    faulthandler.dump_traceback_later(STARTUP_LIMIT_S, exit=True)
    for name, options in section.items():
        try:
            environment = load_environment(name, options)
            with exits_contained():
                environment.prepare()
            _environments[name] = environment
        except GdpoError as error:
            _environments[name] = Fault(str(error))
        except Exception as error:
            _environments[name] = Fault(f"environment {name!r} could not be prepared: {first_line(error)}")
    faulthandler.cancel_dump_traceback_later()


def verify(name: str, trajectories: Sequence[Trajectory], time_limit_s: float, seed: int) -> list[Verdict] | Fault:
    """Return the checked verdicts of one environment for one shard, or a ``Fault`` if its code fails."""
    environment = _environments[name]
    if isinstance(environment, Fault):
        return environment
    with _task(time_limit_s):
        try:
            _seed(seed, name, trajectories)
            with exit_status_marked(EXIT_CALLED):
                verdicts = environment.verify(trajectories)
            return checked_verdicts(tuple(environment.reward_names), trajectories, verdicts)
        except GdpoError as error:
            return Fault(f"environment {name!r}: {error}")
        except BaseException as error:  # also catches sys.exit() in a reward function
            # ``__class__`` is the user's class even if a wrapper holds the object; ``type()`` would be the wrapper's.
            return Fault(f"environment {name!r}: {environment.__class__.__name__}.verify raised {first_line(error)}")


@contextlib.contextmanager
def _task(time_limit_s: float) -> Iterator[None]:
    """Exit if the block exceeds the time limit, and undo changes of timers and signal handlers at its end, so that the
    next task is not affected.

    The driver enforces the time limit. This additional timer works without the driver and without the interpreter lock,
    so code that hangs in a C extension does not outlive a killed driver.
    """
    faulthandler.dump_traceback_later(time_limit_s + _GRACE_S, exit=True)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def step(name: str, steps: Sequence[EpisodeStep], time_limit_s: float, seed: int) -> list[EpisodeReply] | Fault:
    """Run one step of every episode. Return the replies, or a ``Fault`` if the environment's code raises or returns
    invalid values."""
    environment = _environments[name]
    if isinstance(environment, Fault):
        return environment
    replies = []
    with _task(time_limit_s):
        try:
            for request in steps:
                # All samples of a prompt are reset with the same seed, so that a group answers the same question.
                _seed(seed, name, [request], f"/{request.turn}" if request.turn else None)
                with exit_status_marked(EXIT_CALLED):
                    replies.append(advance(environment, request))
            return replies
        except GdpoError as error:
            return Fault(f"environment {name!r}: {error}")
        except BaseException as error:
            return Fault(f"environment {name!r}: the episode raised {first_line(error)}")


def _seed(seed: int, name: str, trajectories: Sequence[Trajectory | EpisodeStep], turn: str | None = "") -> None:
    """Seed Python's and NumPy's global generators, so that random rewards are the same after a resume.

    The seed depends on the prompt id, the sample index and ``turn``. If ``turn`` is None, the seed depends only on the
    prompt id.
    """
    first = trajectories[0]
    sample = "" if turn is None else f"{first.sample_index}{turn}"
    digest = hashlib.sha256(f"{seed}/{name}/{first.prompt.id}/{sample}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))


def _exit_with_driver(driver: int) -> None:
    """Exit soon after the driver has ended, for any reason, together with the processes that verifiers started."""
    # When the driver dies, even by SIGKILL, the parent of this process becomes init or a subreaper.
    while os.getppid() == driver:
        time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


_lock = threading.Lock()


@contextlib.contextmanager
def _main_program_hidden() -> Iterator[None]:
    """Temporarily clear ``__file__`` and ``__spec__`` of ``__main__``, so that multiprocessing does not run the main
    module in the new process."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    with _lock:
        saved: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        main.update(dict.fromkeys(saved))
        try:
            yield
        finally:
            main.update(saved)


class _Process(SpawnProcess):
    """Worker process that pebble regards as alive until pebble has read its last messages.

    One thread of pebble reads the workers' messages, another looks for dead workers. If a worker dies immediately after
    it has taken a task, the second thread can be first. pebble then does not know which task the dead worker had: the
    task ends at its time limit, as if the verifier were hanging, or the whole pool breaks. pebble checks every 0.1 s,
    so a few more checks give the first thread time to read.
    """

    _checks = 0
    _stopped = False

    def is_alive(self) -> bool:
        """Return whether the process runs, or ended only a few calls ago without having been stopped."""
        if super().is_alive():
            return True
        self._checks += 1
        return self._checks <= _CHECKS_AFTER_DEATH and not self._stopped

    def terminate(self) -> None:
        """Stop the process. pebble calls this for a worker that it has finished with, and then waits for its end."""
        self._stopped = True
        super().terminate()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process, and kill the processes that it has left running."""
        super().join(timeout)
        if self.pid is not None and self.exitcode is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        with _main_program_hidden():
            return Popen(process_obj)


class RecordingSpawnContext(SpawnContext):
    """Multiprocessing context that keeps track of its processes, so that their exit codes can be reported."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[_Process] = []

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        """Create a process and record it. pebble calls this method in place of the class ``Process``."""
        process = _Process(*args, **options)
        self._started.append(process)
        return process

    def take_deaths(self) -> list[str]:
        """Describe the exit of each process that ended with a nonzero status since the last call."""
        ended = [process for process in self._started if process.pid is not None and process.exitcode is not None]
        for process in ended:
            self._started.remove(process)
        return [_describe_exit(process.exitcode) for process in ended if process.exitcode]


def _describe_exit(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
