"""Criteria and rewards from the evaluations of single criteria in replies of NeMo Gym's rubric servers.

The servers ``multichallenge`` and ``inverse_if`` list their evaluations in ``rubric_evaluations``, and
``finance_agent_v2`` in ``rubric_judgements``. An evaluation has the criterion's text, its score, and optionally its id
and weight (``algorithms.rubric_formats``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdpo_nemo.algorithms.rubric_formats import canonical
from gdpo_nemo.algorithms.rubrics import Criterion, member, read_rubric
from gdpo_nemo.environments.server_replies import Failure, FailureKind, finite_number, printable
from gdpo_nemo.utils.errors import ConfigError

PATH = "rubric_evaluations"
"""Default path of the evaluations in a reply."""


def read_evaluations(value: Any, path: str, family: str) -> tuple[dict[str, float | None], dict[str, Criterion]]:
    """Return the rewards and the criteria of a family by component, from the evaluations in a reply.

    A criterion without a score has the reward None. A criterion without an id gets its position, counted from 1.

    Args:
        value: list of evaluations.
        path: path of the list in the reply, for error messages.
        family: name of the family, such as ``rubric/*``.

    Raises:
        Failure: BAD_REPLY if the evaluations are invalid.
    """
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        text = printable(str(value), 40)
        raise Failure(FailureKind.BAD_REPLY, f"expected a list of evaluations as {path}, got {text!r}")
    entries = []
    try:
        for position, entry in enumerate(value, 1):
            found = canonical(entry, strict=False)
            # inverse_if returns an empty id if the row has none.
            entries.append({**found, "id": found.get("id") or str(position)})
        criteria = read_rubric(entries)
    except ConfigError as error:
        raise Failure(FailureKind.BAD_REPLY, f"{path}: {printable(str(error))}") from None
    rewards: dict[str, float | None] = {}
    for name, entry in zip(criteria, value):
        score = entry.get("score")
        subject = f"the score of {name} in {path}"
        rewards[member(family, name)] = None if score is None else finite_number(score, subject)
    return rewards, {member(family, name): criterion for name, criterion in criteria.items()}
