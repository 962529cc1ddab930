r"""Environments with one reward per character: the digits of a sorted number, and the fields of a form.

    uv run examples/run_gdpo.py --config configs/gdpo_fields_cpu.yaml
    uv run examples/run_gdpo.py --config configs/gdpo_fields_cpu.yaml gdpo.credit=sequence run.name=fields_sequence
    uv run examples/run_gdpo.py --config configs/gdpo_form_cpu.yaml

With one advantage per answer, a wrong digit is reinforced if the other digits are correct. The verdicts name the
character that each reward is about (``Verdict.reward_spans``), so with ``gdpo.credit: span`` the reward acts on this
character only. The more fields an answer has, the more noise this removes, and the fields of the form do not depend on
each other.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_nemo import Environment, Trajectory, Verdict, read_options
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


class Form(Environment):
    """Environment for a form of labelled fields, each with a digit (``a3b1c4...``). The right digits never change.

    Components: ``format`` (1 if the answer has all fields in order), ``a`` to ``p`` (1 if the field with this label has
    the right digit; the reward of a field that does not exist acts on no token), and ``share`` (share of right fields,
    for reporting). Option: ``seed``, which chooses the right digits.
    """

    instant = True
    labels = "abcdefghijklmnop"
    reward_names = ("format", *labels, "share")

    def __init__(self, options: Mapping[str, Any] | None = None):
        seed = read_options("form", options, seed=0).seed
        self._right = dict(zip(self.labels, random.Random(seed).choices(string.digits, k=len(self.labels))))

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return rows whose prompts are the numbers of forms, which do not determine the right digits."""
        numbers = range(900) if split == "train" else range(900, 1000)
        return [{"id": f"form/{number}", "prompt": f"{number:03d}="} for number in numbers][:size]

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, with the span of each field's digit."""
        return [self._verdict(trajectory.text) for trajectory in trajectories]

    def _verdict(self, text: str) -> Verdict:
        places = {label: match.start() + 1 for label in self.labels if (match := re.search(f"{label}[0-9]", text))}
        rewards = {label: float(label in places and text[places[label]] == self._right[label]) for label in self.labels}
        spans = {label: [(places[label], places[label] + 1)] if label in places else [] for label in self.labels}
        share = sum(rewards.values()) / len(rewards)
        form = float(re.fullmatch("[0-9]".join([*self.labels, ""]), text) is not None)
        return Verdict({"format": form, **rewards, "share": share}, reward_spans=spans)
