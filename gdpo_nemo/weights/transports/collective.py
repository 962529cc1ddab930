"""Weights by broadcast from the policy's first rank to all processes of all engines at once, bucket by bucket.

NCCL carries them from GPU to GPU; gloo, which needs no GPU, over TCP from host to host. The sender is rank 0 of a group
and keeps the store where it meets, the processes of the engines are ranks 1 and up. The group stands: the next update
goes through it again as long as its engines are the same actors and nothing broke. Otherwise a new one is made. What an
engine gets alone, because it was replaced or lost an update, comes through a group that ends with it. Both ends work on
one bucket while another is on its way, so that neither holds more than two.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, ClassVar, Iterable, Iterator, Mapping

import torch

from gdpo_nemo.weights.broadcast_group import BroadcastGroup, BroadcastServer, Meeting, joined, leave
from gdpo_nemo.weights.buckets import Bucket, PeerLost, divide, filled
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.transports.transport import Receiver, Sender, StreamingTransport, Tensors


class CollectiveTransport(StreamingTransport):
    """A broadcast from rank 0 to every process of the engines, bucket by bucket, while the policy's ranks gather.

    With ``TransportOptions.keep`` rank 0 keeps what it sent in host memory, for an engine that has to start again.
    """

    backend: ClassVar[str]
    _sent = False
    _engines: tuple[tuple[int, Any], ...] = ()
    """Number and actor of the members of the group that stands. Their handles are kept to tell an engine from its
    replacement."""
    _members = ""
    """What rank 0 knows this membership by."""
    _standing: tuple[CollectiveReceiver, ...] = ()
    """What these engines were told last."""

    def prepare(self, version: int) -> None:
        """Name the version; nothing of it was sent yet."""
        super().prepare(version)
        self._sent = False

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """The first delivery of a version goes through the group that stands, or a new one if its engines are others.

        Any other one has a group of its own, and sends what was kept if that is so.
        """
        stands = not self._sent
        receivers = self._receivers(engines, stands)
        updates = [
            engine.update_weights.remote(self.manifest, receiver)
            for engine, receiver in zip(engines.values(), receivers)
        ]
        policy = self.policy
        if self._sent and self.options.keep:
            return updates, policy.start_sender(CollectiveSender, "broadcast_kept", ranks=[0])
        self._sent = True
        what = (self.manifest, self.options.bucket_bytes, self.options.keep)
        return updates, policy.start_sender(CollectiveSender, "broadcast", *what)

    def _receivers(self, engines: Mapping[int, Any], stands: bool) -> tuple[CollectiveReceiver, ...]:
        policy = self.policy
        each = policy.engine_processes
        if stands and tuple(engines.items()) != self._engines:
            self._engines = tuple(engines.items())
            self._members = secrets.token_hex(8)
        members = self._members if stands else ""
        opened = policy.start_sender(CollectiveSender, "open", self.backend, each * len(engines), members, ranks=[0])
        ((meeting, new),) = policy.wait(opened, "opening the weights' sender")
        told = tuple(
            CollectiveReceiver(meeting, number, 1 + place * each, new, self.options.bucket_bytes, policy.timeout_s)
            for place, number in enumerate(engines)
        )
        if stands:
            self._standing = told
        return told

    def close(self) -> None:
        """Let every member leave the group that stands. Waits for nobody: some may be dead."""
        if self._standing:
            self.policy.start_sender(CollectiveSender, "close", self._members, ranks=[0])
        for (_, engine), receiver in zip(self._engines, self._standing):
            engine.close_receiver.remote(receiver)
        self._engines = ()
        self._standing = ()


class NcclTransport(CollectiveTransport):
    """From GPU to GPU."""

    backend = "nccl"
    refuses = {
        "cpu": "needs GPUs (cluster.gpus_per_node); gloo is the same broadcast between hosts",
        "colocated": "cannot join two processes on one GPU (cluster.placement colocated)",
    }


class GlooTransport(CollectiveTransport):
    """From host to host."""

    backend = "gloo"


class CollectiveSender(Sender):
    """Rank 0 sends; the others only gather along."""

    _server: BroadcastServer
    """Of the next broadcast."""
    _standing: BroadcastServer | None = None
    _members = ""

    def open(self, backend: str, receivers: int, members: str) -> tuple[Meeting, bool]:
        """Where the receivers of the next broadcast find this rank, and whether they have to come together there.

        Args:
            members: which ones they are; those of the broadcast before are in a group already, unless it broke. Empty:
                make a group for one broadcast.
        """
        if not members:
            self._server = BroadcastServer(self.host, receivers, backend)
            return self._server.meeting, True
        standing = self._standing
        if standing is not None and not standing.ended and members == self._members:
            self._server = standing
            return standing.meeting, False
        self.close(self._members)
        self._server = BroadcastServer(self.host, receivers, backend, stands=True)
        self._standing = self._server
        self._members = members
        return self._server.meeting, True

    def broadcast(self, manifest: Manifest, bucket_bytes: int, keep: bool) -> None:
        """Broadcast the current weights from rank 0, as they are gathered, to receivers that were told of ``open``.

        ``keep``: rank 0 keeps them in host memory for ``broadcast_kept``.
        """
        with self.gathered() as tensors:
            if self.rank == 0:
                self._kept: list[torch.Tensor] = []
                buckets = filled(manifest, tensors, bucket_bytes, self._device())
                self._send(self._keeping(buckets, keep))

    def broadcast_kept(self) -> None:
        """Broadcast what was kept, from this rank alone."""
        device = self._device()
        self._send(bucket.to(device) for bucket in self._kept)

    def close(self, members: str) -> None:
        """End the group of ``members``, if it stands."""
        if self._standing is not None and members == self._members:
            self._standing.end()
            self._standing = None

    def _device(self) -> Any:
        return self.policy.runtime.device if self._server.meeting.backend == "nccl" else "cpu"

    def _keeping(self, buckets: Iterable[torch.Tensor], keep: bool) -> Iterator[torch.Tensor]:
        for bucket in buckets:
            if keep:
                self._kept.append(bucket.to("cpu", copy=True))
            yield bucket

    def _send(self, buckets: Iterator[torch.Tensor]) -> None:
        server = self._server
        del self._server
        try:
            server.send(buckets)
        finally:
            for _ in buckets:  # what is kept is kept whole
                pass


@dataclass(frozen=True)
class CollectiveReceiver(Receiver):
    """What the processes of one engine are told: where the group meets, and which ranks they are."""

    meeting: Meeting
    engine: int
    rank: int
    """Of the engine's first process; the others follow it."""
    joins: bool
    """Whether the group comes together for this update; otherwise they stand in it."""
    bucket_bytes: int
    timeout_s: float
    """How long to wait for the sender, which may be training."""

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Receive the tensors of an update on ``device``, as process ``worker`` (0 ..) of the engine.

        Raises:
            PeerLost: the sender or another receiver was lost. RunError: a tensor is not what was sent.
        """
        # gloo ends the process when the ends disagree on a size; both take it from the manifest.
        group = joined(self.meeting, self._member(worker), self.rank + worker, self.joins, self.timeout_s)
        buckets = divide(manifest, self.bucket_bytes)
        try:
            with group as entered:
                for bucket, buffer in _received(entered, buckets, device):
                    yield from bucket.open(buffer)
        except PeerLost as error:
            raise PeerLost(f"weight update {manifest.version}: {error}") from error

    def close(self, worker: int) -> None:
        """Leave the group."""
        leave(self._member(worker), self.meeting)

    def _member(self, worker: int) -> str:
        return f"process {worker} of engine {self.engine}"


def _received(
    group: BroadcastGroup, buckets: list[Bucket], device: torch.device
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Every bucket with its bytes; the next one is on its way already when one is handed out."""
    under_way = None
    for bucket in buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        operation = group.broadcast(buffer)
        if under_way:
            under_way[2].finish()
            yield under_way[:2]
        under_way = bucket, buffer, operation
    if under_way:
        under_way[2].finish()
        yield under_way[:2]
