"""Transports that broadcast the weights from the policy's first rank to all processes of all engines.

NCCL transfers from GPU to GPU. gloo works without GPUs and transfers over TCP from host to host. The sender is rank 0
of a process group and hosts the group's store. The engine processes have ranks 1 and above.

The group is persistent: the next update reuses it if the engines are the same actors and no update failed. Otherwise a
new group is created. An engine that was replaced or did not receive an update gets the weights through a temporary
group. Weights are sent in buckets. Sender and receivers process one bucket while another bucket is in transfer, so that
each process stores at most two buckets.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gdpo_nemo.weights.broadcast_group import BroadcastGroup, BroadcastServer, Meeting, joined_group, leave
from gdpo_nemo.weights.host_memory import HostCopies
from gdpo_nemo.weights.manifest import Bucket, Manifest, PeerLost, divide, filled
from gdpo_nemo.weights.pieces import Piece, assembled
from gdpo_nemo.weights.transports.base import Receiver, Sender, StreamingTransport, Tensors


class CollectiveTransport(StreamingTransport):
    """Broadcast from rank 0 to every engine process while the policy's ranks gather the weights.

    With ``TransportOptions.keep``, rank 0 keeps the sent weights in host memory for engines that restart later.
    """

    backend: ClassVar[str]
    _sent = False
    """True if the prepared version has been sent."""
    _engines: tuple[tuple[int, Any], ...] = ()
    """(number, actor) of the persistent group's engines. The actor distinguishes an engine from its replacement."""
    _members = ""
    """Identifier on rank 0 of the persistent group's engines."""
    _persistent_receivers: tuple[CollectiveReceiver, ...] = ()
    """Receivers of the persistent group's engines, from the group's most recent delivery."""

    def prepare(self, version: int) -> None:
        """Set the version to send."""
        super().prepare(version)
        self._sent = False

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Start a delivery.

        The first delivery of a version uses the persistent group, or a new persistent group if the engines have
        changed. Every later delivery of this version uses a temporary group. With ``TransportOptions.keep``, later
        deliveries send the weights that rank 0 has kept.
        """
        persistent = not self._sent
        receivers = self._receivers(engines, persistent)
        updates = []
        for engine, receiver in zip(engines.values(), receivers):
            updates.append(engine.update_weights.remote(self.manifest, receiver))
        policy = self.policy
        if self._sent and self.options.keep:
            return updates, policy.start_sender(CollectiveSender, "broadcast_kept", ranks=[0])
        self._sent = True
        options = self.options
        sent = policy.start_sender(CollectiveSender, "broadcast", self.manifest, options.bucket_bytes, options.keep)
        return updates, sent

    def _receivers(self, engines: Mapping[int, Any], persistent: bool) -> tuple[CollectiveReceiver, ...]:
        policy = self.policy
        processes = policy.engine_processes
        if persistent and tuple(engines.items()) != self._engines:
            self._engines = tuple(engines.items())
            self._members = secrets.token_hex(8)
        members = self._members if persistent else ""
        count = processes * len(engines)
        opened = policy.start_sender(CollectiveSender, "open", self.backend, count, members, ranks=[0])
        ((meeting, must_join),) = policy.wait(opened, "opening the weight sender")
        bucket_bytes = self.options.bucket_bytes
        receivers = tuple(
            CollectiveReceiver(meeting, number, 1 + index * processes, must_join, bucket_bytes, policy.timeout_s)
            for index, number in enumerate(engines)
        )
        if persistent:
            self._persistent_receivers = receivers
        return receivers

    def close(self) -> None:
        """Make every member leave the persistent group, without waiting for the members, because some may be dead."""
        if self._persistent_receivers:
            self.policy.start_sender(CollectiveSender, "close", self._members, ranks=[0])
        for (_, engine), receiver in zip(self._engines, self._persistent_receivers):
            engine.close_receiver.remote(receiver)
        self._engines = ()
        self._persistent_receivers = ()


class NcclTransport(CollectiveTransport):
    """Broadcast with NCCL, from GPU to GPU."""

    backend = "nccl"
    refuses = {
        "cpu": "requires GPUs (cluster.gpus_per_node); use gloo for the same broadcast without GPUs",
        "colocated": "does not support two processes on one GPU (cluster.placement colocated)",
    }


class GlooTransport(CollectiveTransport):
    """Broadcast with gloo, from host to host."""

    backend = "gloo"


class CollectiveSender(Sender):
    """Sender on rank 0. Other ranks only participate in gathering the weights."""

    _server: BroadcastServer
    """Server for the next broadcast."""
    _persistent_server: BroadcastServer | None = None
    """Server of the persistent group."""
    _members = ""
    """Identifier of the persistent group's receivers."""
    _kept: HostCopies | None = None
    """Weights of the last ``broadcast`` with ``keep``."""

    def open(self, backend: str, receivers: int, members: str) -> tuple[Meeting, bool]:
        """Prepare the next broadcast. Return the group's rendezvous, and True if the receivers must join the group.

        Args:
            receivers: number of receiving processes.
            members: identifier of the set of receivers. If the persistent group has this identifier and has not failed,
                it is reused. An empty identifier creates a group for a single broadcast.
        """
        if not members:
            self._server = BroadcastServer(self.host, receivers, backend)
            return self._server.meeting, True
        server = self._persistent_server
        if server is not None and not server.ended and members == self._members:
            self._server = server
            return server.meeting, False
        self.close(self._members)
        self._server = BroadcastServer(self.host, receivers, backend, persistent=True)
        self._persistent_server = self._server
        self._members = members
        return self._server.meeting, True

    def broadcast(self, manifest: Manifest, bucket_bytes: int, keep: bool) -> None:
        """Broadcast the current weights from rank 0 while they are gathered. Call ``open`` first.

        Args:
            keep: True to keep the weights in rank 0's host memory for ``broadcast_kept``.
        """
        with self.gathered() as tensors:
            if self.rank == 0:
                buckets = filled(manifest, tensors, bucket_bytes, self._device())
                if keep:
                    self._kept = self._kept or HostCopies(torch.device(self._device()))
                    self._kept.begin([bucket.nbytes for bucket in divide(manifest, bucket_bytes)])
                    buckets = _copied(buckets, self._kept)
                self._send(buckets)

    def broadcast_kept(self) -> None:
        """Broadcast the weights that ``broadcast`` has kept. Only rank 0 calls this method."""
        assert self._kept is not None
        self._send(self._kept.on_device())

    def close(self, members: str) -> None:
        """End the persistent group if its receivers are ``members``."""
        if self._persistent_server is not None and members == self._members:
            self._persistent_server.end()
            self._persistent_server = None

    def _device(self) -> Any:
        return self.policy.runtime.device if self._server.meeting.backend == "nccl" else "cpu"

    def _send(self, buckets: Iterator[torch.Tensor]) -> None:
        server = self._server
        del self._server
        try:
            server.send(buckets)
        finally:
            for _ in buckets:  # keep all weights even after a failure
                pass


