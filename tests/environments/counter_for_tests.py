"""A class as TRL's ``environment_factory`` takes it, and reward functions that judge its objects."""

from __future__ import annotations

import threading

MADE: list[Counter] = []
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

    async def wait(self) -> str:
        """
        Waits until it is released.
        """
        RELEASE.wait()
        return "over"

    def _hidden(self) -> None: ...


def value(environments, **columns):
    return [float(environment.value) for environment in environments]


async def turns(completions, start):
    return [None if start[0] == 5 else len(completions[0])]


def broken(environments, **columns):
    raise KeyError("absent")
