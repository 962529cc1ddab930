"""Weights by broadcast from the policy's first rank to all processes of all engines at once, bucket by bucket.

NCCL carries them from GPU to GPU; gloo, which needs no GPU, over TCP from host to host. Every update makes a group of
its own: the sender is its rank 0 and keeps the store where the group meets, the processes of the engines are ranks 1
and up. So an engine that was replaced takes part in the next update like any other. Both ends work on one bucket while
another is on its way, so that neither holds more than two.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from dataclasses import dataclass
from typing import Any, ClassVar, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from gdpo_nemo.config.messages import message_line
from gdpo_nemo.weights.buckets import Bucket, PeerLost, divide, filled
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.transports.transport import Receiver, Sender, StreamingTransport, Tensors

_JOIN_S = 120.0
"""Limit for the engines to join and for one bucket to pass; they wait already when the sender begins."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class CollectiveTransport(StreamingTransport):
    """A broadcast from rank 0 to every process of the engines, bucket by bucket, while the policy's ranks gather.

    With ``TransportOptions.keep`` rank 0 keeps what it sent in host memory, for an engine that has to start again.
    """

    backend: ClassVar[str]
    _sent = False

    def prepare(self, version: int) -> None:
        """Name the version; nothing of it was sent yet."""
        super().prepare(version)
        self._sent = False

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """One group of rank 0 and these engines for this delivery; a second one of the same version sends what was
        kept."""
        policy = self.policy
        bucket = self.options.bucket_bytes
        each = policy.engine_processes
        opened = policy.start_sender(CollectiveSender, "open", self.backend, ranks=[0])
        ((host, port),) = policy.wait(opened, "opening the weights' sender")
        receivers = each * len(engines)
        updates = [
            engine.update_weights.remote(
                self.manifest,
                CollectiveReceiver(host, port, first, 1 + receivers, bucket, policy.timeout_s, self.backend),
            )
            for engine, first in zip(engines.values(), range(1, 1 + receivers, each))
        ]
        keep = self.options.keep
        if keep and self._sent:
            kept = policy.start_sender(CollectiveSender, "broadcast_kept", receivers, self.backend, ranks=[0])
            return updates, kept
        self._sent = True
        what = (self.manifest, receivers, bucket, self.backend, keep)
        return updates, policy.start_sender(CollectiveSender, "broadcast", *what)


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

    def open(self, backend: str) -> tuple[str, int]:
        """(host, port) where receivers of the next broadcast find this rank."""
        self._server = BroadcastServer(self.host, backend)
        return self.host, self._server.port

    def broadcast(self, manifest: Manifest, receivers: int, bucket_bytes: int, backend: str, keep: bool) -> None:
        """Broadcast the current weights from rank 0, as they are gathered, to receivers that were told of ``open``.

        ``keep``: rank 0 keeps them in host memory for ``broadcast_kept``.
        """
        with self.gathered() as tensors:
            if self.rank == 0:
                self._kept: list[torch.Tensor] = []
                buckets = filled(manifest, tensors, bucket_bytes, self._device(backend))
                self._send(self._keeping(buckets, keep), receivers)

    def broadcast_kept(self, receivers: int, backend: str) -> None:
        """Broadcast what was kept, from this rank alone."""
        device = self._device(backend)
        self._send((bucket.to(device) for bucket in self._kept), receivers)

    def _device(self, backend: str) -> Any:
        return self.policy.runtime.device if backend == "nccl" else "cpu"

    def _keeping(self, buckets: Iterable[torch.Tensor], keep: bool) -> Iterator[torch.Tensor]:
        for bucket in buckets:
            if keep:
                self._kept.append(bucket.to("cpu", copy=True))
            yield bucket

    def _send(self, buckets: Iterator[torch.Tensor], receivers: int) -> None:
        try:
            self._server.send(buckets, receivers)
        finally:
            # With its store the receivers' wait ends, too.
            del self._server
            for _ in buckets:  # what is kept is kept whole
                pass


