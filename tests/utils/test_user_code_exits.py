"""Exceptions of user code that would end the process, and calls of ``os._exit``."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gdpo_nemo.utils.exits import ExitRaised, exits_contained, os_exit_blocked
from gdpo_nemo.utils.waits import in_daemon_thread


class Odd(BaseException):
    """Not an Exception."""


def contained(error: BaseException) -> None:
    with exits_contained():
        raise error


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("x"), Odd("x"), KeyboardInterrupt("x")])
def test_exceptions_that_end_a_process_become_ordinary_ones_in_threads(error):
    with pytest.raises(ExitRaised, match=type(error).__name__):
        in_daemon_thread(lambda: contained(error), "t").result()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(128 + signal.SIGTERM)])
def test_exceptions_of_signal_handlers_propagate_in_the_main_thread(error):
    with pytest.raises(type(error)):
        contained(error)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("text"), Odd("x")])
def test_exits_of_user_code_do_not_end_the_main_thread(error):
    with pytest.raises(ExitRaised, match=type(error).__name__):
        contained(error)


def test_os_exit_is_blocked_in_its_thread_only_while_blocks_overlap():
    """If each block exchanged the function, the one that ends last would leave the other's replacement for ever."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with os_exit_blocked():
            inside.set()
            leave.wait(60)

    with os_exit_blocked():
        other = in_daemon_thread(stay, "t")
        assert inside.wait(60)
        with pytest.raises(SystemExit, match="it calls os._exit.0."):
            os._exit(0)
    child = os.fork()
    if child == 0:
        os._exit(7)  # the other thread is still in its block
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    leave.set()
    assert other.result(60) is None
