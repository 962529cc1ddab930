"""Writing of sample files beside the run: in a thread, or in a process for the groups of rollout hosts.

The driver passes these groups on as the hosts have packed them, and does not build tables of their samples. The process
ends with the driver, so that it cannot write to the folder of a later start of the run.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from gdpo_nemo.data.records import Group, Prompt, Trajectory, unpack_trajectories
from gdpo_nemo.observe.sample_values import NO_VALUES, SampleValues
from gdpo_nemo.observe.samples import FOLDER, VALIDATION, write_rollouts
from gdpo_nemo.utils.files import sync_folder
from gdpo_nemo.utils.waits import waiting

_PIPE_BYTES = 1 << 20
"""Size of the pipe to the process, the largest that Linux allows by default."""
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG in <linux/prctl.h>."""

PackedGroup = tuple[Prompt, int, bytes | Sequence[Trajectory]]
"""(prompt, prompt index, packed or plain trajectories) of a group."""


class SampleProcess:
    """Driver side of the process. The thread that creates an instance must outlive it, because the process ends with
    this thread."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pipesize=_PIPE_BYTES)

    def write(
        self, run_dir: str | Path, step: int, groups: Sequence[Group], values: SampleValues, validation: bool
    ) -> None:
        """Write the sample file of a step. The arguments are those of ``write_rollouts``.

        Raises:
            Exception: any exception of ``write_rollouts``.
            OSError, EOFError: if the process has ended.
        """
        packed = [(_short(group.prompt), group.position, group.packed or group.trajectories) for group in groups]
        requests, answers = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        pickle.dump((str(run_dir), step, packed, values, validation), requests, pickle.HIGHEST_PROTOCOL)
        requests.flush()
        error = pickle.load(answers)
        if error is not None:
            raise error

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _short(prompt: Prompt) -> Prompt:
    """Return a prompt without the fields that are not saved with samples."""
    return Prompt(prompt.id, prompt.token_ids, prompt.text, prompt.environment, images=prompt.images)


def _unpacked(packed: PackedGroup) -> Group:
    prompt, position, members = packed
    trajectories = unpack_trajectories(members, prompt) if isinstance(members, bytes) else list(members)
    return Group(prompt, trajectories, position)


def _serve(driver: int, requests: BinaryIO, answers: BinaryIO) -> None:
    """Write the steps that the driver sends, until it closes the pipe."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != driver:  # the driver has already ended
        return
    for number in (signal.SIGINT, signal.SIGHUP):  # the driver decides when to end
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            run_dir, step, packed, values, validation = pickle.load(requests)
        except EOFError:
            return
        error: Exception | None = None
        try:
            write_rollouts(run_dir, step, list(map(_unpacked, packed)), values, validation=validation)
        except Exception as raised:  # the driver raises it
            error = raised
        del packed, values
        pickle.dump(error, answers)
        answers.flush()


_MAX_PENDING = 2
"""Maximum number of steps in memory: one step being written and one waiting step."""
_SLOW_S = 10.0
"""Time in seconds that ``write`` may wait for the disk before a message is shown."""


class SampleWriter:
    """Writer of samples in a background thread, one step after the other. Groups of rollout hosts are written by a
    ``SampleProcess``.

    Groups passed to ``write`` must not be changed afterwards. If a step cannot be written, the next call raises the
    error once. The failed step has no sample file, but later steps are still written.

    Args:
        complain: function that is called once with a message if the run had to wait for the disk.
        most: maximum number of groups to write per step, from the beginning. None writes all groups.
    """

    def __init__(self, run_dir: str | Path, complain: Callable[[str], None], most: int | None = None):
        self._run_dir = run_dir
        self._most = most
        self._complain: Callable[[str], None] | None = complain
        self._changed = threading.Condition()
        self._steps: deque[tuple[int, Sequence[Group], SampleValues, bool]] = deque()
        """Arguments of ``write_rollouts`` for the steps to write. The first step is being written."""
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process: SampleProcess | None = None

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        values: SampleValues = NO_VALUES,
        *,
        validation: bool = False,
    ) -> None:
        """Write the samples of ``step`` in the background. See ``write_rollouts``. Waits while two steps are pending.

        Raises:
            Exception: if an earlier step could not be written. ``step`` is still written.
        """
        if self._most is not None and not validation:
            groups = groups[: self._most]
            values = values.part(slice(sum(len(group.trajectories) for group in groups)))
        start = time.monotonic()
        with self._changed:
            self._wait(lambda: len(self._steps) < _MAX_PENDING, f"the disk, for samples of step {step}")
            self._steps.append((step, groups, values, validation))
            if self._thread is None:
                # A daemon thread does not keep the process alive if the driver ends without ``close``.
                self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        waited = time.monotonic() - start
        if waited > _SLOW_S and self._complain:
            self._complain(
                f"samples are written more slowly than they are generated: step {step} waited {waited:.1f} s"
            )
            self._complain = None
        self._raise()

    def flush(self, step: int | None = None) -> None:
        """Wait until the samples of the steps up to ``step`` are on disk under their final names.

        None waits for all steps.

        Raises the exceptions of ``write``.
        """
        with self._changed:
            self._wait(
                lambda: not self._steps or (step is not None and self._steps[0][0] > step),
                "samples to be written to disk",
            )
        self._raise()
        for name in (FOLDER, VALIDATION):
            if (folder := Path(self._run_dir) / name).is_dir():
                sync_folder(folder)

    def close(self) -> None:
        """Write the pending samples and stop the thread. Raises the exceptions of ``write``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            with waiting("samples to be written to disk", "driver"):
                self._thread.join()
        self._raise()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if not done():
            with waiting(what, "driver"):
                self._changed.wait_for(done)

    def _raise(self) -> None:
        with self._changed:
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self._closed)
                if not self._steps:
                    break
                step, groups, values, validation = self._steps[0]
            try:
                self._write(step, groups, values, validation)
            except Exception as error:  # noqa: BLE001 - raised by the next call
                self._error = error
            del groups, values  # Otherwise, they would stay in memory until the next step.
            with self._changed:
                self._steps.popleft()
                self._changed.notify_all()
        if self._process is not None:
            self._process.close()

    def _write(self, step: int, groups: Sequence[Group], values: SampleValues, validation: bool) -> None:
        if any(group.packed for group in groups):
            self._process = self._process or SampleProcess()
            try:
                self._process.write(self._run_dir, step, groups, values, validation)
                return
            except (BrokenPipeError, EOFError):  # the process was killed
                self._process.close()
                self._process = None
        write_rollouts(self._run_dir, step, groups, values, validation=validation)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
