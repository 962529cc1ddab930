"""Selection of the groups that dynamic sampling trains: groups with a training signal.

A group has a training signal, or signal for short, if the estimator gives at least one of its samples a nonzero
advantage before the batch norm. The estimator itself computes this advantage, with the weights in force. The estimator
compares samples within their group. With ``gdpo.group_by: prompt``, the estimator compares the samples of all groups in
the batch that have the same prompt tokens. REINFORCE++ without a baseline compares a sample with the whole batch, so
every reward is a signal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gdpo_nemo.algorithms.settings import PRESETS, Settings
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.environment_algorithms import config_of, part_of
from gdpo_nemo.config.rollout_checks import valid_needed
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.data.records import Group, Prompt, trajectories_of
from gdpo_nemo.rollouts.credit import advantages_of, reward_columns
from gdpo_nemo.rollouts.group_maker import MadeGroup
from gdpo_nemo.rollouts.ledger import LATE, LOW_VARIANCE, NO_SIGNAL
from gdpo_nemo.rollouts.prompt_pools import is_constant


def has_signal(group: Group, config: Config, siblings: Sequence[Group] = ()) -> bool:
    """Return True if the estimator gives a sample of the group an advantage other than 0, before the batch norm.

    The estimator gets the group and its siblings as a batch, with the rewards after shaping and without the KL. With
    ``dynamic_sampling.before_shaping``, it gets the original rewards.

    Args:
        config: config with the weights in force in ``gdpo.rewards``. See ``with_weights``.
        siblings: other groups whose samples are compared with the samples of ``group``.

    Raises:
        RunError: if a custom estimator fails or returns non-finite values.
    """
    config = config_of(config, group.prompt.environment)
    if spec_of(config).section == "teacher":  # the teacher gives every token an advantage
        return True
    gdpo = replace(config.gdpo, kl_in_reward=None)
    if gdpo.dynamic_sampling.before_shaping:
        gdpo = replace(gdpo, shaping=[])
    if _missing(gdpo) == "error":  # The update reports missing rewards, with the number of all of its samples.
        gdpo = replace(gdpo, options={**gdpo.options, "missing": "exclude"})
    config = replace(config, gdpo=gdpo)
    groups = [group, *siblings]
    samples = [t for t in trajectories_of(groups) if t.trains]
    columns = reward_columns(samples, config) if samples else {}
    if all(np.isnan(column).all() for name, column in columns.items() if gdpo.rewards.get(name)):
        return False
    return bool(advantages_of(groups, config).has_advantage[: len(group.trajectories)].any())


def _missing(gdpo: GdpoConfig) -> str:
    base = PRESETS[gdpo.preset] if gdpo.preset else Settings()
    return str(gdpo.options.get("missing", base.missing))


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
    others = trajectories_of(siblings)
    selected = []
    for index, member in enumerate(members):
        compared = Group(group.prompt, [*members[:index], *members[index + 1 :], *others])
        if has_signal(compared, config):
            selected.append(member)
    return Group(group.prompt, selected) if selected else None


def siblings_of(group: Group, groups: Iterable[Group], config: Config) -> list[Group]:
    """Return the other groups in ``groups`` whose samples are compared with the samples of ``group``."""
    if config_of(config, group.prompt.environment).gdpo.group_by == "row":
        return []
    key = _compared_by(group.prompt, config)
    return [other for other in groups if other.position != group.position and _compared_by(other.prompt, config) == key]


def _compared_by(prompt: Prompt, config: Config) -> tuple[str, bytes]:
    """Return a key that is equal for prompts whose samples are compared with ``gdpo.group_by: prompt``."""
    return part_of(config, prompt.environment), prompt.key


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

    Late groups are rejected. Dynamic sampling also rejects samples without a training signal, and
    ``rollout.selection.variance_top_p`` groups with little variance.

    Args:
        before: groups that earlier rounds of the step selected for training.
        reasons: receives the reason for each rejected group, by prompt index.
    """
    retained: list[Group] = []
    rejected: list[Group] = []
    batch = [*before, *(made_group.group for made_group in made if not is_late(made_group, config))]
    top_p = config.rollout.selection.variance_top_p
    varied = positions_of(batch) if top_p is None else top_variance(batch, config, top_p)
    for made_group in made:
        group = made_group.group
        part: Group | None = group
        if is_late(made_group, config):
            part = None
            reasons[group.position] = LATE
        elif config.gdpo.dynamic_sampling.enabled:
            part = part_with_signal(group, config, siblings_of(group, batch, config))
            if part is None:
                reasons[group.position] = NO_SIGNAL
            elif group.position not in varied:
                part = None
                reasons[group.position] = LOW_VARIANCE
        with_signal, without_signal = split_group(group, part)
        retained += with_signal
        rejected += without_signal
    return retained, rejected


