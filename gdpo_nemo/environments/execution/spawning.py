"""Processes that are spawned without their parent's main program.

multiprocessing runs that program's file again in every process that it spawns, for the sake of what is pickled by
reference to ``__main__``. Nothing of ours is; and where the main program is a user's script that trains at its top
level, each verifier would start the training again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any, Iterator

_lock = threading.Lock()


@contextlib.contextmanager
def _main_program_hidden() -> Iterator[None]:
    """``__main__`` names neither a file nor a module, which is where multiprocessing looks for what to run."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    with _lock:
        before: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        main.update(dict.fromkeys(before))
        try:
            yield
        finally:
            main.update(before)


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        with _main_program_hidden():
            return Popen(process_obj)


class Spawning(SpawnContext):
    """A context for multiprocessing and pebble, which knows what became of its processes."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[_Process] = []

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        """As the class of this name, which pebble calls."""
        process = _Process(*args, **options)
        self._started.append(process)
        return process

    def take_deaths(self) -> list[str]:
        """How processes ended, since the last call, that did not end with status 0; no one twice."""
        ended = [process for process in self._started if process.pid is not None and process.exitcode is not None]
        for process in ended:
            self._started.remove(process)
        return [_how(process.exitcode) for process in ended if process.exitcode]


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
