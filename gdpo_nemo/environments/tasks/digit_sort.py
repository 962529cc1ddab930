"""Sort five digits: a task that a model of a million parameters learns from three rewards in a minute.

The prompt ``39172=`` wants ``<t>BODY</t><a>12379</a>``, where the body is a place to think, best kept short.
One prompt in ten is held out by arithmetic, so that no list of splits has to be kept.
"""

from __future__ import annotations

import random
import re
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.errors import ConfigError

DIGITS = 5
_WELL_FORMED = re.compile(r"<t>[^<>]*</t><a>[^<>]*</a>")
_DIGIT_RUN = re.compile(r"[0-9]+")


def is_held_out(digits: str) -> bool:
    """Whether a prompt belongs to validation: ``sum(d_i * 7**i) % 10 == 0``, true for exactly one in ten."""
    return sum(int(digit) * 7**place for place, digit in enumerate(digits)) % 10 == 0


def digit_rows(split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
    """The 90,000 training rows or the 10,000 held-out rows, in an order drawn from the seed, cut at ``size``."""
    # `is_held_out` of all prompts at once: one by one they take half a CPU second of every start.
    numbers = np.arange(10**DIGITS)
    checksum = sum(numbers // 10 ** (DIGITS - 1 - place) % 10 * 7**place for place in range(DIGITS))
    held_out = checksum % 10 == 0
    chosen = [f"{number:0{DIGITS}d}" for number in numbers[held_out == (split != "train")].tolist()]
    random.Random(seed).shuffle(chosen)
    return [{"id": f"digits/{digits}", "prompt": f"{digits}=", "digits": digits} for digits in chosen[:size]]


class DigitSort(Environment):
    """The digit-sorting environment.

    Components: ``correctness`` (the last run of digits is the sorted prompt), ``format`` (tags in place), ``length``
    (at most ``length_limit`` tokens with the end token) and ``all`` (the product of the three raw flags, meant for
    reporting). Each needs a completion that ended by itself.

    Options: ``length_limit`` (24 tokens), ``correctness_values`` ([0, 1]: reward of a wrong and of a right answer) and
    ``length_if_correct`` (false: pay the length only when the answer is right; the raw flag is then reported as
    ``length_flag``).
    """

    instant = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "digit_sort", options, length_limit=24, correctness_values=[0.0, 1.0], length_if_correct=False
        )
        if len(chosen.correctness_values) != 2:
            raise ConfigError("environment digit_sort: correctness_values must be two numbers, [wrong, right]")
        self._length_limit = chosen.length_limit
        self._wrong, self._right = (float(value) for value in chosen.correctness_values)
        self._length_if_correct = chosen.length_if_correct
        self.reward_names: tuple[str, ...] = ("correctness", "format", "length", "all")
        if self._length_if_correct:
            self.reward_names += ("length_flag",)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory; the prompt's ``digits`` column holds what was to be sorted."""
        return [self._verdict(trajectory) for trajectory in trajectories]

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """See ``digit_rows``."""
        return digit_rows(split, size, seed)

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """What the task wants, and the same with everything wrong."""
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
