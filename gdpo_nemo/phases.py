"""What this process does now: named phases, since when, and how far each is. ``observe/display.py`` shows them."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Callable, Iterator


@dataclass
class Progress:
    """How much of something is done."""

    unit: str
    total: int
    done: int = 0

    def __str__(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.unit}"


@dataclass
class Tally:
    """Groups that are drawn together."""

    samples: Progress
    groups: Progress

    @classmethod
    def of(cls, samples: int, groups: int) -> Tally:
        """Nothing of it is done yet."""
        return cls(Progress("samples", samples), Progress("groups judged", groups))

    def __str__(self) -> str:
        return f"{self.samples}, {self.groups}"


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase under way."""

    name: str
    since: float
    """Seconds, of ``clock``."""
    detail: Callable[[], object]
    """How far it is, as something to print; called from another thread at any time, empty where there is nothing to
    say."""


clock = time.monotonic
"""What phases are measured by."""
# Of the whole process, as waits are: whoever works says what it does without knowing who watches.
_phases: list[Phase] = []
_watchers: list[Callable[[Phase], None]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def phase(name: str, detail: Callable[[], object] = str) -> Iterator[None]:
    """Make known what happens inside the block."""
    found = Phase(name, clock(), detail)
    with _lock:
        _phases.append(found)
    try:
        yield
    finally:
        with _lock:
            _phases.remove(found)
            watchers = list(_watchers)
        for watch in watchers:
            watch(found)


def current() -> list[Phase]:
    """The phases under way, in the order of their beginnings."""
    with _lock:
        return list(_phases)


@contextlib.contextmanager
def watched(watcher: Callable[[Phase], None]) -> Iterator[None]:
    """Call ``watcher`` with every phase that ends while the block runs, from the thread that it ends in."""
    with _lock:
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
