"""Which groups dynamic sampling retains: those of which some sample gets an advantage from the comparisons that the
estimator makes.

Samples are compared within their group, with ``gdpo.group_by: prompt`` within all groups of the batch that have the
same prompt tokens. REINFORCE++ without a baseline compares a sample with the batch, so every reward is a signal; and
the preset verl (``singleton: raw``) passes the reward of a sample that is alone on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithms.groups import moments
from gdpo_nemo.algorithms.settings import PRESETS, Settings
from gdpo_nemo.algorithms.table import build_table
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.rollouts.group_maker import MadeGroup
from gdpo_nemo.rollouts.learning import reward_columns
from gdpo_nemo.rollouts.turn_credit import turn_rows


def has_signal(group: Group, config: Config, siblings: Sequence[Group] = ()) -> bool:
    """Return whether some sample of the group has a weighted component that varies among the samples it is compared
    with, as shaped (or ``dynamic_sampling.before_shaping``).

    Args:
        siblings: other groups whose samples are compared with those of ``group``.
    """
    if config.gdpo.dynamic_sampling.before_shaping:
        config = replace(config, gdpo=replace(config.gdpo, shaping=[]))
    own = [t for t in group.trajectories if t.trains]
    members = [*own, *(t for sibling in siblings for t in sibling.trajectories if t.trains)]
    if not own:
        return False
    ids = np.zeros(len(members), np.int64)
    of_group = np.arange(len(members)) < len(own)
    columns = _weighted_columns(members, config)
    if config.gdpo.credit == "turn":
        rows = turn_rows(members, columns, config.gdpo.discount)
        ids, columns = rows.ids(ids, config.gdpo.turn_baseline), rows.columns
        of_group = of_group[rows.trajectory]
    if all(np.isnan(column).all() for column in columns.values()):
        return False
    if _compares_with_the_batch(config):
        return any(bool((~np.isnan(column) & of_group).any()) for column in columns.values())
    return _varies(columns, ids, of_group, _singleton(config) == "raw")


def _weighted_columns(members: Sequence[Trajectory], config: Config) -> dict[str, np.ndarray]:
    return {name: column for name, column in reward_columns(members, config).items() if config.gdpo.rewards.get(name)}


def _varies(columns: Mapping[str, np.ndarray], ids: np.ndarray, rows: np.ndarray, raw: bool) -> bool:
    """Return whether one of the rows has a component that is not constant among the rows of its id; with ``raw`` also
    whether it is the only one that has it."""
    table = build_table(columns, ids)
    mine = table.groups.take(rows)
    for column, present in zip(table.columns, table.present, strict=True):
        stats = moments(table.groups, column, present)
        speaks = ~stats.constant | (stats.count == 1) if raw else ~stats.constant
        if (present & mine & table.groups.rows(speaks)).any():
            return True
    return False


def _compares_with_the_batch(config: Config) -> bool:
    gdpo = config.gdpo
    return gdpo.estimator == "reinforce_plus_plus" and gdpo.options.get("minus_baseline") is False


def _singleton(config: Config) -> str:
    gdpo = config.gdpo
    base = PRESETS[gdpo.preset] if gdpo.preset else Settings()
    return str(gdpo.options.get("singleton", base.singleton))


def part_with_signal(group: Group, config: Config, siblings: Sequence[Group] = ()) -> Group | None:
    """Return the part of a group that dynamic sampling retains: the whole or nothing, or the samples whose fellows vary
    (``leave_one_out``). Args: as ``has_signal``."""
    if not config.gdpo.dynamic_sampling.leave_one_out:
        return group if has_signal(group, config, siblings) else None
    members = [t for t in group.trajectories if t.trains]
    others = [t for sibling in siblings for t in sibling.trajectories]
    fellows = [Group(group.prompt, [*members[:place], *members[place + 1 :], *others]) for place in range(len(members))]
    kept = [member for member, compared in zip(members, fellows) if has_signal(compared, config)]
    return Group(group.prompt, kept) if kept else None


def siblings_of(group: Group, groups: Iterable[Group], config: Config) -> list[Group]:
    """Return the groups of a batch, without ``group``, whose samples are compared with its samples."""
    if config.gdpo.group_by == "row":
        return []
    tokens = _tokens(group.prompt)
    return [other for other in groups if other.position != group.position and _tokens(other.prompt) == tokens]


def _tokens(prompt: Prompt) -> bytes:
    return prompt.token_ids.tobytes()


def retained_and_rest(group: Group, part: Group | None) -> tuple[list[Group], list[Group]]:
    """Return ``part`` and the other samples of its group, each as a list of at most one group of that position."""
    chosen = {t.sample_index for t in part.trajectories} if part else set()
    rest = [t for t in group.trajectories if t.sample_index not in chosen]
    retained = [Group(group.prompt, part.trajectories, group.position)] if part else []
    return retained, [Group(group.prompt, rest, group.position)] if rest else []


class InFlight:
    """The prompts of the groups that are being sampled, which a group that is done may yet be compared with."""

    def __init__(self, config: Config):
        self._config = config
        self._prompts: dict[int, bytes] = {}

    def add(self, position: int, prompt: Prompt) -> None:
        """Note that the group of a position is being sampled."""
        if self._config.gdpo.group_by == "prompt":
            self._prompts[position] = _tokens(prompt)

    def remove(self, position: int) -> None:
        """Note that the group of a position is done."""
        self._prompts.pop(position, None)

    def may_have_signal(self, made: MadeGroup, ready: Iterable[MadeGroup]) -> bool:
        """Return whether a group has a signal, or gets one if a group in flight with the same prompt earns other
        rewards.

        Args:
            made: a group that is done.
            ready: groups that are done and not trained yet.
        """
        group = made.group
        if _tokens(group.prompt) in self._prompts.values():
            return True
        siblings = siblings_of(group, (other.group for other in ready), self._config)
        return part_with_signal(group, self._config, siblings) is not None
