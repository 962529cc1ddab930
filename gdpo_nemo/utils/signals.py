"""Handling of SIGTERM and SIGHUP, and separation of terminal output from library output.

A terminal sends SIGHUP when it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STOPPED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of a process that a signal has stopped. Signal handlers raise SystemExit with these statuses."""

_terminal_streams: set[int] = set()
"""Duplicates of the terminal's descriptor, used while descriptor 2 is redirected to a file (``raw_lines_in``)."""


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM and SIGHUP. SIGHUP is omitted if the process ignores it, for example under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def answered_by(handler: Callable[[int, object], None], *also: signal.Signals) -> Iterator[None]:
    """Handle ``termination_signals()`` and the signals in ``also`` with ``handler`` while the block runs.

    Outside the main thread, this has no effect, because Python handles signals only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (*termination_signals(), *also)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def hangups_held() -> Iterator[None]:
    """Block SIGHUP until the end of the block. Processes that are started in the block also block SIGHUP.

    A closing terminal sends SIGHUP to all processes of the foreground group. The workers must survive this signal,
    because the last checkpoint is written from their state.
    """
    # A signal mask applies to only one thread. The kernel would deliver the signal to another thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_lost_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal was closed, because printing would fail."""
    for stream in {1, 2, *_terminal_streams}:
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # closed terminal; files and pipes give ENOTTY and are not redirected
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)


@contextlib.contextmanager
def raw_lines_in(file: Path) -> Iterator[None]:
    """Redirect the standard error of libraries and child processes to ``file`` while the block runs.

    This hides the errors and stack traces that Ray's C++ code writes regardless of its log level. Python's
    ``sys.stderr`` still writes to the terminal. The file is deleted at the end if it is empty.
    """
    duplicate = os.dup(2)
    try:
        log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # for example on a full disk, which the run reports when it writes metrics
        log = os.open(os.devnull, os.O_WRONLY)
    before = sys.stderr
    before.flush()
    os.dup2(log, 2)
    os.close(log)
    _terminal_streams.add(duplicate)
    terminal = os.fdopen(duplicate, "w", buffering=1, errors="backslashreplace", closefd=False)
    if _is_standard(before):
        sys.stderr = terminal
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal was closed
            terminal.flush()
        sys.stderr = before
        os.dup2(duplicate, 2)
        _terminal_streams.discard(duplicate)
        os.close(duplicate)
        with contextlib.suppress(OSError):
            if not file.stat().st_size:
                file.unlink()


def _is_standard(stream: Any) -> bool:
    """Return True if the stream writes to descriptor 2, unlike the streams of notebooks and tests."""
    try:
        return bool(stream.fileno() == 2)
    except (AttributeError, OSError, ValueError):
        return False
