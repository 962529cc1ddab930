"""What stays where only ranks of the policy are lost: Ray's session, the nodes, the engines.

The rest of the run is taken down as after any failure, and set up again from its last checkpoint, in the same process
and by the code that resumes every run (``setup``). An engine of a large model takes minutes to start, a rank does not.

Whatever else is amiss, or goes wrong meanwhile, is for the supervisor, which starts all of the run again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Callable

from gdpo_nemo.errors import START_AGAIN, FailureKind, GdpoError, InfrastructureFailed, kind_of
from gdpo_nemo.supervisor import count_rebuild, current_attempt, report

if TYPE_CHECKING:  # these import torch and Ray, for which a config that is refused does not wait
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.probe import Probe
    from gdpo_nemo.cluster.reservation import Placement
    from gdpo_nemo.setup import RunComponents

_HEARD_S = 5.0
"""Longest from the first word of a lost rank, which a peer may say, until Ray knows of its end."""


class Kept:
    """Parts that ``setup`` makes where they are missing, and that are closed with the run unless it ``goes_on``."""

    def __init__(self) -> None:
        self.session = contextlib.ExitStack()
        """Holds Ray's session, once there is one."""
        self.placement: Placement | None = None
        self.fleet: EngineFleet | None = None
        self.probe: Probe | None = None
        """Calibrated on the model's folder, which the engines no longer hold when they are kept."""
        self.goes_on = False
        """Whether the run is set up again, with what is here."""
        self.when_ray_is_lost: Callable[[str], None] = _end
        """What ends the process with the sentence that it is given."""
        self._furthest = -1

    def ray_is_lost(self, sentence: str) -> None:
        """A server of the session has ended."""
        self.when_ray_is_lost(sentence)

    def decide(self, parts: RunComponents, error: GdpoError) -> None:
        """Set ``goes_on`` if the error is the loss of ranks, and of nothing else, and a further step was trained since
        the last time; ends those that are left, and says so in the error."""
        self.goes_on = kind_of(error) == FailureKind.INFRASTRUCTURE and self._may_go_on(parts)
        if not self.goes_on:
            return
        self._furthest = parts.state.step
        parts.policy.close()
        said = str(error).replace(START_AGAIN, "")
        sentence = f"{said}; the policy is started again from the last checkpoint, all else stays"
        error.args = (sentence,)
        self.when_ray_is_lost = _end
        count_rebuild(sentence)

    def _may_go_on(self, parts: RunComponents) -> bool:
        attempt = current_attempt()
        return (
            attempt.supervised
            and attempt.restarts + attempt.rebuilds < parts.config.run.max_restarts
            and parts.stop.patient
            and not parts.stop.requested
            and parts.state.step > self._furthest
            and self.placement is not None
            # Engines on the policy's devices were started before it, in the memory that was free then.
            and not self.placement.places.shared
            and not any(self.placement.is_lost(node) for node in {*self.placement.places.policy})
            and (self.fleet is None or self.fleet.all_ready())
            and parts.policy.has_lost_ranks(_HEARD_S)
        )

    def end_engines(self) -> None:
        """Close the engines, or let them wait for the next policy."""
        if self.fleet is None:
            return
        if self.goes_on:
            self.fleet.forget_weights()
        else:
            fleet, self.fleet = self.fleet, None
            fleet.close()

    def end_session(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Close Ray's session, unless it stays."""
        if not self.goes_on:
            self.placement = None
            self.session.__exit__(kind, error, trace)

    def close(self) -> None:
        """Close what is left, where a run that was to go on did not get far enough to do so itself."""
        self.goes_on = False
        self.end_engines()
        self.end_session()


def _end(sentence: str) -> None:
    """End this process: between two set-ups there is no run that could be told."""
    error = InfrastructureFailed(sentence + START_AGAIN)
    report(error)
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
