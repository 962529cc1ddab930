"""``rewards.png`` and ``report.html`` of a run under way, drawn by a process beside it.

Drawing takes seconds of a core and Python's lock, which the run's loop needs. The process reads the run's files as
anyone may and replaces both pictures whole; it gives way to everything else on the machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gdpo_nemo.config.writing import remove_partial_files

_PROGRAM = (
    "import os, sys; os.nice(19); from gdpo_nemo.observe.redraw import draw; draw(sys.argv[1], sys.argv[2] == 'True')"
)


def draw(run_dir: str | Path, plot: bool) -> None:
    """Write ``report.html``, and ``rewards.png`` where ``plot`` and there are rewards.

    Raises:
        RunError: a file of the run cannot be read, or one of these not be written.
    """
    from gdpo_nemo.observe.history import History
    from gdpo_nemo.observe.html_report import write_report
    from gdpo_nemo.observe.metrics import read_metrics
    from gdpo_nemo.observe.plot import plot_rewards

    if plot and History.of(read_metrics(run_dir)).components:
        plot_rewards(run_dir)
    write_report(run_dir)


class Redraw:
    """Draws a run every ``period`` steps; 0: never. Where the last drawing has not ended, one is left out."""

    def __init__(self, run_dir: str | Path, period: int, plot: bool):
        self._command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(Path(run_dir).absolute()), str(plot)]
        self._period = period
        self._run_dir = Path(run_dir)
        self._process: subprocess.Popen[bytes] | None = None

    def step(self, step: int) -> None:
        """Have the run drawn if it is time. The files hold all steps up to this one.

        Raises:
            OSError: no process could be started. RuntimeError: the last drawing failed.
        """
        if not self._period or step % self._period:
            return
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._process = None
            if status:
                raise RuntimeError(f"the process that draws ended with status {status}; gdpo-nemo report says why")
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, stderr=quiet)

    def close(self) -> None:
        """End a drawing in flight, whose files the last drawing replaces, and remove its unfinished file."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            remove_partial_files(self._run_dir, self._process.pid)
            self._process = None
