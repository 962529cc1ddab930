"""Families of reward components: the criteria of the rows' rubrics as arrays of slots.

Criterion j of a group is in slot j of its family. Slots of different groups are never compared, so the number of slots
is the number of criteria of the largest rubric, and not the number of different criteria in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdpo_nemo.algorithms.rubrics import Criterion, family_name, gated
from gdpo_nemo.algorithms.table import score
from gdpo_nemo.data.records import Trajectory
from gdpo_nemo.utils.errors import RunError


@dataclass(frozen=True)
class Family:
    """Rewards of a family's criteria in a batch."""

    name: str
    """Name of the family, such as ``rubric/*``."""
    rewards: np.ndarray
    """float64 [slots, trajectories], NaN for a missing reward."""
    weights: np.ndarray
    """float64 [slots, trajectories], weight of the criterion in its rubric. 0 if the row does not have it."""
    names: Sequence[tuple[str, ...]]
    """Component in each slot, for each trajectory. Trajectories of a group have the same names."""

    @property
    def scores(self) -> np.ndarray:
        """float64 [trajectories], score of each trajectory, NaN if no criterion has a reward."""
        return score(self.rewards, self.weights)

    def with_rewards(self, rewards: np.ndarray) -> Family:
        """Return the family with other rewards."""
        return replace(self, rewards=rewards)


def families_of(trajectories: Sequence[Trajectory], group_by: str) -> dict[str, Family]:
    """Return the families of the trajectories by name, after their required criteria.

    Args:
        group_by: value of ``gdpo.group_by``.

    Raises:
        RunError: if the samples of a group have different weights of a criterion.
    """
    names = dict.fromkeys(family_name(name) for t in trajectories for name in t.criteria)
    return {family: _family(family, trajectories, group_by) for family in names}


def _family(family: str, trajectories: Sequence[Trajectory], group_by: str) -> Family:
    keys: list[object] = [t.prompt.token_ids.tobytes() if group_by == "prompt" else t.prompt.id for t in trajectories]
    rubrics: dict[object, dict[str, Criterion]] = {}
    for key, trajectory in zip(keys, trajectories):
        _merge(rubrics.setdefault(key, {}), family, trajectory)
    slots = max(map(len, rubrics.values()))
    names = {key: tuple(rubric) for key, rubric in rubrics.items()}
    weights = {}
    for key, rubric in rubrics.items():
        weights[key] = [criterion.weight for criterion in rubric.values()] + [0.0] * (slots - len(rubric))
    rewards = np.full((slots, len(trajectories)), np.nan)
    for row, (key, trajectory) in enumerate(zip(keys, trajectories)):
        found = gated(trajectory.rewards, trajectory.criteria, family)
        rewards[: len(names[key]), row] = [found.get(name, np.nan) for name in names[key]]
    return Family(family, rewards, np.array([weights[key] for key in keys]).T, [names[key] for key in keys])


def _merge(rubric: dict[str, Criterion], family: str, trajectory: Trajectory) -> None:
    """Add the criteria of a trajectory to the rubric of its group."""
    for name, criterion in trajectory.criteria.items():
        if family_name(name) != family:
            continue
        known = rubric.setdefault(name, criterion)
        if known.weight != criterion.weight:
            raise RunError(
                f"criterion {name!r} of prompt {trajectory.prompt.id} has the weights {known.weight:g} and "
                f"{criterion.weight:g}; all samples of a group must have the same rubric"
            )


def slots_of(columns: Mapping[str, np.ndarray], families: Mapping[str, Family]) -> dict[str, np.ndarray]:
    """Return the columns for ``compute_advantages``, in which a family has the shape [trajectories, slots]."""
    return {name: column.T if name in families else column for name, column in columns.items()}
