r"""Environment with one reward per character: every digit of a sorted number is scored separately.

    uv run examples/run_gdpo.py --config configs/gdpo_fields_cpu.yaml
    uv run examples/run_gdpo.py --config configs/gdpo_fields_cpu.yaml gdpo.credit=sequence run.name=fields_sequence

With one advantage per answer, a wrong digit is reinforced if the other digits are correct. The verdicts name the
character that each reward is about (``Verdict.reward_spans``), so with ``gdpo.credit: span`` the reward acts on this
character only.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from gdpo_nemo import Environment, Trajectory, Verdict
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, digit_rows

_ANSWER = re.compile(r"<t>[^<>]*</t><a>([0-9]{5})</a>")


class DigitFields(Environment):
    """Environment for digit sorting with a reward for each digit.

    Components: ``format`` (1 if the tags are correct), ``digit_1`` to ``digit_5`` (1 if this digit of the answer is
    right; not applicable without correct tags), and ``share`` (share of right digits, for reporting).
    """

    digits = tuple(f"digit_{place}" for place in range(1, DIGITS + 1))
    reward_names = ("format", *digits, "share")

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return the rows of digit_sort."""
        return digit_rows(split, size, seed)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, with the span of each digit."""
        return [self._verdict(trajectory) for trajectory in trajectories]

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        found = _ANSWER.fullmatch(trajectory.text)
        if found is None:
            return Verdict({"format": 0.0, "share": 0.0})
        right = sorted(trajectory.prompt.fields["digits"])
        scores = [float(digit == wanted) for digit, wanted in zip(found[1], right)]
        spans = {name: [(found.start(1) + place, found.start(1) + place + 1)] for place, name in enumerate(self.digits)}
        rewards = {"format": 1.0, **dict(zip(self.digits, scores)), "share": sum(scores) / DIGITS}
        return Verdict(rewards, reward_spans=spans)
