"""Supervisor that restarts a run after an infrastructure failure.

The process of the command, which has not imported any large library, forks the run and waits for it::

    supervisor (the command)                         child (the run)
    supervised: fork ─────────────────────────────►  own process group, killed with its parent ─► run(attempt)
    _wait: forward each signal (USR1 as TERM) ────►  Stop: ends after the step and a checkpoint
    outcome ◄── pipe: kind and message ────────────  report(error)
    outcome ◄── exit status ───────────────────────  exit

| the child ended | next |
|---|---|
| with status 0, 129, 130 or 143, or after a signal was forwarded | return its status |
| with a failure of config, data, user code or numerics, which would recur, or of unknown kind | return its status |
| with an infrastructure failure, or without a report | settle, then give up or restart |

* settle: wait up to 15 s for the remaining processes of the run. These processes become children of the supervisor, and
  the cleanup process ends them.
* give up: after ``run.max_restarts`` restarts, or after two consecutive attempts that did not get beyond the furthest
  step.
* restart: pause for 1 s, doubled for each attempt without progress, up to 60 s. Then fork again.

Because of its separate process group, the child receives each signal only once. A terminal, ``timeout`` and Ray's jobs
signal whole process groups, and a second SIGTERM would end the run immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdpo_nemo.cluster.worker_processes import remove_leftovers
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.run_files import RESTARTING, amend_status, status_if_whole, write_alert
from gdpo_nemo.utils.errors import START_AGAIN, FailureKind, GdpoError, RunError, kind_of, printable
from gdpo_nemo.utils.signals import leave_lost_terminal, termination_signals

METRICS = {
    "driver/restarts": ("restarts", "Restarts of the run by the supervisor so far (`run.max_restarts`)"),
    "driver/rebuilds": (
        "times",
        "Times that this driver restarted a lost policy while the engines continued",
    ),
    "driver/recovery": (
        "s",
        "Time from a failure to the end of the first step after a restart or rebuild (only in that step's row)",
    ),
}
_BACKOFF_S = (1.0, 60.0)
"""First and longest pause in seconds. The pause is doubled after each attempt without a new step."""
_STUCK = 2
"""Number of consecutive attempts without a new step after which the run is not restarted."""
_STOPPED = (129, 130, 143)
"""Exit statuses of a run that was asked to end."""
_SETTLE_S = 15.0
"""Maximum wait in seconds for the processes of an ended run. The cleanup process takes 3 s. Daemons of user code may
remain."""
_SET_DEATH_SIGNAL = 1
_ADOPT_ORPHANS = 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER in <linux/prctl.h>."""
_RECORD_LIMIT = 1 << 16
_RAY_PROBLEM = re.compile(r"\[[^]]* [WEFC] [^]]*\] \S+: (.*)")
"""Matches a warning or error in Ray's log files: [time level process thread] file:line: text."""
_LONGEST_RAY_MESSAGE = 300


@dataclass(frozen=True)
class Attempt:
    """The current start of the run, with the history of earlier starts."""

    restarts: int = 0
    """Number of earlier starts of the run."""
    lost_at: float | None = None
    """Time at which the previous attempt failed, in seconds since the epoch; None for the first attempt."""
    reason: str | None = None
    """Message of the previous attempt's failure."""
    supervised: bool = False
    """True if a supervisor may restart the run after this attempt."""
    rebuilds: int = 0
    """Number of times that this process has restarted the policy (see ``recovery``)."""
    begin: float | None = None
    """Time of the user's request or of the restart, in seconds since the epoch. None: start of this process."""

    def __str__(self) -> str:
        return f"rebuild {self.rebuilds} of the policy" if self.rebuilds else f"restart {self.restarts}"

    def metrics(self, first_step_at: float | None) -> dict[str, float]:
        """Return the metrics ``driver/...`` of a step. Empty before the first restart.

        Args:
            first_step_at: end of the step, in seconds since the epoch. None if it is not the attempt's first step.
        """
        row = {"driver/restarts": float(self.restarts)} if self.restarts else {}
        row |= {"driver/rebuilds": float(self.rebuilds)} if self.rebuilds else {}
        if first_step_at is not None and self.lost_at is not None:
            row["driver/recovery"] = first_step_at - self.lost_at
        return row


FIRST_ATTEMPT = Attempt()
"""Attempt of a run without a supervisor."""


