"""Exits of user code: ``os._exit``, SystemExit and similar exceptions, which would end the process.

The import of this module replaces ``os._exit``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import NoReturn

from gdpo_nemo.utils.errors import first_line
from gdpo_nemo.utils.signals import STOPPED

_real_exit = os._exit
_blocked = threading.local()
"""Process (``pid``) in which this thread must not exit."""
_status_of_zero: tuple[int, int] | None = None
"""Process, and the status with which it exits instead of 0."""


def _exit(status: int) -> NoReturn:
    if getattr(_blocked, "pid", None) == os.getpid():
        raise SystemExit(f"it calls os._exit({status!r})")
    if status == 0 and _status_of_zero is not None and _status_of_zero[0] == os.getpid():
        status = _status_of_zero[1]
    _real_exit(status)


os._exit = _exit


@contextlib.contextmanager
def os_exit_blocked() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit in this block and thread, so that user code cannot end the process silently.

    Forked processes can still exit with ``os._exit``.
    """
    before = getattr(_blocked, "pid", None)
    _blocked.pid = os.getpid()
    try:
        yield
    finally:
        _blocked.pid = before


@contextlib.contextmanager
def exit_status_marked(status: int) -> Iterator[None]:
    """Change the exit status of ``os._exit(0)`` to ``status`` in this block, in all threads of this process.

    Forked processes can still exit with status 0.
    """
    global _status_of_zero
    _status_of_zero = os.getpid(), status
    try:
        yield
    finally:
        _status_of_zero = None


class ExitRaised(Exception):
    """Replaces SystemExit and other exceptions that are not subclasses of Exception. See ``exits_contained``."""


@contextlib.contextmanager
def exits_contained() -> Iterator[None]:
    """Convert exceptions of user code that would end the process, or the event loop that waits for the user code.

    Such exceptions are SystemExit and other exceptions that are not subclasses of Exception. ``os._exit`` raises
    SystemExit. The exceptions of signal handlers, which run in the main thread, propagate.

    Raises:
        ExitRaised: in place of these exceptions.
    """
    try:
        with os_exit_blocked():
            yield
    except Exception:
        raise
    except BaseException as error:
        by_signal = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in STOPPED)
        if by_signal and threading.current_thread() is threading.main_thread():
            raise
        raise ExitRaised(first_line(error)) from error
