"""Groups that were trained and are trained again, beside new ones, in later steps.

A group is used again as it was sampled: tokens, the sampler's log-probs and rewards stay. Its advantages are worked out
anew with the batch that it is trained in, and so are the log-probs that its ratio starts from
(``loss_fn.old_logprobs: trainer``); how far the sampler was from these is ``loss_fn.off_policy``'s.

What is drawn depends on the seed, the step and the groups that earlier steps trained, and on nothing else. A checkpoint
holds where the groups are, not the groups: they are read back from the samples of the step that trained them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.data.records import Group
from gdpo_nemo.errors import RunError

_STREAM = 1
"""Tells the draws apart from whatever else is seeded by (seed, step)."""

Load = Callable[[int, Sequence[int]], Iterable[Group]]
"""(step, positions) -> the groups of these positions that the step trained, with everything that training needs."""


def oldest_version(group: Group) -> int:
    """Steps behind the oldest weights that wrote a token of the group which may be trained.

    Raises:
        ValueError: none may be.
    """
    versions = [version for t in group.trajectories if t.trains for version in _versions(t.policy_version, t.spans)]
    if not versions:
        raise ValueError(f"group {group.prompt.id} has no sample that may be trained")
    return min(versions)


def _versions(oldest: int, spans: Sequence[tuple[int, int]]) -> list[int]:
    return [version for version, tokens in spans if tokens > 0] or [oldest]


@dataclass
class _Kept:
    """A group that may be drawn."""

    group: Group
    step: int
    """The step that trained it first."""
    oldest: int
    uses: int = 0
    """Times that it was drawn."""


class ReplayBuffer:
    """The groups of earlier steps that may be used again; not thread-safe.

    Args:
        reuse: times that a group may be drawn.
        max_age: steps between the weights that wrote a group's oldest token and those that it trains, at most.
        seed: of the run.
        size: groups that are kept at most, the newest; None: as many as ``max_age`` lets live.
    """

    def __init__(self, reuse: int, max_age: int, seed: int, size: int | None = None):
        if reuse < 1 or max_age < 1 or (size is not None and size < 1):
            raise ValueError(f"reuse {reuse}, max_age {max_age} and size {size} must be at least 1")
        self.reuse = reuse
        self.max_age = max_age
        self.seed = seed
        self.size = size
        self._kept: dict[int, _Kept] = {}
        """By position; those of earlier steps come first."""

    def __len__(self) -> int:
        """Groups that may be drawn, if their age allows."""
        return len(self._kept)

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Keep groups that ``step`` trained for the first time; those without a sample that may be trained are not.

        Raises:
            ValueError: a group has no position, or is there already.
        """
        for group in sorted(groups, key=lambda group: group.position):
            if group.position < 0 or group.position in self._kept:
                raise ValueError(f"group {group.prompt.id} of position {group.position} cannot be kept, or is already")
            if any(t.trains for t in group.trajectories):
                self._kept[group.position] = _Kept(group, step, oldest_version(group))
        while self.size is not None and len(self._kept) > self.size:
            del self._kept[next(iter(self._kept))]

    def draw(self, count: int, version: int) -> list[Group]:
        """Groups for the step that trains weights of ``version``, by position; fewer than ``count`` where there are
        not so many.

        Each call counts as a use. Groups that are too old by now, or used up, are forgotten.
        """
        self._kept = {p: kept for p, kept in self._kept.items() if version - kept.oldest <= self.max_age}
        positions = sorted(self._kept)
        generator = np.random.default_rng([self.seed, _STREAM, version])
        chosen = generator.permutation(len(positions))[:count]
        drawn = [self._kept[position] for position in sorted(positions[place] for place in chosen)]
        for kept in drawn:
            kept.uses += 1
        self._kept = {p: kept for p, kept in self._kept.items() if kept.uses < self.reuse}
        return [kept.group for kept in drawn]

    def state(self) -> list[list[int]]:
        """[step, position, uses] of every group, in order: what a checkpoint holds, in plain numbers."""
        return [[kept.step, position, kept.uses] for position, kept in self._kept.items()]

    def restore(self, state: Iterable[Sequence[Any]], load: Load) -> None:
        """Become what ``state`` was taken of.

        Args:
            load: gives the groups of a step back; called once a step.

        Raises:
            RunError: a group is not among the samples of its step.
        """
        entries = [(int(step), int(position), int(uses)) for step, position, uses in state]
        found: dict[int, Group] = {}
        for step in dict.fromkeys(step for step, _, _ in entries):
            wanted = [position for of, position, _ in entries if of == step]
            there: Mapping[int, Group] = {group.position: group for group in load(step, wanted)}
            missing = [position for position in wanted if position not in there]
            if missing:
                raise RunError(
                    f"the samples of step {step} lack the groups of positions {', '.join(map(str, missing))}, which "
                    "rollout.replay_buffer was to use again; set rollout.replay_buffer.groups to 0, or restore the file"
                )
            found.update((position, there[position]) for position in wanted)
        self._kept = {p: _Kept(found[p], step, oldest_version(found[p]), uses) for step, p, uses in entries}
