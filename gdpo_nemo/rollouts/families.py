"""Families of reward components: the criteria of the rows' rubrics as arrays of slots.

Criterion j of a group is in slot j of its family. Slots of different groups are never compared, so the number of slots
is the number of criteria of the largest rubric, and not the number of different criteria in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from gdpo_nemo.algorithms.rubrics import Criterion, family_name, gated
from gdpo_nemo.algorithms.table import score
from gdpo_nemo.algorithms.weighting import RowRewards, RuleRunner
from gdpo_nemo.data.records import Group, Trajectory
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
    factors: np.ndarray
    """float64 [slots, trajectories], factor of ``gdpo.weighting`` in the weight of the criterion."""
    names: Sequence[tuple[str, ...]]
    """Component in each slot, for each trajectory. Trajectories of a group have the same names."""

    @property
    def scores(self) -> np.ndarray:
        """float64 [trajectories], score of each trajectory, NaN if no criterion has a reward."""
        return score(self.rewards, self.weights)

    @property
    def trained_weights(self) -> np.ndarray:
        """float64 [slots, trajectories], weights of the criteria in the advantages."""
        return np.asarray(self.weights * self.factors)

    def with_rewards(self, rewards: np.ndarray) -> Family:
        """Return the family with other rewards."""
        return replace(self, rewards=rewards)


def group_key(trajectory: Trajectory, group_by: str) -> object:
    """Return a value that is equal for the trajectories of a group.

    Args:
        group_by: value of ``gdpo.group_by``.
    """
    prompt = trajectory.prompt
    return prompt.key if group_by == "prompt" else prompt.id


def families_of(trajectories: Sequence[Trajectory], group_by: str) -> dict[str, Family]:
    """Return the families of the trajectories by name, after their required criteria.

    Args:
        group_by: value of ``gdpo.group_by``.

    Raises:
        RunError: if the samples of a group have different weights of a criterion.
    """
    rubrics: dict[object, dict[str, dict[str, Criterion]]] = {}
    keys: list[object] = []
    latest: dict[object, dict[str, Criterion]] = {}
    for trajectory in trajectories:
        key = group_key(trajectory, group_by)
        keys.append(key)
        rubric = rubrics.setdefault(key, {})
        # The samples of a group usually have the same criteria, which need to be read only once.
        if trajectory.criteria != latest.get(key):
            _merge(rubric, trajectory)
        latest[key] = trajectory.criteria
    names = dict.fromkeys(chain.from_iterable(rubrics.values()))
    return {name: _family(name, trajectories, keys, rubrics) for name in names}


def weigh_criteria(groups: Sequence[Group], runner: RuleRunner | None, step: int) -> None:
    """Set ``Criterion.factor`` in all trajectories of a step, to 1 if the rule has no factors for criteria.

    Args:
        runner: rule of ``gdpo.weighting``, or None.
        step: number of the step, for messages.
    """
    if runner is not None and not runner.rule.weighs_criteria:
        runner = None
    for group in groups:
        criteria: dict[str, Criterion] = {}
        for trajectory in group.trajectories:
            criteria |= trajectory.criteria
        # Recorded samples have the factors of their run.
        if runner is None and all(criterion.factor == 1.0 for criterion in criteria.values()):
            continue
        factors = {} if runner is None else _factors(group, criteria, runner, step)
        for name, criterion in criteria.items():
            criteria[name] = replace(criterion, factor=factors.get(name, 1.0))
        for trajectory in group.trajectories:
            trajectory.criteria = {name: criteria[name] for name in trajectory.criteria}


def _factors(group: Group, criteria: Mapping[str, Criterion], runner: RuleRunner, step: int) -> dict[str, float]:
    """Return the factors of a group's criteria, each of which depends on the criteria of its family."""
    trained = [trajectory for trajectory in group.trajectories if trajectory.trains]
    factors: dict[str, float] = {}
    for family in dict.fromkeys(map(family_name, criteria)):
        weights = {name: criterion.weight for name, criterion in criteria.items() if family_name(name) == family}
        rewards = {}
        for name in weights:
            rewards[name] = np.array([t.rewards.get(name) for t in trained], np.float64)
        factors |= runner.criterion_factors(step, RowRewards(group.prompt.id, weights, rewards))
    return factors


def _merge(rubric: dict[str, dict[str, Criterion]], trajectory: Trajectory) -> None:
    """Add the criteria of a trajectory to the rubric of its group, which contains the criteria by family."""
    for name, criterion in trajectory.criteria.items():
        known = rubric.setdefault(family_name(name), {}).setdefault(name, criterion)
        if known.weight != criterion.weight:
            raise RunError(
                f"criterion {name!r} of prompt {trajectory.prompt.id} has the weights {known.weight:g} and "
                f"{criterion.weight:g}; all samples of a group must have the same rubric"
            )


def _family(
    name: str,
    trajectories: Sequence[Trajectory],
    keys: Sequence[object],
    rubrics: Mapping[object, Mapping[str, Mapping[str, Criterion]]],
) -> Family:
    """Return a family of the trajectories. ``keys`` contains the key of each trajectory's rubric."""
    slots = max(len(rubric.get(name, ())) for rubric in rubrics.values())
    components, weights, factors, has_gate = {}, {}, {}, {}
    for key, rubric in rubrics.items():
        criteria = rubric.get(name, {})
        components[key] = tuple(criteria)
        weights[key] = [criterion.weight for criterion in criteria.values()] + [0.0] * (slots - len(criteria))
        factors[key] = [criterion.factor for criterion in criteria.values()] + [1.0] * (slots - len(criteria))
        has_gate[key] = any(criterion.required for criterion in criteria.values())
    rewards = np.full((len(trajectories), slots), np.nan)
    for row, (key, trajectory) in enumerate(zip(keys, trajectories)):
        found: Mapping[str, float | None] = trajectory.rewards
        if has_gate[key]:
            found = gated(trajectory.rewards, trajectory.criteria, name)
        rewards[row, : len(components[key])] = [found.get(component) for component in components[key]]
    return Family(
        name,
        rewards.T,
        np.array([weights[key] for key in keys]).T,
        np.array([factors[key] for key in keys]).T,
        [components[key] for key in keys],
    )


def criterion_terms(
    terms: Mapping[str, np.ndarray], trajectories: Sequence[Trajectory], group_by: str
) -> list[dict[str, float]]:
    """Return the terms of each trajectory's criteria, by component.

    Args:
        terms: terms of each family's criteria (``Advantages.criteria``): float64 [trajectories, slots].
        group_by: value of ``gdpo.group_by``.
    """
    found: list[dict[str, float]] = [{} for _ in trajectories]
    for name, family in families_of(trajectories, group_by).items():
        for own, trajectory, names, row in zip(found, trajectories, family.names, terms[name].tolist()):
            own.update(pair for pair in zip(names, row) if pair[0] in trajectory.criteria)
    return found


def slots_of(columns: Mapping[str, np.ndarray], families: Mapping[str, Family]) -> dict[str, np.ndarray]:
    """Return the columns for ``compute_advantages``, in which a family has the shape [trajectories, slots]."""
    return {name: column.T if name in families else column for name, column in columns.items()}
