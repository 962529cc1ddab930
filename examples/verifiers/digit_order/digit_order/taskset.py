"""Sort five digits in one turn, and show the work: ``39172=`` is answered by ``<t>...</t><a>12379</a>``.

Three functions score an answer. They have nothing to do with each other, and the last one is rarely met by chance, so
its share of a weighted sum is small.
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
    async def ascending(self, trace: vf.Trace) -> float:
        """Return 1 if the last number of the answer is the sorted digits."""
        numbers = _NUMBER.findall(trace.last_reply)
        return float(bool(numbers) and numbers[-1] == "".join(sorted(self.data.digits)))

    @vf.reward(weight=1.0)
    async def tagged(self, trace: vf.Trace) -> float:
        """Return 1 if the answer consists of work and result, each in its tags."""
        return float(_SHAPE.fullmatch(trace.last_reply) is not None)

    @vf.reward(weight=1.0)
    async def worked(self, trace: vf.Trace) -> float:
        """Return 1 if the answer has exactly the wanted number of dots, wherever they are."""
        return float(trace.last_reply.count(".") == self.config.dots)

    @vf.metric
    async def reply_length(self, trace: vf.Trace) -> float:
        """Return the number of characters of the answer."""
        return float(len(trace.last_reply))


class DigitOrderTaskset(vf.Taskset[DigitOrderTask, DigitOrderConfig]):
    """Tasks in a random order. Users select those to train and to validate on by their position."""

    def load(self) -> Iterator[DigitOrderTask]:
        """Yield the tasks."""
        draw = random.Random(self.config.seed)
        for number in draw.sample(range(10**DIGITS), self.config.tasks):
            digits = f"{number:0{DIGITS}d}"
            data = DigitOrderData(id=digits, prompt=f"{digits}=", digits=digits)
            yield DigitOrderTask(data, self.config.task)
