"""Taking an answer out of a completion and comparing it with the gold answer. Nothing here evaluates model output."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

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

    logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_mathematics(gold: str, answer: str, time_limit_s: int) -> bool:
    """Whether math-verify finds the answer equal to the gold one (``1/2`` and ``0.5`` are).

    An answer that cannot be parsed, or not within the limit, is not equal: that is the verifier's decision about the
    answer and no failure. Equal texts are equal, be they mathematics or not. The limit uses SIGALRM, so this runs in a
    main thread only.
    """
    from math_verify import parse, verify

    if answer.strip() == gold.strip():
        return True
    parsed = parse(answer[-ANSWER_CHARACTERS:], parsing_timeout=time_limit_s)
    return bool(verify(_parsed_gold(gold), parsed, timeout_seconds=time_limit_s))


def hf_math_verify(gold: str, answer: str, time_limit_s: int) -> bool:
    """What NeMo-RL's verifier of that name decides (``environments/math_environment.py``).

    The gold answer is boxed and read as LaTeX alone, the whole answer is searched, and texts are not compared. As in
    ``same_mathematics`` what cannot be parsed in time is not equal, and the limit needs a main thread.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    parsed = parse(answer, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=time_limit_s)
    return bool(verify(_boxed_gold(gold), parsed, timeout_seconds=time_limit_s))


@lru_cache(maxsize=4096)
def _boxed_gold(gold: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()])


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    from math_verify import parse

    # A bare `(0, 1]` or `3, 4` is only read as a whole when it is marked as mathematics.
    return parse(gold if _MARKED.search(gold) else rf"\boxed{{{gold}}}") or parse(gold)
