"""Transports in which each of the policy's ranks broadcasts its pieces to all processes of all engines.

NCCL transfers from GPU to GPU. gloo works without GPUs and transfers over TCP from host to host. Every sending rank is
rank 0 of a separate process group and hosts the group's store. The engine processes have ranks 1 and above in each of
these groups.

The groups are persistent: the next update reuses them if the engines are the same actors and no update failed.
Otherwise new groups are created. An engine that was replaced or did not receive an update gets the weights through
temporary groups. Weights are sent in buckets. A sender fills one bucket while another bucket is in transfer. A receiver
processes one bucket while one bucket of each sender is in transfer. With more senders, buckets are smaller.

All engine processes receive the buckets in the order of ``divide``, across all groups. A sender takes part only in its
own group and sends in the same order. Therefore members of different groups cannot wait for each other in a circle, and
NCCL's kernels of different communicators start in the same order on all GPUs of the engines. A rank may therefore not
wait for other ranks between its pieces, unless it is the only rank that sends.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gdpo_nemo.weights.broadcast_group import BroadcastGroup, BroadcastServer, Meeting, Operation, joined_group, leave
from gdpo_nemo.weights.copies import BaseMissing, RankCopy, engine_copy
from gdpo_nemo.weights.manifest import Manifest, PeerLost, divide, filled, message_sizes
from gdpo_nemo.weights.pieces import Piece, assembled
from gdpo_nemo.weights.transports.base import Receiver, Tensors
from gdpo_nemo.weights.transports.shards import ShardSender, ShardTransport


class CollectiveTransport(ShardTransport):
    """Broadcast from every policy rank that sends pieces to every engine process.

    Ranks without a copy of the version send while they read their weights. With ``TransportOptions.keep``, they copy
    the sent weights to host memory for engines that restart later.
    """

    sender: ClassVar[type[CollectiveSender]]
    _engines: tuple[tuple[int, Any], ...] = ()
    """(number, actor) of the persistent groups' engines. The actor distinguishes an engine from its replacement."""
    _members = ""
    """Identifier on the ranks of the persistent groups' engines."""
    _persistent_receivers: tuple[CollectiveReceiver, ...] = ()
    """Receivers of the persistent groups' engines, from the most recent delivery through these groups."""

    def deliver(self, engines: Mapping[int, Any], manifest: Manifest, first: bool) -> tuple[list[Any], list[Any]]:
        """Start a delivery.

        The first delivery of a version uses the persistent groups, or new persistent groups if the engines have
        changed. Every later delivery of this version uses temporary groups.
        """
        receivers = self._receivers(engines, manifest.ranks, persistent=first)
        updates = []
        for engine, receiver in zip(engines.values(), receivers):
            updates.append(engine.update_weights.remote(manifest, receiver))
        policy = self.policy
        if self._copied == manifest.version:
            difference = manifest.base is not None
            return updates, policy.start_sender(self.sender, "send_copy", difference, ranks=manifest.ranks)
        keep = self.options.keep
        if keep:
            self._copied = manifest.version
        return updates, policy.start_sender(self.sender, "stream", manifest.version, self.bucket_bytes, keep)

    def _receivers(
        self, engines: Mapping[int, Any], ranks: Sequence[int], persistent: bool
    ) -> tuple[CollectiveReceiver, ...]:
        policy = self.policy
        processes = policy.engine_processes
        if persistent and tuple(engines.items()) != self._engines:
            self._engines = tuple(engines.items())
            self._members = secrets.token_hex(8)
        members = self._members if persistent else ""
        opened = policy.start_sender(self.sender, "open", processes * len(engines), members, ranks=ranks)
        groups = dict(zip(ranks, policy.wait(opened, "opening the weight sender")))
        receivers = tuple(
            CollectiveReceiver(groups, number, 1 + index * processes, self.bucket_bytes, policy.timeout_s)
            for index, number in enumerate(engines)
        )
        if persistent:
            self._persistent_receivers = receivers
        return receivers

    def close(self) -> None:
        """Make every member leave the persistent groups, without waiting for the members, because some may be dead."""
        for receiver in self._persistent_receivers[:1]:
            self.policy.start_sender(self.sender, "close", self._members, ranks=tuple(receiver.groups))
        for (_, engine), receiver in zip(self._engines, self._persistent_receivers):
            engine.close_receiver.remote(receiver)
        self._engines = ()
        self._persistent_receivers = ()


