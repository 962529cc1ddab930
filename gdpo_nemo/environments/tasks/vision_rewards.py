r"""Reward functions for questions about images, equal to those of NeMo-RL's ``environments/rewards.py``.

The reference answer is in the column ``answer``. The answer of a completion is the text between the first ``<answer>``
and the last ``</answer>``, or in ``boxed_expression`` the content of the last ``\boxed{}``. Saved configs contain the
names of the functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gdpo_nemo.environments.base import Failure
from gdpo_nemo.environments.tasks.answers import Unfinished, completion_text, hf_math_verify

_TIME_LIMIT_S = 5.0
"""CPU time limit of a comparison, which is also math-verify's default."""
_SMALLEST_AREA = 1e-3
_BOX = "\\boxed{"
Box = tuple[float, ...]


def has_tags(completions: Sequence[Any], think_tag: str = "think", answer_tag: str = "answer", **_: Any) -> list[float]:
    """Return 0.25 for completions with a pair of think tags, plus 0.75 for completions with a pair of answer tags."""
    rewards = []
    for text in map(completion_text, completions):
        tags = _tagged(text, think_tag) is not None, _tagged(text, answer_tag) is not None
        rewards.append(0.25 * tags[0] + 0.75 * tags[1])
    return rewards


def same_text(completions: Sequence[Any], answer: Sequence[Any], answer_tag: str = "answer", **_: Any) -> list[float]:
    """Return 1 for answers with the same letters and digits as the reference answer, else 0. Case is ignored."""
    pairs = _pairs(completions, answer, answer_tag)
    return [float(found is not None and _letters(found) == _letters(gold)) for found, gold in pairs]


def same_expression(
    completions: Sequence[Any], answer: Sequence[Any], tag: str = "answer", **_: Any
) -> list[float | Failure]:
    """Return 1 for answers that math-verify considers equal to the reference answer, else 0."""
    return [_is_equal(found, gold) for found, gold in _pairs(completions, answer, tag)]


def boxed_expression(
    completions: Sequence[Any], answer: Sequence[Any], format_score: float = 0.1, **_: Any
) -> list[float | Failure]:
    r"""Return ``format_score`` for completions with ``\boxed{}`` after ``</think>``, plus ``1 - format_score`` if
    math-verify considers the content of the last ``\boxed{}`` equal to the reference answer."""
    rewards: list[float | Failure] = []
    for text, gold in _texts(completions, answer):
        reward = _is_equal(_last_boxed(text), gold)
        if not isinstance(reward, Failure):
            has_format = re.search(r"</think>.*\\boxed\{.*\}", text, re.DOTALL) is not None
            reward = (1.0 - format_score) * reward + format_score * has_format
        rewards.append(reward)
    return rewards


def box_overlap(
    completions: Sequence[Any],
    answer: Sequence[Any],
    giou_penalty_thres: float = 10.0,
    answer_tag: str = "answer",
    **_: Any,
) -> list[float]:
    """Return the intersection over union (IoU) of the box in each answer and the reference box ``[x1, y1, x2, y2]``.

    An IoU below ``giou_penalty_thres`` is replaced by the generalized IoU. Answers without a box get 0. The order of
    corners is not checked, so a box with exchanged corners may get 1.
    """
    rewards = []
    for found, gold in _pairs(completions, answer, answer_tag):
        boxes = _box(gold), _box(found or "")
        reward = _overlap(*boxes, giou_penalty_thres) if all(boxes) else 0.0
        rewards.append(reward if math.isfinite(reward) else 0.0)  # a coordinate is infinite or not a number
    return rewards


def _texts(completions: Sequence[Any], answers: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield the text of each completion and its reference answer. Raises ValueError for a row without an answer."""
    for text, gold in zip(map(completion_text, completions), answers):
        if gold is None:
            raise ValueError("a row has no reference answer in the column 'answer'")
        yield text, str(gold)


def _pairs(completions: Sequence[Any], answers: Sequence[Any], tag: str) -> Iterator[tuple[str | None, str]]:
    """Yield the answer of each completion (None without tags) and its reference answer."""
    for text, gold in _texts(completions, answers):
        yield _tagged(text, tag), gold


def _tagged(text: str, tag: str) -> str | None:
    found = re.search(rf"<{tag}>(.*)</{tag}>", text, re.DOTALL)
    return None if found is None else found[1]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).lower()


def _is_equal(answer: str | None, gold: str) -> float | Failure:
    if answer is None:
        return 0.0
    boxed = answer if answer.startswith(_BOX) else f"{_BOX}{answer}}}"
    plain = gold.removeprefix(_BOX).removesuffix("}") if gold.startswith(_BOX) else gold
    try:
        return float(hf_math_verify(plain, boxed, _TIME_LIMIT_S))
    except Unfinished as unfinished:
        return Failure(str(unfinished))


def _last_boxed(text: str) -> str | None:
    """Return the content of the last box, or None if no box is complete."""
    content = text.rpartition(_BOX)[2] if _BOX in text else ""
    depth = 1
    for index, letter in enumerate(content):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return content[:index].strip()
    return None


def _box(text: str) -> Box:
    """Return four numbers, or an empty tuple if the text has another form."""
    try:
        numbers = tuple(float(part) for part in text.replace("[", "").replace("]", "").split(","))
    except ValueError:
        return ()
    return numbers if len(numbers) == 4 else ()


def _overlap(first: Box, second: Box, giou_below: float) -> float:
    intersection = max(0.0, min(first[2], second[2]) - max(first[0], second[0]))
    intersection *= max(0.0, min(first[3], second[3]) - max(first[1], second[1]))
    union = max(_SMALLEST_AREA, _area(first) + _area(second) - intersection)
    iou = intersection / union
    if iou >= giou_below:
        return iou
    hull = (*map(min, first[:2], second[:2]), *map(max, first[2:], second[2:]))
    hull_area = max(_SMALLEST_AREA, _area(hull))
    return iou - (hull_area - union) / hull_area


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
