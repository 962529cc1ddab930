"""Mathematics with a gold answer of any form: fractions, intervals, expressions, compared by math-verify."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.answers import column, prepare_math, same_mathematics
from gdpo_nemo.environments.options import read_options


class Math:
    r"""The mathematics environment.

    Components, each 0 or 1: ``correctness`` (the final answer equals the gold one; math-verify prefers what is in
    ``\boxed{}``) and ``format`` (exactly one ``\boxed{``, with something in it).

    Options: ``gold_key`` (column with the gold answer, ``answer``) and ``time_limit_s`` (2, per parse and comparison).
    """

    reward_names = ("correctness", "format")
    system_prompt = r"Reason step by step and put the final answer, and nothing else, inside \boxed{}."

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options("math", options, gold_key="answer", time_limit_s=2)
        self._gold_key, self._limit = chosen.gold_key, chosen.time_limit_s

    def prepare(self) -> None:
        """Import the parser before the clock runs."""
        prepare_math()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory."""
        return [
            Verdict(
                {
                    "correctness": float(self._correct(trajectory)),
                    "format": float(_boxed_once(trajectory.text)),
                }
            )
            for trajectory in trajectories
        ]

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """The right answer, boxed."""
        return [rf"\boxed{{{row.get(self._gold_key)}}}"]

    def _correct(self, trajectory: Trajectory) -> bool:
        return same_mathematics(str(column(trajectory.prompt, self._gold_key)), trajectory.text, self._limit)


def _boxed_once(text: str) -> bool:
    _, box, rest = text.partition(r"\boxed{")
    content, closed, _ = rest.partition("}")
    return bool(box and closed and content.strip()) and r"\boxed{" not in rest
