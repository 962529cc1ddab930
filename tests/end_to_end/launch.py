"""Starts of the program as a user makes them, and what they left in their run folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from gdpo_nemo.cluster.worker_launcher import FOLDER
from gdpo_nemo.commands.cli import main
from gdpo_nemo.observe.metric_registry import unknown_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 1200
STEPS = 6
UNDISTURBED_STEPS = 12
LR = 2e-4
CONSTRAINT = "gdpo.constraints={length: {at_least: 0.9, lr: 2.0}}"
MIX = {"digit_sort": 0.7, "twin": 0.3}
MIXED = (
    "env.twin={plugin: digit_sort, length_limit: 30}",
    "data.train.environment=null",
    f"data.mix={MIX}".replace("'", ""),
)
"""Overrides for two environments with the same components."""
UNDISTURBED = (
    *MIXED,
    f"gdpo.max_num_steps={UNDISTURBED_STEPS}",
    "gdpo.val_at_start=true",
    CONSTRAINT,
    "gdpo.weighting={rule: ctwa, target: 0.5, lr: 0.2}",
    "gdpo.estimator=examples/custom_estimator.py:Fading",
    f"policy.megatron_cfg={{optimizer: {{lr: {LR}}}, scheduler: {{lr_decay_style: cosine}}}}",
)
"""Overrides of the undisturbed run, which others repeat or go on with."""
_PARTS_OF_THE_SUITE = re.compile(r"resource_tracker|gdpo_nemo\.cluster\.fork_server")
_LOOK_S = 2.0
"""How often the processes of a run are listed, which takes longer than to see whether a step is done."""


@dataclass(frozen=True)
class Ended:
    """A launch that has ended."""

    run_dir: Path
    status: int
    out: str
    err: str
    left_behind: list[str]
    """Processes and temporary files that outlived the run."""


class Launch:
    """One start of ``examples/run_gdpo.py`` on a run folder."""

    started: ClassVar[list[subprocess.Popen[str]]] = []
    """Processes of all launches, for clean-up after a test that failed."""

    def __init__(self, run_dir: Path, model: Path, *overrides: str, before: list[str] | None = None, **streams: int):
        self.run_dir = run_dir
        # What the run writes beside its folder comes here, except for Ray's sockets, whose path must be short, and
        # torch's cache, which is the user's.
        self.scratch = Path(tempfile.mkdtemp(prefix="e2e"))
        shared = tempfile.gettempdir()
        beside = {
            "TMPDIR": str(self.scratch),
            "RAY_TMPDIR": shared,
            "TORCHINDUCTOR_CACHE_DIR": f"{shared}/torchinductor_tests",
        }
        environment = {**os.environ, **beside}
        # Like a user's run, it has a fork server of its own, whose workers are among its descendants.
        del environment[FOLDER]
        self.process = subprocess.Popen(
            [*(before or []), sys.executable, *self.command(run_dir, model, overrides)],
            text=True,
            cwd=REPOSITORY,
            env=environment,
            **(streams or {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}),
        )
        self.started.append(self.process)
        self.seen: dict[int, float] = {}

    def command(self, run_dir: Path, model: Path, overrides: tuple[str, ...]) -> list[str]:
        """The arguments of Python."""
        return [str(REPOSITORY / "examples" / "run_gdpo.py"), *arguments(run_dir, model, overrides)]

    def wait_for_step(self, step: int) -> None:
        """Return once the metrics hold ``step``; remembers every process of the run on the way."""
        self.wait_until(lambda done: done >= step, f"step {step} did not come")

    def wait_until(self, good: Callable[[int], bool], complaint: str, pause_s: float = 0.05) -> None:
        """Return once ``good`` likes the last step that the metrics hold, which is asked every ``pause_s``; remembers
        every process of the run on the way."""
        deadline = time.monotonic() + START_S
        looked = 0.0
        while not good(max((row["step"] for row in rows(self.run_dir) if "loss" in row), default=0)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, complaint
            if time.monotonic() - looked > _LOOK_S:
                self._look()
                looked = time.monotonic()
            time.sleep(pause_s)
        self._look()

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        deadline = time.monotonic() + START_S
        looked = 0.0
        while self.process.poll() is None and time.monotonic() < deadline:
            if time.monotonic() - looked > _LOOK_S:
                self._look()
                looked = time.monotonic()
            time.sleep(0.2)
        out, err = self.process.communicate(timeout=300)
        with contextlib.suppress(OSError):  # it is as empty as it should be, or ``left_behind`` will say what is in it
            self.scratch.rmdir()
        assert unknown_metrics(rows(self.run_dir)) == []
        return self.process.returncode, out, err

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child.create_time()
        except psutil.NoSuchProcess:
            return

    def listening(self) -> dict[str, list[str]]:
        """Addresses at which processes of the run accept connections or datagrams now, by the process's name."""
        found: dict[str, list[str]] = {}
        own = psutil.Process(self.process.pid)
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                bound = [c.laddr.ip.removeprefix("::ffff:") for c in process.net_connections("inet") if not c.raddr]
                found.setdefault(process.name(), []).extend(bound)
        return found

    def left_behind(self) -> list[str]:
        """Processes and temporary files that outlive the run."""
        survivors = self.survivors()
        files = [str(path) for path in self.scratch.glob("*")]
        shutil.rmtree(self.scratch, ignore_errors=True)
        return survivors + files

    def survivors(self, patience_s: float = 120.0) -> list[str]:
        """Processes of the run that still live after ``patience_s``."""
        assert len(self.seen) > 4, "the processes of the run were not seen"
        deadline = time.monotonic() + patience_s
        while True:
            alive = [name for pid, born in self.seen.items() if (name := _name_if_alive(pid, born))]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.2)


