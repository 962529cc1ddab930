"""Where every prompt of a run is: the one account of what is drawn, trained and dropped.

A position is the number of prompts dealt before one. It is ``WAITING`` once admitted, ``DRAWING`` while its group is
sampled and judged, ``READY`` when it may be trained, and at last trained or dropped with a reason, which happens to
every position exactly once.

With P groups a step, a window W and a bound S on staleness, a group is admitted only while fewer than
B = (S + 1) * P - (W - 1) are outstanding, and trained only while it is less than W behind the oldest outstanding one.
So group i, admitted after u updates, has i <= u * P + B - 1 and is trained at rank r <= i + W - 1, in update v with
v * P <= r; hence v - u <= (B + W - 2) / P, which is at most S. Dropped groups only lower the rank. S = 0 makes W = 1
and B = P: a step's groups, in order.

That holds for groups admitted under the trainer's own weights. Where published weights are up to L updates behind these
(``rollout.sync_every`` - 1), B is that of S - L; where they are n more behind, as while they are under way, only
B - n * P may be outstanding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Iterable, Mapping

from gdpo_nemo.config.rollout_bounds import admission_bound as admission_bound


class Stage(StrEnum):
    """How far an outstanding position is."""

    WAITING = "waiting"
    DRAWING = "drawing"
    READY = "ready"


@dataclass
class LedgerState:
    """What a checkpoint holds of a ledger."""

    position: int = 0
    """Every position before this one is trained or dropped."""
    retired: list[int] = field(default_factory=list)
    """Later ones that are, too, in order."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """Of all these, (position, reason) of those dropped since the last batch, which the next one accounts for."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], position: int = 0) -> LedgerState:
        """What ``dataclasses.asdict`` made of a state; where ``saved`` is empty, as in older checkpoints, all prompts
        before ``position`` are trained or dropped."""
        if not saved:
            return cls(position)
        dropped = [(int(p), str(reason)) for p, reason in saved.get("dropped", ())]
        return cls(int(saved["position"]), [int(p) for p in saved["retired"]], dropped)


@dataclass
class Entry:
    """An outstanding position."""

    position: int
    version: int
    """Of the newest published weights when it was admitted; none older may draw it."""
    stage: Stage = Stage.WAITING


class Ledger:
    """The account of one run; not thread-safe.

    Args:
        groups: P, those that a step trains.
        bound: B, those that may be outstanding; see ``admission_bound``.
        window: W.
        limit: positions of the whole run; None: no end.
        updates: those done before ``start``.
        late: L, updates that published weights may be behind; ``bound`` is of that.
    """

    def __init__(
        self,
        groups: int,
        bound: int,
        window: int,
        start: LedgerState | None = None,
        limit: int | None = None,
        updates: int = 0,
        late: int = 0,
    ):
        start = start or LedgerState()
        if not groups <= bound or window < 1:
            raise ValueError(f"bound {bound} must be at least {groups} groups, and window {window} at least 1")
        self.groups = groups
        self.bound = bound
        self.window = window
        self.limit = limit
        self.late = late
        self.updates = updates
        """Calls of ``trained``, those of before a resume included: the version of the trainer's weights."""
        self.dropped: list[tuple[int, str]] = list(start.dropped)
        """(position, reason) of those dropped since the last ``take_dropped``."""
        self._outstanding: dict[int, Entry] = {}
        self._next = start.position
        """The first position that was never admitted."""
        self._retired = set(start.retired)
        """Trained or dropped, and behind one that is not."""

    def __len__(self) -> int:
        """Outstanding positions."""
        return len(self._outstanding)

    def __getitem__(self, position: int) -> Entry:
        return self._outstanding[position]

    def __contains__(self, position: int) -> bool:
        return position in self._outstanding

    def count(self, *stages: Stage) -> int:
        """Outstanding positions in these stages."""
        return sum(entry.stage in stages for entry in list(self._outstanding.values()))

    def admit(self, version: int, most: int | None = None) -> list[int]:
        """Admit the next positions under published weights of ``version``: while fewer than ``most`` (at most B; None:
        B) are outstanding and the limit is not reached. Returns them, in order."""
        room = self.bound - max(0, self.updates - version - self.late) * self.groups
        room = room if most is None else min(most, room)
        admitted = []
        while len(self._outstanding) < room:
            while self._next in self._retired:  # before a resume
                self._next += 1
            if self.limit is not None and self._next >= self.limit:
                break
            self._outstanding[self._next] = Entry(self._next, version)
            admitted.append(self._next)
            self._next += 1
        return admitted

    def move(self, position: int, stage: Stage) -> None:
        """Note how far a position is; stages only go forward."""
        entry = self._outstanding[position]
        order = list(Stage)
        if order.index(stage) < order.index(entry.stage):
            raise ValueError(f"position {position} cannot go from {entry.stage} to {stage}")
        entry.stage = stage

    def drop(self, position: int, reason: str) -> None:
        """Give a position up: it is never trained."""
        del self._outstanding[position]
        self._retired.add(position)
        self.dropped.append((position, reason))

    def get_batch(self, count: int | None = None) -> list[int] | None:
        """The ``count`` positions (None: P) that the next update trains, in order; None while there are not enough.

        They are the first that are ready among those less than W behind the oldest outstanding one, each time one has
        been taken.
        """
        taken: list[int] = []
        left = sorted(self._outstanding)
        while len(taken) < (self.groups if count is None else count):
            near = (p for p in left if p < left[0] + self.window and self._outstanding[p].stage is Stage.READY)
            position = next(near, None)
            if position is None:
                return None
            taken.append(position)
            left.remove(position)
        return sorted(taken)

    def trained(self, positions: Iterable[int]) -> None:
        """Account for an update of these positions."""
        for position in positions:
            del self._outstanding[position]
            self._retired.add(position)
        self.updates += 1
        first = min(self._outstanding, default=self._next)
        # At ``first`` itself, too: after a resume it may be one that is not to be admitted again.
        self._retired = {p for p in self._retired if p >= first}

    def take_dropped(self) -> list[tuple[int, str]]:
        """(position, reason) of what was dropped since the last call, for the batch that accounts for it.

        Not a part of ``trained``: what is dropped while a batch trains is the next one's.
        """
        taken = self.dropped
        self.dropped = []
        return taken

    def state(self) -> LedgerState:
        """What a resumed run goes on from: outstanding positions are drawn again."""
        first = min(self._outstanding, default=self._next)
        while first in self._retired:
            first += 1
        return LedgerState(first, sorted(p for p in self._retired if p >= first), list(self.dropped))
