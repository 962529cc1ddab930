"""What an environment may return, enforced: a reward is a finite number or nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Mapping, Sequence

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.errors import RunError


def checked_verdicts(reward_names: Sequence[str], trajectories: Sequence[Trajectory], verdicts: Any) -> list[Verdict]:
    """The verdicts with rewards as floats and NaN as None.

    Raises RunError for a wrong number of verdicts, something that is no verdict, a component that was not announced
    in ``reward_names``, and a value that is no number or not finite.
    """
    verdicts = list(verdicts) if isinstance(verdicts, (list, tuple)) else verdicts
    if not isinstance(verdicts, list) or not all(isinstance(verdict, Verdict) for verdict in verdicts):
        raise RunError(f"verify must return a list of Verdict, not {type(verdicts).__name__}")
    if len(verdicts) != len(trajectories):
        raise RunError(f"verify returned {len(verdicts)} verdicts for {len(trajectories)} trajectories")
    return [_checked(reward_names, trajectory, verdict) for trajectory, verdict in zip(trajectories, verdicts)]


def reward_value(value: Any, what: str) -> float | None:
    """A reward as float; None and NaN ('not applicable') become None. Raises RunError naming ``what``."""
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise RunError(f"{what} is {value[:40]!r}, which is no number")
    try:
        number = float(value)
    except Exception:
        raise RunError(f"{what} is of type {type(value).__name__}, which is no number") from None
    if math.isinf(number):
        raise RunError(f"{what} is infinite ({number})")
    return None if math.isnan(number) else number


def _checked(reward_names: Sequence[str], trajectory: Trajectory, verdict: Verdict) -> Verdict:
    where = f"sample {trajectory.sample_index} of prompt {trajectory.prompt.id}"
    rewards = _checked_rewards(reward_names, verdict.rewards, where)
    if len(verdict.turn_rewards) not in (0, trajectory.turns):
        raise RunError(
            f"verify returned turn_rewards of {len(verdict.turn_rewards)} turns for {where}, which has "
            f"{trajectory.turns}"
        )
    of_turns = [
        _checked_rewards(reward_names, earned, f"turn {turn} of {where}")
        for turn, earned in enumerate(verdict.turn_rewards, 1)
    ]
    for component in dict.fromkeys(name for earned in of_turns for name in earned):
        if component not in rewards:
            raise RunError(f"verify returned turn_rewards of {component!r} for {where}, whose rewards do not have it")
    return replace(verdict, rewards=rewards, turn_rewards=tuple(of_turns))


def _checked_rewards(
    reward_names: Sequence[str], rewards: Mapping[str, float | None], where: str
) -> dict[str, float | None]:
    for component in rewards:
        if component not in reward_names:
            raise RunError(f"verify returned the reward {component!r}, which is not in its reward_names")
    return {name: reward_value(value, f"reward {name!r} of {where}") for name, value in rewards.items()}
