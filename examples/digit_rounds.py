r"""Several digits to sort, one after the other: a game whose turns have nothing to do with each other.

    uv run examples/run_gdpo.py --config configs/gdpo_rounds_cpu.yaml
    uv run examples/run_gdpo.py --config configs/gdpo_rounds_cpu.yaml gdpo.credit=sequence gdpo.discount=1 \
        run.name=whole

Every round asks for five other digits, and each answer is rewarded by itself. The advantage of a whole trajectory
praises a wrong answer for the right ones beside it; that of a turn (``gdpo.credit: turn``, ``gdpo.discount: 0``) does
not. The model (``make_tiny_model.py:make_rounds_model``) has seen such games, seldom with everything right.
"""

from __future__ import annotations

import random
import re
from typing import Any, Mapping

from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, digit_rows

_ANSWER = re.compile(r"<t>[^<>]*</t><a>([^<>]*)</a>")


class DigitRounds(Environment):
    """The environment. Components, each of every round: ``correctness`` (the answer is the sorted digits) and
    ``format`` (tags in place). Option: ``rounds`` (8)."""

    instant = True
    reward_names = ("correctness", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._rounds = read_options("digit_rounds", options, rounds=8).rounds

    def episode(self) -> Rounds:
        """A new episode."""
        return Rounds(self._rounds)

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Rows as of ``digit_sort``: the digits of the first round, from which those of the others follow."""
        return digit_rows(split, size, seed)


class Rounds:
    """One episode."""

    def __init__(self, rounds: int):
        self._rounds = rounds

    def reset(self, row: Mapping[str, Any]) -> None:
        """Draw the digits of all rounds, the same for all samples of a row."""
        draw = random.Random(row["digits"])
        further = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(self._rounds - 1)]
        self._left = [row["digits"], *further]

    def step(self, message: Mapping[str, Any]) -> tuple[str | None, dict[str, float], bool]:
        """Judge a round and ask for the next."""
        digits = self._left.pop(0)
        found = _ANSWER.fullmatch(message["content"]) if message["finish_reason"] == "stop" else None
        right = found is not None and found[1] == "".join(sorted(digits))
        rewards = {"correctness": float(right), "format": float(found is not None)}
        return (f"{self._left[0]}=" if self._left else None), rewards, not self._left