class CollectiveSender(ShardSender):
    """Sender on a rank, which hosts a group for its pieces."""

    backend: ClassVar[str]
    _server: BroadcastServer
    """Server for the next delivery."""
    _persistent_server: BroadcastServer | None = None
    """Server of the persistent group."""
    _members = ""
    """Identifier of the persistent group's receivers."""

    def open(self, receivers: int, members: str) -> tuple[Meeting, bool]:
        """Prepare the next delivery. Return the group's rendezvous, and True if the receivers must join the group.

        Args:
            receivers: number of receiving processes.
            members: identifier of the set of receivers. If the persistent group has this identifier and has not failed,
                it is reused. An empty identifier creates a group for a single delivery.
        """
        if not members:
            self._server = BroadcastServer(self.host, receivers, self.backend)
            return self._server.meeting, True
        server = self._persistent_server
        if server is not None and not server.ended and members == self._members:
            self._server = server
            return server.meeting, False
        self.close(self._members)
        self._server = BroadcastServer(self.host, receivers, self.backend, persistent=True)
        self._persistent_server = self._server
        self._members = members
        return self._server.meeting, True

    def stream(self, version: int, bucket_bytes: int, keep: bool) -> None:
        """Broadcast the current weights of this rank as ``version`` while they are read. Call ``open`` first.

        All ranks call this method, because reading is collective. Ranks without weights to send have no server.

        Args:
            keep: True to copy the weights to host memory for ``send_copy``.
        """
        self.copy = (self.copy or RankCopy(self.device())) if keep else None
        with self.pieces() as pieces:
            manifest = self.metadata(version)
            if manifest.entries and self.copy:
                self._send(self.copy.stream(divide(manifest, bucket_bytes), pieces))
            elif manifest.entries:
                self._send(filled(manifest, pieces, bucket_bytes, self.device()))

    def send_copy(self, difference: bool) -> None:
        """Broadcast the copied weights, in full or as a difference. Call ``open`` first."""
        device = self.device()
        self._send(message.to(device, non_blocking=True) for message in self.messages(difference))

    def close(self, members: str) -> None:
        """End the persistent group if its receivers are ``members``."""
        if self._persistent_server is not None and members == self._members:
            self._persistent_server.end()
            self._persistent_server = None

    def _send(self, buckets: Iterator[torch.Tensor]) -> None:
        server = self._server
        del self._server
        try:
            server.send(buckets)
        finally:
            for _ in buckets:  # keep all weights even after a failure
                pass


class NcclSender(CollectiveSender):
    """Sender from a GPU."""

    backend = "nccl"


class GlooSender(CollectiveSender):
    """Sender from host memory."""

    backend = "gloo"

    def device(self) -> torch.device:
        """Return the CPU, because gloo sends from host memory."""
        return torch.device("cpu")


class NcclTransport(CollectiveTransport):
    """Broadcast with NCCL, from GPU to GPU."""

    sender = NcclSender
    refuses = {
        "cpu": "requires GPUs (cluster.gpus_per_node); use gloo for the same broadcast without GPUs",
        "colocated": "does not support two processes on one GPU (cluster.placement colocated)",
    }


class GlooTransport(CollectiveTransport):
    """Broadcast with gloo, from host to host."""

    sender = GlooSender


@dataclass(frozen=True)
class CollectiveReceiver(Receiver):
    """Receiver that joins the senders' groups and receives their broadcasts."""

    groups: Mapping[int, tuple[Meeting, bool]]
    """For each sending policy rank, its group, and True if the processes must join the group for this update, False if
    they are already members."""
    engine: int
    """Number of the engine."""
    rank: int
    """Rank of the engine's first process in the groups. The engine's other processes have the following ranks."""
    bucket_bytes: int
    timeout_s: float
    """Time limit for waiting for the senders, which may be training."""

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors of an update on ``device``, in process ``worker`` (from 0) of the engine.

        Raises:
            BaseMissing: if the process cannot apply a difference.
            PeerLost: if a sender or another receiver was lost.
            RunError: if the checksum of a tensor differs.
        """
        return assembled(self._pieces(manifest, device, worker))

    def _pieces(self, manifest: Manifest, device: torch.device, worker: int) -> Iterator[Piece]:
        # gloo ends the process if the buffer sizes of sender and receiver differ. Both compute them from the manifest.
        buckets = divide(manifest, self.bucket_bytes)
        sizes = message_sizes(manifest, buckets)
        member = self._member(worker)
        try:
            with contextlib.ExitStack() as stack:
                groups = {}
                for rank, (meeting, must_join) in self.groups.items():
                    joining = joined_group(meeting, _of(member, rank), self.rank + worker, must_join, self.timeout_s)
                    groups[rank] = stack.enter_context(joining)
                received = _received([groups[bucket.rank] for bucket in buckets], sizes, device, len(groups))
                yield from engine_copy(member).pieces(manifest, buckets, received, device)
        except BaseMissing:
            raise
        except PeerLost as error:
            raise PeerLost(f"weight update {manifest.version}: {error}") from error

    def close(self, worker: int) -> None:
        """Leave the persistent groups."""
        member = self._member(worker)
        for rank, (meeting, _) in self.groups.items():
            leave(_of(member, rank), meeting)

    def _member(self, worker: int) -> str:
        return f"process {worker} of engine {self.engine}"


def _of(member: str, rank: int) -> str:
    """Return the name of an engine process in the group of a policy rank."""
    return f"{member} with rank {rank}"


def _received(
    groups: Sequence[BroadcastGroup], sizes: Sequence[int], device: torch.device, ahead: int
) -> Iterator[torch.Tensor]:
    """Yield the message of every bucket, uint8 [bytes], while the next ``ahead`` messages are already in transfer.

    Args:
        groups: group of each message.
        sizes: bytes of each message.
    """
    in_transfer: deque[tuple[torch.Tensor, Operation]] = deque()
    for group, size in zip(groups, sizes, strict=True):
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        in_transfer.append((buffer, group.broadcast(buffer)))
        if len(in_transfer) > ahead:
            yield _finished(*in_transfer.popleft())
    while in_transfer:
        yield _finished(*in_transfer.popleft())


def _finished(buffer: torch.Tensor, operation: Operation) -> torch.Tensor:
    operation.finish()
    return buffer
