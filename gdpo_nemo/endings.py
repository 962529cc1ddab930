"""The signals that ask a command to end: SIGTERM, and SIGHUP, which a terminal sends when it goes away."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
from typing import Callable, Iterator


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
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # hung up; a file or a pipe gives ENOTTY and stays as it is
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
