"""Limits on the number of outstanding groups: the hard bound from staleness, and the adaptive depth below this bound.

Both the rollout scheduler and the simulator in ``planning`` use these limits.
"""

from __future__ import annotations

from math import ceil

from gdpo_nemo.config.rollout_checks import admission_bound

WAITING = 0.05
"""Fraction of a step that the trainer may wait for its batch before the depth grows."""
_LONG_WAIT = 0.5
"""Fraction of a step. If the trainer waits longer, the depth may grow again after one step. If the depth has become too
large, it shrinks later."""


def outstanding_bound(groups: int, max_staleness: int, window: int) -> int:
    """Return the maximum number of groups that may be admitted and not yet trained (``admission_bound``).

    With this bound, no token is older than ``max_staleness`` when it is trained.

    Args:
        groups: P, number of groups that a step trains.
        max_staleness: S, maximum age of a token in steps.
        window: W. At most W - 1 later groups may overtake a group. If S is 0, W must be 1.

    Raises:
        ValueError: if the bound is less than one batch, so that a step could never start.
    """
    bound = admission_bound(groups, max_staleness, window)
    if window < 1 or bound < groups:
        raise ValueError(
            f"a window of {window} leaves room for {bound} of the {groups} groups of a step; with a staleness of "
            f"{max_staleness} the window must be between 1 and {max_staleness * groups + 1}"
        )
    return bound


class AutoDepth:
    """Adaptive maximum number of groups in flight, between one batch and the bound.

    While the trainer waits, throughput is proportional to the depth (Little's law). In this case, the depth grows in
    proportion to the wait, at most by half. If groups for later batches are repeatedly ready in advance, the depth
    shrinks by half of the number of these groups above a margin.

    A change of the depth takes effect only after the groups admitted with the new depth are trained, ``depth / groups``
    steps later. Usually the next change waits for this effect. However, the depth may grow at once if the last change
    was a reduction, and after one step if the trainer waits most of the time.
    """

    def __init__(self, groups: int, bound: int):
        """Start with a depth of two batches, one to train and one to sample, or with the bound if it is smaller.

        Args:
            groups: P, number of groups that a step trains.
            bound: B, result of ``outstanding_bound``.

        Raises:
            ValueError: if the bound is less than one batch.
        """
        if not 1 <= groups <= bound:
            raise ValueError(f"a bound of {bound} groups is below the {groups} of a batch")
        self.groups = groups
        self.bound = bound
        self.depth = min(bound, 2 * groups)
        self._settling = ceil(self.depth / groups)  # The trainer waits for the first batches at any depth.
        self._last_change_grew = True
        self._floor = groups
        self._surpluses: list[int] = []

    def observe(self, waited: float, step: float, surplus: int) -> int:
        """Record one step and return the new depth.

        Args:
            waited: time in seconds that the trainer waited for its batch.
            step: duration of the step in seconds, including the wait.
            surplus: number of ready groups that remain after the batch is taken.
        """
        idle = min(1.0, max(0.0, waited / step)) if step > 0 else 0.0
        settled = self._settling <= 0
        self._settling -= 1
        if idle > WAITING:
            if settled or not self._last_change_grew:
                self._grow(idle)
        elif settled:
            self._surpluses.append(surplus)
            self._shrink()
        return self.depth

    def _grow(self, idle: float) -> None:
        if not self._last_change_grew:  # The last reduction was too large.
            self._floor = min(self.bound, self.depth + 1)
        target = self.depth * min(1.5, 1 / max(0.5, 1 - idle))
        self._change(min(self.bound, max(self.depth + 1, ceil(target))), grew=True)
        if idle > _LONG_WAIT:
            self._settling = 1

    def _shrink(self) -> None:
        if len(self._surpluses) < ceil(self.depth / self.groups):
            return
        excess = min(self._surpluses) - ceil(self.groups / 8)
        self._surpluses.clear()
        if excess > 0:
            self._change(max(self._floor, self.depth - ceil(excess / 2)), grew=False)
        elif self._floor > self.groups:  # Conditions change, so retry a depth that was too small after some time.
            self._floor -= 1

    def _change(self, depth: int, grew: bool) -> None:
        if depth == self.depth:
            return
        self._settling = ceil(max(depth, self.depth) / self.groups)
        self.depth = depth
        self._last_change_grew = grew
        self._surpluses.clear()
