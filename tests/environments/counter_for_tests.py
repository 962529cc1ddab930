"""A class as TRL's ``environment_factory`` takes it, and reward functions that judge its objects."""

from __future__ import annotations

import asyncio
import builtins
import os
import threading

MADE: list[Counter] = []
RESETS: list[int] = []
RELEASE = threading.Event()


class Counter:
    """Counts up; holds what cannot be pickled, as a connection cannot."""

    def __init__(self):
        self.lock = threading.Lock()
        MADE.append(self)

    def reset(self, start: int = 0, **columns) -> str | None:
        if start < 0:
            raise ValueError("starts below zero")
        self.value = start
        RESETS.append(start)
        return f" It is {start}." if start else None

    def add(self, amount: int) -> str:
        """
        Adds to the counter.

        Args:
            amount: What is added.

        Returns:
            The new value.
        """
        if amount > 9:
            raise ValueError("too much")
        self.value += amount
        return str(self.value)

    async def loop(self) -> str:
        """
        Names its event loop.
        """
        return str(id(asyncio.get_running_loop()))

    def leave(self, how: str) -> str:
        """
        Ends the process.

        Args:
            how: os._exit, or the exception to raise.
        """
        if how == "os._exit":
            os._exit(0)
        raise getattr(builtins, how)(3)

    def pour(self, characters: int) -> str:
        """
        Returns a long text.

        Args:
            characters: Its length.
        """
        return "x" * characters

    async def wait(self) -> str:
        """
        Waits until it is released.
        """
        RELEASE.wait()
        return "over"

    def _hidden(self) -> None: ...


class AsyncCounter(Counter):
    """Begins its episodes asynchronously."""

    async def reset(self, start: int = 0, **columns) -> str | None:
        """Note the event loop."""
        return f"{super().reset(start)} {await self.loop()}"


async def loop(environments, **columns):
    return [float(id(asyncio.get_running_loop()))]


def leaves(environments, **columns):
    os._exit(0)


def value(environments, **columns):
    return [float(environment.value) for environment in environments]


async def turns(completions, start):
    return [None if start[0] == 5 else len(completions[0])]


def broken(environments, **columns):
    raise KeyError("absent")


def criteria(environments, **columns):
    values = [environment.value for environment in environments]
    return [{"low" if value < 5 else "high": 1.0, "even": float(value % 2 == 0)} for value in values]
