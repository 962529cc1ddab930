"""Pieces of error messages: one line, and the name that was probably meant."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to ``name``, or the list of the known names."""
    known = sorted(known)
    match = get_close_matches(name, known, n=1)
    if match:
        return f"; did you mean {match[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def message_line(error: BaseException) -> str:
    """The first line of the exception's message that is not blank; where there is none, the exception's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def first_line(error: BaseException) -> str:
    """The exception's type and the first line of its message, at most 300 characters."""
    name = type(error).__name__
    line = message_line(error)
    return name if line == name else f"{name}: {line[:300]}"