@dataclass(frozen=True)
class Failure:
    """Reason why an attempt failed."""

    kind: str | None
    """A ``FailureKind``; None if it is unknown."""
    sentence: str
    """Message for the user."""


def supervised(config: Config, run: Callable[[Attempt], int]) -> int:
    """Call ``run`` in a child process, again after each infrastructure failure, and return the exit status.

    This function returns, or raises the exception of ``run``, in the child process and in the parent process. The
    caller must end both processes in the same way.

    Args:
        run: called with the attempt.
    """
    run_dir = Path(config.run.dir).absolute()
    furthest = _furthest_step(run_dir)
    restarts = stuck = 0
    attempt = Attempt(supervised=True)
    _control(_ADOPT_ORPHANS, 1)
    while True:
        if restarts:
            attempt = replace(attempt, begin=time.time())
        child = _Child.forked()
        if child is None:
            return _reported(run, attempt)
        status, failure = child.outcome(lambda pid: _last_ray_message(run_dir, pid))
        lost_at = time.time()
        if failure is None or failure.kind != FailureKind.INFRASTRUCTURE:
            return status
        _settle()
        step = _furthest_step(run_dir)
        stuck = 0 if step > furthest else stuck + 1
        furthest = max(step, furthest)
        reason_to_give_up = _reason_to_give_up(restarts, config.run.max_restarts, stuck, furthest)
        if reason_to_give_up:
            _announce(run_dir, step, f"{failure.sentence}; {reason_to_give_up}", "failed")
            return status
        restarts += 1
        pause = min(_BACKOFF_S[0] * 2**stuck, _BACKOFF_S[1])
        sentence = (
            f"{failure.sentence.replace(START_AGAIN, '')}; the run is restarted in {pause:.0f} s "
            f"(restart {restarts} of at most {config.run.max_restarts}, run.max_restarts)"
        )
        _announce(run_dir, step, sentence, RESTARTING)
        time.sleep(pause)
        attempt = Attempt(restarts, lost_at, sentence, supervised=True)


def in_child(work: Callable[[], int]) -> int:
    """Call ``work`` in a child process and return its exit status.

    Signals are forwarded to the child. A signal that arrives while the child ends is also reflected in the status. In
    the child, this function does not return: it exits with the status, or raises the exception of ``work``, which the
    caller must not catch.
    """
    child = _Child.forked()
    if child is None:
        raise SystemExit(work())
    status, _ = child.outcome()
    return status or (128 + child.forwarded_signal if child.forwarded_signal else 0)


def _reason_to_give_up(restarts: int, most: int, stuck: int, furthest: int) -> str | None:
    """Return the reason why the run is not restarted again, or None."""
    if restarts >= most:
        return f"it was restarted {restarts} times, the limit of run.max_restarts"
    if stuck >= _STUCK:
        return f"{stuck} attempts in a row did not get beyond step {furthest}, so it is not restarted"
    return None


