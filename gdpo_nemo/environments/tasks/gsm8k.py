"""Grade-school mathematics (GSM8K) with three rewards: correctness, integer, format.

The components are the same as in the GDPO authors' GSM8K demonstration and in NeMo-RL's ``math_multi_reward``. The
option ``strict`` reproduces the original rewards exactly. In strict mode, an integer cannot match a gold answer that
contains a comma.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.data.row_formats import GSM8K_PROMPT
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import (
    Unfinished,
    column,
    has_think_and_answer,
    prepare_math,
    same_mathematics,
    tagged_answer,
)

_STRICT_BLOCKS = re.compile(r"<think>.*?</think>\n<answer>.*?</answer>\n?", re.DOTALL)
"""The pattern allows a final line break, like `$` in the original pattern."""
_INTEGER = re.compile(r"[+-]?[0-9]+")


class Gsm8k(Environment):
    """Environment for GSM8K.

    Components, each 0 or 1:
        correctness: the answer equals the gold answer, which follows ``####`` in the gold column.
        integer: the answer is an integer in digits, with an optional sign.
        format: the completion consists of one think block and one answer block.
        math_verify, only with the option ``math_verify``: math-verify considers the answer equal to the gold answer.

    The answer is the text between the answer tags. Without tags, the answer is the whole completion.

    Options:
        gold_key (answer): column with the solution.
        time_limit_s (2): CPU time limit in seconds. Parsing and comparing together may use twice this time. A sample
            that exceeds the limit is masked.
        strict (false): true to reproduce the original rewards. The answer must be identical to the gold answer,
            including commas. An integer must satisfy ``str.isdigit``. Exactly one line break must separate the blocks.
            The system prompt shows this format.
        math_verify (false): also return the component ``math_verify``, for evaluation with ``strict``.
    """

    instant = True

    reward_names: tuple[str, ...] = ("correctness", "integer", "format")
    system_prompt = (
        "Solve the problem. First reason inside <think> and </think>. Then give the result inside <answer> and "
        "</answer>: one integer, written in digits, with no unit and no other text."
    )

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options("gsm8k", options, gold_key="answer", strict=False, time_limit_s=2.0, math_verify=False)
        self._gold_key = chosen.gold_key
        self._strict = chosen.strict
        self._limit = chosen.time_limit_s
        self._math_verify = chosen.math_verify
        if self._strict:
            self.system_prompt = GSM8K_PROMPT
        if self._math_verify:
            self.reward_names = (*Gsm8k.reward_names, "math_verify")

    def prepare(self) -> None:
        """Import math-verify before the first time limit starts."""
        prepare_math()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory."""
        compute_rewards = self._strict_rewards if self._strict else self._rewards
        return [self._verdict(compute_rewards, trajectory) for trajectory in trajectories]

    def _verdict(self, compute_rewards: Callable[[str, str], dict[str, float]], trajectory: Trajectory) -> Verdict:
        gold = str(column(trajectory.prompt, self._gold_key)).rpartition("####")[2].strip()
        try:
            rewards = compute_rewards(trajectory.text, gold)
            if self._math_verify:
                rewards["math_verify"] = self._is_equal(tagged_answer(trajectory.text), gold)
            return Verdict(rewards)
        except Unfinished as unfinished:
            return Verdict({}, Outcome.ENV_FAILED, str(unfinished))

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return the right answer in the right format."""
        gold = str(row.get(self._gold_key)).rpartition("####")[2].strip().replace(",", "")
        return [f"<think>...</think>\n<answer>{gold}</answer>"]

    def _rewards(self, text: str, gold: str) -> dict[str, float]:
        answer = tagged_answer(text)
        return {
            "correctness": self._is_equal(answer, gold),
            "integer": float(_INTEGER.fullmatch(answer) is not None),
            "format": float(has_think_and_answer(text)),
        }

    def _is_equal(self, answer: str, gold: str) -> float:
        return float(same_mathematics(gold.replace(",", ""), answer, self._limit))

    def _strict_rewards(self, text: str, gold: str) -> dict[str, float]:
        answer = tagged_answer(text)
        once = text.count("<answer>") == text.count("</answer>") == 1
        return {
            "correctness": float(answer == gold),
            "integer": float(answer.isdigit()),
            "format": float(once and _STRICT_BLOCKS.fullmatch(text) is not None),
        }
