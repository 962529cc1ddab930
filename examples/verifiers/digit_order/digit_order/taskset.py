"""Sort five digits in one turn, and show the work: ``39172=`` is answered by ``<t>...</t><a>12379</a>``.

Three functions score an answer. The first one has values from 0 to 5 and the others 0 or 1, and a model rarely meets
the last one by chance.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

DIGITS = 5
_SHAPE = re.compile(r"<t>([^<>]*)</t><a>([^<>]*)</a>")
_NUMBER = re.compile(r"[0-9]+")


class DigitOrderTaskConfig(vf.TaskConfig):
    """Options of the scoring."""

    dots: int = 3
    """Number of dots that the work must have."""


class DigitOrderConfig(vf.TasksetConfig):
    """Options of the tasks."""

    tasks: int = 10_000
    """Number of tasks, at most 100,000. Any two of them ask for different digits."""
    seed: int = 0
    """Seed of the tasks and their order."""
    task: DigitOrderTaskConfig = DigitOrderTaskConfig()


class DigitOrderData(vf.TaskData):
    """One row: the digits that the prompt asks to sort."""

    digits: str


class DigitOrderTask(vf.Task[DigitOrderData, vf.State, DigitOrderTaskConfig]):
    """Scoring of one answer."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """End the episode after one turn."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def in_place(self, trace: vf.Trace) -> float:
        """Return the number of digits that are at their place in the result, the last number of the answer."""
        return float(self._in_place(trace))

    @vf.reward(weight=1.0)
    async def tagged(self, trace: vf.Trace) -> float:
        """Return 1 if the answer consists of work and result, each in its tags."""
        return float(_SHAPE.fullmatch(trace.last_reply) is not None)

    @vf.reward(weight=1.0)
    async def worked(self, trace: vf.Trace) -> float:
        """Return 1 if the answer has exactly the wanted number of dots, wherever they are."""
        return float(trace.last_reply.count(".") == self.config.dots)

    @vf.metric
    async def ascending(self, trace: vf.Trace) -> float:
        """Return 1 if all digits are at their place."""
        return float(self._in_place(trace) == DIGITS)

    def _in_place(self, trace: vf.Trace) -> int:
        """Return the number of digits at their place, or 0 if the result has too many or too few digits."""
        numbers = _NUMBER.findall(trace.last_reply)
        if not numbers or len(numbers[-1]) != DIGITS:
            return 0
        return sum(map(str.__eq__, numbers[-1], sorted(self.data.digits)))


class DigitOrderTaskset(vf.Taskset[DigitOrderTask, DigitOrderConfig]):
    """Tasks in a random order. Users select those to train and to validate on by their position."""

    def load(self) -> Iterator[DigitOrderTask]:
        """Yield the tasks."""
        draw = random.Random(self.config.seed)
        for number in draw.sample(range(10**DIGITS), self.config.tasks):
            digits = f"{number:0{DIGITS}d}"
            data = DigitOrderData(id=digits, prompt=f"{digits}=", digits=digits)
            yield DigitOrderTask(data, self.config.task)
