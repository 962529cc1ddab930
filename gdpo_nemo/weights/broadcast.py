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
from typing import Iterable, Iterator

import torch
import torch.distributed as dist

from gdpo_nemo.config.messages import message_line
from gdpo_nemo.weights.buckets import Bucket, PeerLost, divide
from gdpo_nemo.weights.manifest import Manifest

_JOIN_S = 120.0
"""Time for the engines to join and for one bucket to pass; they are known to wait when the sender begins."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class Sender:
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
class Broadcast:
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

    def fetch(self, manifest: Manifest, device: torch.device, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
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


def _gloo(store, rank: int, world: int, host: str, limit: datetime.timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    # By address: a host's name often resolves to its loopback, where no other host can answer.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _nccl(store, rank: int, world: int, host: str, limit: datetime.timedelta) -> dist.ProcessGroup:
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