class _Child:
    """The run's process, as seen by the supervisor. SIGCHLD and the signals in ``waited`` are blocked in the
    supervisor."""

    def __init__(self, pid: int, report: int, waited: set[signal.Signals], mask: set[Any]):
        self._pid = pid
        self._report = report
        self._waited = waited
        self._mask = mask
        self.forwarded_signal = 0
        """Number of the last signal that was forwarded to the child; 0 if no signal was forwarded."""

    @classmethod
    def forked(cls) -> _Child | None:
        """Fork the process. Returns None in the child."""
        waited = {*termination_signals(), signal.SIGINT, signal.SIGCHLD, signal.SIGTSTP, signal.SIGUSR1}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        report, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(write_end)
            return cls(pid, report, waited, before)
        os.close(report)
        _Report.to = write_end
        _stay_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None

    def outcome(self, explained: Callable[[int], str] = lambda pid: "") -> tuple[int, Failure | None]:
        """Wait until the process has ended.

        Args:
            explained: returns additional information about a process that ended without a report, from its id.

        Returns:
            Exit status for this process, and the failure. The failure is None if nothing failed or the end was
            requested.
        """
        code = self._wait()
        with open(self._report, "rb") as pipe:
            failure = _parsed(pipe.read(_RECORD_LIMIT))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if code < 0:
            status, how = 128 - code, f"was killed by {signal.Signals(-code).name}"
        else:
            status, how = code, f"ended with status {code} without a message"
        if code == 0 or code in _STOPPED or self.forwarded_signal:
            return status, None
        return status, failure or Failure(
            FailureKind.INFRASTRUCTURE, f"the run's process {self._pid} {how}{explained(self._pid)}"
        )

    def _wait(self) -> int:
        """Forward signals until the child has ended. Returns its exit code, or the negative number of the signal that
        killed it."""
        while True:
            while ended := _ended_child():
                if ended[0] == self._pid:
                    return os.waitstatus_to_exitcode(ended[1])
            number = signal.sigwaitinfo(self._waited).si_signo
            if number == signal.SIGTSTP:
                self._stop_both()
            elif number != signal.SIGCHLD:
                self._forward(number)

    def _forward(self, number: int) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        self.forwarded_signal = number
        with contextlib.suppress(ProcessLookupError):
            # The run handles SIGTERM: it saves a checkpoint and ends. Slurm sends USR1 for the same purpose.
            os.kill(self._pid, signal.SIGTERM if number == signal.SIGUSR1 else number)

    def _stop_both(self) -> None:
        """Handle Ctrl-Z: suspend both processes. The child continues when the supervisor is continued."""
        os.kill(self._pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(self._pid, signal.SIGCONT)


class _Report:
    """Pipe through which the child reports its failure."""

    to: int | None = None
    """Write end of the pipe."""


def _stay_with(parent: int) -> None:
    """Enter a separate process group, request SIGKILL when ``parent`` dies, and allow output to the terminal."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # The parent has already ended.
        os.kill(os.getpid(), signal.SIGKILL)


def _control(option: int, value: int) -> None:
    """Call prctl for this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise RunError(
            f"the run cannot be supervised: {os.strerror(ctypes.get_errno())} (run.max_restarts=0 disables supervision)"
        )


def _ended_child() -> tuple[int, int] | None:
    """Return (process id, status) of a child that has ended, including adopted processes. None if all children are
    still running."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _settle() -> None:
    """Wait until all processes of the ended run have exited."""
    remove_leftovers()  # in case the cleanup process was killed too
    deadline = time.monotonic() + _SETTLE_S
    with contextlib.suppress(ChildProcessError):  # all have exited
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.05)


def _reported(run: Callable[[Attempt], int], attempt: Attempt) -> int:
    try:
        return run(attempt)
    except BaseException as error:
        report(error)
        raise


def report(error: BaseException) -> None:
    """Report to the supervisor, if there is one, why this process is about to fail. Only the first report has an
    effect."""
    write_end, _Report.to = _Report.to, None
    if write_end is None:
        return
    sentence = str(error) if isinstance(error, GdpoError) else f"{type(error).__name__}: {error}"
    record = {"kind": kind_of(error), "sentence": printable(" ".join(sentence.split()))[: _RECORD_LIMIT // 16]}
    with open(write_end, "w") as pipe, contextlib.suppress(OSError):
        pipe.write(json.dumps(record))


def _parsed(record: bytes) -> Failure | None:
    try:
        return Failure(**json.loads(record))
    except (ValueError, TypeError):  # missing or truncated
        return None


def _last_ray_message(run_dir: Path, pid: int) -> str:
    """Describe the last message of the process's Ray client.

    A client that loses its raylet ends the process immediately, sometimes before the run notices that Ray's servers are
    lost.
    """
    logs = status_if_whole(run_dir).get("logs")
    with contextlib.suppress(OSError):
        for log in Path(logs).glob(f"python-core-driver-*_{pid}.log") if logs else ():
            line = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            if found := _RAY_PROBLEM.fullmatch(line):
                return f"; last message of its Ray client: {printable(found[1])[:_LONGEST_RAY_MESSAGE]}"
    return ""


def _furthest_step(run_dir: Path) -> int:
    try:
        return max((int(row["step"]) for row in read_metrics(run_dir) if "loss" in row), default=0)
    except (RunError, KeyError, ValueError, TypeError):
        return 0  # The next attempt encounters and reports the same problem.


def _announce(run_dir: Path, step: int, sentence: str, outcome: str) -> None:
    """Report a restart or failure on the terminal, as an alert and in the status file."""
    with contextlib.suppress(OSError):
        print(f"supervisor: {sentence}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # The disk may be full. The message is already on the terminal.
        write_alert(run_dir, step, sentence)
    amend_status(run_dir, outcome=outcome, reason=sentence)
