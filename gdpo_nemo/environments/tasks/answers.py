"""Extraction of answers from completions, comparison with the gold answer, and format rewards.

Model output is never executed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from gdpo_nemo.data.records import Prompt
from gdpo_nemo.utils.errors import RunError, nearest

ANSWER_CHARACTERS = 4096
"""Maximum number of characters of an answer to parse. Only the end of a longer answer is parsed."""

_MATH_DELIMITER = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""A LaTeX math delimiter or box: ``$`` (except an escaped ``\\$``), ``\\boxed``, ``\\(`` or ``\\[``."""
_BLOCKS = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def column(prompt: Prompt, name: str) -> Any:
    """Return the prompt's column ``name``. Raises RunError if the column is missing or null."""
    value = prompt.fields.get(name)
    if value is None:
        raise RunError(f"prompt {prompt.id} has no column {name!r}{nearest(name, prompt.fields)}")
    return value


def tagged_answer(text: str) -> str:
    """Return the text between the last ``<answer>`` and the next ``</answer>``, stripped. Without tags, return the
    whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def has_think_and_answer(text: str) -> bool:
    """Return whether the text consists of one think block, white space, and one answer block."""
    once = text.count("<answer>") == text.count("</answer>") == 1
    return once and _BLOCKS.fullmatch(text.strip()) is not None


def prepare_math() -> None:
    """Import math-verify, which takes seconds, and suppress its warnings about answers that it cannot parse."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)


class Unfinished(Exception):
    """Raised if a comparison exceeds its time limit. The result of the comparison is unknown."""

    def __init__(self, time_limit_s: float):
        super().__init__(f"math-verify did not finish within {time_limit_s:g} s of CPU time")


class _OutOfTime(BaseException):
    """Raised when the timer expires. This is a BaseException, so that ``except Exception`` in the interrupted code does
    not catch it."""


@contextlib.contextmanager
def _computing_at_most(time_limit_s: float) -> Iterator[None]:
    """Interrupt the block after ``time_limit_s`` seconds of CPU time. Raises Unfinished. Requires the main thread.

    A limit on CPU time does not depend on the load of the machine.
    """
    expired = False

    def interrupt(*_: object) -> None:
        nonlocal expired
        expired = True
        raise _OutOfTime

    previous_handler = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        # Repeat the signal, because the interrupted code may catch all exceptions.
        signal.setitimer(signal.ITIMER_VIRTUAL, time_limit_s, 0.5)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTime:
        pass
    finally:
        signal.signal(signal.SIGVTALRM, previous_handler)
    if expired:
        raise Unfinished(time_limit_s)


_HUGE_NUMBER = re.compile(r"(\^|\*\*)\s*[({]*\s*\d+\s*[)}]*\s*(\^|\*\*)|(\^|\*\*)\s*[({]*\s*\d{6,}|\d{6,}\s*[)}]*\s*!")
"""A nested power, or a power or factorial with a large operand. Evaluating these numbers would take forever."""


def _is_too_large(gold: str, answer: str) -> bool:
    """Return whether the answer, but not the gold answer, is a number too large to evaluate.

    An answer that is too large counts as wrong. Such an answer is not evaluated, because the evaluation would exceed
    the time limit.
    """
    return bool(_HUGE_NUMBER.search(answer)) and not _HUGE_NUMBER.search(gold)


def same_mathematics(gold: str, answer: str, time_limit_s: float) -> bool:
    """Return whether math-verify considers the answer equal to the gold answer, such as ``1/2`` and ``0.5``.

    An answer that cannot be parsed is wrong. Identical texts are always considered equal, even if they are not
    mathematics. Requires the main thread.

    Args:
        time_limit_s: CPU time limit in seconds. Parsing and comparing together may use twice this time.

    Raises:
        Unfinished: if the time limit is exceeded.
    """
    from math_verify import parse, verify

    if answer.strip() == gold.strip():
        return True
    answer = answer[-ANSWER_CHARACTERS:]
    if _is_too_large(gold, answer):
        return False
    expected = _parsed_gold(gold)
    with _computing_at_most(2 * time_limit_s):
        is_equal = verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None)
    return bool(is_equal)


def hf_math_verify(gold: str, answer: str, time_limit_s: float) -> bool:
    """Compare like NeMo-RL's verifier of the same name (``environments/math_environment.py``).

    Differences from ``same_mathematics``: the gold answer is boxed and parsed as LaTeX only, the whole answer is
    searched, and identical texts are also parsed and compared. The time limit and the exception are the same as in
    ``same_mathematics``.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if _is_too_large(gold, answer):
        return False
    expected = _boxed_gold(gold)
    targets = [ExprExtractionConfig(), LatexExtractionConfig()]
    with _computing_at_most(2 * time_limit_s):
        is_equal = verify(expected, parse(answer, targets, parsing_timeout=None), timeout_seconds=None)
    return bool(is_equal)


@lru_cache(maxsize=4096)
def _boxed_gold(gold: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return list(parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()]))


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    from math_verify import parse

    # Without a box or math delimiters, math-verify parses only a part of answers such as `(0, 1]` or `3, 4`.
    return list(parse(gold if _MATH_DELIMITER.search(gold) else rf"\boxed{{{gold}}}") or parse(gold))


JSON_CHARACTERS = 200_000
"""Maximum length in characters of a completion that is parsed as JSON. A longer completion counts as invalid."""


def regex(completions: Sequence[Any], pattern: str, **_: Any) -> list[float]:
    """Return 1 for completions whose stripped text matches ``pattern`` completely, else 0. A dot also matches line
    breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(completion).strip()) is not None) for completion in completions]


