"""The errors a user is meant to read: one sentence each, printed without a traceback.

The command line turns ``ConfigError`` into exit status 2 and ``RunError`` into exit status 1. Anything else that
escapes is a defect of the program and keeps its traceback.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def printable(text: str) -> str:
    """The text with escape sequences, and whatever else a terminal would act on, written out (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class GdpoError(Exception):
    """Base of the errors that are explained in one line."""

    def __str__(self) -> str:
        return printable(" ".join(super().__str__().split()))


class ConfigError(GdpoError):
    """The configuration cannot be run as written; the text names the key and what to change."""


class RunError(GdpoError):
    """A run failed after it had started; the text says what failed and where to look."""


class EngineFailed(RunError):
    """An engine broke for reasons of its own process or device; another one in its place may do."""


def present(value: T | None, what: str) -> T:
    """Return ``value``. Raises RuntimeError where it is None: an order that the program itself got wrong."""
    if value is None:
        raise RuntimeError(f"{what} was used before it was started")
    return value
