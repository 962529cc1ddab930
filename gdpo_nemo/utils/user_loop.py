"""Event loop for coroutines of user code, which exists until the process ends.

Clients, sessions and locks belong to the event loop in which they were first used. If each call had its own loop, a
client that is created once would fail at the second call.

The main thread runs the loop during a call, so that signals interrupt the coroutine: time limits of tools and of
libraries such as math-verify use SIGALRM. At other times, a daemon thread runs the loop, so that connections stay open
and other threads can use the loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

from gdpo_nemo.utils.exits import os_exit_blocked


class _UserLoop:
    """Event loop that either the main thread or a daemon thread runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._start_thread(None)

    def submit[T](self, awaitable: Awaitable[T]) -> Future[T]:
        """Start an awaitable in the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop)

    def run[T](self, awaitable: Awaitable[T]) -> T:
        """Run an awaitable in the main thread and return its result."""
        task: asyncio.Task[T] | None = None
        try:
            self._loop.call_soon_threadsafe(self._halt.set)
            self._thread.join()
            task = self._loop.create_task(_awaited(awaitable))
            return self._loop.run_until_complete(task)
        finally:
            if task is not None and not task.done():  # a signal handler has raised
                task.cancel()
            self._start_thread(self._thread)

    def _start_thread(self, previous: threading.Thread | None) -> None:
        self._halt = asyncio.Event()
        arguments = previous, self._halt
        self._thread = threading.Thread(target=self._run_until, args=arguments, name="user loop", daemon=True)
        self._thread.start()

    def _run_until(self, previous: threading.Thread | None, halt: asyncio.Event) -> None:
        """Run the loop in this thread after the previous thread has ended, until ``halt`` is set."""
        if previous is not None:
            previous.join()
        halted = self._loop.create_task(halt.wait())
        while not halted.done():
            try:
                with os_exit_blocked():
                    self._loop.run_until_complete(halted)
            except (SystemExit, KeyboardInterrupt):  # from another task, whose future also has the exception
                continue


_loop: _UserLoop | None = None
_lock = threading.Lock()


def _forget_loop() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)  # the threads of the parent process do not run in the child process


def run[T](awaitable: Awaitable[T], limit_s: float | None = None) -> T:
    """Run an awaitable of user code in this process's loop and return its result.

    Args:
        limit_s: time limit in seconds, which the main thread ignores.

    Raises:
        TimeoutError: if the time limit is exceeded. The awaitable is cancelled.
    """
    global _loop
    with _lock:
        _loop = loop = _loop or _UserLoop()
    if threading.current_thread() is threading.main_thread():
        return loop.run(awaitable)
    future = loop.submit(awaitable)
    try:
        return future.result(limit_s)
    except TimeoutError:
        future.cancel()
        raise


def provide_loop() -> None:
    """Give this thread an event loop for ``asyncio.get_event_loop()``, because ``asyncio.run`` of other code in the
    process removes the one of the main thread."""
    policy = asyncio.get_event_loop_policy()
    try:
        policy.get_event_loop()
    except RuntimeError:
        policy.set_event_loop(policy.new_event_loop())


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found
