"""Tool calling with a format reward in {0, 1} and a correctness reward in [-3, 3], as in ToolRL and the GDPO paper.

Reward definition: arXiv 2504.13958 (ToolRL) as its code has it, which matches calls greedily where the paper speaks of
an optimal matching; GDPO (arXiv 2601.05242, appendix C) uses the same. Values compare as Python values of the JSON:
``"1"`` is not ``1``, while ``1``, ``1.0`` and ``true`` are equal.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.answers import column

WORST = -3.0
BEST = 3.0
_THINK = r"<think>.*?</think>"
_CALLS = r"<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"<response>.*?</response>"

Call = Mapping[str, Any]


class ToolCalling(Environment):
    """The tool-calling environment, for rows in the manner of RLLA (a chat prompt and a ``ground_truth``).

    Components: ``format`` (the blocks the ground truth has, in order and on their own lines) and ``correctness``.
    A RLLA Parquet file is read with ``columns: {messages: prompt, ground_truth: reward_model.ground_truth}``.

    Option: ``gold_key`` (column with the ground truth, ``ground_truth``).
    """

    instant = True

    reward_names = ("correctness", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._gold_key = read_options("tool_calling", options, gold_key="ground_truth").gold_key

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory. Raises RunError for a row without ground truth."""
        verdicts = []
        for trajectory in trajectories:
            gold = str(column(trajectory.prompt, self._gold_key))
            text = trajectory.text.strip()
            verdicts.append(Verdict({"correctness": correctness(gold, text), "format": formatted(gold, text)}))
        return verdicts

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """The ground truth itself."""
        return [str(row.get(self._gold_key))]


def formatted(gold: str, text: str) -> float:
    """1.0 if ``text`` has exactly the blocks that ``gold`` has, else 0.0. The blocks' contents are not looked at."""
    calls = "<tool_call>" in gold
    response = "<response>" in gold
    blocks = [_THINK] + [_CALLS] * calls + [_RESPONSE] * response
    tags = ["tool_call"] * calls + ["response"] * response
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
    return float(once and re.fullmatch("\n".join(blocks), text, re.DOTALL) is not None)


def correctness(gold: str, text: str) -> float | None:
    """How well the tool calls of ``text`` meet those of ``gold``, in [-3, 3]; 0 where the gold has none.

    Linear in the matched names, parameter names and values. -3 for calls that are missing or cannot be read. None
    when those of the gold cannot be read (some rows speak of ``<tool_call>`` in their thoughts): such a row would pay
    every completion the same -3 and hide the fault.
    """
    if "<tool_call>" not in gold:
        return 0.0
    try:
        expected = _read_calls(gold)
        highest = 1.0 + sum(1.0 + len(_parameters(call)) for call in expected)
    except _Unreadable:
        return None
    try:
        made = _read_calls(text)
        return BEST if made == expected else WORST + (BEST - WORST) * _score(expected, made) / highest
    except _Unreadable:
        return WORST


class _Unreadable(Exception):
    """Calls that are missing, are not one JSON object a line, or lack their name or parameters."""


def _read_calls(text: str) -> list[Call]:
    """The calls of the first block, one JSON object a line."""
    if "<tool_call>" not in text or "</tool_call>" not in text:
        raise _Unreadable
    block = text.partition("<tool_call>")[2].partition("</tool_call>")[0].strip()
    try:
        return [json.loads(line) for line in block.split("\n")]
    except (ValueError, RecursionError) as error:
        raise _Unreadable from error


def _score(expected: Sequence[Call], made: Sequence[Call]) -> float:
    score = _jaccard([_name(call) for call in expected], [_name(call) for call in made])
    unused = list(made)
    for call in expected:
        candidates = [(index, other) for index, other in enumerate(unused) if _name(other) == _name(call)]
        if not candidates:
            continue
        values = {index: _match(_parameters(call), _parameters(other)) for index, other in candidates}
        best = max(values, key=lambda index: (values[index], -index))  # of equal ones the first
        if values[best] > 0:
            score += values[best]
            del unused[best]
    return score


def _match(expected: Mapping[str, Any], made: Mapping[str, Any]) -> float:
    """Agreement of the parameters' names (0 to 1) plus the number of equal values."""
    same = sum(1 for name, value in expected.items() if name in made and made[name] == value)
    return _jaccard(expected, made) + same


def _jaccard(first: Iterable[str], second: Iterable[str]) -> float:
    """Intersection over union of two multisets; 1 if both are empty."""
    # a list: Counter would take a mapping for counts
    one = Counter(list(first))
    other = Counter(list(second))
    union = (one | other).total()
    return (one & other).total() / union if union else 1.0


def _name(call: Any) -> str:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _Unreadable
    return call["name"]


def _parameters(call: Call) -> Mapping[str, Any]:
    if not isinstance(call.get("parameters"), dict):
        raise _Unreadable
    return call["parameters"]
