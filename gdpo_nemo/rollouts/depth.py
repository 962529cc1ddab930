"""How many groups may be outstanding: the hard bound that staleness sets, and the depth below it that a run needs.

The scheduler of a run and the simulator of ``planning`` follow the same rule.
"""

from __future__ import annotations

from math import ceil

from gdpo_nemo.config.rollout_bounds import admission_bound

WAITING = 0.05
"""Share of a step that the trainer may wait for its batch before the depth grows."""
_MOSTLY = 0.5
"""Share of waiting from which on one step's word is enough: what proves too much is given back later."""


def outstanding_bound(groups: int, max_staleness: int, window: int) -> int:
    """Groups that may be admitted and not yet trained so that no token is older than ``max_staleness`` when trained
    (``admission_bound``), if that fills a step.

    Args:
        groups: P, groups of a step.
        max_staleness: S.
        window: W; a group may be overtaken by at most W - 1 later ones. At S = 0 only 1 leaves room for a batch.

    Raises:
        ValueError: the bound would be below one batch, so that no step could ever be filled.
    """
    bound = admission_bound(groups, max_staleness, window)
    if window < 1 or bound < groups:
        raise ValueError(
            f"a window of {window} leaves room for {bound} of the {groups} groups of a step; with a staleness of "
            f"{max_staleness} it is between 1 and {max_staleness * groups + 1}"
        )
    return bound


class AutoDepth:
    """The depth in flight, always between one batch and the bound.

    Where the trainer waits, throughput follows the depth (Little's law), so it grows by what was missing, at most
    by half. Where groups that the next batches could take lie ready again and again, half of what is beyond a margin is
    given back. A change shows only when the groups admitted under it have been trained, ``depth / groups`` steps later;
    until then the next one waits, but for growth after a cut or where the trainer waits most of the time.
    """

    def __init__(self, groups: int, bound: int):
        """Start with one batch to train and one to draw, where the bound has room for both.

        Args:
            groups: P, groups of a step.
            bound: B, as ``outstanding_bound`` gives it.

        Raises:
            ValueError: the bound is below one batch.
        """
        if not 1 <= groups <= bound:
            raise ValueError(f"a bound of {bound} groups is below the {groups} of a batch")
        self.groups = groups
        self.bound = bound
        self.depth = min(bound, 2 * groups)
        self._settling = ceil(self.depth / groups)  # the first batches are waited for at any depth
        self._grew = True
        self._floor = groups
        self._surplus: list[int] = []

    def observe(self, waited: float, step: float, surplus: int) -> int:
        """Take note of one step and return the depth from now on.

        Args:
            waited: seconds that the trainer waited for its batch.
            step: seconds of the whole step, the wait included.
            surplus: groups left over when the batch was taken, complete and within the window.
        """
        idle = min(1.0, max(0.0, waited / step)) if step > 0 else 0.0
        settled = self._settling <= 0
        self._settling -= 1
        if idle > WAITING:
            if settled or not self._grew:
                self._grow(idle)
        elif settled:
            self._surplus.append(surplus)
            self._shrink()
        return self.depth

    def _grow(self, idle: float) -> None:
        if not self._grew:  # the last cut went too far
            self._floor = min(self.bound, self.depth + 1)
        wanted = self.depth * min(1.5, 1 / max(0.5, 1 - idle))
        self._change(min(self.bound, max(self.depth + 1, ceil(wanted))), grew=True)
        if idle > _MOSTLY:
            self._settling = 1

    def _shrink(self) -> None:
        if len(self._surplus) < ceil(self.depth / self.groups):
            return
        beyond = min(self._surplus) - ceil(self.groups / 8)
        self._surplus.clear()
        if beyond > 0:
            self._change(max(self._floor, self.depth - ceil(beyond / 2)), grew=False)
        elif self._floor > self.groups:  # conditions change: what was too little once is tried again in time
            self._floor -= 1

    def _change(self, depth: int, grew: bool) -> None:
        if depth == self.depth:
            return
        self._settling = ceil(max(depth, self.depth) / self.groups)
        self.depth = depth
        self._grew = grew
        self._surplus.clear()
