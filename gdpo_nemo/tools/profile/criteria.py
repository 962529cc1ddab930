"""Profile of a family's criteria: shares that are met, dead or missing, and the repeatability of the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gdpo_nemo.algorithms.rubrics import criterion_id
from gdpo_nemo.data.records import Group, Trajectory, trajectories_of
from gdpo_nemo.rollouts.families import Family, families_of
from gdpo_nemo.tools.profile.reward_profile import noise_of

SHOWN = 5
"""Largest number of criteria that are listed."""
_LONGEST = 80
"""Number of characters that are shown of a criterion."""


class Worst(NamedTuple):
    """A criterion of a row that is dead or has changing verdicts."""

    row: str
    criterion: str
    """Id and beginning of the text."""
    problem: str


@dataclass(frozen=True)
class CriteriaProfile:
    """Measurements of the verdicts on a family's criteria, before required criteria are applied.

    A criterion is counted once for each row that has it.
    """

    criteria: int
    met: float
    """Share of the verdicts that are 1, or 0 for a negative weight. NaN without verdicts."""
    dead: float
    """Share of the criteria with equal verdicts on all samples of the row. NaN without verdicts."""
    missing: float
    """Share of the samples and criteria without a verdict."""
    noise: float | None
    """Share of the variance of the criteria's z-scores that changes when the same samples are verified again. None if
    not measured."""
    agreement: float | None
    """Share of the verdicts that are equal when the same samples are verified again. None if not measured."""
    worst: list[Worst]
    """Criteria whose verdicts change most, then dead criteria with the largest weights, at most ``SHOWN``."""


def profile_criteria(
    groups: Sequence[Group], repeats: Sequence[Sequence[Trajectory]], repeated: np.ndarray
) -> dict[str, CriteriaProfile]:
    """Return the profile of each family.

    Args:
        groups: verified groups.
        repeats: the samples of the groups with the rewards of each further verification.
        repeated: bool [verifications, samples], False for samples that a further verification could not verify.
    """
    samples = trajectories_of(groups)
    valid = np.array([sample.trains for sample in samples])
    again = [families_of(_ungated(verified), "row") for verified in repeats]
    found = {}
    for name, family in families_of(_ungated(samples), "row").items():
        others = np.array([families[name].rewards for families in again]).reshape(len(again), *family.rewards.shape)
        found[name] = _profile(family, others, repeated, groups, valid)
    return found


def _ungated(samples: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the samples without required criteria, whose rewards in a family are the verdicts."""
    found = []
    for sample in samples:
        criteria = {name: replace(criterion, required=False) for name, criterion in sample.criteria.items()}
        found.append(replace(sample, criteria=criteria))
    return found


@dataclass(frozen=True)
class _Judged:
    """Verdicts on a criterion of a row. The row has at least one."""

    row: str
    name: str
    text: str
    weight: float
    verdicts: np.ndarray
    """float64 [verdicts]"""
    changed: float
    """Share of the verdicts that differ when the same samples are verified again. 0 if not measured."""

    @property
    def is_dead(self) -> bool:
        return bool(np.ptp(self.verdicts) == 0)

    @property
    def worst(self) -> Worst:
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}..."
        problem = f"{self.changed:.0%} of the verdicts change" if self.changed else f"always {self.verdicts[0]:g}"
        return Worst(self.row, f"{criterion_id(self.name)}: {text}" if text else criterion_id(self.name), problem)


def _profile(
    family: Family, again: np.ndarray, repeated: np.ndarray, groups: Sequence[Group], valid: np.ndarray
) -> CriteriaProfile:
    """Return the profile of a family.

    Args:
        again: rewards in further verifications: float64 [verifications, slots, samples].
        valid: bool [samples], False for samples that could not be verified.
    """
    found, start = [], 0
    for group in groups:
        rows = slice(start, start := start + len(group.trajectories))
        for slot, name in enumerate(family.names[rows.start]):
            present = valid[rows] & ~np.isnan(family.rewards[slot, rows])
            if present.any():
                verdicts = family.rewards[slot, rows][present]
                compared = repeated[:, rows][:, present]
                changes = (again[:, slot, rows][:, present] != verdicts) & compared
                share = float(changes.sum() / max(1, compared.sum()))
                criterion = group.trajectories[0].criteria[name]
                weight = criterion.weight
                found.append(_Judged(group.prompt.id, name, criterion.text, weight, verdicts, share))
    noise, changed = _repeatability(family, again, repeated, groups, valid)
    problems = [one for one in found if one.changed or one.is_dead]
    problems.sort(key=lambda one: (-one.changed, -abs(one.weight)))
    judged = valid & (family.weights != 0)
    verdicts = family.rewards[judged]
    met = verdicts == np.where(family.weights > 0, 1.0, 0.0)[judged]
    present = ~np.isnan(verdicts)
    return CriteriaProfile(
        len(found),
        float(met[present].mean()) if found else math.nan,
        float(np.mean([one.is_dead for one in found])) if found else math.nan,
        float(1 - present.mean()) if len(present) else math.nan,
        noise,
        None if changed is None else 1 - changed,
        [one.worst for one in problems[:SHOWN]],
    )


def _repeatability(
    family: Family, again: np.ndarray, repeated: np.ndarray, groups: Sequence[Group], valid: np.ndarray
) -> tuple[float | None, float | None]:
    """Return the result of ``noise_of``, in which each criterion of a row has its own z-scores."""
    slots = len(family.rewards)
    rows = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    ids = (np.arange(slots)[:, None] * len(groups) + rows).ravel()
    judged = (valid & (family.weights != 0)).ravel()
    return noise_of(
        family.rewards.ravel(), again.reshape(len(again), family.rewards.size), judged, np.tile(repeated, slots), ids
    )
