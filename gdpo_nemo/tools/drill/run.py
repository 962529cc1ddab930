"""Run under test, which is started with ``gdpo-nemo train``, disturbed by faults, and restarted if it ends."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from gdpo_nemo.cluster.cleanup_process import inode_of, shared_memory
from gdpo_nemo.observe import journal
from gdpo_nemo.observe.metrics import FILE, parse_row, read_metrics
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.tools.drill.faults import DRIVER, Fault, RunProcesses, Target, Then
from gdpo_nemo.training.replay import audit_run
from gdpo_nemo.utils.errors import RunError

_LOOK_S = 0.1
_LIST_S = 1.0
"""Seconds between two listings of the run's processes, because a listing takes longer than checking the step."""
_STARTS = 3
"""Maximum number of manual restarts after one fault."""
_CLEANUP_S = 60.0
"""Seconds within which processes and files of an ended run must disappear. The cleanup process takes some seconds."""
REPORT_STEPS = 3
"""Number of steps within which a run must report a fault."""
_TAIL = 1 << 18


@dataclass
class Outcome:
    """Outcome of an injected fault."""

    fault: str
    victim: str
    """Affected processes or files. Empty if the run has no target for this fault."""
    step: int = 0
    """Last trained step before the fault."""
    seconds: float | None = None
    """Seconds from the fault to the end of the next step, or None if the run did not train another step."""
    starts: int = 0
    """Number of manual restarts."""
    said: list[str] = field(default_factory=list)
    """Alerts that report the fault."""
    wrong: str | None = None
    """Description of the error, or None without an error."""

    def record(self) -> dict[str, Any]:
        """Return the outcome as a dictionary for a JSON file."""
        return asdict(self)


