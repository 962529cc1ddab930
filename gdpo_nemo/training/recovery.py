"""Recovery from the loss of policy ranks, without restarting Ray, the nodes or the engines.

All other parts of the run are closed, as after any failure. ``setup`` then creates them again in the same process, from
the last checkpoint, with the same code that resumes a run. Keeping the engines saves time, because an engine for a
large model takes minutes to start, while a rank does not.

After any other failure, or a failure during the recovery, the supervisor restarts the whole run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from gdpo_nemo.training.supervisor import FIRST_ATTEMPT, Attempt, report
from gdpo_nemo.utils.errors import START_AGAIN, FailureKind, GdpoError, InfrastructureFailed, kind_of

if TYPE_CHECKING:  # These modules import torch and Ray, which would delay the message about an invalid config.
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.reservation import Placement
    from gdpo_nemo.cluster.weight_sync import SyncCheck
    from gdpo_nemo.training.components import RunComponents

_HEARD_S = 5.0
"""Maximum seconds between the first report of a lost rank, possibly from another rank, and Ray's detection of its
end."""


class Decision(Enum):
    """Action after a failed attempt."""

    RESTART = "set up the run again in this process, with the retained parts"
    FAIL = "close everything; the supervisor may restart the run"


class RetainedSession:
    """Owner of the run's Ray session, nodes and engines. ``setup`` creates the parts that do not exist yet.

    Each attempt calls ``begin``, then ``handle_lost_ray`` when it can report errors, and ``decide`` if it fails. Its
    teardown then calls ``end_engines`` and ``end_session``, which close or retain their parts according to the
    decision.
    """

    def __init__(self, attempt: Attempt = FIRST_ATTEMPT) -> None:
        self.attempt = attempt
        """Current attempt of the run."""
        self.session = contextlib.ExitStack()
        """Stack that closes Ray's session and the fork server, if they were started."""
        self.placement: Placement | None = None
        self.fleet: EngineFleet | None = None
        self.sync_check: SyncCheck | None = None
        """Sync check, calibrated with the weights of the model folder. Retained engines have other weights."""
        self.decision = Decision.FAIL
        """Decision after the last attempt; FAIL while an attempt runs."""
        self._end_without_ray: Callable[[str], None] = _end
        self._furthest = -1

    def begin(self) -> None:
        """Start an attempt. If the attempt fails, the run ends unless ``decide`` returns RESTART."""
        self.decision = Decision.FAIL

    def handle_lost_ray(self, end: Callable[[str], None]) -> None:
        """Set the function that ends the process with a message if Ray's session is lost."""
        self._end_without_ray = end

    def ray_is_lost(self, sentence: str) -> None:
        """Handle the loss of a server of Ray's session."""
        self._end_without_ray(sentence)

    def decide(self, parts: RunComponents, error: GdpoError) -> Decision:
        """Decide whether to restart the policy in this process after an error.

        Returns:
            RESTART if the error is only a loss of policy ranks, and a new step was trained since the last restart. The
            remaining ranks are then ended, and the decision is added to the error's message.
        """
        self.decision = Decision.FAIL
        if kind_of(error) == FailureKind.INFRASTRUCTURE and self._may_restart(parts):
            self._restart(parts, error)
        return self.decision

    def _restart(self, parts: RunComponents, error: GdpoError) -> None:
        self.decision = Decision.RESTART
        self._furthest = parts.state.step
        parts.policy.close()
        message = str(error).replace(START_AGAIN, "")
        sentence = f"{message}; the policy is restarted from the last checkpoint; everything else continues"
        error.args = (sentence,)
        self._end_without_ray = _end
        rebuilds = self.attempt.rebuilds + 1
        self.attempt = replace(self.attempt, rebuilds=rebuilds, lost_at=time.time(), reason=sentence)

    def _may_restart(self, parts: RunComponents) -> bool:
        attempt = self.attempt
        return (
            attempt.supervised
            and attempt.restarts + attempt.rebuilds < parts.config.run.max_restarts
            and parts.stop.patient
            and not parts.stop.requested
            and parts.state.step > self._furthest
            and self.placement is not None
            # Colocated engines must start before the policy, while the GPU memory is free.
            and not self.placement.places.shared
            and not any(self.placement.is_lost(node) for node in {*self.placement.places.policy})
            and (self.fleet is None or self.fleet.all_ready())
            and parts.policy.has_lost_ranks(_HEARD_S)
        )

    def end_engines(self) -> None:
        """Close the engines. If the policy is restarted, retain the engines instead, and prepare them for the new
        policy's weights."""
        if self.fleet is None:
            return
        if self.decision is Decision.RESTART:
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
        """Close Ray's session, unless the policy is restarted."""
        if self.decision is Decision.FAIL:
            self.placement = None
            self.session.__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the retained parts if the attempt after a restart failed before it took them over."""
        self.decision = Decision.FAIL
        self.end_engines()
        self.end_session()


def _end(sentence: str) -> None:
    """End this process with an error message. Used between two attempts, when no run exists that could handle the
    error."""
    error = InfrastructureFailed(sentence + START_AGAIN)
    report(error)
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
