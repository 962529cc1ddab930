"""Questions whose answer is one number, for small pretrained models. Right and short answers get rewards.

The built-in questions, such as "Which number is larger, 42 or 17?", do not need a dataset. Rows of a dataset such as
GSM8K are scored in the same way. One in ten pairs of numbers is held out for validation, in both orders.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import permutations
from typing import Any

from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.utils.errors import ConfigError, RunError, nearest

QUESTIONS = {
    "larger": "Which number is larger, {a} or {b}?",
    "smaller": "Which number is smaller, {a} or {b}?",
    "sum": "What is {a} + {b}?",
}
REQUEST = "Answer with just the number."
_ANSWERS: dict[str, Callable[[int, int], int]] = {"larger": max, "smaller": min, "sum": operator.add}

_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?"
_NUMBERS = re.compile(rf"(?<![\w.])-?(?:{_NUMBER})|(?:{_NUMBER})")
_ONLY = re.compile(rf"-?(?:{_NUMBER})\.?")
_ENDS = re.compile(r"[0-9][.!*)\]}$%\s]*")
"""Last digit of a reply that ends with its answer, and the characters that may follow this digit."""


def is_held_out(a: int, b: int) -> bool:
    """Return whether the pair belongs to validation: ``(smaller + 7 * larger) % 10 == 0``, about one pair in ten."""
    return (min(a, b) + 7 * max(a, b)) % 10 == 0


class NumberAnswer(Environment):
    """Environment for questions whose answer is one number.

    Components, each 0 or 1 except ``brief``:
        correct: the last number in the reply is the right answer.
        only: the reply is just a number and was not cut off at the token limit.
        ends: the reply ends with a number and was not cut off at the token limit.
        brief: 1 for replies up to ``brief_from`` characters, then a linear decrease to 0 at ``brief_limit`` characters.

    Options:
        question (larger): built-in question: larger, smaller or sum.
        numbers ([10, 98]): smallest and largest number in a built-in question.
        gold_key (answer): column with the answer. If the text contains ``####``, the answer is the part after this
            mark.
        brief_from (0): maximum length in characters at which ``brief`` is 1. The length of the longest right answer is
            a good value.
        brief_limit (60): minimum length in characters at which ``brief`` is 0.

    Advantages are usually divided by the standard deviation of a group. With ``brief_from`` 0, a difference of one
    character can therefore matter as much as a right answer if the samples of a group are otherwise equal.
    """

    instant = True

    reward_names = ("correct", "only", "ends", "brief")

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "number_answer",
            options,
            question="larger",
            numbers=[10, 98],
            gold_key="answer",
            brief_from=0,
            brief_limit=60,
        )
        if chosen.question not in QUESTIONS:
            raise ConfigError(
                f"environment number_answer: unknown question {chosen.question!r}{nearest(chosen.question, QUESTIONS)}"
            )
        if not _is_range(chosen.numbers):
            raise ConfigError(
                "environment number_answer: numbers must be the smallest and the largest of at least 10 integers from "
                f"0 on, not {list(chosen.numbers)}"
            )
        if chosen.brief_limit < 1:
            raise ConfigError("environment number_answer: brief_limit must be at least 1 character")
        if not 0 <= chosen.brief_from < chosen.brief_limit:
            raise ConfigError(
                "environment number_answer: brief_from must be at least 0 and less than brief_limit, "
                f"{chosen.brief_limit}, not {chosen.brief_from}"
            )
        self._question: str = chosen.question
        self._range = range(chosen.numbers[0], chosen.numbers[1] + 1)
        self._gold_key: str = chosen.gold_key
        self._brief: tuple[int, int] = chosen.brief_from, chosen.brief_limit

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. Raises RunError for a row whose answer is not a number."""
        return list(map(self._verdict, trajectories))

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return at most ``size`` questions about ordered pairs of different numbers, shuffled with the seed."""
        pairs = [pair for pair in permutations(self._range, 2) if is_held_out(*pair) == (split != "train")]
        random.Random(seed).shuffle(pairs)
        return [self._row(a, b) for a, b in pairs[:size]]

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return two right answers: only the number, and the number in a sentence."""
        answer = _gold(row.get(self._gold_key))
        return [f"{answer}", f"Let me think. The answer is {answer}."]

    def _row(self, a: int, b: int) -> dict[str, Any]:
        question = QUESTIONS[self._question].format(a=a, b=b)
        message = {"role": "user", "content": f"{question} {REQUEST}"}
        answer = str(_ANSWERS[self._question](a, b))
        return {"id": f"{self._question}/{a}/{b}", "prompt": [message], self._gold_key: answer}

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        text = trajectory.text.strip()
        ended = trajectory.finish_reason == "stop"
        numbers = _NUMBERS.findall(text)
        rewards = {
            "correct": float(bool(numbers) and _value(numbers[-1]) == self._wanted(trajectory.prompt)),
            "only": float(ended and _ONLY.fullmatch(text) is not None),
            "ends": float(ended and bool(numbers) and _ends_with_number(text)),
            "brief": _linear_decrease(len(text), *self._brief),
        }
        return Verdict(rewards)

    def _wanted(self, prompt: Prompt) -> Decimal:
        gold = column(prompt, self._gold_key)
        try:
            return _value(_gold(gold))
        except ArithmeticError:
            raise RunError(f"prompt {prompt.id}: {self._gold_key} is not a number: {str(gold)[-80:]!r}") from None


def _gold(answer: Any) -> str:
    return str(answer).rpartition("####")[2].strip()


def _value(number: str) -> Decimal:
    """Convert text to a number. Raises ArithmeticError if it is not a number."""
    return Decimal(number.replace(",", ""))


def _linear_decrease(length: int, start: int, end: int) -> float:
    """Return 1 up to ``start``, 0 from ``end``, and a linear decrease between them."""
    return min(1.0, max(0.0, (end - length) / (end - start)))


def _ends_with_number(text: str) -> bool:
    digits = max((index for index, character in enumerate(text) if character in "0123456789"), default=None)
    return digits is not None and _ENDS.fullmatch(text[digits:]) is not None


def _is_range(numbers: Sequence[Any]) -> bool:
    if len(numbers) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        return False
    start, end = numbers
    return bool(start >= 0 and end - start >= 9)
