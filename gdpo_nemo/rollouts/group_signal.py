"""Selection of the groups that dynamic sampling trains: groups with a training signal.

A group has a training signal, or signal for short, if the estimator gives at least one of its samples a nonzero
advantage. The estimator compares samples within their group. With ``gdpo.group_by: prompt``, the estimator compares the
samples of all groups in the batch that have the same prompt tokens. REINFORCE++ without a baseline compares a sample
with the whole batch, so every reward is a signal. The preset verl (``singleton: raw``) uses the raw reward as the
advantage of a sample that is not compared with other samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithms.settings import PRESETS, Settings
from gdpo_nemo.algorithms.table import build_table, moments
from gdpo_nemo.config.rollout_checks import valid_needed
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.rollouts.credit import reward_columns, turn_rows
from gdpo_nemo.rollouts.group_maker import MadeGroup
from gdpo_nemo.rollouts.ledger import LATE, NO_SIGNAL


def has_signal(group: Group, config: Config, siblings: Sequence[Group] = ()) -> bool:
    """Return True if at least one weighted component of the group varies among the samples compared with each other.

    The check uses the rewards after shaping. With ``dynamic_sampling.before_shaping``, the check uses the original
    rewards.

    Args:
        siblings: other groups whose samples are compared with the samples of ``group``.
    """
    if config.gdpo.dynamic_sampling.before_shaping:
        config = replace(config, gdpo=replace(config.gdpo, shaping=[]))
    samples = [t for t in group.trajectories if t.trains]
    members = [*samples, *(t for sibling in siblings for t in sibling.trajectories if t.trains)]
    if not samples:
        return False
    ids = np.zeros(len(members), np.int64)
    of_group = np.arange(len(members)) < len(samples)
    columns = _weighted_columns(members, config)
    if config.gdpo.credit == "turn":
        rows = turn_rows(members, columns, config.gdpo.discount)
        ids, columns = rows.ids(ids, config.gdpo.turn_baseline), rows.columns
        of_group = of_group[rows.trajectory]
    if all(np.isnan(column).all() for column in columns.values()):
        return False
    if _compares_with_batch(config.gdpo):
        return any(bool((~np.isnan(column) & of_group).any()) for column in columns.values())
    return _varies(columns, ids, of_group, _singleton(config.gdpo) == "raw")


def _weighted_columns(members: Sequence[Trajectory], config: Config) -> dict[str, np.ndarray]:
    # A scheduled component also counts while its weight is 0, because this check does not depend on the step.
    weighted = {name for name, weight in config.gdpo.rewards.items() if weight or name in config.gdpo.schedules}
    return {name: column for name, column in reward_columns(members, config).items() if name in weighted}


def _varies(columns: Mapping[str, np.ndarray], ids: np.ndarray, rows: np.ndarray, raw: bool) -> bool:
    """Return True if a selected row has a component that is not constant among the rows with the same id.

    Args:
        ids: id of the comparison group of each row. Shape: [rows].
        rows: selected rows. Shape: bool [rows].
        raw: True if a component that occurs in only one row of a comparison group is also a signal.
    """
    table = build_table(columns, ids)
    selected = table.groups.take(rows)
    for column, present in zip(table.columns, table.present, strict=True):
        stats = moments(table.groups, column, present)
        varies = ~stats.constant | (stats.count == 1) if raw else ~stats.constant
        if (present & selected & table.groups.rows(varies)).any():
            return True
    return False


def _compares_with_batch(gdpo: GdpoConfig) -> bool:
    return gdpo.estimator == "reinforce_plus_plus" and gdpo.options.get("minus_baseline") is False


def _singleton(gdpo: GdpoConfig) -> str:
    base = PRESETS[gdpo.preset] if gdpo.preset else Settings()
    return str(gdpo.options.get("singleton", base.singleton))


def part_with_signal(group: Group, config: Config, siblings: Sequence[Group] = ()) -> Group | None:
    """Return the samples of a group that dynamic sampling trains, or None if no sample is trained.

    Without ``dynamic_sampling.leave_one_out``, all samples of a group with a signal are trained. With this option, a
    sample is trained if the other samples in the comparison have a signal.

    Args:
        siblings: other groups whose samples are compared with the samples of ``group``.
    """
    if not config.gdpo.dynamic_sampling.leave_one_out:
        return group if has_signal(group, config, siblings) else None
    members = [t for t in group.trajectories if t.trains]
    others = [t for sibling in siblings for t in sibling.trajectories]
    selected = []
    for index, member in enumerate(members):
        compared = Group(group.prompt, [*members[:index], *members[index + 1 :], *others])
        if has_signal(compared, config):
            selected.append(member)
    return Group(group.prompt, selected) if selected else None


def siblings_of(group: Group, groups: Iterable[Group], gdpo: GdpoConfig) -> list[Group]:
    """Return the other groups in ``groups`` whose samples are compared with the samples of ``group``."""
    if gdpo.group_by == "row":
        return []
    tokens = _tokens(group.prompt)
    return [other for other in groups if other.position != group.position and _tokens(other.prompt) == tokens]


def _tokens(prompt: Prompt) -> bytes:
    return prompt.token_ids.tobytes()


def split_group(group: Group, part: Group | None) -> tuple[list[Group], list[Group]]:
    """Split a group into the samples of ``part`` and the remaining samples.

    Each result is a list with one group, or an empty list if the group would not contain any samples.
    """
    chosen = {t.sample_index for t in part.trajectories} if part else set()
    rest = [t for t in group.trajectories if t.sample_index not in chosen]
    retained = [Group(group.prompt, part.trajectories, group.position)] if part else []
    return retained, [Group(group.prompt, rest, group.position)] if rest else []


def is_late(made: MadeGroup, config: Config) -> bool:
    """Return True if fewer than ``rollout.min_valid`` samples of a group finished in time."""
    return made.valid < valid_needed(config)


def split_groups(
    made: Sequence[MadeGroup], before: Sequence[Group], config: Config, reasons: dict[int, str]
) -> tuple[list[Group], list[Group]]:
    """Split the verified groups of a synchronous step into groups to train and rejected groups.

    Late groups are rejected. Dynamic sampling also rejects samples without a training signal.

    Args:
        before: groups that earlier rounds of the step selected for training.
        reasons: receives the reason for each rejected group, by prompt index.
    """
    retained: list[Group] = []
    rejected: list[Group] = []
    batch = [*before, *(made_group.group for made_group in made if not is_late(made_group, config))]
    for made_group in made:
        group = made_group.group
        part: Group | None = group
        if is_late(made_group, config):
            part = None
            reasons[group.position] = LATE
        elif config.gdpo.dynamic_sampling.enabled:
            part = part_with_signal(group, config, siblings_of(group, batch, config.gdpo))
            if part is None:
                reasons[group.position] = NO_SIGNAL
        with_signal, without_signal = split_group(group, part)
        retained += with_signal
        rejected += without_signal
    return retained, rejected


class InFlight:
    """Prompts of the groups in flight. A finished group may still be compared with a group in flight."""

    def __init__(self, config: Config):
        self._config = config
        self._prompts: dict[int, bytes] = {}

    def add(self, position: int, prompt: Prompt) -> None:
        """Record that the group with this prompt index is being sampled."""
        if self._config.gdpo.group_by == "prompt":
            self._prompts[position] = _tokens(prompt)

    def remove(self, position: int) -> None:
        """Record that the group with this prompt index is finished."""
        self._prompts.pop(position, None)

    def may_have_signal(self, made: MadeGroup, ready: Iterable[MadeGroup]) -> bool:
        """Return True if a finished group has a signal or a group with the same prompt is in flight.

        Args:
            ready: groups that are finished and not trained yet.
        """
        group = made.group
        if _tokens(group.prompt) in self._prompts.values():
            return True
        siblings = siblings_of(group, (other.group for other in ready), self._config.gdpo)
        return part_with_signal(group, self._config, siblings) is not None
