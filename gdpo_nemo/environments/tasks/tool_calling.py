"""Tool calling with a format reward in {0, 1} and a correctness reward in [-3, 3], as in ToolRL and the GDPO paper.

The rewards follow the code of ToolRL (arXiv 2504.13958), which matches calls greedily, while the ToolRL paper describes
an optimal matching. GDPO (arXiv 2601.05242, appendix C) uses the same rewards. Arguments are compared as parsed JSON in
Python: ``"1"`` differs from ``1``, but ``1``, ``1.0`` and ``true`` are equal.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks import call_match
from gdpo_nemo.environments.tasks.answers import column

WORST = -3.0
BEST = 3.0
_THINK = r"<think>.*?</think>"
_CALLS = r"<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"<response>.*?</response>"

Call = Mapping[str, Any]


class ToolCalling(Environment):
    """Environment for tool calling: rows have a chat prompt and a ``ground_truth``, or are RLLA's rows (``rlla_row``).

    Components:
        correctness: agreement of the tool calls with the ground truth, from -3 to 3. See ``correctness``.
        format: 1 if the completion has the same blocks as the ground truth, in order and on separate lines, else 0.

        ast, only with the option ``ast``: 1 if the calls match those of the ground truth by BFCL's rules, else 0. See
            ``ast_match``.

    Options:
        gold_key (ground_truth): column with the ground truth.
        ast (false): also return the component ``ast``, for evaluation.
    """

    instant = True

    reward_names: tuple[str, ...] = ("correctness", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options("tool_calling", options, gold_key="ground_truth", ast=False)
        self._gold_key = chosen.gold_key
        self._ast = chosen.ast
        if self._ast:
            self.reward_names = (*ToolCalling.reward_names, "ast")

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert RLLA's rows. Other rows remain unchanged."""
        return rlla_row(row) if self._gold_key not in row else row

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. Raises RunError for a row without ground truth."""
        verdicts = []
        for trajectory in trajectories:
            gold = str(column(trajectory.prompt, self._gold_key))
            text = trajectory.text.strip()
            rewards = {"correctness": correctness(gold, text), "format": formatted(gold, text)}
            verdicts.append(Verdict(rewards | ({"ast": ast_match(gold, text)} if self._ast else {})))
        return verdicts

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return the ground truth as the example."""
        return [str(row.get(self._gold_key))]


def rlla_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of RLLA's files as a row with ``prompt``, ``ground_truth`` and, for supervised training,
    ``completion``.

    ``rlla_sft.json`` has instructions, inputs and outputs. The Parquet files have chat prompts and the ground truth in
    ``reward_model``. Other rows remain unchanged.
    """
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        prompt, gold = row.get("prompt"), reward_model["ground_truth"]
    elif {"instruction", "input", "output"} <= row.keys():
        system, user = {"role": "system", "content": row["instruction"]}, {"role": "user", "content": row["input"]}
        prompt, gold = [system, user], row["output"]
    else:
        return row
    return {"prompt": prompt, "ground_truth": gold, "completion": gold}


def brief_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rlla_row`` with only the last sentence of the reasoning in ``completion``, so that answers are short."""
    converted = rlla_row(row)
    thought = str(converted["completion"]).removeprefix("<think>").partition("</think>")[0].strip()
    brief = re.split(r"(?<=[.!?])\s+", thought)[-1]
    return {**converted, "completion": str(converted["completion"]).replace(thought, brief, 1)}


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


def ast_match(gold: str, text: str) -> float | None:
    """Return 1.0 if the calls in ``text`` match the calls in ``gold`` by BFCL's rules, else 0.0.

    Types are those of the values in ``gold``. If ``gold`` has no calls, ``text`` must not contain readable calls. The
    result is None if the calls in ``gold`` cannot be parsed.
    """
    expected = made_calls(gold)
    if expected is None:
        return None
    functions, answers = call_match.exact_answers(expected)
    return float(call_match.calls_match(functions, made_calls(text) or [], answers))


def made_calls(text: str) -> list[call_match.Call] | None:
    """Return the names and parameters of the calls in ``text``, or None if the calls cannot be parsed."""
    if "<tool_call>" not in text:
        return []
    try:
        return [(_name(call), _parameters(call)) for call in _read_calls(text)]
    except _Unreadable:
        return None


class _Unreadable(Exception):
    """Raised if calls are missing, are not one JSON object per line, or lack a name or parameters."""


def _read_calls(text: str) -> list[Call]:
    """Parse the calls in the first tool-call block, one JSON object per line."""
    if "<tool_call>" not in text or "</tool_call>" not in text:
        raise _Unreadable
    block = text.partition("<tool_call>")[2].partition("</tool_call>")[0].strip()
    try:
        return list(map(json.loads, block.split("\n")))
    except (ValueError, RecursionError) as error:
        raise _Unreadable from error


def _score(expected: Sequence[Call], made: Sequence[Call]) -> float:
    score = _jaccard(map(_name, expected), map(_name, made))
    unused = list(made)
    for call in expected:
        best, value = None, 0.0
        for index, other in enumerate(unused):
            if _name(other) == _name(call):
                match = _match(_parameters(call), _parameters(other))
                if match > value:  # the first call if several are best
                    best, value = index, match
        if best is not None:
            score += value
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
