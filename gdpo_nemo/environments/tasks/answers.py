"""Taking an answer out of a completion and comparing it with the gold answer. Nothing here evaluates model output."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from functools import lru_cache
from typing import Any, Iterator

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.errors import RunError

ANSWER_CHARACTERS = 4096
"""Only this much of the end of an answer is compared; a longer one is no answer, only a load for the parser."""

_MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""A mark of mathematics: ``$``, unless it is the currency ``\\$``, a box, ``\\(`` or ``\\[``."""
_BLOCKS = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def column(prompt: Prompt, name: str) -> Any:
    """The prompt's column ``name``. Raises RunError when the dataset lacks it or holds null there."""
    value = prompt.fields.get(name)
    if value is None:
        raise RunError(f"prompt {prompt.id} has no column {name!r}{nearest(name, prompt.fields)}")
    return value


def tagged_answer(text: str) -> str:
    """What stands after the last ``<answer>`` up to the next ``</answer>``, stripped; without tags the whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def has_think_and_answer(text: str) -> bool:
    """Whether the text is one think block, white space, and one answer block, and nothing else."""
    once = text.count("<answer>") == text.count("</answer>") == 1
    return once and _BLOCKS.fullmatch(text.strip()) is not None


def prepare_math() -> None:
    """Import math-verify (seconds), and keep its warnings about hopeless answers out of the log."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)


class Unfinished(Exception):
    """The comparison took more time than it may; nothing is known of the answer."""

    def __init__(self, time_limit_s: float):
        super().__init__(f"math-verify did not finish within {time_limit_s:g} s of computing")


class _OutOfTime(BaseException):
    """Passes the handlers of Exception in what it interrupts."""


@contextlib.contextmanager
def _computing_at_most(time_limit_s: float) -> Iterator[None]:
    """Interrupt the block after so many seconds of this process's computing: on a busy machine that is as much work as
    on an idle one. Main thread only. Raises Unfinished."""
    expired = False

    def end(*_: object) -> None:
        nonlocal expired
        expired = True
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        # Again and again, as what is interrupted may catch everything.
        signal.setitimer(signal.ITIMER_VIRTUAL, time_limit_s, 0.5)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTime:
        pass
    finally:
        signal.signal(signal.SIGVTALRM, before)
    if expired:
        raise Unfinished(time_limit_s)


_ENDLESS = re.compile(r"(\^|\*\*)\s*[({]*\s*\d+\s*[)}]*\s*(\^|\*\*)|(\^|\*\*)\s*[({]*\s*\d{6,}|\d{6,}\s*[)}]*\s*!")
"""A tower of powers, and a power or a factorial of millions: numbers that no parser finishes."""


def _is_hopeless(gold: str, answer: str) -> bool:
    """Whether the answer is a number without an end and the gold one is not, which no clock is needed to decide."""
    return bool(_ENDLESS.search(answer)) and not _ENDLESS.search(gold)


def same_mathematics(gold: str, answer: str, time_limit_s: float) -> bool:
    """Whether math-verify finds the answer equal to the gold one (``1/2`` and ``0.5`` are).

    An answer that cannot be parsed is not equal: that is the verifier's decision about the answer and no failure. Equal
    texts are equal, be they mathematics or not.

    Raises:
        Unfinished: not within the limit, of seconds of computing in parsing and comparing each; main thread only.
    """
    from math_verify import parse, verify

    if answer.strip() == gold.strip():
        return True
    answer = answer[-ANSWER_CHARACTERS:]
    if _is_hopeless(gold, answer):
        return False
    expected = _parsed_gold(gold)
    with _computing_at_most(2 * time_limit_s):
        same = verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None)
    return bool(same)


def hf_math_verify(gold: str, answer: str, time_limit_s: float) -> bool:
    """What NeMo-RL's verifier of that name decides (``environments/math_environment.py``).

    The gold answer is boxed and read as LaTeX alone, the whole answer is searched, and texts are not compared. Limit
    and errors: as in ``same_mathematics``.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if _is_hopeless(gold, answer):
        return False
    expected = _boxed_gold(gold)
    ways = [ExprExtractionConfig(), LatexExtractionConfig()]
    with _computing_at_most(2 * time_limit_s):
        same = verify(expected, parse(answer, ways, parsing_timeout=None), timeout_seconds=None)
    return bool(same)


@lru_cache(maxsize=4096)
def _boxed_gold(gold: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()])


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    from math_verify import parse

    # A bare `(0, 1]` or `3, 4` is only read as a whole when it is marked as mathematics.
    return parse(gold if _MARKED.search(gold) else rf"\boxed{{{gold}}}") or parse(gold)
