"""``status.json`` of a run: which processes it has and what its driver waits for, renewed every second or two."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable

from gdpo_nemo import waits
from gdpo_nemo.config.reading import parse_json, read_text

FILE = "status.json"
RESTARTING = "restarting"
"""Outcome of a start of the run that is followed by another one."""

_PERIOD_S = 1.0


class StatusFile:
    """Writes the status from a thread of its own, so that it stays true while every other thread waits.

    Args:
        describe: called from that thread; returns what only the run knows (step, versions, roles, queues).
    """

    def __init__(self, run_dir: Path, describe: Callable[[], dict[str, Any]]):
        self._file = run_dir / FILE
        self._describe = describe
        for torn in run_dir.glob(f"{self._file.stem}.[0-9a]*"):  # of a process that was killed while it wrote
            torn.unlink(missing_ok=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="status", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while True:
            self.write(waits.current())
            if self._stop.wait(_PERIOD_S):
                return

    def write(self, waiting: list[waits.Wait], **more: Any) -> None:
        """Write the status now; where it cannot be written, the file stays as it was."""
        status = {**self._describe(), **more, "waits": [asdict(wait) for wait in waiting]}
        status = dict(time=time.time(), host=socket.gethostname(), driver=os.getpid(), **status)
        temporary = self._file.with_suffix(f".{threading.get_ident()}")
        # A full disk ends the run through its metrics, with a sentence; here it must end neither this thread nor,
        # at the end, the telling of it.
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(status, indent=1))
            os.replace(temporary, self._file)

    def close(self, outcome: str) -> None:
        """End the thread; the last status says how the run ended."""
        self._stop.set()
        self._thread.join()
        self.write([], outcome=outcome)


def amend_status(run_dir: Path, **fields: Any) -> None:
    """Change the last status of a run whose process has ended; without one, or where it cannot be written, nothing."""
    file = run_dir / FILE
    with contextlib.suppress(OSError, ValueError):
        status = parse_json(read_text(file))
        if isinstance(status, dict):
            temporary = file.with_suffix(".amended")
            temporary.write_text(json.dumps({**status, "waits": [], **fields}, indent=1))
            os.replace(temporary, file)
