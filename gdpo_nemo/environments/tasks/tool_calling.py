"""Tool calling with a format reward in {0, 1} and a correctness reward in [-3, 3], as in ToolRL and the GDPO paper.

The rewards follow the code of ToolRL (arXiv 2504.13958), which matches calls greedily, while the ToolRL paper describes
an optimal matching. GDPO (arXiv 2601.05242, appendix C) uses the same rewards. Arguments are compared as parsed JSON in
Python: ``"1"`` differs from ``1``, but ``1``, ``1.0`` and ``true`` are equal.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import column

WORST = -3.0
BEST = 3.0
_THINK = r"<think>.*?</think>"
_CALLS = r"<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"<response>.*?</response>"

Call = Mapping[str, Any]


class ToolCalling(Environment):
    """Environment for tool calling, for rows in the RLLA format: a chat prompt and a ``ground_truth``.

    To read a Parquet file of RLLA, set ``columns: {messages: prompt, ground_truth: reward_model.ground_truth}``.

    Components:
        correctness: agreement of the tool calls with the ground truth, from -3 to 3. See ``correctness``.
        format: 1 if the completion has the same blocks as the ground truth, in order and on separate lines, else 0.

    Options:
        gold_key (ground_truth): column with the ground truth.
    """

    instant = True

    reward_names = ("correctness", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._gold_key = read_options("tool_calling", options, gold_key="ground_truth").gold_key

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. Raises RunError for a row without ground truth."""
        verdicts = []
        for trajectory in trajectories:
            gold = str(column(trajectory.prompt, self._gold_key))
            text = trajectory.text.strip()
            verdicts.append(Verdict({"correctness": correctness(gold, text), "format": formatted(gold, text)}))
        return verdicts

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return the ground truth as the example."""
        return [str(row.get(self._gold_key))]


def formatted(gold: str, text: str) -> float:
    """Return 1.0 if ``text`` consists of the same blocks as ``gold``, else 0.0. The contents of the blocks are not
    compared."""
    calls = "<tool_call>" in gold
    response = "<response>" in gold
    blocks = [_THINK] + [_CALLS] * calls + [_RESPONSE] * response
    tags = ["tool_call"] * calls + ["response"] * response
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
    return float(once and re.fullmatch("\n".join(blocks), text, re.DOTALL) is not None)


def correctness(gold: str, text: str) -> float | None:
    """Compare the tool calls in ``text`` with the tool calls in ``gold``. Return a score from -3 to 3.

    The score is linear in the number of matching names, parameter names and parameter values. The score is 0 if
    ``gold`` has no calls, and -3 if the calls in ``text`` are missing or cannot be parsed. The score is None if the
    calls in ``gold`` cannot be parsed, for example if the reasoning in a row mentions ``<tool_call>``.
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
    """Raised if calls are missing, are not one JSON object per line, or lack a name or parameters."""


def _read_calls(text: str) -> list[Call]:
    """Parse the calls in the first tool-call block, one JSON object per line."""
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
        best = max(values, key=lambda index: (values[index], -index))  # the first call if several are best
        if values[best] > 0:
            score += values[best]
            del unused[best]
    return score


def _match(expected: Mapping[str, Any], made: Mapping[str, Any]) -> float:
    """Return the Jaccard index of the parameter names, from 0 to 1, plus the number of equal values."""
    same = sum(1 for name, value in expected.items() if name in made and made[name] == value)
    return _jaccard(expected, made) + same


def _jaccard(first: Iterable[str], second: Iterable[str]) -> float:
    """Return the Jaccard index (intersection over union) of two multisets, or 1 if both are empty."""
    # Convert to lists, because Counter interprets a mapping as counts.
    first_counts = Counter(list(first))
    second_counts = Counter(list(second))
    union = (first_counts | second_counts).total()
    return (first_counts & second_counts).total() / union if union else 1.0


def _name(call: Any) -> str:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise _Unreadable
    return name


def _parameters(call: Call) -> Mapping[str, Any]:
    parameters = call.get("parameters")
    if not isinstance(parameters, dict):
        raise _Unreadable
    return parameters
