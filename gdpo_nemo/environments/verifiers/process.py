"""Driver side of the worker process of the ``verifiers`` environment."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from gdpo_nemo.environments.verifiers.worker import end_children
from gdpo_nemo.utils.waits import waiting

_SCRIPT = Path(__file__).with_name("worker.py")
LOAD_S = 600.0
"""Time limit in seconds to load a package or its tasks."""
_CLOSE_S = 10.0
"""Seconds after which a worker that was asked to end is killed. It is longer than the worker's own time limit."""
_LAST_OUTPUT = 4096
"""Bytes at the end of the log in which the last line of output is searched."""


class WorkerError(Exception):
    """The worker answered a request with an error. The message is one line."""


class WorkerDied(Exception):
    """The worker ended before it answered a request. The message is one line."""


class WorkerProcess:
    """Worker process that loads a package. Several threads may use it. The constructor does not wait for the package.

    Args:
        python: interpreter of the virtual environment with verifiers and the package.
        log: file for the output of the package, or None for a temporary file.
        settings: package, args, concurrency and deadline_s.
    """

    def __init__(self, python: Path, log: Path | None, settings: Mapping[str, Any]):
        self._log = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115 - closed in close()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._blocked = ""
        self._end = ""
        """Reason why the worker has ended, or empty."""
        self._description: Future[Any] = Future()
        self._pending = {0: self._description}
        requests, requests_end = os.pipe()
        replies_end, replies = os.pipe()
        # Programs of the package's virtual environment are found before those of the run.
        environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        self._process = subprocess.Popen(
            [python, "-P", _SCRIPT, str(requests), str(replies)],
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not end the worker before the driver
        )
        os.close(requests)
        os.close(replies)
        self._requests = os.fdopen(requests_end, "w", buffering=1)
        self._reader = threading.Thread(target=self._read, args=(replies_end,), daemon=True, name="verifiers worker")
        self._reader.start()
        self._send(settings)

    def description(self) -> dict[str, Any]:
        """Wait until the package is loaded, and return its description.

        Raises:
            WorkerError: if the package cannot be loaded.
            WorkerDied: if the process ends, or does not load the package within ``LOAD_S`` seconds.
        """
        description: dict[str, Any] = self.result(self._description, LOAD_S)
        return description

    @property
    def alive(self) -> bool:
        """True until the worker has ended."""
        return self._process.poll() is None

    def submit(self, method: str, **arguments: Any) -> Future[Any]:
        """Send a request. The result is that of the adapter's method, or WorkerError or WorkerDied."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            if self._end:
                future.set_exception(WorkerDied(self._end))
                return future
            self._pending[number] = future
        self._send({"id": number, "method": method, "arguments": arguments})
        return future

    def result(self, future: Future[Any], limit_s: float) -> Any:
        """Wait for the result of a request, and kill the worker if it does not answer in time.

        Raises:
            WorkerError: if the request is faulty.
            WorkerDied: if the worker ended, or did not answer within ``limit_s`` seconds.
        """
        try:
            with waiting("episodes of verifiers", "environments", limit_s):
                return future.result(limit_s)
        except TimeoutError:
            self._blocked = f"no answer within {limit_s:g} s"
            self._kill()
            self._reader.join()
            raise WorkerDied(self._end) from None

    def close(self) -> None:
        """End the worker and the processes that it started."""
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._reader.join()
        self._log.close()

    def _kill(self) -> None:
        # A stopped process cannot start another one while its descendants are killed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)
        end_children(self._process.pid)
        self._process.kill()
        self._process.wait()

    def _send(self, request: Mapping[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # The reader reports the end of the worker.
            self._requests.write(json.dumps(request) + "\n")

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe) as replies:
            for line in replies:
                reply = json.loads(line)
                if "blocked" in reply:
                    self._blocked = f"the event loop was blocked by {reply['blocked']}"
                    continue
                with self._lock:
                    future = self._pending.pop(reply.get("id", 0))
                if "error" in reply:
                    future.set_exception(WorkerError(reply["error"]))
                else:
                    future.set_result(reply["result"])
        self._process.wait()
        with self._lock:
            self._end = self._reason()
        for future in self._pending.values():
            future.set_exception(WorkerDied(self._end))

    def _reason(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        end = os.pread(self._log.fileno(), _LAST_OUTPUT, max(0, size - _LAST_OUTPUT))
        lines = end.decode(errors="replace").strip().splitlines()
        output = f"; last output: {lines[-1][:200]}" if lines else ""
        reason = self._blocked or f"its process ended with status {self._process.returncode}"
        return reason + output
