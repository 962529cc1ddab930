r"""Multi-turn environment with independent turns: sort other digits in each turn.

    uv run examples/run_gdpo.py --config configs/gdpo_rounds_cpu.yaml
    uv run examples/run_gdpo.py --config configs/gdpo_rounds_cpu.yaml gdpo.credit=sequence gdpo.discount=1 \
        run.name=whole

Each round asks for five other digits, and each answer is rewarded separately. With one advantage per trajectory, a
wrong answer is reinforced if the other answers are correct. Advantages per turn (``gdpo.credit: turn``,
``gdpo.discount: 0``) avoid this. The model (``make_tiny_model.py:make_rounds_model``) was trained on such games, mostly
with some errors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from gdpo_nemo import Environment, read_options
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, digit_rows

_ANSWER = re.compile(r"<t>[^<>]*</t><a>([^<>]*)</a>")


class DigitRounds(Environment):
    """Environment in which each round asks for digits to sort.

    Components of each round: ``correctness`` (1 if the answer is the sorted digits) and ``format`` (1 if the tags are
    correct). Option: ``rounds``, the number of rounds (default: 8).
    """

    instant = True
    reward_names = ("correctness", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._rounds = read_options("digit_rounds", options, rounds=8).rounds

    def episode(self) -> Rounds:
        """Return a new episode."""
        return Rounds(self._rounds)

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return rows with the digits of the first round, as in ``digit_sort``. They determine the other rounds."""
        return digit_rows(split, size, seed)


class Rounds:
    """Episode of one sample."""

    def __init__(self, rounds: int):
        self._rounds = rounds

    def reset(self, row: Mapping[str, Any]) -> None:
        """Sample the digits of all rounds. They are the same for all samples of a row."""
        draw = random.Random(row["digits"])
        later_digits = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(self._rounds - 1)]
        self._remaining = [row["digits"], *later_digits]

    def step(self, message: Mapping[str, Any]) -> tuple[str | None, dict[str, float], bool]:
        """Score the answer and return (next question or None, rewards, whether the episode is done)."""
        digits = self._remaining.pop(0)
        found = _ANSWER.fullmatch(message["content"]) if message["finish_reason"] == "stop" else None
        right = found is not None and found[1] == "".join(sorted(digits))
        rewards = {"correctness": float(right), "format": float(found is not None)}
        return (f"{self._remaining[0]}=" if self._remaining else None), rewards, not self._remaining
