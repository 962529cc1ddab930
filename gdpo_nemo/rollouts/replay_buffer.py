"""Replay buffer: reuse of trained groups in later steps, in addition to new groups.

A reused group keeps its tokens, the sampler's log-probs and its rewards. The advantages of a reused group are
recomputed with the batch that trains the group again. The old log-probs of the probability ratio are also recomputed
(``loss_fn.old_logprobs: trainer``), and ``loss_fn.off_policy`` corrects their difference from the sampler's log-probs.

The selection depends only on the seed, the step and the groups that earlier steps trained. A checkpoint contains only
references to the groups. On resume, the groups are read from the sample files of the steps that trained them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Group
from gdpo_nemo.utils.errors import RunError

_STREAM = 1
"""Number in the seed that makes this random stream independent of other streams with the seed (seed, step)."""

Load = Callable[[int, Sequence[int]], Iterable[Group]]
"""Function that takes (step, prompt indices) and returns the complete groups of these indices that the step trained."""


def oldest_version(group: Group) -> int:
    """Return the version of the oldest weights that wrote a trainable token of the group.

    Raises:
        ValueError: if no sample of the group can be trained.
    """
    versions: list[int] = []
    for trajectory in group.trajectories:
        if trajectory.trains:
            sampled = [version for version, tokens in trajectory.spans if tokens > 0]
            versions += sampled or [trajectory.policy_version]
    if not versions:
        raise ValueError(f"group {group.prompt.id} has no trainable sample")
    return min(versions)


@dataclass
class _Entry:
    """Entry of the buffer, which is a group that may be reused."""

    group: Group
    step: int
    """Step that trained the group for the first time."""
    oldest: int
    uses: int = 0
    """Number of times that the group was reused."""


class ReplayBuffer:
    """Buffer of groups of earlier steps that may be reused. Not thread-safe.

    Args:
        reuse: maximum number of times that a group is reused.
        max_age: maximum age of a group: the current weight version minus the version that wrote its oldest token.
        seed: seed of the run.
    """

    def __init__(self, reuse: int, max_age: int, seed: int):
        if reuse < 1 or max_age < 1:
            raise ValueError(f"reuse {reuse} and max_age {max_age} must be at least 1")
        self.reuse = reuse
        self.max_age = max_age
        self.seed = seed
        self._entries: dict[int, _Entry] = {}
        """Groups by prompt index. Groups of earlier steps come first."""

    def __len__(self) -> int:
        """Return the number of groups in the buffer, including groups that have become too old."""
        return len(self._entries)

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Add groups that ``step`` trained for the first time, except groups without a trainable sample.

        Raises:
            ValueError: if a group has no prompt index, or is already in the buffer.
        """
        for group in sorted(groups, key=lambda group: group.position):
            if group.position < 0 or group.position in self._entries:
                raise ValueError(
                    f"group {group.prompt.id} has no prompt index or is already in the replay buffer "
                    f"(prompt index {group.position})"
                )
            if any(t.trains for t in group.trajectories):
                self._entries[group.position] = _Entry(group, step, oldest_version(group))

    def draw(self, count: int, version: int) -> list[Group]:
        """Select up to ``count`` groups at random for the step that trains weights of ``version``.

        Each selection counts as a use. Groups that are too old or have reached the maximum number of uses are removed
        from the buffer.

        Returns:
            The selected groups, ordered by prompt index.
        """
        self._entries = {p: entry for p, entry in self._entries.items() if version - entry.oldest <= self.max_age}
        positions = sorted(self._entries)
        generator = np.random.default_rng([self.seed, _STREAM, version])
        chosen = sorted(generator.permutation(len(positions))[:count])
        selected = [self._entries[positions[index]] for index in chosen]
        for entry in selected:
            entry.uses += 1
        self._entries = {p: entry for p, entry in self._entries.items() if entry.uses < self.reuse}
        return [entry.group for entry in selected]

    def state(self) -> list[list[int]]:
        """Return [step, prompt index, uses] of every group in the buffer, for a checkpoint."""
        return [[entry.step, position, entry.uses] for position, entry in self._entries.items()]

    def restore(self, state: Iterable[Sequence[Any]], load: Load) -> None:
        """Restore the buffer from the result of ``state``.

        Args:
            load: function that reads the groups of a step. The function is called once per step.

        Raises:
            RunError: if a group is not among the samples of its step.
        """
        entries = [(int(step), int(position), int(uses)) for step, position, uses in state]
        required: dict[int, list[int]] = {}
        for step, position, _ in entries:
            required.setdefault(step, []).append(position)
        found: dict[int, Group] = {}
        for step, positions in required.items():
            loaded = {group.position: group for group in load(step, positions)}
            missing = [position for position in positions if position not in loaded]
            if missing:
                raise RunError(
                    f"the samples of step {step} lack the groups with prompt indices {', '.join(map(str, missing))}, "
                    "which rollout.replay_buffer requires; restore the file or set rollout.replay_buffer.groups to 0"
                )
            found |= loaded
        self._entries = {p: _Entry(found[p], step, oldest_version(found[p]), uses) for step, p, uses in entries}
