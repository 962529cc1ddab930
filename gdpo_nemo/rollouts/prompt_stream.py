"""Batches for algorithms that do not sample: the next rows of the data, in the order that sampling has them, too."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, Sequence

from gdpo_nemo.config.layout import prompts_per_round
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Prompt

Span = tuple[str, str, float, float]
"""(lane, name, start, end) in seconds since the epoch, for the trace."""


class Batch(Protocol):
    """What a step is made of."""

    next_position: int
    """Prompts dealt since the start of training once this batch is trained."""
    spans: list[Span]
    """What making it took, for the timeline."""


class BatchStream(Protocol):
    """Where the trainer gets its batches: ``RolloutScheduler`` where the algorithm samples, else ``PromptStream``."""

    def queues(self) -> dict[str, Any]:
        """What is under way, for the status file; called from another thread."""

    def schedule(self, step: int) -> None:
        """Account for the updates of ``step`` steps, and start everything that the published weights may make."""

    def progress(self) -> str:
        """How far the batch or validation under way is, to be shown; called from another thread."""

    def get_batch(self, step: int) -> Batch | None:
        """Batch number ``step``; waits for it. None once the prompts are used up."""

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Any]:
        """Start to make what an algorithm's ``validate`` is given for the held-out prompts."""

    def take_events(self) -> list[str]:
        """What somebody should know of the time since the last call, a sentence each."""

    def ledger(self) -> dict[str, Any]:
        """Which prompts are trained or dropped, for a checkpoint (``LedgerState`` as a dictionary); empty where the
        number of prompts dealt says it."""

    def close(self) -> None:
        """Drop what is in flight."""


@dataclass
class PromptBatch:
    """The rows of one step; ``Prompt.fields`` holds their further columns."""

    prompts: list[Prompt]
    next_position: int
    spans: list[Span] = field(default_factory=list)


class PromptStream:
    """Deals the training prompts of a run that samples nothing.

    Args:
        position: prompts dealt by earlier steps (0, or what the checkpoint says).
    """

    def __init__(self, config: Config, prompts: PromptSource, position: int):
        self._count = prompts_per_round(config)
        self._prompts = prompts
        self._position = position

    def progress(self) -> str:
        """Nothing takes long enough."""
        return ""

    def schedule(self, step: int) -> None:
        """Nothing has to be made ahead."""

    def get_batch(self, step: int) -> PromptBatch:
        """The next prompts."""
        prompts = self._prompts.batch(self._position, self._count)
        self._position += self._count
        return PromptBatch(prompts, self._position)

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Sequence[Prompt]]:
        """The prompts as they are."""
        done: Future[Sequence[Prompt]] = Future()
        done.set_result(prompts)
        return done

    def queues(self) -> dict[str, Any]:
        """Nothing is in flight."""
        return {}

    def take_events(self) -> list[str]:
        """Nothing happens here."""
        return []

    def ledger(self) -> dict[str, Any]:
        """Prompts are dealt in order."""
        return {}

    def close(self) -> None:
        """Nothing is in flight."""
