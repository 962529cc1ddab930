"""The phases of a command for whoever waits: one line that is redrawn on a terminal, a line now and then elsewhere.

Nothing here imports more than the standard library: it is what a user sees while everything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Callable, Iterator, TextIO

from gdpo_nemo import phases
from gdpo_nemo.phases import Phase

QUIET = 0
NORMAL = 1
VERBOSE = 2
_REDRAW_S = 0.25
_LINE_S = 10.0
"""Where nothing can be redrawn: a phase is shown once it has lasted this long, and no line follows another sooner."""
_SHORT_S = 0.1
"""Phases that the line of the start leaves out."""
_ERASE = "\r\x1b[K"


class Display:
    """Shows the phases under way. ``tick`` draws; ``shown`` calls it from a thread.

    Args:
        began: when the command was asked for, of ``phases.clock``.
        terminal: whether a line may be redrawn.
        width: columns of the terminal, asked at every draw, because it may be resized.
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
        """Prints a line where something else than this has the terminal."""
        self._stream = stream
        self._began = began
        self._width = width or (lambda: _columns(stream))
        self._lock = threading.RLock()
        self._drawn = ""
        self._covered = 0
        self._last = -_LINE_S
        self._ended: dict[str, float] | None = {}

    def tick(self) -> None:
        """Show what is under way now."""
        with self._lock:
            if self.level == QUIET or self._covered:
                return
            if self.terminal:
                self._draw(f"{duration(phases.clock() - self._began)}  {under_way()}"[: max(0, self._width() - 1)])
            else:
                self._line_now_and_then()

    def ended(self, phase: Phase) -> None:
        """A phase is over."""
        seconds = phases.clock() - phase.since
        if self._ended is not None:
            self._ended[phase.name] = self._ended.get(phase.name, 0.0) + seconds
        if self.level == VERBOSE:
            detail = str(phase.detail())
            self.write(f"{phase.name}: {seconds:.1f} s" + (f", {detail}" if detail else ""))

    def go_on_from(self, other: Display) -> None:
        """Take over the beginning of another display, and what its phases took."""
        self._began = other._began
        self._ended = other._ended

    def begin_again(self) -> None:
        """Tell of the start that begins now as of the first one."""
        self._began = phases.clock()
        self._ended = {}

    def ready(self) -> str:
        """What the time so far went into; later phases do not count."""
        found = self._ended or {}
        self._ended = None
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items() if seconds >= _SHORT_S)
        return f"ready after {phases.clock() - self._began:.1f} s" + (f" ({parts})" if parts else "")

    def write(self, line: str) -> None:
        """Print a line; the redrawn one stays below it."""
        if self.level == QUIET:
            return
        if self.above:
            self.above(line)
            return
        with self.covered():
            self._put(line + "\n")

    @contextlib.contextmanager
    def covered(self) -> Iterator[None]:
        """Draw nothing while the block runs: somebody else writes to the terminal."""
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
        # A terminal that has gone away, or a full disk, ends the pictures and not the command.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _line_now_and_then(self) -> None:
        now = phases.clock()
        longest = max((now - each.since for each in phases.current()), default=0.0)
        if longest >= _LINE_S and now - self._last >= _LINE_S:
            self._last = now
            self._put(f"{duration(now - self._began)}  {under_way()}\n")


_display: Display | None = None


def active() -> Display | None:
    """The display of the command that runs; None without one."""
    return _display


@contextlib.contextmanager
def shown(
    stream: TextIO, level: int = NORMAL, began: float | None = None, before: Display | None = None
) -> Iterator[Display]:
    """Show the phases of the block on ``stream``; where some display shows them already, that one goes on.

    ``began``: seconds since the epoch; None: when this process started. ``before``: a display that has ended, whose
    times this one goes on with.
    """
    global _display
    if _display is not None:
        yield _display
        return
    age = time.time() - (process_start() if began is None else began)
    display = Display(stream, phases.clock() - age, level, can_redraw(stream))
    if before is not None:
        display.go_on_from(before)
    stop = threading.Event()

    def draw() -> None:
        display.tick()
        while not stop.wait(_REDRAW_S):
            display.tick()

    thread = threading.Thread(target=draw, name="display", daemon=True)
    _display = display
    with phases.watched(display.ended):
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
    """``Display.covered`` of the display that is active, if there is one."""
    with _display.covered() if _display else contextlib.nullcontext():
        yield


def under_way() -> str:
    """The phases, each with its time and how far it is."""
    now = phases.clock()
    return " · ".join(
        "  ".join(part for part in (each.name, duration(now - each.since), str(each.detail())) if part)
        for each in phases.current()
    )


def can_redraw(stream: TextIO) -> bool:
    """Whether it is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def duration(seconds: float) -> str:
    """``7 s``, ``2:05``, ``1:02:05``."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _columns(stream: TextIO) -> int:
    try:
        # Some terminals, those of containers among them, do not know their size and say 0.
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def process_start() -> float:
    """When this process started, in seconds since the epoch."""
    import psutil

    return float(psutil.Process().create_time())