def top_variance(groups: Sequence[Group], config: Config, share: float) -> set[int]:
    """Select the groups that hold most of the variance within groups, for at least one component.

    The groups of a component are the fewest groups whose variances add up to ``share`` of the sum over all groups. The
    result is their union over the components with a weight. A family of criteria counts as one component.

    Source: SNR-aware filtering with top-p (RAGEN-2, arXiv 2604.06268), which uses the variance of the total reward.

    Returns:
        The prompt indices of the selected groups.
    """
    columns: dict[tuple[str, str], np.ndarray] = {}
    for index, group in enumerate(groups):
        own = config_of(config, group.prompt.environment)
        part = part_of(config, group.prompt.environment)
        samples = [t for t in group.trajectories if t.trains]
        for name, values in (reward_columns(samples, own) if samples else {}).items():
            values = values[~np.isnan(values)]
            if own.gdpo.rewards.get(name) and len(values) and not is_constant(values):
                columns.setdefault((part, name), np.zeros(len(groups)))[index] = values.var()
    selected: set[int] = set()
    for variances in columns.values():
        selected.update(groups[index].position for index in fewest(variances, share))
    return selected


def fewest(values: np.ndarray, share: float) -> list[int]:
    """Return the indices of the fewest values that add up to ``share`` of the sum. Of equal values, the first is
    chosen.

    Args:
        values: float64 [values], 0 or more. A value of 0 is never chosen.
        share: more than 0, at most 1.
    """
    order = np.argsort(-values, kind="stable")
    mass = np.cumsum(values[order])
    if not len(values) or mass[-1] <= 0:
        return []
    # The first sum that reaches the share; the sums after the last positive value are equal.
    count = 1 + int(np.searchsorted(mass, share * mass[-1]))
    chosen: list[int] = order[:count].tolist()
    return chosen


def positions_of(groups: Iterable[Group]) -> set[int]:
    """Return the prompt indices of the groups."""
    return {group.position for group in groups}


class InFlight:
    """Prompts of the groups in flight. A finished group may still be compared with a group in flight."""

    def __init__(self, by_prompt: bool):
        self._by_prompt = by_prompt
        self._prompts: dict[int, bytes] = {}

    def add(self, position: int, prompt: Prompt) -> None:
        """Record that the group with this prompt index is being sampled."""
        if self._by_prompt:
            self._prompts[position] = prompt.key

    def remove(self, position: int) -> None:
        """Record that the group with this prompt index is finished."""
        self._prompts.pop(position, None)

    def may_have_signal(self, made: MadeGroup, ready: Iterable[MadeGroup], config: Config) -> bool:
        """Return True if a finished group has a signal or a group with the same prompt is in flight.

        Args:
            config: config with the weights in force.
            ready: groups that are finished and not trained yet.
        """
        group = made.group
        if group.prompt.key in self._prompts.values():
            return True
        siblings = siblings_of(group, (other.group for other in ready), config)
        return part_with_signal(group, config, siblings) is not None
