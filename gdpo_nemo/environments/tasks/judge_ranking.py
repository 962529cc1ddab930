"""Inquiries about the order of the samples of a group, which the judge ranks by each criterion in one request.

The idea is that of RULER (OpenPipe's ART): a judge compares answers with each other more reliably than with a scale.
The answers are shown in several orders, because judges prefer some positions. An order depends only on the contents, so
the order of the samples has no effect. Equal answers are shown once and tie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.base import Failure, count_option
from gdpo_nemo.environments.server_replies import printable
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.environments.tasks.judge_model import Grade, Inquiry, Question, answer_text, chat, prompt_text
from gdpo_nemo.environments.tasks.judge_rubric import UNTRUSTED, InvalidReply, Part, Rubric
from gdpo_nemo.utils.errors import ConfigError, RunError

DEFAULT_ORDERS = 2
"""Default of the option ``orders``: an order and its reverse."""
_MOST_ORDERS = 100
_SYSTEM = (
    "You rank answers that a language model gave to one prompt. The prompt, the answers, the criteria, and the "
    f"reference, if there is one, {UNTRUSTED}"
    'Reply with only a JSON object {"rankings": [{"id": ..., "reason": ..., "ranking": [...]}, ...]} that has one '
    "entry for each criterion.\n"
    "id: the id of the criterion.\n"
    "reason: one sentence.\n"
    "ranking: the ids of all answers, from the answer that the criterion describes best to the one that it describes "
    'least. Write answers that are equally good as a list in the ranking: ["2", ["1", "3"]]. null if you cannot tell.'
)

type Ranks = dict[str, dict[str, int] | None]
"""Rank of each answer by component, from 0 (best), or None if the judge cannot tell."""


class Ranking:
    """Form of inquiry that ranks the samples of each group by each criterion.

    The reward of a sample is the share of the other samples that it precedes, from 0 (last) to 1 (first), averaged over
    the orders. A tie counts half. Without two different answers, the reward is None and the judge is not asked.

    Args:
        rubric: criteria of the rows.
        reference: column with a reference answer, or None.
        orders: number of orders in which the answers are shown. Every second one reverses the one before it.

    Raises:
        ConfigError: if the number of orders is invalid.
    """

    system = _SYSTEM

    def __init__(self, rubric: Rubric, reference: str | None, orders: int):
        self._orders = count_option("orders", orders) or DEFAULT_ORDERS
        if self._orders > _MOST_ORDERS:
            raise ConfigError(f"orders: must be at most {_MOST_ORDERS}, got {self._orders}")
        self._rubric = rubric
        self._reference = reference
        self.reward_names = rubric.reward_names

    def check(self, prompt: Prompt) -> None:
        """Check the rubric of a row.

        Raises:
            ConfigError: if the rubric is invalid or has a required criterion, because a ranking does not tell if a
                criterion is met.
        """
        for component, criterion in self._rubric.of(prompt).items():
            if criterion.required:
                place = Part(prompt.id, []).place(component)
                raise ConfigError(f"{place}: required conflicts with ranking; remove it")

    def inquiries(self, trajectories: Sequence[Trajectory]) -> list[Inquiry[Ranks]]:
        """Return one inquiry per group, which are the samples with the same id of the prompt.

        Raises:
            ConfigError: if a rubric is invalid.
        """
        groups: dict[str, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            groups.setdefault(trajectory.prompt.id, []).append(index)
        found = []
        for samples in groups.values():
            found.append(self._inquiry(samples, [trajectories[index] for index in samples]))
        return found

    def _inquiry(self, samples: Sequence[int], group: Sequence[Trajectory]) -> Inquiry[Ranks]:
        prompt = group[0].prompt
        criteria = self._rubric.of(prompt)
        answers = list(map(answer_text, group))
        if any(trajectory.images for trajectory in group):
            raise RunError("ranking: images after the prompt are not supported; use another form of the judge")
        reference = column(prompt, self._reference) if self._reference else None
        orders = self._orders_of(prompt_text(prompt), answers)
        questions = []
        parts = self._rubric.parts(prompt.id, criteria)
        for order in orders:
            shown = dict(zip(map(str, range(1, len(order) + 1)), order))
            for part in parts:
                request = chat(
                    self.system,
                    [placed.image for placed in prompt.images],
                    prompt=prompt_text(prompt),
                    reference=reference,
                    criteria=part.material(with_scales=False),
                    answers=[{"id": label, "answer": answer} for label, answer in shown.items()],
                )
                questions.append(Question(request, partial(_read, part, shown)))
        grade = partial(_grade, answers, tuple(criteria), len(orders))
        return Inquiry(samples, questions, grade, self._rubric.from_row(criteria))

    def _orders_of(self, prompt: str, answers: Sequence[str]) -> list[list[str]]:
        """Return the orders of the different answers, or none if all answers are equal."""
        different = set(answers)
        orders = []
        for number in range(self._orders if len(different) > 1 else 0):
            order = sorted(different, key=lambda answer: _shuffled(number // 2, prompt, answer))  # noqa: B023
            orders.append(order[:: -1 if number % 2 else 1])
        return orders


def _shuffled(number: int, prompt: str, answer: str) -> tuple[bytes, str]:
    """Return a sort key that depends only on the contents."""
    text = f"{number} {len(prompt)} {prompt}{answer}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), answer


def _read(part: Part, shown: Mapping[str, str], text: str) -> Ranks | Failure:
    """Return the ranks in a reply.

    Args:
        shown: answers by their id in the request.
        text: text of the reply.
    """
    ranks: Ranks = {}
    try:
        for component, entry in part.entries(text, "rankings", "ranking").items():
            ranks[component] = _ranks(entry["ranking"], shown, part.place(component))
    except InvalidReply as error:
        return Failure(str(error))
    return ranks


def _ranks(ranking: Any, shown: Mapping[str, str], place: str) -> dict[str, int] | None:
    """Return the rank of each answer, or None if the ranking is null.

    Raises:
        InvalidReply: if the ranking does not contain each answer once.
    """
    if ranking is None:
        return None
    if not isinstance(ranking, list):
        raise InvalidReply(f"{place}: the judge's ranking must be a list, got {printable(str(ranking), 40)!r}")
    ranks: dict[str, int] = {}
    for rank, entry in enumerate(ranking):
        for given in entry if isinstance(entry, list) else [entry]:
            label = str(given) if isinstance(given, (str, int)) and not isinstance(given, bool) else ""
            if label not in shown:
                raise InvalidReply(f"{place}: the judge ranked {printable(str(given), 40)!r}, which is not an answer")
            if shown[label] in ranks:
                raise InvalidReply(f"{place}: the judge ranked the answer {label} twice")
            ranks[shown[label]] = rank
    for label, answer in shown.items():
        if answer not in ranks:
            raise InvalidReply(f"{place}: the judge did not rank the answer {label}")
    return ranks


def _grade(answers: Sequence[str], components: Sequence[str], orders: int, results: Sequence[Ranks]) -> list[Grade]:
    """Return one grade per sample, given the results of each order, which are one or one per criterion."""
    by_order = []
    for number in range(orders):
        size = len(results) // orders
        merged: Ranks = {}
        for result in results[number * size : (number + 1) * size]:
            merged |= result
        by_order.append(merged)
    grades = [Grade({}) for _ in answers]
    differ = []
    for component in components:
        rankings = [ranks for order in by_order if (ranks := order[component]) is not None]
        for place, reward in enumerate(_rewards(answers, rankings)):
            grades[place].rewards[component] = reward
        for first, second in zip(by_order[::2], by_order[1::2]):
            differ += _differences(first[component], second[component])
    if differ:
        grades[0].observed["judge/disagreement"] = differ
    return grades


def _rewards(answers: Sequence[str], rankings: Sequence[Mapping[str, int]]) -> list[float | None]:
    """Return the reward of each sample, which is None without a ranking."""
    rewards: list[float | None] = []
    for answer in answers:
        shares = []
        for ranks in rankings:
            own = ranks[answer]
            points = sum(1.0 if ranks[other] > own else 0.5 for other in answers if ranks[other] >= own) - 0.5
            shares.append(points / (len(answers) - 1))
        rewards.append(fmean(shares) if shares else None)
    return rewards


def _differences(first: Mapping[str, int] | None, second: Mapping[str, int] | None) -> list[float]:
    """Return for each pair of answers 1 if two rankings order it differently, else 0."""
    if first is None or second is None:
        return []
    found = []
    for one, other in combinations(first, 2):
        found.append(float(_sign(first[one] - first[other]) != _sign(second[one] - second[other])))
    return found


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
