"""The event loop of user code: one per process, regardless of the thread that runs it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from gdpo_nemo.utils import user_loop
from gdpo_nemo.utils.waits import in_daemon_thread


async def where() -> tuple[asyncio.AbstractEventLoop, bool]:
    return asyncio.get_running_loop(), threading.current_thread() is threading.main_thread()


def test_all_threads_use_one_loop_and_the_main_thread_runs_its_calls_itself():
    loop, in_main = user_loop.run(where())
    assert in_main
    assert in_daemon_thread(lambda: user_loop.run(where()), "t").result() == (loop, False)
    assert user_loop.run(where()) == (loop, True)


def test_tasks_continue_between_calls():
    done = threading.Event()

    async def begin() -> asyncio.Task:
        async def work() -> None:
            await asyncio.sleep(0)
            done.set()

        return asyncio.create_task(work())

    task = user_loop.run(begin())
    assert done.wait(60) and user_loop.run(task) is None


class Limit(BaseException):
    """Not caught by ``except Exception``, like the time limit of tools."""


@pytest.mark.parametrize("blocks", [True, False])
def test_a_signal_interrupts_a_coroutine_and_the_loop_remains(blocks, monkeypatch):
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            if blocks:
                time.sleep(600)
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    def end(*_: object) -> None:
        raise Limit

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Limit):
            user_loop.run(hang())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert cancelled.wait(60) and user_loop.run(where())[1]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, Limit])
def test_loop_survives_exceptions_of_a_task(kind):
    async def leave() -> None:
        raise kind("over")

    async def leave_in_a_task() -> None:
        await asyncio.gather(leave())

    for coroutine in (leave, leave_in_a_task):
        with pytest.raises(kind):
            in_daemon_thread(lambda: user_loop.run(coroutine()), "t").result(60)  # noqa: B023 - called at once
    assert in_daemon_thread(lambda: user_loop.run(where()), "t").result(60)


def test_a_time_limit_cancels_the_coroutine_of_a_thread():
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        in_daemon_thread(lambda: user_loop.run(hang(), 0.01), "t").result(60)
    assert cancelled.wait(60)
