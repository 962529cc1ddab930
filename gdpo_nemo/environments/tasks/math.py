"""Mathematics problems whose answers math-verify compares: numbers, fractions, intervals or expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import Unfinished, column, hf_math_verify, prepare_math, same_mathematics
from gdpo_nemo.utils.errors import ConfigError

_VERIFIERS = {"default": same_mathematics, "hf_math_verify": hf_math_verify}


class Math(Environment):
    r"""The mathematics environment.

    Components, each 0 or 1:
        correctness: the final answer equals the gold answer. math-verify prefers the content of ``\boxed{}``.
        format: the completion contains exactly one ``\boxed{}``, which is not empty.
        exceed, only with the option ``exceed``: the completion has more tokens than the limit.

    Options:
        gold_key (answer): column with the gold answer. If the text contains ``####``, as in GSM8K, the answer follows
            this mark.
        time_limit_s (2): CPU time limit in seconds. Parsing and comparing together may use twice this time. A sample
            that exceeds the limit is masked.
        math_verify_impl (default): default, or hf_math_verify for the behavior of NeMo-RL's verifier of that name.
        exceed (0): limit of the component ``exceed`` in tokens, for evaluation; 0: without this component.
    """

    instant = True

    reward_names: tuple[str, ...] = ("correctness", "format")
    system_prompt = r"Reason step by step and put the final answer, and nothing else, inside \boxed{}."

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "math", options, gold_key="answer", time_limit_s=2.0, math_verify_impl="default", exceed=0
        )
        if chosen.math_verify_impl not in _VERIFIERS:
            raise ConfigError(
                f"environment math: option math_verify_impl must be {' or '.join(_VERIFIERS)}, not "
                f"{chosen.math_verify_impl!r}"
            )
        self._gold_key = chosen.gold_key
        self._limit = chosen.time_limit_s
        self._same = _VERIFIERS[chosen.math_verify_impl]
        self._exceed = chosen.exceed
        if self._exceed:
            self.reward_names = (*Math.reward_names, "exceed")

    def prepare(self) -> None:
        """Import math-verify before the first time limit starts."""
        prepare_math()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory."""
        return list(map(self._verdict, trajectories))

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        try:
            correct = self._correct(trajectory)
        except Unfinished as unfinished:
            return Verdict({}, Outcome.ENV_FAILED, str(unfinished))
        rewards = {"correctness": float(correct), "format": float(_boxed_once(trajectory.text))}
        if self._exceed:
            rewards["exceed"] = float(trajectory.num_policy_tokens > self._exceed)
        return Verdict(rewards)

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return the right answer in a box."""
        return [rf"\boxed{{{str(row.get(self._gold_key)).rpartition('####')[2].strip()}}}"]

    def _correct(self, trajectory: Trajectory) -> bool:
        gold = str(column(trajectory.prompt, self._gold_key)).rpartition("####")[2].strip()
        return self._same(gold, trajectory.text, self._limit)


def _boxed_once(text: str) -> bool:
    _, box, rest = text.partition(r"\boxed{")
    content, closed, _ = rest.partition("}")
    return bool(box and closed and content.strip()) and r"\boxed{" not in rest
