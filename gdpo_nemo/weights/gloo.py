"""Weights by broadcast over TCP, from the policy's first rank to all engines at once; needs no shared disk and no GPU.

Every update makes a group of its own: the sender is its rank 0 and keeps the store where the group meets, the engines are
ranks 1 and up. So an engine that was replaced takes part in the next update like any other. The sender copies from GPU to
host first; on GPUs with a fast fabric NCCL would be the better transport, which this project does not have.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gdpo_nemo.errors import RunError
from gdpo_nemo.weights.manifest import Manifest

_JOIN_S = 120.0
"""Time for the engines to join and for one bucket to pass; they are known to wait when the sender begins."""


class PeerLost(RunError):
    """The group broke while weights were on their way. What the receivers held before is untouched."""


class Sender:
    """The sending end. Opens a store on all of this machine's addresses; ``port`` says where."""

    def __init__(self, host: str):
        limit = datetime.timedelta(seconds=_JOIN_S)
        self._host, self._store = host, dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.port: int = self._store.port

    def send(self, manifest: Manifest, buffer: np.ndarray, receivers: int, bucket_bytes: int) -> None:
        """Broadcast ``buffer`` (uint8 [bytes]) to ``receivers`` that were told host, port, their rank and the manifest.

        Raises:
            PeerLost: not all of them came, or one was lost on the way.
        """
        # gloo ends the process when the ends disagree on a size; both take it from the manifest.
        _broadcast(self._store, 0, 1 + receivers, self._host, buffer[: manifest.nbytes], bucket_bytes, _JOIN_S)


@dataclass(frozen=True)
class Broadcast:
    """What one receiver is told: where the group meets, and its own rank (1 .. world - 1) in it."""

    host: str
    port: int
    rank: int
    world: int
    bucket_bytes: int
    timeout_s: float
    """How long to wait for the sender, which may be training."""

    def fetch(self, manifest: Manifest) -> np.ndarray:
        """Receive uint8 [bytes] of an update.

        Raises:
            PeerLost: the sender or another receiver was lost.
        """
        limit = datetime.timedelta(seconds=self.timeout_s)
        buffer = np.empty(manifest.nbytes, np.uint8)
        try:
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=limit)
        except RuntimeError as error:
            raise PeerLost(f"weight update {manifest.version}: no sender at {self.host}:{self.port} ({_brief(error)})") from error
        here = _own_address(self.host, self.port)
        _broadcast(store, self.rank, self.world, here, buffer, self.bucket_bytes, self.timeout_s)
        return buffer


def _broadcast(store, rank: int, world: int, host: str, buffer: np.ndarray, bucket_bytes: int, timeout_s: float) -> None:
    """The same on both ends: join, then one broadcast a bucket, then wait until all have everything."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    # By address: a host's name often resolves to its loopback, where no other host can answer.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    flat = torch.from_numpy(buffer)
    try:
        group = dist.ProcessGroupGloo(store, rank, world, options)
        for start in range(0, buffer.nbytes, bucket_bytes):
            group.broadcast([flat[start : start + bucket_bytes]], dist.BroadcastOptions()).wait()
        group.barrier(dist.BarrierOptions()).wait()
    except RuntimeError as error:
        raise PeerLost(f"a member of the broadcast group was lost ({_brief(error)})") from error


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def _brief(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:160]