class BroadcastServer:
    """The sending end. Opens a store on all of this machine's addresses; ``port`` says where."""

    def __init__(self, host: str, backend: str):
        limit = datetime.timedelta(seconds=_JOIN_S)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._host = host
        self._backend = backend
        self.port = self._store.port

    def send(self, buckets: Iterable[torch.Tensor], receivers: int) -> None:
        """Broadcast ``buckets`` (uint8 [bytes], on the backend's device) to ``receivers`` that were told where to meet.

        A bucket is asked for while the one before is on its way.

        Raises:
            PeerLost: not all of them came, or one was lost on the way.
        """
        with _group(self._store, 0, 1 + receivers, self._host, self._backend, _JOIN_S) as group:
            sent = None
            for bucket in buckets:
                if sent:
                    _pass(sent[1])
                sent = bucket, _broadcast(group, bucket)  # the pair keeps the bytes alive
            if sent:
                _pass(sent[1])


@dataclass(frozen=True)
class CollectiveReceiver(Receiver):
    """What the processes of one engine are told: where the group meets, and which ranks they are."""

    host: str
    port: int
    rank: int
    """Of the engine's first process; the others follow it."""
    world: int
    bucket_bytes: int
    timeout_s: float
    """How long to wait for the sender, which may be training."""
    backend: str

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Receive the tensors of an update on ``device``, as process ``worker`` (0 ..) of the engine.

        Raises:
            PeerLost: the sender or another receiver was lost. RunError: a tensor is not what was sent.
        """
        # gloo ends the process when the ends disagree on a size; both take it from the manifest.
        limit = datetime.timedelta(seconds=self.timeout_s)
        try:
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=limit)
        except RuntimeError as error:
            raise PeerLost(
                f"weight update {manifest.version}: no sender at {self.host}:{self.port} ({message_line(error)[:160]})"
            ) from error
        here = _own_address(self.host, self.port)
        with _group(store, self.rank + worker, self.world, here, self.backend, self.timeout_s) as group:
            for bucket, buffer in _received(group, divide(manifest, self.bucket_bytes), device):
                yield from bucket.open(buffer)


def _received(group, buckets: list[Bucket], device: torch.device) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Every bucket with its bytes; the next one is on its way already when one is handed out."""
    under_way = None
    for bucket in buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        work = _broadcast(group, buffer)
        if under_way:
            _pass(under_way[2])
            yield under_way[:2]
        under_way = bucket, buffer, work
    if under_way:
        _pass(under_way[2])
        yield under_way[:2]


@contextlib.contextmanager
def _group(store, rank: int, world: int, host: str, backend: str, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """The group of one update; at its end all wait until all have everything."""
    limit = datetime.timedelta(seconds=timeout_s)
    make = {"gloo": _gloo, "nccl": _nccl}[backend]
    try:
        group = make(store, rank, world, host, limit)
    except RuntimeError as error:
        raise PeerLost(_lost(error)) from error
    try:
        yield group
        done = torch.ones(1, dtype=torch.int64, device="cuda" if backend == "nccl" else "cpu")
        _pass(group.allreduce([done]))
    except BaseException:
        group.abort()  # what is under way with a lost member never ends
        raise
    group.shutdown()


def _gloo(store, rank: int, world: int, host: str, limit: datetime.timedelta) -> Any:
    # torch declares these groups apart from ProcessGroup, though they are used as one.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    # By address: a host's name often resolves to its loopback, where no other host can answer.
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, world, options)


def _nccl(store, rank: int, world: int, host: str, limit: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # Read when a group is made: waits then end with an exception when their time is up, not with the process.
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _broadcast(group, buffer: torch.Tensor):
    try:
        return group.broadcast([buffer], dist.BroadcastOptions())
    except RuntimeError as error:
        raise PeerLost(_lost(error)) from error


def _pass(work) -> None:
    """Wait until what is on its way has arrived."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(_lost(error)) from error


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def _lost(error: BaseException) -> str:
    return f"a member of the broadcast group was lost ({message_line(error)[:160]})"
