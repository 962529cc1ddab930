"""Test import of user code in a child process, which finds out whether an import ends the process or is stuck."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.waits import work_done

IDLE_S = 10.0
"""Seconds without CPU time or I/O after which an import is considered stuck."""
LONGEST_S = 300.0
"""Maximum seconds of an import. Workers have the same limit for constructing their environments."""
_LOOK_S = 0.5

_TRIAL = Path(__file__).with_name("trial_process.py")
"""Script of the child process, which receives this process's search path."""

_trials_enabled = False


@contextlib.contextmanager
def imports_tried() -> Iterator[None]:
    """Test every import of user code in the block in a child process first.

    Only the process that the user starts needs this test. If user code ends a worker or a rank, other processes replace
    this process or report the failure.
    """
    global _trials_enabled
    before, _trials_enabled = _trials_enabled, True
    try:
        yield
    finally:
        _trials_enabled = before


def try_import(name: str) -> None:
    """Import a module in a child process.

    Has no effect unless ``imports_tried`` is active. Exceptions of the test import are ignored.

    Raises:
        ConfigError: if the import ends the child process, or is stuck. The error message does not name the module.
    """
    if not _trials_enabled or name in sys.modules:
        return
    reader, writer = os.pipe()
    arguments = [name, writer, sys.path, sys.argv]
    process = subprocess.Popen(
        [sys.executable, "-P", str(_TRIAL), json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writer,),
        start_new_session=True,
    )
    os.close(writer)
    try:
        _wait(process, reader)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):  # kill the group, with all processes that the import started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], reader: int) -> None:
    """Wait until the import has ended.

    Raises:
        ConfigError: if the import ends the process, is stuck, or takes too long.
    """
    begin = changed = time.monotonic()
    work = None
    # Do not wait for the end of the pipe, because a process started by the import may keep the pipe open.
    while not select.select([reader], [], [], _LOOK_S)[0] and process.poll() is None:
        now = time.monotonic()
        if (done := work_done(process.pid)) != work:
            work, changed = done, now
        if now - changed > IDLE_S:
            raise ConfigError(
                f"its import is stuck: no CPU time or I/O for {IDLE_S:.0f} s (move code that waits into a function)"
            )
        if now - begin > LONGEST_S:
            raise ConfigError(f"its import has not finished after {LONGEST_S:.0f} s")
    if select.select([reader], [], [], 0)[0] and os.read(reader, 1):
        return
    code = process.wait()
    how = f"is killed by {signal.Signals(-code).name}" if code < 0 else f"exits with status {code}"
    raise ConfigError(f"a process that imports it {how}")
