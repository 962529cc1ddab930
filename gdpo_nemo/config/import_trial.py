"""Importing the user's own code in a process that it may end, before this one imports it.

A file may call ``exit`` of the C library, run into a segmentation fault or wait for something that never comes while it
is imported. In a process of its own that costs a sentence; what it raises is left to the import that follows.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

from gdpo_nemo.errors import ConfigError
from gdpo_nemo.waits import work_done

IDLE_S = 10.0
"""An import that neither computes, reads nor writes for so long waits for something."""
LONGEST_S = 300.0
"""What a worker has to build its environments, too."""
_LOOK_S = 0.5

# ``os._exit`` raises, as in the import that follows (``objects.staying``), which then says so. 1: PR_SET_PDEATHSIG.
_TRIAL = """
import ctypes, importlib, importlib.util, json, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
name, file, told, sys.path, sys.argv = json.loads(sys.argv[1])
leave, here = os._exit, os.getpid()
def refuse(status):
    if os.getpid() != here:
        leave(status)
    raise SystemExit
os._exit = refuse
try:
    if file is None:
        importlib.import_module(name)
    else:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
except BaseException:
    pass
os.write(told, b"1")
leave(0)
"""

_on = False


@contextlib.contextmanager
def imports_tried() -> Iterator[None]:
    """Have every import of the user's code in the block tried first. For the process that the user sees: a worker or a
    rank that such code ends is replaced, or named, by others."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


def try_import(name: str, file: Path | None = None) -> None:
    """Import a module, or a file under that name, in another process, if that is wanted. Returns whatever the import
    raises there.

    Raises:
        ConfigError: it ends that process, or hangs; says how, and not what was imported.
    """
    if not _on or name in sys.modules:
        return
    here, told = os.pipe()
    about = [name, file and str(file), told, sys.path, sys.argv]
    process = subprocess.Popen(
        [sys.executable, "-c", _TRIAL, json.dumps(about)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(told,),
        start_new_session=True,
    )
    os.close(told)
    try:
        _wait(process, here)
    finally:
        os.close(here)
        with contextlib.suppress(ProcessLookupError):  # and what the import has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], told: int) -> None:
    """Return once the import has come to an end of its own; raise ConfigError where it does not."""
    begin = changed = time.monotonic()
    work = None
    # A process that the import has started may hold the pipe open: its end is not waited for.
    while not select.select([told], [], [], _LOOK_S)[0] and process.poll() is None:
        now = time.monotonic()
        if (done := work_done(process.pid)) != work:
            work, changed = done, now
        if now - changed > IDLE_S:
            raise ConfigError(
                f"its import hangs: it has done nothing for {IDLE_S:.0f} s (what waits belongs in a function)"
            )
        if now - begin > LONGEST_S:
            raise ConfigError(f"its import has taken {LONGEST_S:.0f} s and goes on")
    if select.select([told], [], [], 0)[0] and os.read(told, 1):
        return
    code = process.wait()
    how = f"is killed by {signal.Signals(-code).name}" if code < 0 else f"ends with status {code}"
    raise ConfigError(f"a process that imports it {how}")
