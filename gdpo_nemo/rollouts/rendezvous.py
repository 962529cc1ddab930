"""Requests that reach the engines together, in an order that no timing can change.

Which requests an engine computes beside each other can change their log-probs in the last place. So where a run is to
be reproduced without a journal, a trajectory that wants a completion waits until every other one of its step wants one,
too, or has ended.
"""

from __future__ import annotations

import asyncio

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.lane import PendingRequest
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling

_Entry = tuple[tuple[int, int], SampleRequest, Sampling, int | None, asyncio.Future[PendingRequest]]


class Rendezvous:
    """The trajectories of one step.

    Args:
        members: their number; each has to ``leave``.
    """

    def __init__(self, fleet: EngineFleet, members: int):
        self._fleet = fleet
        self._members = members
        self._waiting: list[
            tuple[tuple[int, int], SampleRequest, Sampling, int | None, asyncio.Future[PendingRequest]]
        ] = []

    async def sample(
        self, key: tuple[int, int], request: SampleRequest, sampling: Sampling, engine: int | None
    ) -> tuple[Completion, int]:
        """A completion and the number of its engine, as ``EngineFleet.sample``.

        Args:
            key: (position, sample) of the trajectory, by which requests are ordered.
        """
        submitted: asyncio.Future[PendingRequest] = asyncio.get_running_loop().create_future()
        entry = (key, request, sampling, engine, submitted)
        self._waiting.append(entry)
        self._meet()
        try:
            pending = await submitted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise
        return await self._fleet.answer_of(pending)

    def leave(self) -> None:
        """A trajectory has ended."""
        self._members -= 1
        self._meet()

    def _meet(self) -> None:
        if not self._waiting or len(self._waiting) < self._members:
            return
        waiting = sorted(self._waiting, key=lambda entry: entry[0])
        self._waiting = []
        for _, request, sampling, engine, submitted in waiting:
            if not submitted.done():
                try:
                    submitted.set_result(self._fleet.submit(request, sampling, engine))
                except Exception as error:  # noqa: BLE001 - of the fleet; it belongs to who asked
                    submitted.set_exception(error)
