"""The ways of new weights from the policy to the engines, as the driver steers them; one is chosen by
``weights.transport``.

On all of them the engine gets a manifest, checks names before and a checksum of every tensor when its bytes come, and
loads through vLLM's layer-wise reload. What was loaded last stays at hand, for an engine that has to start again.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Protocol

from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.session import gather
from gdpo_nemo.weights.broadcast import Broadcast
from gdpo_nemo.weights.folder import Folder
from gdpo_nemo.weights.handles import Handles
from gdpo_nemo.weights.manifest import Manifest


class Transport(Protocol):
    """Takes the policy's weights with ``load``, gives them to engines with ``ship``, as often as needed."""

    manifest: Any
    """The manifest of what was loaded, or a reference to it in Ray's object store."""

    def load(self, version: int) -> None:
        """Take the current weights of the policy as ``version``."""

    def ship(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Give engines (by number) what was loaded: references to their updates, in order, and to the policy's part in
        it."""

    def close(self) -> None:
        """Leave nothing behind."""


class Memory:
    """Ray's object store: mapped without a copy on the node of rank 0, pulled once by every other node."""

    def __init__(self, policy: PolicyGroup):
        self._policy = policy

    def load(self, version: int) -> None:
        self.manifest, self._buffer = self._policy.pack_weights(version)

    def ship(self, engines):
        return [engine.update.remote(self.manifest, self._buffer) for engine in engines.values()], []

    def close(self) -> None:
        """The references go with this object."""


class Broadcasting:
    """A broadcast from rank 0 to every process of the engines, bucket by bucket, while the policy's ranks gather.

    Args:
        backend: nccl, from GPU to GPU; gloo, from host to host.
        keep: whether an engine may have to start again while the policy trains; rank 0 then keeps what it sent in host
            memory. Otherwise such an engine gets the policy's weights gathered anew.
    """

    def __init__(self, policy: PolicyGroup, bucket_bytes: int, backend: str, keep: bool):
        self._policy = policy
        self._bucket = bucket_bytes
        self._backend = backend
        self._keep = keep
        self._outline: Manifest | None = None
        self._sent = False

    def load(self, version: int) -> None:
        self._outline = self._outline or self._policy.outline_weights()
        self.manifest = replace(self._outline, version=version)
        self._sent = False

    def ship(self, engines):
        """One group of rank 0 and these engines for this delivery; a second one of the same version sends what was
        kept."""
        ranks = self._policy.ranks
        timeout = self._policy.timeout_s
        each = self._policy.config.generation.vllm_cfg.tensor_parallel_size
        opened = [ranks[0].open_sender.remote(self._backend)]
        ((host, port),) = gather(opened, "opening the weights' sender", timeout, "policy")
        receivers = each * len(engines)
        firsts = range(1, 1 + receivers, each)
        sources = [Broadcast(host, port, rank, 1 + receivers, self._bucket, timeout, self._backend) for rank in firsts]
        updates = [engine.receive.remote(self.manifest, source) for engine, source in zip(engines.values(), sources)]
        if self._keep and self._sent:
            return updates, [ranks[0].broadcast_kept.remote(receivers, self._backend)]
        self._sent = True
        what = (self.manifest, receivers, self._bucket, self._backend, self._keep)
        return updates, [rank.broadcast_weights.remote(*what) for rank in ranks]

    def close(self) -> None:
        """The policy holds the weights and ends with the run."""


class Lending:
    """Handles of memory on the device that a policy rank and an engine process share, bucket by bucket."""

    def __init__(self, policy: PolicyGroup, bucket_bytes: int):
        self._policy = policy
        self._bucket = bucket_bytes
        self._outline: Manifest | None = None

    def load(self, version: int) -> None:
        self._outline = self._outline or self._policy.outline_weights()
        self.manifest = replace(self._outline, version=version)

    def ship(self, engines):
        """Doors at the ranks beside these engines; all ranks gather, for those and for nobody else."""
        ranks = self._policy.ranks
        timeout = self._policy.timeout_s
        beside = [rank for engine in engines for rank in self._policy.shared[engine]]
        opened = gather([ranks[rank].open_door.remote() for rank in beside], "opening handles", timeout, "policy")
        doors = dict(zip(beside, opened))
        updates = [
            engine.receive.remote(
                self.manifest,
                Handles(tuple(doors[rank] for rank in self._policy.shared[number]), self._bucket, timeout),
            )
            for number, engine in engines.items()
        ]
        return updates, [
            actor.lend_weights.remote(self.manifest, self._bucket, rank in doors) for rank, actor in enumerate(ranks)
        ]

    def close(self) -> None:
        """Nothing outlasts an update."""


class Disk:
    """safetensors files in a folder that all nodes see; the newest version stays until the next one is loaded."""

    def __init__(self, policy: PolicyGroup, bucket_bytes: int, folder: Path):
        self._policy = policy
        self._bucket = bucket_bytes
        self._folder = folder
        self._version: Path | None = None

    def load(self, version: int) -> None:
        before = self._version
        self._version = self._folder / f"version_{version}"
        self.manifest = self._policy.hold_weights(version)
        written = self._policy.ranks[0].write_weights.remote(str(self._version), self._bucket)
        gather([written], f"writing {self._version}", self._policy.timeout_s, "policy")
        if before not in (None, self._version):
            shutil.rmtree(before, ignore_errors=True)

    def ship(self, engines):
        return [engine.fetch.remote(self.manifest, Folder(str(self._version))) for engine in engines.values()], []

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def make_transport(name: str, policy: PolicyGroup, folder: Path, bucket_bytes: int, keep: bool = False) -> Transport:
    """The transport called ``name``.

    Args:
        folder: where files would go.
        keep: see ``Broadcasting``.
    """
    if name == "memory":
        return Memory(policy)
    if name == "ipc":
        return Lending(policy, bucket_bytes)
    return Disk(policy, bucket_bytes, folder) if name == "folder" else Broadcasting(policy, bucket_bytes, name, keep)
