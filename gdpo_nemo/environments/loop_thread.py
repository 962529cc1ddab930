"""An event loop in a daemon thread, for environments that talk to servers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, Coroutine, TypeVar

from gdpo_nemo.errors import RunError

_T = TypeVar("_T")
_CLOSE_S = 10.0


class LoopThread:
    """The loop. Its thread starts with the first work.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin some work, from any thread. Raises RunError after ``close``."""
        with self._lock:
            if self._closed:
                work.close()
                raise RunError("the environment is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all work, do the last, and end the loop."""
        with self._lock:
            self._closed = True
            loop = self._loop
            self._loop = None
        if loop is None:
            last.close()
            return
        asyncio.run_coroutine_threadsafe(_shut(last), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)


async def _shut(last: Coroutine[Any, Any, None]) -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
