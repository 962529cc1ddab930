"""What a person sees while a command works: one redrawn line on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.console import Console

from gdpo_nemo.observe import console, display as display_module
from gdpo_nemo.observe.display import NORMAL, QUIET, VERBOSE, Display, can_redraw, duration
from gdpo_nemo.observe.metrics import History
from gdpo_nemo.utils import progress
from gdpo_nemo.utils.progress import Tally, phase


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "clock", clock)
    return clock


class Terminal:
    """A pseudo-terminal: ``stream`` is what a program writes to, ``read`` what a person's terminal gets."""

    def __init__(self, columns: int = 80):
        self._master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")
        self.resize(columns)
        os.set_blocking(self._master, False)
        self.line = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """What was written since the last call; ``line`` is then what stands in the last row."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._master, 1 << 16):
                found += part
        text = found.decode()
        self.line = (self.line + text).replace("\r\n", "\n").rpartition("\n")[2].rpartition("\r\x1b[K")[2]
        return text

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with contextlib.closing(Terminal()) as found:
        yield found


def plain(clock: Clock, level: int = NORMAL) -> tuple[Display, io.StringIO]:
    text = io.StringIO()
    return Display(text, clock(), level), text


def test_a_terminal_shows_the_phases_in_order_with_their_times(clock, terminal):
    shown = Display(terminal.stream, clock(), terminal=True)
    seen = []
    for name in ("imports", "data", "Ray", "policy"):
        with phase(name):
            for _ in range(8):
                clock.now += 0.5
                shown.tick()
                terminal.read()
                seen.append(terminal.line)
    assert seen[0] == "0 s  imports  0 s" and seen[1] == "1 s  imports  1 s" and seen[-1] == "16 s  policy  4 s"
    assert list(dict.fromkeys(line.split("  ")[1] for line in seen)) == ["imports", "data", "Ray", "policy"]


def test_no_second_passes_on_a_terminal_without_a_new_line_even_between_phases(clock, terminal):
    shown = Display(terminal.stream, clock(), terminal=True)
    silent = longest = 0.0
    for tick in range(400):
        clock.now += 0.25
        with phase("policy") if tick % 50 < 30 else contextlib.nullcontext():
            shown.tick()
        silent = 0.0 if terminal.read() else silent + 0.25
        longest = max(longest, silent)
    assert longest < 3


def test_phase_shows_its_progress(clock, terminal):
    tally = Tally.of(128, 16)
    shown = Display(terminal.stream, clock(), terminal=True)
    with phase("step 1: batch", lambda: tally):
        tally.samples.done = 37
        clock.now += 2
        shown.tick()
    terminal.read()
    assert terminal.line == "2 s  step 1: batch  2 s  37 of 128 samples, 0 of 16 groups scored"


def test_the_line_fits_a_terminal_that_is_made_narrower(clock, terminal):
    shown = Display(terminal.stream, clock(), terminal=True)
    with phase("a phase with a long name, which says much of what it does"):
        for columns in (80, 20, 1):
            terminal.resize(columns)
            clock.now += 1
            shown.tick()
            terminal.read()
            assert len(terminal.line) < columns


def test_output_of_other_code_is_on_separate_lines(clock, terminal):
    shown = Display(terminal.stream, clock(), terminal=True)
    with phase("model"):
        shown.tick()
        shown.write("warm-up step 10")
        with shown.covered():
            shown.tick()
            print("step 1", file=terminal.stream, flush=True)
        shown.tick()
    written = terminal.read().replace("\r\n", "\n").replace("\r\x1b[K", "<")
    assert written == "<0 s  model  0 s<warm-up step 10\nstep 1\n<0 s  model  0 s"


def test_pipe_gets_a_line_only_for_long_phases_and_no_two_within_ten_seconds(clock):
    shown, text = plain(clock)
    for name, seconds in (("imports", 9), ("policy", 35), ("probe", 3)):
        with phase(name):
            for _ in range(4 * seconds):
                clock.now += 0.25
                shown.tick()
    assert text.getvalue() == "19 s  policy  10 s\n29 s  policy  20 s\n39 s  policy  30 s\n"


def test_quiet_prints_nothing_and_verbose_every_phase(clock):
    for level, expected in ((QUIET, ""), (VERBOSE, "Ray: 2.0 s\n")):
        shown, text = plain(clock, level)
        with progress.watched(shown.ended), phase("Ray"):
            clock.now += 2
            shown.tick()
        assert text.getvalue() == expected
    shown, text = plain(clock, QUIET)
    shown.write("making the model")
    assert text.getvalue() == ""


def test_the_line_of_the_start_adds_phases_up_and_leaves_later_and_short_ones_out(clock):
    shown, _ = plain(clock)
    with progress.watched(shown.ended):
        for name, seconds in (("imports", 2.0), ("probe", 0.01), ("Ray", 1.5), ("imports", 0.5)):
            with phase(name):
                clock.now += seconds
        assert shown.ready() == "ready after 4.0 s (imports 2.5, Ray 1.5)"
        with phase("step 1"):
            clock.now += 1
        assert "step" not in shown.ready()


@pytest.mark.parametrize("term, redrawn", [("xterm", True), ("dumb", False), (None, True)])
def test_a_dumb_terminal_gets_plain_lines(term, redrawn, terminal, monkeypatch):
    monkeypatch.delenv("TERM", raising=False) if term is None else monkeypatch.setenv("TERM", term)
    assert can_redraw(terminal.stream) is redrawn and not can_redraw(io.StringIO())
    text = io.StringIO()
    rich = Console(file=text, force_terminal=True, width=100)
    shown = console.make_console("auto", "demo", 60, History(), rich)
    assert isinstance(shown, console.LiveConsole) is redrawn
    if redrawn:
        shown._live.stop()


def test_a_terminal_that_has_gone_ends_no_command(clock):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    shown = Display(Gone(), clock(), terminal=True)
    with phase("Ray"):
        shown.tick()
        shown.write("a line")


def test_a_display_inside_another_is_that_one_and_leaves_an_empty_line(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with display_module.shown(terminal.stream) as outer, phase("config"):
        outer.tick()
        with display_module.shown(sys.stdout, VERBOSE) as inner:
            assert inner is outer and outer.level == NORMAL
        assert display_module.active() is outer
    assert display_module.active() is None
    assert "config" in terminal.read() and terminal.line == ""


def test_the_panel_shows_the_phase_and_takes_the_terminal_for_itself(clock, terminal, run_dir, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    with display_module.shown(terminal.stream, VERBOSE) as shown, phase("policy"):
        rich = Console(file=text, force_terminal=True, width=100)
        panel = console.make_console("live", "demo", 60, History(), rich)
        terminal.read()
        clock.now += 7
        shown.tick()
        panel._live.refresh()
        with phase("Ray"):
            clock.now += 1
        panel.close("complete", run_dir)
        assert terminal.read() == ""
    assert "policy  7 s" in text.getvalue() and "Ray: 1.0 s" in text.getvalue()


def test_a_quiet_console_shows_alerts_and_the_end(run_dir):
    text = io.StringIO()
    history = History()
    shown = console.make_console("quiet", "demo", 60, history, Console(file=text, width=100))
    history.add({"step": 1, "reward/a/mean": 0.5})
    shown.step(history.training[-1])
    shown.validation({"step": 1, "validation/a": 0.5})
    shown.tell("note", "resuming")
    shown.say("ready after 4 s")
    assert text.getvalue() == ""
    shown.tell("ALERT", "engine 0 died")
    shown.close("complete", run_dir)
    assert text.getvalue().startswith("ALERT engine 0 died\n") and "complete after step 1" in text.getvalue()


def test_durations_read_as_people_write_them():
    assert [duration(s) for s in (-1, 0.4, 59.9, 60, 125, 3725)] == ["0 s", "0 s", "59 s", "1:00", "2:05", "1:02:05"]


@pytest.mark.slow
def test_display_imports_only_the_standard_library():
    code = (
        "import sys, gdpo_nemo.observe.display; "
        "print(sorted({'torch', 'transformers', 'ray', 'rich', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
