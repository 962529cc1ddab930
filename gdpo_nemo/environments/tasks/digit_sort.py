"""Digit sorting: a task with three rewards that a model with a million parameters learns in a minute.

The answer to the prompt ``39172=`` is ``<t>BODY</t><a>12379</a>``. The body is for reasoning and should be short. One
prompt in ten is held out for validation. A checksum of the digits selects the held-out prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.utils.errors import ConfigError

DIGITS = 5
_WELL_FORMED = re.compile(r"<t>[^<>]*</t><a>[^<>]*</a>")
_DIGIT_RUN = re.compile(r"[0-9]+")


def is_held_out(digits: str) -> bool:
    """Return whether a prompt belongs to validation: ``sum(d_i * 7**i) % 10 == 0``. This is true for exactly one prompt
    in ten."""
    total: int = sum(int(digit) * 7**exponent for exponent, digit in enumerate(digits))
    return total % 10 == 0


def digit_rows(split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
    """Return at most ``size`` of the 90,000 training rows or the 10,000 held-out rows, shuffled with the seed."""
    # Vectorized `is_held_out` for all prompts. A Python loop would add half a second of CPU time to every start.
    numbers = np.arange(10**DIGITS)
    checksum = sum(numbers // 10 ** (DIGITS - 1 - exponent) % 10 * 7**exponent for exponent in range(DIGITS))
    held_out = checksum % 10 == 0
    chosen = [f"{number:0{DIGITS}d}" for number in numbers[held_out == (split != "train")].tolist()]
    random.Random(seed).shuffle(chosen)
    return [{"id": f"digits/{digits}", "prompt": f"{digits}=", "digits": digits} for digits in chosen[:size]]


class DigitSort(Environment):
    """Environment for digit sorting.

    Components. A completion that is cut off at the token limit meets none of these conditions:
        correctness: the last sequence of digits is the sorted prompt.
        format: the completion has the form ``<t>BODY</t><a>DIGITS</a>``.
        length: the completion has at most ``length_limit`` tokens, including the end token.
        all: 1 if the completion meets all three conditions, for reporting.

    Options:
        length_limit (24): maximum number of tokens for the component ``length``.
        correctness_values ([0, 1]): rewards for a wrong and for a right answer.
        length_if_correct (false): true to reward the length only if the answer is right. In this case, the additional
            component ``length_flag`` reports the length condition for all answers.
    """

    instant = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "digit_sort", options, length_limit=24, correctness_values=[0.0, 1.0], length_if_correct=False
        )
        if len(chosen.correctness_values) != 2:
            raise ConfigError("environment digit_sort: correctness_values must be two numbers, [wrong, right]")
        self._length_limit = chosen.length_limit
        self._wrong, self._right = map(float, chosen.correctness_values)
        self._length_if_correct = chosen.length_if_correct
        self.reward_names: tuple[str, ...] = ("correctness", "format", "length", "all")
        if self._length_if_correct:
            self.reward_names += ("length_flag",)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. The prompt's ``digits`` column contains the digits to sort."""
        return list(map(self._verdict, trajectories))

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """See ``digit_rows``."""
        return digit_rows(split, size, seed)

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return a right answer and a completion without reward."""
        return [f"<t></t><a>{''.join(sorted(row['digits']))}</a>", "<t>" + "." * self._length_limit]

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        ended = trajectory.finish_reason == "stop"
        runs = _DIGIT_RUN.findall(trajectory.text)
        correct = ended and bool(runs) and runs[-1] == "".join(sorted(column(trajectory.prompt, "digits")))
        formatted = ended and _WELL_FORMED.fullmatch(trajectory.text) is not None
        short = ended and len(trajectory.completion_ids) <= self._length_limit
        rewards = {
            "correctness": self._right if correct else self._wrong,
            "format": float(formatted),
            "length": float(short and (correct or not self._length_if_correct)),
            "all": float(correct and formatted and short),
        }
        if self._length_if_correct:
            rewards["length_flag"] = float(short)
        return Verdict(rewards)