def _copied(buckets: Iterable[torch.Tensor], copies: HostCopies) -> Iterator[torch.Tensor]:
    for bucket in buckets:
        copies.add(bucket)
        yield bucket


@dataclass(frozen=True)
class CollectiveReceiver(Receiver):
    """Receiver that joins the sender's group and receives its broadcasts."""

    meeting: Meeting
    engine: int
    """Number of the engine."""
    rank: int
    """Rank of the engine's first process in the group. The engine's other processes have the following ranks."""
    must_join: bool
    """True if the processes must join the group for this update, False if they are already members."""
    bucket_bytes: int
    timeout_s: float
    """Time limit for waiting for the sender, which may be training."""

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors of an update on ``device``, in process ``worker`` (from 0) of the engine.

        Raises:
            PeerLost: if the sender or another receiver was lost.
            RunError: if the checksum of a tensor differs.
        """
        return assembled(self._pieces(manifest, device, worker))

    def _pieces(self, manifest: Manifest, device: torch.device, worker: int) -> Iterator[Piece]:
        # gloo ends the process if the buffer sizes of sender and receiver differ. Sender and receiver compute the sizes
        # from the manifest.
        joining = joined_group(self.meeting, self._member(worker), self.rank + worker, self.must_join, self.timeout_s)
        buckets = divide(manifest, self.bucket_bytes)
        try:
            with joining as group:
                for bucket, buffer in _received(group, buckets, device):
                    yield from bucket.open(buffer)
        except PeerLost as error:
            raise PeerLost(f"weight update {manifest.version}: {error}") from error

    def close(self, worker: int) -> None:
        """Leave the persistent group."""
        leave(self._member(worker), self.meeting)

    def _member(self, worker: int) -> str:
        return f"process {worker} of engine {self.engine}"


def _received(
    group: BroadcastGroup, buckets: list[Bucket], device: torch.device
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Yield (bucket, buffer) of every bucket while the next bucket is already in transfer."""
    in_transfer = None
    for bucket in buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        operation = group.broadcast(buffer)
        if in_transfer:
            in_transfer[2].finish()
            yield in_transfer[:2]
        in_transfer = bucket, buffer, operation
    if in_transfer:
        in_transfer[2].finish()
        yield in_transfer[:2]
