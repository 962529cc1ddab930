"""Publishing weights: policy to engines by a transport, with a probe that proves they arrived."""

from __future__ import annotations

import time

import numpy as np

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.transports import Memory, Transport
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.errors import RunError


class WeightSync:
    """Moves the policy's weights to every engine of the fleet.

    Args:
        probe: int32 [tokens], at least 2: a sequence whose log-probs trainer and engines must agree on after every
            update; None switches that off.
        limit: largest difference allowed.
        transport: of the policy's weights; None: through the object store.
        shared: whether the engines sit on the policy's devices. They then sleep from ``rest`` to the next ``publish``.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        fleet: EngineFleet,
        probe: np.ndarray | None,
        limit: float,
        transport: Transport | None = None,
        shared: bool = False,
    ):
        self.transport = transport or Memory(policy)
        self.version: int | None = None
        """The newest version that every engine holds."""
        self._policy, self._fleet, self._probe, self._limit, self._shared = policy, fleet, probe, limit, shared
        self._slept: dict[str, float] = {}

    def publish(self, version: int) -> dict[str, float]:
        """Send the current weights as ``version``; returns ``time/sync`` and ``parity/probe``.

        Where devices are shared also ``time/sleep`` (what ``rest`` took before) and ``time/wake`` (part of ``time/sync``).

        Raises:
            RunError: an engine does not hold what the policy holds.
        """
        start = time.monotonic()
        row = self._slept
        if self._shared:
            row["time/wake"] = self._wake("weights")
        self.transport.load(version)
        self._fleet.update(self.transport)
        if self._shared:
            row["time/wake"] += self._wake("kv_cache")
        self.version, self._slept = version, {}
        if self._probe is not None:
            row["parity/probe"] = self._difference(version)
        return {"time/sync": time.monotonic() - start, **row}

    def rest(self) -> None:
        """Where devices are shared: the engines give their memory to the policy, until the next ``publish``."""
        if self._shared:
            start = time.monotonic()
            self._fleet.sleep()
            self._slept = {"time/sleep": time.monotonic() - start}

    def _wake(self, what: str) -> float:
        start = time.monotonic()
        self._policy.release()
        self._fleet.wake(what)
        return time.monotonic() - start

    def _difference(self, version: int) -> float:
        ids = self._probe
        # The engines score at temperature 1, so the trainer must too.
        sequence = TrainSequence(ids[:1], ids[1:], np.zeros(len(ids) - 1, np.float32))
        (mine,) = self._policy.logprobs([sequence], temperature=1.0)
        worst = 0.0
        for index, theirs in enumerate(self._fleet.score(ids)):
            worst = max(worst, float(np.abs(mine - theirs).max()))
            # Written so that NaN fails, too.
            if not np.abs(mine - theirs).max() <= self._limit:
                raise RunError(
                    f"engine {index} does not hold the weights of version {version}: its log-probs differ by "
                    f"{np.abs(mine - theirs).max():.3g} from the trainer's (policy.generation.parity_limit {self._limit})"
                )
        return worst