def json_schema(
    completions: Sequence[Any], schema: Mapping[str, Any] | Sequence[Any] | None = None, **_: Any
) -> list[float]:
    """Return 1 for completions that are JSON and valid under ``schema``, else 0.

    Without ``schema``, any well-formed JSON is valid. If ``schema`` is a list, such as a dataset column, it contains
    one schema per completion.
    """
    schemas = schema if isinstance(schema, (list, tuple)) else [schema] * len(completions)
    rewards = []
    for completion, row_schema in zip(completions, schemas):
        rewards.append(float(_is_valid_json(completion_text(completion), row_schema)))
    return rewards


def length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int,
    cut_off: int | None = None,
    **_: Any,
) -> list[float]:
    """Return 1 for completions of at most ``max_tokens`` tokens, including the end token.

    Longer completions get 0. With ``cut_off``, the reward decreases linearly from ``max_tokens`` to 0 at ``cut_off``
    tokens.
    """
    return [_length_reward(len(ids), max_tokens, cut_off) for ids in completion_ids]


_UNITS = ("tokens", "words")


def length_band(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    column: str = "length_band",
    unit: str = "tokens",
    margin: float = 0.0,
    **columns: Any,
) -> list[float | None]:
    """Return 1 for completions whose length is in the row's band, which ends at both limits. Longer and shorter
    completions get 0.

    With ``margin``, the reward decreases linearly to 0 at this distance from the band. None for rows without a band.

    Args:
        column: column with the band [shortest, longest]. A limit of null is open.
        unit: tokens (including the end token) or words.

    Raises:
        ValueError: if a band or an argument is invalid.
    """
    if unit not in _UNITS or not margin >= 0:
        raise ValueError(f"unit must be one of {', '.join(_UNITS)}, and margin at least 0, got {unit!r} and {margin}")
    if column not in columns:
        raise ValueError(f"the rows have no column {column!r}{nearest(column, columns)}")
    rewards: list[float | None] = []
    for completion, ids, band in zip(completions, completion_ids, columns[column]):
        size = len(ids) if unit == "tokens" else len(completion_text(completion).split())
        rewards.append(None if band is None else _band_reward(size, band, margin))
    return rewards


def _band_reward(size: int, band: Any, margin: float) -> float:
    try:
        low, high = band
        low = 0 if low is None else float(low)
        high = math.inf if high is None else float(high)
    except (TypeError, ValueError):
        raise ValueError(f"a band must be [shortest, longest], got {band!r:.40}") from None
    if not 0 <= low <= high:
        raise ValueError(f"a band must ascend from 0 or more, got {band!r:.40}")
    distance = max(low - size, size - high, 0.0)
    return float(distance == 0) if margin == 0 else max(0.0, 1.0 - distance / margin)


def distinct(completions: Sequence[Any], id: Sequence[str], n: int = 3) -> list[float | None]:
    """Return the share of a completion's n-grams of words that no other completion of its prompt contains.

    This is 1 minus the n-gram precision against the other completions, as in self-BLEU (arXiv 1802.01886). A completion
    with fewer than ``n`` words is one n-gram, and an empty completion gets 0. The reward is None if the call has only
    one completion of the prompt, because there is nothing to compare.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a positive integer, got {n!r}")
    sets = [_ngrams(completion_text(completion), n) for completion in completions]
    sizes = Counter(id)
    counts: dict[str, Counter[tuple[str, ...]]] = {prompt: Counter() for prompt in sizes}
    for prompt, grams in zip(id, sets):
        counts[prompt].update(grams)
    rewards: list[float | None] = []
    for prompt, grams in zip(id, sets):
        unique = sum(counts[prompt][gram] == 1 for gram in grams)
        rewards.append(None if sizes[prompt] < 2 else unique / max(1, len(grams)))
    return rewards


def _ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    words = text.split()
    if len(words) <= n:
        return {tuple(words)} if words else set()
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


def completion_text(completion: Any) -> str:
    """Return the text of a completion in either of TRL's formats: text, or a list of chat messages."""
    return completion if isinstance(completion, str) else "".join(map(_content_text, completion))


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return "".join(str(part.get("text") or "") for part in content) if isinstance(content, list) else str(content)


def _is_valid_json(text: str, schema: Mapping[str, Any] | None) -> bool:
    import jsonschema

    if len(text) > JSON_CHARACTERS:
        return False
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        if schema is not None:
            jsonschema.validate(value, schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return False
    return True


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _length_reward(tokens: int, max_tokens: int, cut_off: int | None) -> float:
    if tokens <= max_tokens:
        return 1.0
    if cut_off is None or tokens >= cut_off:
        return 0.0
    return (cut_off - tokens) / (cut_off - max_tokens)
