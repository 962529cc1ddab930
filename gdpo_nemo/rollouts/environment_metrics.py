"""Metrics of a step by environment, for runs with several environments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gdpo_nemo.config.environment_algorithms import config_of
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group, trajectories_of
from gdpo_nemo.rollouts.credit import reward_columns, trajectory_groups
from gdpo_nemo.rollouts.prompt_pools import is_constant

METRICS = {
    "rollout/groups/NAME": (
        "groups",
        "Groups of environment NAME in the step's batch, in a run with several environments",
    ),
}


def environment_metrics(groups: Sequence[Group], config: Config) -> dict[str, float]:
    """Return the metrics ``rollout/groups/<environment>`` and ``reward/<environment>/<component>/...`` of a batch.

    The latter are ``mean``, ``std``, ``missing`` and ``dead_groups``, as for all samples (``algorithms.Diagnostics``).
    They are absent for components that apply to no sample of the environment. The result is empty if all training rows
    have the same environment.
    """
    data = config.data.train
    if len(config.env) < 2 or (data.environment is not None and data.environment_key is None):
        return {}
    row = {}
    for environment in config.env:
        members = [group for group in groups if group.prompt.environment == environment]
        row[f"rollout/groups/{environment}"] = float(len(members))
        own = config_of(config, environment)
        trajectories = trajectories_of(members)
        valid = np.array([t.trains for t in trajectories], bool)
        ids = trajectory_groups(members, own.gdpo.group_by)
        for name, column in (reward_columns(trajectories, own) if members else {}).items():
            row |= _statistics(f"{environment}/{name}", column[valid], ids[valid])
    return row


def _statistics(name: str, rewards: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Return the metrics of a component.

    Args:
        rewards: float64 [samples], NaN where the component does not apply.
        ids: int64 [samples], group of each sample.
    """
    present = ~np.isnan(rewards)
    values = rewards[present]
    if not len(values):
        return {}
    row = {f"reward/{name}/mean": float(values.mean()), f"reward/{name}/missing": 1.0 - len(values) / len(rewards)}
    if len(values) > 1:
        row[f"reward/{name}/std"] = float(values.std(ddof=1))
    groups = np.unique(ids[present])
    if len(values) > len(groups):  # Groups of one sample, as with ppo, have no signal to lose.
        row[f"reward/{name}/dead_groups"] = float(
            np.mean([is_constant(values[ids[present] == group]) for group in groups])
        )
    return row
