"""The face that rollouts see of the environments, whether they run in one pool, in several, or on other nodes."""

from __future__ import annotations

from collections import Counter
from typing import Protocol, Sequence

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep


class EnvironmentExecutor(Protocol):
    """Runs the environments of a config: ``EnvironmentPool``, ``EnvironmentPools`` or ``EnvironmentNodes``."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. Raises RunError where an environment's author has to act."""
        ...

    def step(self, steps: Sequence[EpisodeStep]) -> list[EpisodeReply]:
        """Return one reply per episode, in order. Raises RunError as ``verify`` does."""
        ...

    async def step_one(self, step: EpisodeStep) -> EpisodeReply:
        """Return the reply to one step, with no thread waiting where a server does it. Raises as ``step``."""
        ...

    def abandon(self, step: EpisodeStep) -> None:
        """Release what servers hold for an episode that nobody will step again."""
        ...

    def take_recoveries(self) -> Counter[str]:
        """What was done again or replaced since the last call, a sentence each, and how often."""
        ...

    def close(self) -> None:
        """End the worker processes; calls under way raise RunError."""
        ...