class DrilledRun:
    """Training run that can be started several times in the same folder. ``close`` ends its remaining processes.

    Args:
        arguments: arguments of ``gdpo-nemo train``, including the run's folder.
        patience_s: maximum seconds to wait for a step.
    """

    def __init__(self, run_dir: Path, arguments: Sequence[str], patience_s: float, seed: int = 0):
        self.run_dir = run_dir
        self.log = run_dir.with_name(f"{run_dir.name}.log")
        self._arguments = arguments
        self._patience_s = patience_s
        self._random = random.Random(seed)
        self._seen: dict[int, float] = {}
        self._listed = 0.0
        self._furthest = 0
        self._shared: set[tuple[str, int]] = set()
        # Folder for the run's temporary files. Caches and Ray's sockets are elsewhere, because sockets require short
        # paths.
        self._scratch = Path(tempfile.mkdtemp(prefix="drill"))
        run_dir.parent.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start or resume the run."""
        shared = tempfile.gettempdir()
        variables = {"TMPDIR": str(self._scratch), "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", shared)}
        variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_drill"
        )
        self.log.touch()  # a fault can come before the thread below has opened it
        # The log is written through a pipe, so that a run that cannot write files can still report the error.
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **variables},
            start_new_session=True,  # Ctrl-C interrupts only the test, which then ends the run
        )  # fmt: skip
        threading.Thread(target=self._keep_output, args=(self._process.stdout,), daemon=True).start()
        self._processes = RunProcesses(self._process.pid, self.run_dir)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "gdpo_nemo", "train", *self._arguments]

    def _keep_output(self, output: BinaryIO) -> None:
        with open(self.log, "ab") as log:
            for line in output:
                log.write(line)
                log.flush()

    @property
    def ended(self) -> int | None:
        """Exit status of the run, or None while it is running."""
        return self._process.poll()

    def step(self) -> int:
        """Return the last step in ``metrics.jsonl``."""
        return _last_step(self.run_dir / FILE)

    def wait_for(self, step: int) -> bool:
        """Wait until ``step`` is trained. Return False if the run ends before this step. Raises RunError on timeout."""
        return self._until(lambda: self.step() >= step, f"step {step}")

    def finish(self) -> int:
        """Wait for the end of the run and return its exit status. Raises RunError on timeout."""
        while self.ended is None:
            before = self.step()
            self._until(lambda: self.step() > before, "the run to end")  # noqa: B023 - called in the same iteration
        return self._process.wait()

    def some_moment(self) -> None:
        """Wait for a random time, at most the duration of two steps."""
        time.sleep(self._random.uniform(0, min(_pace(self.run_dir / FILE), self._patience_s / 10)))

    def disturb(self, fault: Fault) -> Outcome:
        """Inject a fault and wait until the run has trained another step. Raises RunError on timeout."""
        since, begin, step = time.time(), time.monotonic(), self.step()
        logged = self.log.stat().st_size
        driver = self._processes.of(DRIVER)
        victim = fault.act(Target(self.run_dir, self._processes, self._random))
        outcome = Outcome(fault.name, victim or "", step)
        if victim is None:
            return outcome
        # A step that has already begun may still finish after the fault.
        if fault.then is Then.RESTARTS:
            self._until(lambda: self._processes.of(DRIVER) not in ([], driver), f"a restart after {fault.name}")
        elif fault.then is Then.REBUILDS:
            self._until(lambda: self._is_reported(fault, since, logged, step), f"a report of {fault.name}")
        elif fault.then is Then.ENDS:
            self._until(lambda: False, f"the run to end after {fault.name}")
            self._start_again(fault, outcome)
        furthest = self._furthest = max(step, self._furthest, self.step())
        later = furthest + (REPORT_STEPS if fault.then is Then.ANY else 0)
        while not outcome.wrong and not self._until(lambda: self.step() > later, f"a step after {later}"):
            outcome.said += self._reports(since, logged)
            self._start_again(fault, outcome)
        if outcome.wrong:
            return outcome
        outcome.seconds = time.monotonic() - begin
        if fault.then is Then.ANY:
            outcome.said = self._reports(since, logged)
            outcome.wrong = "; ".join(f"left behind: {name}" for name in self.left_behind()) or None
        elif fault.says:
            # The run reports a fault at the end of the step, or at the next use of a process that was idle.
            self._until(lambda: self._is_reported(fault, since, logged, furthest), "a report of the fault")
            outcome.said = self._find_reports(fault, since, logged)
            if not outcome.said:
                others = "; ".join(self._reports(since, logged)) or "none"
                outcome.wrong = f"the run did not report the fault; its reports since then: {others}; see {self.log}"
        return outcome

    def _is_reported(self, fault: Fault, since: float, logged: int, step: int) -> bool:
        """Return whether the run has reported the fault, or has trained more than ``REPORT_STEPS`` further steps."""
        return bool(self._find_reports(fault, since, logged)) or self.step() > step + REPORT_STEPS

    def _find_reports(self, fault: Fault, since: float, logged: int) -> list[str]:
        """Return the alerts and error lines that match the fault's pattern."""
        return [text for text in self._reports(since, logged) if fault.says and re.search(fault.says, text)]

    def _reports(self, since: float, logged: int) -> list[str]:
        """Return the alerts since a time, and the error lines of the log from byte ``logged``."""
        alerts = [alert["text"] for alert in read_alerts(self.run_dir) if alert.get("time", 0.0) >= since]
        with open(self.log, "rb") as log:
            log.seek(logged)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return [*alerts, *errors]

    def _start_again(self, fault: Fault, outcome: Outcome) -> None:
        """Restart the run like a user would, or set ``outcome.wrong`` if it should not have ended."""
        outcome.starts += 1
        status = self.ended
        if status == 0:
            outcome.wrong = "the run ended before it trained another step"
        elif fault.then is Then.ANY and status != -signal.SIGKILL and not outcome.said:
            outcome.wrong = f"the run ended with exit status {status} and without a message; see {self.log}"
        elif fault.then not in (Then.ENDS, Then.ANY):
            outcome.wrong = f"the run ended with exit status {status} instead of continuing; see {self.log}"
        elif outcome.starts > _STARTS:
            outcome.wrong = f"the run was started {_STARTS} times and ended with exit status {status}; see {self.log}"
        elif self.step() and (self.run_dir / journal.FILE).exists() and (found := audit_run(self.run_dir).found):
            outcome.wrong = "; ".join(found)
        else:
            self.start()

    def _until(self, condition: Callable[[], bool], awaited: str) -> bool:
        deadline = time.monotonic() + self._patience_s
        while not condition():
            self._furthest = max(self._furthest, self.step())
            if self.ended is not None:
                return condition()
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self.run_dir}: timed out after {self._patience_s:.0f} s waiting for {awaited}; see {self.log}"
                )
            if time.monotonic() - self._listed > _LIST_S:
                found = self._processes.all()
                self._seen |= found
                # Only the run's processes are examined, because other programs may also leave shared memory behind.
                self._shared |= shared_memory(found)
                self._listed = time.monotonic()
            time.sleep(_LOOK_S)
        return True

    def left_behind(self) -> list[str]:
        """Wait until processes and files of ended starts of the run have disappeared.

        Returns a description of each process, shared memory segment or temporary file that remains.
        """
        deadline = time.monotonic() + _CLEANUP_S
        while (found := self._find_left_behind()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return found

    def _find_left_behind(self) -> list[str]:
        running = {} if self.ended is not None else self._processes.all()
        gone = [(pid, born) for pid, born in self._seen.items() if pid not in running]
        processes = [f"process {pid} ({name})" for pid, born in gone if (name := _name(pid, born))]
        used = shared_memory(psutil.pids())
        memory = [path for path, inode in self._shared - used if inode_of(path) == inode]
        # A running start has one temporary folder and the file beside it.
        files = sorted(str(path) for path in self._scratch.iterdir())
        return [*processes, *memory, *(files if not running else files[2:])]

    def close(self) -> None:
        """End the run and delete its temporary files."""
        if self.ended is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience_s)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def trained(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of all trained steps by step number."""
    return {row["step"]: row for row in read_metrics(run_dir) if "loss" in row}


def _last_step(file: Path) -> int:
    return next((int(row["step"]) for row in _newest_rows(file)), 0)


def _pace(file: Path) -> float:
    """Return twice the median seconds of the last five steps, which a few slow steps do not affect."""
    times = [float(row.get("time/step", 0.0)) for row in islice(_newest_rows(file), 5)]
    return 2 * statistics.median(times or [0.0])


def _newest_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows with a loss, the newest row first. Only the end of the file is read, because it may be large."""
    try:
        with open(file, "rb") as rows:
            rows.seek(max(0, rows.seek(0, os.SEEK_END) - _TAIL))
            lines = rows.read().split(b"\n")[:-1]
    except OSError:
        return
    for line in reversed(lines):
        row = parse_row(line)  # None for an incomplete line, such as the first line
        if row is not None and "loss" in row:
            yield row


def _name(pid: int, born: float) -> str | None:
    """Return the name of the process ``pid`` created at ``born`` (seconds), or None if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE:
            return process.name()
    return None
