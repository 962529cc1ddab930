"""The ways of new weights from the policy to the engines, as the driver steers them; one is chosen by ``weights.transport``.

On all of them the engine gets a manifest and a flat buffer of bytes, checks names and a CRC-32 of every tensor, and loads
through vLLM's layer-wise reload. What was loaded last stays at hand, for an engine that has to start again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol, Sequence

from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.session import gather, ray
from gdpo_nemo.weights.folder import Folder
from gdpo_nemo.weights.gloo import Broadcast


class Transport(Protocol):
    """Takes the policy's weights with ``load``, gives them to engines with ``ship``, as often as needed."""

    manifest: Any
    """Reference to the manifest of what was loaded."""

    def load(self, version: int) -> None:
        """Take the current weights of the policy as ``version``."""

    def ship(self, engines: Sequence[Any]) -> tuple[list[Any], Any]:
        """Give engines what was loaded: references to their updates, and to the sender's part (None: it has none)."""

    def close(self) -> None:
        """Leave nothing behind."""


class Memory:
    """Ray's object store: mapped without a copy on the node of rank 0, pulled once by every other node."""

    def __init__(self, policy: PolicyGroup):
        self._policy = policy

    def load(self, version: int) -> None:
        self.manifest, self._buffer = self._policy.pack_weights(version)

    def ship(self, engines):
        return [engine.update.remote(self.manifest, self._buffer) for engine in engines], None

    def close(self) -> None:
        """The references go with this object."""


class Gloo:
    """A broadcast over TCP from rank 0, bucket by bucket."""

    def __init__(self, policy: PolicyGroup, bucket_bytes: int):
        self._policy, self._bucket = policy, bucket_bytes

    def load(self, version: int) -> None:
        self.manifest = self._policy.hold_weights(version)

    def ship(self, engines):
        root, timeout = self._policy.ranks[0], self._policy.timeout_s
        ((host, port),) = gather([root.open_sender.remote()], "opening the weights' sender", timeout, "policy")
        world = 1 + len(engines)
        updates = [
            engine.fetch.remote(self.manifest, Broadcast(host, port, rank, world, self._bucket, timeout))
            for rank, engine in enumerate(engines, 1)
        ]
        return updates, root.send_weights.remote(len(engines), self._bucket)

    def close(self) -> None:
        """Rank 0 holds the weights and ends with the run."""


class Disk:
    """safetensors files in a folder that all nodes see; the newest version stays until the next one is loaded."""

    def __init__(self, policy: PolicyGroup, bucket_bytes: int, folder: Path):
        self._policy, self._bucket, self._folder = policy, bucket_bytes, folder
        self._version: Path | None = None

    def load(self, version: int) -> None:
        before, self._version = self._version, self._folder / f"version_{version}"
        self.manifest = self._policy.hold_weights(version)
        written = self._policy.ranks[0].write_weights.remote(str(self._version), self._bucket)
        gather([written], f"writing {self._version}", self._policy.timeout_s, "policy")
        if before not in (None, self._version):
            shutil.rmtree(before, ignore_errors=True)

    def ship(self, engines):
        return [engine.fetch.remote(self.manifest, Folder(str(self._version))) for engine in engines], None

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def make_transport(name: str, policy: PolicyGroup, folder: Path, bucket_bytes: int) -> Transport:
    """memory, gloo or folder; ``folder`` is where files would go."""
    if name == "memory":
        return Memory(policy)
    return Gloo(policy, bucket_bytes) if name == "gloo" else Disk(policy, bucket_bytes, folder)
