"""Publishing weights: policy to engines by a transport, with a probe that proves they arrived."""

from __future__ import annotations

import time

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.probe import Probe
from gdpo_nemo.weights.transports.memory import MemoryTransport
from gdpo_nemo.weights.transports.transport import Transport, errors_named

METRICS = {
    "time/sync": ("s", "Publishing the new weights to every engine, time/wake and the probe included"),
    "time/sleep": ("s", "Engines giving their memory to the policy before the update, where they share devices"),
    "time/wake": ("s", "Engines taking their memory back after the update, part of time/sync"),
    "parity/probe": (
        "nats",
        "|log-prob of trainer - of engine| on fixed sequences after publication, mean; proves the weights arrived",
    ),
}


class WeightSync:
    """Moves the policy's weights to every engine of the fleet.

    Args:
        probe: what trainer and engines must agree on after every update; None switches that off.
        transport: of the policy's weights; None: through the object store.
        shared: whether the engines sit on the policy's devices. They then sleep from ``sleep_engines`` to the next
            ``publish``.
        kv: what becomes of samples under way (``rollout.kv``).
    """

    def __init__(
        self,
        policy: PolicyGroup,
        fleet: EngineFleet,
        probe: Probe | None,
        transport: Transport | None = None,
        shared: bool = False,
        kv: str = "drain",
    ):
        self.transport = transport or MemoryTransport(policy)
        self.version: int | None = None
        """The newest version that every engine holds."""
        self._policy = policy
        self._fleet = fleet
        self._probe = probe
        self._shared = shared
        self._kv = kv
        self._slept: dict[str, float] = {}

    def publish(self, version: int) -> dict[str, float]:
        """Send the current weights as ``version``; returns ``time/sync`` and ``parity/probe``.

        Where devices are shared also ``time/sleep`` (what ``sleep_engines`` took before) and ``time/wake`` (part of
        ``time/sync``).

        Raises:
            RunError: an engine does not hold what the policy holds.
        """
        start = time.monotonic()
        row = self._slept
        if self._shared:
            row["time/wake"] = self._wake("weights")
        with self._fleet.delivering():
            with errors_named(type(self.transport), "prepare"):
                self.transport.prepare(version)
            self._fleet.update(self.transport, version, self._kv)
        if self._shared:
            row["time/wake"] += self._wake("kv_cache")
        self.version = version
        self._slept = {}
        if self._probe is not None:
            row["parity/probe"] = self._probe.verify(self._policy, self._fleet, version)
        return {"time/sync": time.monotonic() - start, **row}

    def sleep_engines(self) -> None:
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
