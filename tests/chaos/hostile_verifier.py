"""The demo's verifier, which hangs, dies, fails or says nothing of a sample now and then: of the same ones in every
run."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence

from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.environments.tasks.digit_sort import DigitSort

DEEDS = {
    "verifier-hang": "exceeded",
    "verifier-death": "exit code 7",
    "verifier-failure": "out of order",
    "verifier-silence": None,
}
"""A part of the reason for which the sample is masked; None: it is not, its rewards are unknown."""
_OF = 100
"""One sample in so many meets each of the deeds."""


def deed_of(prompt_id: str, sample: int) -> str | None:
    """Return the deed that this sample meets, or None if its verdict is honest.

    The deed does not depend on the completion. An asynchronous run samples different completions each time, so one of
    the deeds would be missing in about one run in ten.
    """
    drawn = zlib.crc32(f"{prompt_id} {sample}".encode()) % _OF
    return list(DEEDS)[drawn] if drawn < len(DEEDS) else None


class HostileDigitSort(DigitSort):
    """The environment."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """As of ``DigitSort``, but for those that meet a deed."""
        return [self._spoilt(t, verdict) for t, verdict in zip(trajectories, super().verify(trajectories))]

    def _spoilt(self, trajectory: Trajectory, verdict: Verdict) -> Verdict:
        deed = deed_of(trajectory.prompt.id, trajectory.sample_index)
        if deed == "verifier-hang":
            time.sleep(3600)
        elif deed == "verifier-death":
            os._exit(7)
        elif deed == "verifier-failure":
            return Verdict({}, Outcome.ENV_FAILED, "out of order")
        elif deed == "verifier-silence":
            return Verdict(dict.fromkeys(verdict.rewards, float("nan")))
        return verdict
