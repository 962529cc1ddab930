"""Samples on their way to the disk: a thread writes them while the run goes on.

pyarrow and zstd work without Python's lock, so the thread takes next to nothing from the loop. At most one step waits
while another is written: where the disk is slower than the run, the run waits, and memory does not grow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.disk_sync import sync_folder
from gdpo_nemo.data.records import Group
from gdpo_nemo.observe.rollouts import FOLDER, VALIDATION, write_rollouts
from gdpo_nemo.waits import waiting

_IN_HAND = 2
"""Steps: one that is being written and one that waits."""
_SLOW_S = 10.0
"""A wait for the disk that is worth a word."""


class SampleWriter:
    """Writes the samples of one step after the other. Groups that were given to ``write`` must not be changed.

    A step that fails is left out; the next call says why by raising the error, once, and further steps are tried.

    Args:
        complain: hears, once, that the run had to wait for the disk.
        most: groups of a step that are written, the first ones; None: all.
    """

    def __init__(self, run_dir: str | Path, complain: Callable[[str], None], most: int | None = None):
        self._run_dir = run_dir
        self._most = most
        self._complain: Callable[[str], None] | None = complain
        self._changed = threading.Condition()
        self._steps: deque[tuple[int, tuple[Any, ...]]] = deque()
        """Those not written yet; the first is in the thread's hands."""
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: np.ndarray | None = None,
        trainer_logprobs: Sequence[np.ndarray | None] | None = None,
        terms: Mapping[str, np.ndarray] | None = None,
        turn_advantages: Sequence[np.ndarray] | None = None,
        entropies: Sequence[np.ndarray | None] | None = None,
        validation: bool = False,
    ) -> None:
        """Have the samples of ``step`` written, as ``write_rollouts`` does; wait where two steps are not yet.

        Raises:
            Exception: whatever kept an earlier step from being written. This one is written all the same.
        """
        columns: tuple[Any, ...] = (groups, advantages, trainer_logprobs, terms, turn_advantages, entropies)
        if self._most is not None and not validation:
            columns = _first(self._most, *columns)
        start = time.monotonic()
        with self._changed:
            self._wait(lambda: len(self._steps) < _IN_HAND, f"the disk, for samples of step {step}")
            self._steps.append((step, (*columns, validation)))
            if self._thread is None:
                # A daemon: a driver that dies in another way than by ``close`` must not hang on its samples.
                self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        waited = time.monotonic() - start
        if waited > _SLOW_S and self._complain:
            self._complain(f"samples are written more slowly than they are drawn: step {step} waited {waited:.1f} s")
            self._complain = None
        self._raise()

    def flush(self, step: int | None = None) -> None:
        """Wait until the samples of all steps, or of those up to ``step``, are on the disk, with the names of
        their files. Raises as ``write``."""
        with self._changed:
            self._wait(
                lambda: not self._steps or (step is not None and self._steps[0][0] > step), "samples to reach the disk"
            )
        self._raise()
        for name in (FOLDER, VALIDATION):
            if (folder := Path(self._run_dir) / name).is_dir():
                sync_folder(folder)

    def close(self) -> None:
        """Write what is left and end the thread. Raises as ``write``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            with waiting("samples to reach the disk", "driver"):
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
                    return
                step, arguments = self._steps[0]
            try:
                write_rollouts(self._run_dir, step, *arguments)
            except Exception as error:  # noqa: BLE001 - handed to the thread that gave the step
                self._error = error
            del arguments
            with self._changed:
                self._steps.popleft()
                self._changed.notify_all()


def _first(most: int, groups: Sequence[Group], *columns: Any) -> tuple[Any, ...]:
    """The first ``most`` groups, and of each column, or mapping of columns, the entries of their samples."""
    chosen = groups[:most]
    count = sum(len(group.trajectories) for group in chosen)

    def part(column: Any) -> Any:
        if isinstance(column, Mapping):
            return {name: values[:count] for name, values in column.items()}
        return None if column is None else column[:count]

    return chosen, *map(part, columns)
