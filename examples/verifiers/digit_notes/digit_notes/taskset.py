"""Find the two largest of eleven digits, in three turns that each show a part of them.

The first turn shows five digits (``39172=``). Each later turn shows the notes, which are the last two digits of the
reply before, and three new digits (``79`` and ``318`` are ``79318=``). A reply that sorts its digits leaves the right
notes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

from digit_notes.notes import FIRST, KEPT, notes_of, parts_of

TURNS = 3
LENGTH = FIRST + (TURNS - 1) * (FIRST - KEPT)
_SHAPE = re.compile(r"<t>[^<>]*</t><a>[^<>]*</a>")


class DigitNotesConfig(vf.TasksetConfig):
    """Options of the tasks."""

    tasks: int = 10_000
    """Number of tasks."""
    seed: int = 0
    """Seed of the tasks."""


class DigitNotesData(vf.TaskData):
    """One row: all digits, of which the prompt shows the first five."""

    digits: str


class DigitNotesTask(vf.Task[DigitNotesData]):
    """Scoring of one episode."""

    @vf.reward(weight=1.0)
    async def largest(self, trace: vf.Trace) -> float:
        """Return 1 if the last notes are the two largest digits of the task."""
        return float(notes_of(trace.last_reply) == _largest(self.data.digits))

    @vf.reward(weight=0.5)
    async def careful(self, trace: vf.Trace) -> float:
        """Return the share of turns whose notes are the two largest digits that the turn shows."""
        notes, right = "", 0
        parts = parts_of(self.data.digits)
        for part, message in zip(parts, trace.assistant_messages):
            shown, notes = notes + part, notes_of(message.content or "")
            right += notes == _largest(shown)
        return right / len(parts)

    @vf.reward(weight=0.25)
    async def tagged(self, trace: vf.Trace) -> float:
        """Return the share of turns whose reply consists of work and result, each in its tags."""
        replies = [message.content or "" for message in trace.assistant_messages]
        return sum(_SHAPE.fullmatch(reply) is not None for reply in replies) / TURNS

    @vf.metric
    async def contexts(self, trace: vf.Trace) -> float:
        """Return the number of conversations in the episode."""
        return float(trace.num_branches)


class DigitNotesTaskset(vf.Taskset[DigitNotesTask, DigitNotesConfig]):
    """Random tasks."""

    def load(self) -> Iterator[DigitNotesTask]:
        """Yield the tasks."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.tasks):
            digits = "".join(draw.choices("0123456789", k=LENGTH))
            data = DigitNotesData(id=digits, prompt=f"{digits[:FIRST]}=", digits=digits)
            yield DigitNotesTask(data, self.config.task)


def _largest(digits: str) -> str:
    """Return the two largest digits in ascending order."""
    return "".join(sorted(digits))[-KEPT:]
