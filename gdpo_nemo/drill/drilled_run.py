"""A run that is started as a user starts it, disturbed, and started again where it ends."""

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
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Sequence

import psutil

from gdpo_nemo.cluster.reaper import shared_memory
from gdpo_nemo.drill.faults import Fault, Target, Then
from gdpo_nemo.drill.run_processes import DRIVER, RunProcesses
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe import journal
from gdpo_nemo.observe.alerts import read_alerts
from gdpo_nemo.observe.metrics import FILE, parse_row, read_metrics
from gdpo_nemo.rerun import audit_run

_LOOK_S = 0.1
_LIST_S = 1.0
"""Between two listings of the processes, which takes longer than to see whether a step is done."""
_STARTS = 3
"""Times that a run is started again by hand after one fault."""
_GONE_S = 60.0
"""In which what a run leaves has to be gone; the reaper takes some seconds."""
_SHARED = ("sem.mp-", "psm_", "vllm_dist_", "gdpo_nemo_")
_SOON = 3
"""Steps within which a run has to say what it went through."""
_TAIL = 1 << 18


@dataclass
class Outcome:
    """What a fault did."""

    fault: str
    victim: str
    """Processes or files; empty: there was nothing of the kind."""
    step: int = 0
    """The last one that was trained before."""
    seconds: float | None = None
    """From the fault to the end of a step that had not been trained before, by what follows it; None: none came."""
    starts: int = 0
    """Times that the run was started again by hand."""
    said: list[str] = field(default_factory=list)
    """The alerts that followed."""
    wrong: str | None = None
    """What must not be; None: all is well."""

    def record(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


class DrilledRun:
    """One run folder. ``close`` ends what is left of the run.

    Args:
        arguments: of ``gdpo-nemo train``, with the run's folder.
        patience_s: longest wait for a step.
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
        self._shared_before = _shared()
        # What the run writes beside its folder comes here, but for Ray's sockets, whose path must be short, and caches.
        self._scratch = Path(tempfile.mkdtemp(prefix="drill"))
        run_dir.parent.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the run, or let it resume."""
        shared = tempfile.gettempdir()
        beside = {"TMPDIR": str(self._scratch), "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", shared)}
        beside["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_drill")
        # Through a pipe: a run whose files cannot grow must be able to say so, and its log is a file.
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **beside},
            start_new_session=True,  # Ctrl-C reaches the drill, which ends the run
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
        """Its exit status; None: it goes on."""
        return self._process.poll()

    def step(self) -> int:
        """The last step that the metrics hold."""
        return _last_step(self.run_dir / FILE)

    def wait_for(self, step: int) -> bool:
        """Wait until ``step`` is trained; False: the run has ended before. Raises RunError: it takes for ever."""
        return self._until(lambda: self.step() >= step, f"step {step}")

    def finish(self) -> int:
        """Wait for the end, and return the exit status. Raises RunError: it takes for ever."""
        while self.ended is None:
            before = self.step()
            self._until(lambda: self.step() > before, "its end")  # noqa: B023 - called before the next turn
        return self._process.wait()

    def some_moment(self) -> None:
        """Let a random part of the last two steps' time go by."""
        time.sleep(self._random.uniform(0, min(_pace(self.run_dir / FILE), self._patience_s / 10)))

    def disturb(self, fault: Fault) -> Outcome:
        """Do it, and see the run through to a new step. Raises RunError."""
        since, begin, step = time.time(), time.monotonic(), self.step()
        logged = self.log.stat().st_size
        driver = self._processes.of(DRIVER)
        victim = fault.act(Target(self.run_dir, self._processes, self._random))
        outcome = Outcome(fault.name, victim or "", step)
        if victim is None:
            return outcome
        # Steps that were under way may yet end.
        if fault.then is Then.RESTARTS:
            self._until(lambda: self._processes.of(DRIVER) not in ([], driver), f"a restart after {fault.name}")
        elif fault.then is Then.REBUILDS:
            self._until(lambda: self._heard(fault, since, logged, step), f"a word of {fault.name}")
        elif fault.then is Then.ENDS:
            self._until(lambda: False, f"its end after {fault.name}")
            self._start_again(fault, outcome)
        furthest = self._furthest = max(step, self._furthest, self.step())
        while not outcome.wrong and not self._until(lambda: self.step() > furthest, f"a step after {furthest}"):
            self._start_again(fault, outcome)
        if outcome.wrong:
            return outcome
        outcome.seconds = time.monotonic() - begin
        if fault.says:
            # What is found out during a step is said at its end, and what is found idle at its next use.
            self._until(lambda: self._heard(fault, since, logged, furthest), "a word of it")
            outcome.said = self._said(fault, since, logged)
            outcome.wrong = None if outcome.said else f"the run said nothing of it; see {self.log}"
        return outcome

    def _heard(self, fault: Fault, since: float, logged: int, step: int) -> bool:
        """Whether the run has said it, or gone on for so long that it never will."""
        return bool(self._said(fault, since, logged)) or self.step() > step + _SOON

    def _said(self, fault: Fault, since: float, logged: int) -> list[str]:
        """Alerts, and the last words of attempts, that name what happened."""
        alerts = [alert["text"] for alert in read_alerts(self.run_dir) if alert.get("time", 0.0) >= since]
        with open(self.log, "rb") as log:
            log.seek(logged)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return [text for text in [*alerts, *errors] if fault.says and re.search(fault.says, text)]

    def _start_again(self, fault: Fault, outcome: Outcome) -> None:
        """As a user would, who has read why it ended."""
        outcome.starts += 1
        status = self.ended
        if status == 0:
            outcome.wrong = "the run was over before it trained another step"
        elif fault.then is not Then.ENDS:
            outcome.wrong = f"the run ended with status {status} instead of going on; see {self.log}"
        elif outcome.starts > _STARTS:
            outcome.wrong = f"the run was started {_STARTS} times and ended with status {status}; see {self.log}"
        elif self.step() and (self.run_dir / journal.FILE).exists() and (found := audit_run(self.run_dir)):
            outcome.wrong = "; ".join(found)
        else:
            self.start()

    def _until(self, good: Callable[[], bool], what: str) -> bool:
        deadline = time.monotonic() + self._patience_s
        while not good():
            self._furthest = max(self._furthest, self.step())
            if self.ended is not None:
                return good()
            if time.monotonic() > deadline:
                raise RunError(f"{self.run_dir}: {what} did not come in {self._patience_s:.0f} s; see {self.log}")
            if time.monotonic() - self._listed > _LIST_S:
                self._seen |= self._processes.all()
                self._listed = time.monotonic()
            time.sleep(_LOOK_S)
        return True

    def left_behind(self) -> list[str]:
        """Processes, shared memory and temporary files that outlive the run, a sentence each; waits for them to go."""
        deadline = time.monotonic() + _GONE_S
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return found

    def _left(self) -> list[str]:
        processes = [f"process {pid} ({name})" for pid, born in self._seen.items() if (name := _name(pid, born))]
        used = {path for path, _ in shared_memory(psutil.pids())}
        memory = [path for path in _shared() - self._shared_before if path not in used]
        return [*processes, *memory, *(str(path) for path in self._scratch.iterdir())]

    def close(self) -> None:
        """End the run, and remove its temporary files."""
        if self.ended is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience_s)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def trained(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The metrics of every step that was trained."""
    return {row["step"]: row for row in read_metrics(run_dir) if "loss" in row}


def _last_step(file: Path) -> int:
    return next((int(row["step"]) for row in _newest_rows(file)), 0)


def _pace(file: Path) -> float:
    """Seconds of two steps, as long as the last five in the median: one that waited for a verdict is no measure."""
    times = [float(row.get("time/step", 0.0)) for row in islice(_newest_rows(file), 5)]
    return 2 * statistics.median(times or [0.0])


def _newest_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Those with a loss, the newest first, from the end of a file that may be as long as the run."""
    try:
        with open(file, "rb") as rows:
            rows.seek(max(0, rows.seek(0, os.SEEK_END) - _TAIL))
            lines = rows.read().split(b"\n")[:-1]
    except OSError:
        return
    for line in reversed(lines):
        row = parse_row(line)  # None for the first one, of which there is a part only
        if row is not None and "loss" in row:
            yield row


def _shared() -> set[str]:
    return {entry.path for entry in os.scandir("/dev/shm") if entry.name.startswith(_SHARED)}


def _name(pid: int, born: float) -> str | None:
    """What the process is that was started then; None: it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE:
            return process.name()
    return None