class OnATerminal(Launch):
    """A start on a terminal of its own, which ``hang_up`` takes away."""

    def __init__(self, *arguments):
        self._master, terminal = os.openpty()
        os.set_blocking(self._master, False)
        # A test suite may itself run under nohup, and a hang-up that is ignored stays so in what it starts.
        before = ["env", "--default-signal=HUP", "setsid", "--ctty"]
        super().__init__(*arguments, before=before, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        self.shown = b""

    def _look(self) -> None:
        super()._look()
        with contextlib.suppress(BlockingIOError):
            while shown := os.read(self._master, 4096):
                self.shown += shown

    def hang_up(self) -> None:
        """End the terminal, as closing its window does: the kernel tells the session's leader, a shell all of the
        job."""
        os.close(self._master)
        os.killpg(self.process.pid, signal.SIGHUP)
        self._look = super()._look


def train_here(run_dir: Path, model: Path, *overrides: str) -> str:
    """Train to the end in this process, which saves the imports of another one, and leaves no process. Returns stdout.

    Who looks at a run's processes, signals or supervisor starts a ``Launch``.
    """
    shown = command_here("train", *arguments(run_dir, model, overrides))
    assert unknown_metrics(rows(run_dir)) == []
    return shown


def command_here(*words: str) -> str:
    """Run a command in this process, with success and without a process left. Returns its stdout."""
    before = _children()
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(list(words)) == 0, shown.getvalue()
    _, alive = psutil.wait_procs(_children() - before, timeout=120)
    assert not alive
    return shown.getvalue()


def _children() -> set[psutil.Process]:
    """Return the children of this process, without Python's tracker of shared memory and the suite's fork servers.

    The fork servers are children of this process if pytest runs without workers of xdist (``-n 0``).
    """
    children = psutil.Process().children(recursive=True)
    return {child for child in children if not _PARTS_OF_THE_SUITE.search(" ".join(child.cmdline()))}


def arguments(run_dir: Path, model: Path, overrides: tuple[str, ...]) -> list[str]:
    """Return the overrides of a small run."""
    return [
        f"run.dir={run_dir}",
        f"policy.model_name={model}",
        f"gdpo.max_num_steps={STEPS}",
        "gdpo.num_prompts_per_step=4",
        "gdpo.val_period=3",
        "gdpo.val_prompts=8",
        "data.train.size=512",
        "data.validation.size=512",
        "checkpointing.save_period=2",
        "logger.console=plain",
        *overrides,
    ]


def _name_if_alive(pid: int, born: float) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE:
            return f"{pid} {' '.join(process.cmdline())[:80]}"
    except psutil.NoSuchProcess:
        return None
    return None


def rows(run_dir: Path) -> list[dict]:
    """The metric rows of a run, without a torn last line."""
    file = run_dir / "metrics.jsonl"
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def timeless(row: dict) -> dict:
    """A row without what the clock says, and without what depends on the transport of weights."""
    left_out = ("weights/", "time/", "throughput/", "idle/", "engines/", "queue/", "driver/", "environments/")
    return {k: v for k, v in row.items() if not k.startswith(left_out)}
