"""Starts a run again after a failure of its infrastructure.

``supervised`` forks: the child is the run, and this process, which has imported nothing heavy, waits for it. What fails
for reasons of config, data, user code or numerics would fail again and ends the command. So does a run that does not
get beyond its furthest step in two further attempts, whatever ends it.

The child has a process group of its own and gets each signal once, from here: a terminal, ``timeout`` and Ray's jobs
signal whole groups, and a run takes a second SIGTERM for impatience. It is killed when this process is. What it leaves
behind, which the reaper ends, becomes a child of this process: the next attempt starts when the last of it is gone.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

from gdpo_nemo.config.schema import Config
from gdpo_nemo.endings import endings, leave_lost_terminal
from gdpo_nemo.errors import START_AGAIN, FailureKind, GdpoError, RunError, kind_of, printable
from gdpo_nemo.observe.alerts import write_alert
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.run_files import status_if_whole
from gdpo_nemo.observe.status import RESTARTING, amend_status

METRICS = {
    "driver/restarts": ("restarts", "Times that the supervisor had started the run again (`run.max_restarts`)"),
    "driver/rebuilds": (
        "times",
        "Times that this driver had started the lost policy again beside the engines that stay",
    ),
    "driver/recovery": (
        "s",
        "From the failure before a restart or rebuild to the end of the first step after it; in its row",
    ),
}
_BACKOFF_S = (1.0, 60.0)
"""The first pause and the longest; each is twice the one before, as long as no step is gained."""
_STUCK = 2
"""Attempts in a row that gained no step, after which another one is in vain."""
_ASKED = (129, 130, 143)
"""Statuses of a run that was asked to end."""
_SETTLE_S = 15.0
"""Longest wait for what a dead run left; the reaper takes 3 s. Daemons that user code started may stay."""
_SET_DEATH_SIGNAL = 1
_ADOPT_ORPHANS = 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of <linux/prctl.h>."""
_RECORD_LIMIT = 1 << 16
_COMPLAINT = re.compile(r"\[[^]]* [WEFC] [^]]*\] \S+: (.*)")
"""A warning or worse in a log of Ray's: [time level process thread] file:line: text."""
_LONGEST_COMPLAINT = 300


