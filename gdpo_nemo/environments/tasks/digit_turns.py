"""Digit sorting in two turns: the second question depends on the first answer.

The first turn is the same task as in ``digit_sort``, with a prompt such as ``39172=``. The environment replies with the
first wrong position of the answer, such as ``3=``, or with ``+=`` if all digits are right. The policy then answers
again in the same format. The task uses only characters of ``digit_sort``, so the same model can be trained on both
tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, digit_rows

_RUN = re.compile(r"[0-9]+")
_WELL_FORMED = re.compile(r"<t>[^<>]*</t><a>[^<>]*</a>")


class DigitTurns(Environment):
    """Environment for digit sorting in two turns.

    Components:
        first, second: fraction of right digits in the first and in the second turn. The answer is the last sequence of
            digits.
        format: fraction of well-formed turns.

    Options:
        always_two (true): play the second turn even if the first answer is right.
    """

    instant = True

    reward_names = ("first", "second", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._options = read_options("digit_turns", options, always_two=True)

    def episode(self) -> Sorting:
        """Return a new episode."""
        return Sorting(self._options.always_two)

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return the same rows as ``digit_sort``."""
        return digit_rows(split, size, seed)

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return the expected answer of every turn."""
        return [f"<t></t><a>{''.join(sorted(row['digits']))}</a>"]


class Sorting:
    """One episode of digit sorting."""

    def __init__(self, always_two: bool):
        self._always_two = always_two
        self._turns = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Store the digits to sort."""
        self._sorted_digits = "".join(sorted(row["digits"]))

    def step(self, message: Mapping[str, Any]) -> tuple[str | None, dict[str, float], bool]:
        """Score a turn. After the first turn, the reply contains the first wrong position."""
        self._turns += 1
        text = message["content"]
        ended = message["finish_reason"] == "stop"
        runs = _RUN.findall(text)
        answer = runs[-1] if runs else ""
        wrong = self._wrong_indices(answer)
        fraction = ended * (1.0 - len(wrong) / DIGITS)
        rewards = {"format": 0.5 * (ended and _WELL_FORMED.fullmatch(text) is not None)}
        if self._turns == 2:
            return None, {**rewards, "second": fraction}, True
        rewards["first"] = fraction
        if fraction == 1.0 and not self._always_two:
            return None, {"first": 1.0, "second": 1.0, "format": 2 * rewards["format"]}, True
        return f"{wrong[0] + 1 if wrong else '+'}=", rewards, False

    def cut(self) -> dict[str, float]:
        """Return the reward 0 for a second turn that does not fit into the turn or token budget."""
        return {"second": 0.0}

    def _wrong_indices(self, answer: str) -> list[int]:
        """Return the zero-based indices of wrong digits. If only the length is wrong, return the last index."""
        wrong = [i for i in range(DIGITS) if answer[i : i + 1] != self._sorted_digits[i]]
        return wrong or ([DIGITS - 1] if len(answer) > DIGITS else [])
