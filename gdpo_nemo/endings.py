"""The signals that ask a command to end: SIGTERM, and SIGHUP, which a terminal sends when it goes away. And what of a
terminal is for the command alone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from pathlib import Path
from typing import Any, Callable, Iterator

_own_streams: set[int] = set()
"""Descriptors that are standard error while the second one is a file (``raw_lines_in``)."""


def endings() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP unless whoever started this program had it ignored, as nohup does."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def answered_by(handler: Callable[[int, object], None], *also: signal.Signals) -> Iterator[None]:
    """Handle ``endings()`` and the signals in ``also`` with ``handler`` while the block runs.

    Outside the main thread none is handled: Python lets only that thread do it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (*endings(), *also)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def hangups_held() -> Iterator[None]:
    """SIGHUP waits until the end of the block, and never reaches processes that are started inside.

    A terminal that goes away signals every process of the foreground group. The workers must outlive that, or there is
    nothing left to make the last checkpoint of.
    """
    # The signal mask is per thread, and the kernel may deliver to any thread: blocking it elsewhere would hold nothing.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_lost_terminal() -> None:
    """Send standard output and error nowhere if their terminal is gone; the next line printed would be an error."""
    for stream in {1, 2, *_own_streams}:
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # hung up; a file or a pipe gives ENOTTY and stays as it is
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


@contextlib.contextmanager
def raw_lines_in(file: Path) -> Iterator[None]:
    """Send what libraries and child processes write on standard error to ``file`` while the block runs; Python's
    ``sys.stderr`` stays the terminal. A file in which nothing came to be is removed.

    Ray's C++ writes its errors there, line by line with states and stacks, whatever it is asked to log.
    """
    kept = os.dup(2)
    try:
        log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # a full disk, which ends a run through its metrics
        log = os.open(os.devnull, os.O_WRONLY)
    before = sys.stderr
    before.flush()
    os.dup2(log, 2)
    os.close(log)
    _own_streams.add(kept)
    own = open(kept, "w", buffering=1, errors="backslashreplace", closefd=False)
    if _is_standard(before):
        sys.stderr = own
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            own.flush()
        sys.stderr = before
        os.dup2(kept, 2)
        _own_streams.discard(kept)
        os.close(kept)
        with contextlib.suppress(OSError):
            if not file.stat().st_size:
                file.unlink()


def _is_standard(stream: Any) -> bool:
    """Whether it writes on descriptor 2; a notebook's or a test's does not."""
    try:
        return bool(stream.fileno() == 2)
    except (AttributeError, OSError, ValueError):
        return False
