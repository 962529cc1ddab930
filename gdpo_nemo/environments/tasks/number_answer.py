"""Questions whose answer is one number, for small pretrained models: right, to the point, and short.

Own questions ("Which number is larger, 42 or 17?") need no data set; rows of one, GSM8K's say, are judged in the same
way. One pair of numbers in ten is held out by arithmetic, in whatever order a question names them.
"""

from __future__ import annotations

import operator
import random
import re
from decimal import Decimal
from itertools import permutations
from typing import Any, Callable, Mapping, Sequence

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.errors import ConfigError, RunError

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
"""What may follow the last digit of a reply that ends with its answer."""


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to validation: ``(smaller + 7 * larger) % 10 == 0``, about one pair in ten."""
    return (min(a, b) + 7 * max(a, b)) % 10 == 0


class NumberAnswer(Environment):
    """The environment.

    Components, each 0 or 1 but the last: ``correct`` (the last number of the reply is the answer), ``only`` (the reply
    is a number and nothing else), ``ends`` (the reply ended by itself, with a number) and ``brief`` (1 up to
    ``brief_from`` characters, from there falling to 0 at ``brief_limit``).

    Options: ``question`` (larger; of its own prompts: larger, smaller or sum), ``numbers`` ([10, 98], the smallest and
    the largest in a question), ``gold_key`` (column with the answer, ``answer``; of a text the part behind ``####``
    counts), ``brief_from`` (0 characters: every one counts) and ``brief_limit`` (60). A group is normalised whatever
    its spread: where every character counts, a digit left out is worth as much as a right answer to samples that differ
    in nothing else. So ``brief_from`` should let the longest right answer pass.
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
                f"environment number_answer: no question is called {chosen.question!r}"
                f"{nearest(chosen.question, QUESTIONS)}"
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
                f"environment number_answer: brief_from must be at least 0 and less than brief_limit, "
                f"{chosen.brief_limit}, not {chosen.brief_from}"
            )
        self._question: str = chosen.question
        self._range = range(chosen.numbers[0], chosen.numbers[1] + 1)
        self._gold_key: str = chosen.gold_key
        self._brief: tuple[int, int] = chosen.brief_from, chosen.brief_limit

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory. Raises RunError for a row whose answer is no number."""
        return [self._verdict(trajectory) for trajectory in trajectories]

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Every pair of two different numbers of the split, in both orders, shuffled by the seed, cut at ``size``."""
        pairs = [pair for pair in permutations(self._range, 2) if is_held_out(*pair) == (split != "train")]
        random.Random(seed).shuffle(pairs)
        return [self._row(a, b) for a, b in pairs[:size]]

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """The answer alone, and in a sentence."""
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
            "brief": _falling(len(text), *self._brief),
        }
        return Verdict(rewards)

    def _wanted(self, prompt: Prompt) -> Decimal:
        gold = column(prompt, self._gold_key)
        try:
            return _value(_gold(gold))
        except ArithmeticError:
            raise RunError(f"prompt {prompt.id}: its {self._gold_key} is no number: {str(gold)[-80:]!r}") from None


def _gold(answer: Any) -> str:
    return str(answer).rpartition("####")[2].strip()


def _value(number: str) -> Decimal:
    """Raises ArithmeticError for a text that is no number."""
    return Decimal(number.replace(",", ""))


def _falling(length: int, start: int, end: int) -> float:
    """1 up to ``start``, 0 from ``end`` on, a straight line between."""
    return min(1.0, max(0.0, (end - length) / (end - start)))


def _ends_with_number(text: str) -> bool:
    digits = max((place for place, character in enumerate(text) if character in "0123456789"), default=None)
    return digits is not None and _ENDS.fullmatch(text[digits:]) is not None


def _is_range(numbers: Sequence[Any]) -> bool:
    if len(numbers) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        return False
    return 0 <= numbers[0] and numbers[1] - numbers[0] >= 9