@dataclass(frozen=True)
class Attempt:
    """Which start of the run this process is."""

    restarts: int = 0
    """Starts before it."""
    lost_at: float | None = None
    """When the one before failed, in seconds since the epoch."""
    reason: str | None = None
    """What was said of that."""
    supervised: bool = False
    """Whether another one may follow."""
    rebuilds: int = 0
    """Times that this process has started the policy again (``kept``)."""

    def __str__(self) -> str:
        return f"rebuild {self.rebuilds} of the policy" if self.rebuilds else f"restart {self.restarts}"

    def metrics(self, first_step_at: float | None) -> dict[str, float]:
        """The keys ``driver/...`` of a step's row; none before the first restart.

        Args:
            first_step_at: the end of the step, if it is the attempt's first; in seconds since the epoch.
        """
        row = {"driver/restarts": float(self.restarts)} if self.restarts else {}
        row |= {"driver/rebuilds": float(self.rebuilds)} if self.rebuilds else {}
        if first_step_at is not None and self.lost_at is not None:
            row["driver/recovery"] = first_step_at - self.lost_at
        return row


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended."""

    kind: str | None
    sentence: str


_attempt = Attempt()


def current_attempt() -> Attempt:
    """That of this process; the first one, where nothing supervises it."""
    return _attempt


def count_rebuild(sentence: str) -> None:
    """Take note that this process starts its policy again, now, for the reason in the sentence."""
    global _attempt
    _attempt = replace(_attempt, rebuilds=_attempt.rebuilds + 1, lost_at=time.time(), reason=sentence)


def supervised(config: Config, attempt: Callable[[float | None], int]) -> int:
    """Call ``attempt``, in a child of this process, until it needs no further one; returns its exit status.

    Returns, and raises what ``attempt`` raises, in the child as well as here: the caller ends both processes alike.

    Args:
        attempt: gets the time when it was begun, in seconds since the epoch; None: when this process started.
    """
    global _attempt
    run_dir = Path(config.run.dir).absolute()
    furthest = _furthest_step(run_dir)
    restarts = stuck = 0
    _attempt = Attempt(supervised=True)
    _control(_ADOPT_ORPHANS, 1)
    while True:
        begin = time.time() if restarts else None
        child = _Child.forked()
        if child is None:
            return _reported(attempt, begin)
        status, failure = child.outcome(lambda pid: _last_of_ray(run_dir, pid))
        lost_at = time.time()
        if failure is None or failure.kind != FailureKind.INFRASTRUCTURE:
            return status
        _settle()
        step = _furthest_step(run_dir)
        stuck = 0 if step > furthest else stuck + 1
        furthest = max(step, furthest)
        hopeless = _hopeless(restarts, config.run.max_restarts, stuck, furthest)
        if hopeless:
            _tell(run_dir, step, f"{failure.sentence}; {hopeless}", "failed")
            return status
        restarts += 1
        pause = min(_BACKOFF_S[0] * 2**stuck, _BACKOFF_S[1])
        sentence = (
            f"{failure.sentence.replace(START_AGAIN, '')}; the run is started again in {pause:.0f} s "
            f"(restart {restarts} of at most {config.run.max_restarts}, run.max_restarts)"
        )
        _tell(run_dir, step, sentence, RESTARTING)
        time.sleep(pause)
        _attempt = Attempt(restarts, lost_at, sentence, supervised=True)


def in_child(work: Callable[[], int]) -> int:
    """Call ``work`` in a child of this process and return the exit status; signals are passed on as to a run, and one
    that comes while the child ends counts.

    The child does not return: it ends with its status, or with what ``work`` raises, which the caller must not catch.
    """
    child = _Child.forked()
    if child is None:
        raise SystemExit(work())
    status, _ = child.outcome()
    return status or (128 + child.asked if child.asked else 0)


def _hopeless(restarts: int, most: int, stuck: int, furthest: int) -> str | None:
    """Why another attempt is not made; None: it is."""
    if restarts >= most:
        return f"it was started again {restarts} times, and run.max_restarts allows no more"
    if stuck >= _STUCK:
        return f"{stuck} attempts in a row did not get beyond step {furthest}, so it is not started again"
    return None


class _Child:
    """The process that runs, as its supervisor sees it. SIGCHLD and the signals that it waits for are blocked here."""

    def __init__(self, pid: int, report: int, waited: set[signal.Signals], mask: set[Any]):
        self._pid = pid
        self._report = report
        self._waited = waited
        self._mask = mask
        self.asked = 0
        """The last signal that was passed on."""

    @classmethod
    def forked(cls) -> _Child | None:
        """The child's side of it is None."""
        waited = {*endings(), signal.SIGINT, signal.SIGCHLD, signal.SIGTSTP, signal.SIGUSR1}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        report, told = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(told)
            return cls(pid, report, waited, before)
        os.close(report)
        _Report.to = told
        _stay_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None

    def outcome(self, explained: Callable[[int], str] = lambda pid: "") -> tuple[int, Failure | None]:
        """Wait for the end. The exit status of this process, if it is to end; None where nothing failed, or somebody
        asked for the end.

        Args:
            explained: what else is known of the end of the process with this number, which itself said nothing.
        """
        code = self._wait()
        with open(self._report, "rb") as pipe:
            said = _parsed(pipe.read(_RECORD_LIMIT))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if code < 0:
            status, how = 128 - code, f"was killed by {signal.Signals(-code).name}"
        else:
            status, how = code, f"ended with status {code} and no word"
        if code == 0 or code in _ASKED or self.asked:
            return status, None
        return status, said or Failure(
            FailureKind.INFRASTRUCTURE, f"the run's process {self._pid} {how}{explained(self._pid)}"
        )

    def _wait(self) -> int:
        """Pass signals on until the child has ended; its exit code, negative: the signal that killed it."""
        while True:
            while ended := _ended_child():
                if ended[0] == self._pid:
                    return os.waitstatus_to_exitcode(ended[1])
            number = signal.sigwaitinfo(self._waited).si_signo
            if number == signal.SIGTSTP:
                self._stop_both()
            elif number != signal.SIGCHLD:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        self.asked = number
        with contextlib.suppress(ProcessLookupError):
            # A run takes SIGTERM for the wish to save and end, which is what Slurm's USR1 stands for.
            os.kill(self._pid, signal.SIGTERM if number == signal.SIGUSR1 else number)

    def _stop_both(self) -> None:
        """Ctrl-Z, and what follows it."""
        os.kill(self._pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(self._pid, signal.SIGCONT)


class _Report:
    """How a child says why it fails."""

    to: int | None = None
    """The end of its pipe."""


def _stay_with(parent: int) -> None:
    """Be killed when ``parent`` is, in a process group of one's own, which may write on the terminal all the same."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        os.kill(os.getpid(), signal.SIGKILL)


def _control(option: int, value: int) -> None:
    """prctl of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise RunError(f"the run cannot be supervised: {os.strerror(ctypes.get_errno())} (run.max_restarts=0 does not)")


def _ended_child() -> tuple[int, int] | None:
    """(process, status) of a child that has ended, or of one that was adopted; None: all that are left go on."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _settle() -> None:
    """Wait until the processes of the run that has ended are gone."""
    deadline = time.monotonic() + _SETTLE_S
    with contextlib.suppress(ChildProcessError):  # there is none left
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.05)


def _reported(attempt: Callable[[float | None], int], begin: float | None) -> int:
    try:
        return attempt(begin)
    except BaseException as error:
        report(error)
        raise


def report(error: BaseException) -> None:
    """Tell the supervisor, if there is one, why this process is about to fail. The first word counts."""
    told, _Report.to = _Report.to, None
    if told is None:
        return
    sentence = str(error) if isinstance(error, GdpoError) else f"{type(error).__name__}: {error}"
    record = {"kind": kind_of(error), "sentence": printable(" ".join(sentence.split()))[: _RECORD_LIMIT // 16]}
    with open(told, "w") as pipe, contextlib.suppress(OSError):
        pipe.write(json.dumps(record))


def _parsed(record: bytes) -> Failure | None:
    try:
        return Failure(**json.loads(record))
    except (ValueError, TypeError):  # none, or half of one
        return None


def _last_of_ray(run_dir: Path, pid: int) -> str:
    """What Ray's client in the process had to say last. One that loses its raylet ends the process at once, at times
    before the watch of Ray's servers has seen it."""
    logs = status_if_whole(run_dir).get("logs")
    with contextlib.suppress(OSError):
        for log in Path(logs).glob(f"python-core-driver-*_{pid}.log") if logs else ():
            line = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            if found := _COMPLAINT.fullmatch(line):
                return f"; Ray's client in it said last: {printable(found[1])[:_LONGEST_COMPLAINT]}"
    return ""


def _furthest_step(run_dir: Path) -> int:
    try:
        return max((int(row["step"]) for row in read_metrics(run_dir) if "loss" in row), default=0)
    except (RunError, KeyError, ValueError, TypeError):
        return 0  # the next attempt finds that out, too, and says so


def _tell(run_dir: Path, step: int, sentence: str, outcome: str) -> None:
    """On the terminal, among the alerts, in the status."""
    with contextlib.suppress(OSError):
        print(f"supervisor: {sentence}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a full disk; it was said on the terminal
        write_alert(run_dir, step, sentence)
    amend_status(run_dir, outcome=outcome, reason=sentence)
