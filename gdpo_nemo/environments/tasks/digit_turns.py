"""Sort five digits in two turns: the second question depends on the first answer.

Turn 1 is digit sorting (``39172=``). The environment then names the first place where the answer's digits go wrong, as
``3=``, or ``+=`` when they are right, and wants ``<t></t><a>SORTED</a>`` once more. The same characters as in the
single-turn task, so the same model plays it.
"""

from __future__ import annotations

import re
from typing import Any, Mapping

from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, digit_rows

_RUN = re.compile(r"[0-9]+")
_WELL_FORMED = re.compile(r"<t>[^<>]*</t><a>[^<>]*</a>")


class DigitTurns(Environment):
    """The environment. Components: ``first`` and ``second`` (the share of places that hold the right digit in the
    turn's last run of digits) and ``format`` (the share of turns in form). Option: ``always_two`` (true: a right first
    answer is asked again, too).
    """

    instant = True

    reward_names = ("first", "second", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._options = read_options("digit_turns", options, always_two=True)

    def episode(self) -> "Sorting":
        """A new episode."""
        return Sorting(self._options.always_two)

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Rows as of ``digit_sort``."""
        return digit_rows(split, size, seed)

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """What every turn wants."""
        return [f"<t></t><a>{''.join(sorted(row['digits']))}</a>"]


class Sorting:
    """One episode."""

    def __init__(self, always_two: bool):
        self._always_two = always_two
        self._turns = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Store the digits to sort."""
        self._wanted = "".join(sorted(row["digits"]))

    def step(self, message: Mapping[str, Any]) -> tuple[str | None, dict[str, float], bool]:
        """Judge a turn; after the first one say where it went wrong."""
        self._turns += 1
        text = message["content"]
        ended = message["finish_reason"] == "stop"
        runs = _RUN.findall(text)
        answer = runs[-1] if runs else ""
        wrong = self._wrong_places(answer)
        share = ended * (1.0 - len(wrong) / DIGITS)
        rewards = {"format": 0.5 * (ended and _WELL_FORMED.fullmatch(text) is not None)}
        if self._turns == 2:
            return None, {**rewards, "second": share}, True
        rewards["first"] = share
        if share == 1.0 and not self._always_two:
            return None, {"first": 1.0, "second": 1.0, "format": 2 * rewards["format"]}, True
        return f"{wrong[0] + 1 if wrong else '+'}=", rewards, False

    def cut(self) -> dict[str, float]:
        """The turn that there was no room for counts as wrong."""
        return {"second": 0.0}

    def _wrong_places(self, answer: str) -> list[int]:
        """Places, from 0, where the answer is not the sorted prompt; a digit too many makes the last one wrong."""
        wrong = [i for i in range(DIGITS) if answer[i : i + 1] != self._wanted[i]]
        return wrong or ([DIGITS - 1] if len(answer) > DIGITS else [])
