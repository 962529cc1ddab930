r"""Digit sorting with a rubric for each row: criteria that code checks, in place of a judge.

    uv run examples/run_gdpo.py --config configs/gdpo_rubric_cpu.yaml
    uv run examples/run_gdpo.py --config configs/gdpo_rubric_cpu.yaml 'gdpo.rewards={score: 1}' run.name=rubric_score

Each row has 3 to 12 of the criteria of `all_criteria`, written for its digits. The model's samples meet some of them
often and others rarely, some have a reward between 0 and 1, some are faults with a negative weight, and some contradict
each other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_nemo import ConfigError, Environment, Trajectory, Verdict, read_options
from gdpo_nemo.algorithms.rubrics import criteria_of, with_scores
from gdpo_nemo.environments.tasks.digit_sort import digit_rows

_NUMBER = r"([0-9]+)"


def all_criteria(digits: str, brief: int) -> list[dict[str, Any]]:
    """Return the criteria from which the rubric of a row is chosen."""
    right = "".join(sorted(digits))
    dots = 4 if digits[0] >= "5" else 1
    return [
        {"id": "answer", "criterion": f"the answer is {right}", "weight": 2},
        {"id": "close", "criterion": f"the answer is close to {right}"},
        {"id": "first", "criterion": f"the answer begins with {right[0]}"},
        {"id": "last", "criterion": f"the answer ends with {right[-1]}"},
        {"id": "open", "criterion": "the text begins with <t>"},
        {"id": "closed", "criterion": "the text ends with </a>", "required": digits[0] in "27"},
        {"id": "form", "criterion": "the text has the form <t>...</t><a>...</a>"},
        {"id": "brief", "criterion": f"the text has few dots, at most {brief}"},
        {"id": "dots", "criterion": f"the text has {dots} dots", "weight": 2},
        {"id": "long", "criterion": "the text has at least 8 dots"},
        {"id": "copy", "criterion": f"the answer is {digits}", "weight": -1},
        {"id": "seven", "criterion": "the text contains 7", "weight": -1},
    ]


def rubric_of(digits: str, brief: int) -> list[dict[str, Any]]:
    """Return the rubric of a row: 3 to 12 of `all_criteria`, selected by the digits."""
    criteria = all_criteria(digits, brief)
    draw = random.Random(digits)
    return draw.sample(criteria, draw.randint(3, len(criteria)))


def reward_of(criterion: str, text: str) -> float:
    """Return the reward of a criterion, from 0 to 1.

    Raises:
        ConfigError: if the criterion is unknown.
    """
    runs = re.findall("[0-9]+", text)
    answer, dots = runs[-1] if runs else "", text.count(".")
    checks = {
        f"the answer is {_NUMBER}": lambda wanted: answer == wanted,
        f"the answer is close to {_NUMBER}": lambda wanted: sum(map(str.__eq__, answer, wanted)) / len(wanted),
        f"the answer begins with {_NUMBER}": answer.startswith,
        f"the answer ends with {_NUMBER}": answer.endswith,
        "the text begins with (.+)": text.startswith,
        "the text ends with (.+)": text.endswith,
        "the text contains (.+)": text.__contains__,
        "the text has the form <t>...</t><a>...</a>": lambda: bool(re.fullmatch("<t>[^<>]*</t><a>[^<>]*</a>", text)),
        f"the text has few dots, at most {_NUMBER}": lambda most: 1 - max(dots - int(most), 0) / 36,
        f"the text has {_NUMBER} dots": lambda count: dots == int(count),
        f"the text has at least {_NUMBER} dots": lambda count: dots >= int(count),
    }
    for pattern, check in checks.items():
        if found := re.fullmatch(pattern, criterion):
            return float(check(*found.groups()))
    raise ConfigError(f"criterion {criterion!r} has no check")


class DigitRubrics(Environment):
    """Environment for digit sorting with a rubric for each row.

    Components: ``rubric/ID`` (the criteria of the row's rubric), ``score`` (their weighted mean, to train without the
    criteria), and for reporting ``mean`` (mean of the criteria without weights, 1 - reward for a fault), ``met`` (share
    of criteria that are fully met, and of faults that are absent) and ``dots`` (a criterion that is rarely met).

    Option: ``brief`` (4), number of dots up to which the criterion of this name is fully met.
    """

    reward_names = ("rubric/*", "score", "mean", "met", "dots")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._brief = read_options("digit_rubrics", options, brief=4).brief

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return the rows of digit_sort with a column ``rubric``."""
        return [{**row, "rubric": rubric_of(row["digits"], self._brief)} for row in digit_rows(split, size, seed)]

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory."""
        return [self._verdict(trajectory) for trajectory in trajectories]

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        rubric = trajectory.prompt.fields["rubric"]
        rewards = {f"rubric/{item['id']}": reward_of(item["criterion"], trajectory.text) for item in rubric}
        criteria = criteria_of(trajectory.prompt.fields, rewards)
        right = [reward if criteria[name].weight > 0 else 1 - reward for name, reward in rewards.items()]
        report = {
            "score": with_scores(rewards, criteria)["rubric/*"],
            "mean": sum(right) / len(right),
            "met": right.count(1) / len(right),
            "dots": rewards.get("rubric/dots"),
        }
        return Verdict({**rewards, **report})
