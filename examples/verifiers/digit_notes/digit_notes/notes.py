"""The rule by which a reply becomes notes, for the harness and the scoring."""

from __future__ import annotations

import re

KEPT = 2
"""Number of digits of the notes."""
FIRST = 5
"""Number of digits in the first prompt."""
_NUMBER = re.compile(r"[0-9]+")


def notes_of(reply: str) -> str:
    """Return the notes that a reply leaves: the end of its last number, or nothing."""
    numbers = _NUMBER.findall(reply)
    return numbers[-1][-KEPT:] if numbers else ""


def parts_of(digits: str) -> list[str]:
    """Split the digits of a task into what each turn shows of them."""
    later = FIRST - KEPT
    return [digits[:FIRST], *(digits[start : start + later] for start in range(FIRST, len(digits), later))]
