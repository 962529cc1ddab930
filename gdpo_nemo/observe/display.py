"""Display of a command's active phases: a line that is redrawn on a terminal, or an occasional line in a log.

This module imports only the standard library, because it runs while all other modules are being imported.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from gdpo_nemo.utils import progress
from gdpo_nemo.utils.progress import Phase

QUIET = 0
NORMAL = 1
VERBOSE = 2
_REDRAW_S = 0.25
_LINE_S = 10.0
"""Minimum age in seconds of a phase before it is printed, and minimum interval between lines.

This applies only if lines cannot be redrawn.
"""
_SHORT_S = 0.1
"""Minimum duration in seconds of a phase that the line with the startup time lists."""
_ERASE = "\r\x1b[K"


class Display:
    """Display of the active phases. ``shown`` calls ``tick`` repeatedly from a thread.

    Args:
        began: start time of the command, as a value of ``progress.clock``.
        terminal: True if the line can be redrawn.
        width: function that returns the width of the terminal in columns. The function is called before every draw,
            because the width may change.
    """

    def __init__(
        self,
        stream: TextIO,
        began: float,
        level: int = NORMAL,
        terminal: bool = False,
        width: Callable[[], int] | None = None,
    ):
        self.level = level
        self.terminal = terminal
        self.above: Callable[[str], None] | None = None
        """Function to print a line while another display, such as the live console, uses the terminal."""
        self._stream = stream
        self._began = began
        self._width = width or (lambda: _columns(stream))
        self._lock = threading.RLock()
        self._drawn = ""
        self._covered = 0
        self._last = -_LINE_S
        self._ended: dict[str, float] | None = {}

    def tick(self) -> None:
        """Show the active phases."""
        with self._lock:
            if self.level == QUIET or self._covered:
                return
            if self.terminal:
                self._draw(f"{duration(progress.clock() - self._began)}  {under_way()}"[: max(0, self._width() - 1)])
            else:
                self._print_occasionally()

    def ended(self, phase: Phase) -> None:
        """Record the duration of a phase that has ended."""
        seconds = progress.clock() - phase.since
        if self._ended is not None:
            self._ended[phase.name] = self._ended.get(phase.name, 0.0) + seconds
        if self.level == VERBOSE:
            detail = str(phase.detail())
            self.write(f"{phase.name}: {seconds:.1f} s" + (f", {detail}" if detail else ""))

    def continue_from(self, other: Display) -> None:
        """Copy the start time and the phase durations of another display."""
        self._began = other._began
        self._ended = other._ended

    def restart(self) -> None:
        """Reset the start time and the phase durations, for a restarted run."""
        self._began = progress.clock()
        self._ended = {}

    def ready(self) -> str:
        """Return a line with the startup time and the durations of the startup phases.

        Later phases are not recorded.
        """
        found = self._ended or {}
        self._ended = None
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items() if seconds >= _SHORT_S)
        return f"ready after {progress.clock() - self._began:.1f} s" + (f" ({parts})" if parts else "")

    def write(self, line: str) -> None:
        """Print a line above the redrawn line."""
        if self.level == QUIET:
            return
        if self.above:
            self.above(line)
            return
        with self.covered():
            self._put(line + "\n")

    @contextlib.contextmanager
    def covered(self) -> Iterator[None]:
        """Hide the display while the block runs, so that other code can write to the terminal."""
        with self._lock:
            self._draw("")
            self._covered += 1
        try:
            yield
        finally:
            with self._lock:
                self._covered -= 1

    def _draw(self, line: str) -> None:
        if line == self._drawn or not self.terminal:
            return
        self._put(_ERASE + line)
        self._drawn = line

    def _put(self, text: str) -> None:
        # If the terminal is closed or the disk is full, the display stops but the command continues.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _print_occasionally(self) -> None:
        now = progress.clock()
        longest = max((now - each.since for each in progress.current()), default=0.0)
        if longest >= _LINE_S and now - self._last >= _LINE_S:
            self._last = now
            self._put(f"{duration(now - self._began)}  {under_way()}\n")


_display: Display | None = None


def active() -> Display | None:
    """Return the display of the running command, or None if the command has no display."""
    return _display


@contextlib.contextmanager
def shown(
    stream: TextIO, level: int = NORMAL, began: float | None = None, before: Display | None = None
) -> Iterator[Display]:
    """Show the active phases on ``stream`` while the block runs. A display that is already active is reused.

    Args:
        began: start time in seconds since the epoch. None means the start of this process.
        before: ended display from which the start time and the phase durations are copied.
    """
    global _display
    if _display is not None:
        yield _display
        return
    age = time.time() - (process_start() if began is None else began)
    display = Display(stream, progress.clock() - age, level, can_redraw(stream))
    if before is not None:
        display.continue_from(before)
    stop = threading.Event()

    def draw() -> None:
        display.tick()
        while not stop.wait(_REDRAW_S):
            display.tick()

    thread = threading.Thread(target=draw, name="display", daemon=True)
    _display = display
    with progress.watched(display.ended):
        thread.start()
        try:
            yield display
        finally:
            _display = None
            stop.set()
            thread.join()
            with display.covered():
                pass


@contextlib.contextmanager
def covered() -> Iterator[None]:
    """Hide the active display, if there is one, while the block runs. See ``Display.covered``."""
    with _display.covered() if _display else contextlib.nullcontext():
        yield


def under_way() -> str:
    """Return the active phases as text, each with its duration and progress."""
    now = progress.clock()
    phases = []
    for phase in progress.current():
        parts = (phase.name, duration(now - phase.since), str(phase.detail()))
        phases.append("  ".join(filter(None, parts)))
    return " · ".join(phases)


def can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def duration(seconds: float) -> str:
    """Format a duration as ``7 s``, ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _columns(stream: TextIO) -> int:
    try:
        # Some terminals, for example in containers, do not know their size and report 0.
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def process_start() -> float:
    """Return the start time of this process, in seconds since the epoch."""
    import psutil

    return float(psutil.Process().create_time())
