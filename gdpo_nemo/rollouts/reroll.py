"""Which prompt a position draws: the next of the data, or one whose group carried no signal some steps ago.

The ledger knows positions, each of which is trained or dropped once. A prompt that is drawn again gets a new position,
so that its samples have other seeds and both attempts are accounted for: the first was dropped, the second is trained
or dropped in its turn. ``PromptDeal`` says which prompt of the data, by its place in the order of dealing, belongs to
a position. Without re-rolls that is the position itself.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping


@dataclass
class DealState:
    """What a checkpoint holds of a deal, in plain numbers."""

    next_place: int = 0
    """The first prompt of the data that was never dealt."""
    again: int = 0
    """Positions that drew a prompt again."""
    dealt: list[tuple[int, int, int]] = field(default_factory=list)
    """(position, place, rolls before) of positions that are outstanding."""
    due: list[tuple[int, int, int]] = field(default_factory=list)
    """(first step, place, rolls) of prompts that are to be drawn again, in order."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], position: int = 0) -> DealState:
        """What ``dataclasses.asdict`` made of a state; where ``saved`` is empty, as in older checkpoints, position and
        place are one up to ``position``."""
        if not saved:
            return cls(position)
        dealt = [(int(p), int(place), int(rolls)) for p, place, rolls in saved["dealt"]]
        due = [(int(step), int(place), int(rolls)) for step, place, rolls in saved["due"]]
        return cls(int(saved["next_place"]), int(saved["again"]), dealt, due)


class PromptDeal:
    """The account of prompts beside the ledger's of positions; not thread-safe.

    Args:
        after: steps after which the prompt of a group without signal is drawn again; 0: it is not.
        most: times that one prompt is drawn again, each time it is dealt.
    """

    def __init__(self, after: int = 0, most: int = 1, start: DealState | None = None):
        if after < 0 or most < 1:
            raise ValueError(f"after {after} must be 0 or more, and most {most} at least 1")
        start = start or DealState()
        self.after = after
        self.most = most
        self._next = start.next_place
        self._again = start.again
        self._dealt = {position: (place, rolls) for position, place, rolls in start.dealt}
        self._due = list(start.due)

    def deal(self, position: int, step: int) -> int:
        """The place of the prompt that an admitted position draws, ``step`` steps being done.

        A position that was outstanding when the run was saved keeps its prompt. Else prompts that are due come first,
        those of the earliest step at their head.
        """
        if position not in self._dealt:
            if self._due and self._due[0][0] <= step:
                _, place, rolls = self._due.pop(0)
                self._again += 1
            else:
                place, rolls = self._next, 0
                self._next += 1
            self._dealt[position] = (place, rolls)
        return self._dealt[position][0]

    def no_signal(self, position: int, step: int) -> bool:
        """Account for a position that is dropped because its group carried no signal, ``step`` steps being done.
        Returns whether its prompt is drawn again."""
        place, rolls = self._dealt.pop(position)
        again = self.after > 0 and rolls < self.most
        if again:
            # In an order that does not depend on which verdict of a step came first.
            insort(self._due, (step + self.after, place, rolls + 1))
        return again

    def done(self, positions: Iterable[int]) -> None:
        """Account for positions that are trained, or dropped for another reason."""
        for position in positions:
            del self._dealt[position]

    @property
    def place(self) -> int:
        """Prompts of the data dealt so far, each counted once: what epochs are counted by."""
        return self._next

    def positions(self, limit: int, step: int) -> int:
        """The positions of a run of ``limit`` prompts, as far as they are known when ``step`` steps are done: one for
        each prompt, one for each time that one was drawn again, and one for each that is due."""
        return limit + self._again + sum(due <= step for due, _, _ in self._due)

    def state(self) -> DealState:
        """What a resumed run goes on from."""
        dealt = [(position, place, rolls) for position, (place, rolls) in sorted(self._dealt.items())]
        return DealState(self._next, self._again, dealt, list(self._due))
