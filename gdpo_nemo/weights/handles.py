"""Weights by handles of shared memory, between a policy rank and the engine process on the same device.

The rank fills two buffers in turn, whose handles the engine's process opened once: CUDA IPC where they lie on a GPU, a file
of shared memory on a CPU; the process copies a buffer and says so, and loads from its copy while the next one is filled.
They talk over a connection on the loopback, so that either notices at once when the other is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Iterator

import torch
import torch.multiprocessing as shared
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from gdpo_nemo.weights.buckets import Bucket, PeerLost, divide
from gdpo_nemo.weights.manifest import Manifest

_JOIN_S = 120.0
"""Time for the engine to come, and to copy one bucket; it is known to wait when the rank begins."""
_FILLED, _TAKEN, _CLOSED = b"filled", b"taken", b"closed"
_DEVICE = 6
"""Place of the device's number among what ``rebuild_cuda_tensor`` is called with."""


class Lender:
    """The sending end, for one engine process; ``door`` is where and with which key it comes in."""

    def __init__(self):
        self._server, self._key = socket.create_server(("127.0.0.1", 0)), secrets.token_bytes(16)
        self._server.settimeout(_JOIN_S)
        self.door: tuple[int, bytes] = (self._server.getsockname()[1], self._key)

    def lend(
        self, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int, device: torch.device
    ) -> None:
        """Pass an update on, bucket by bucket, as ``tensors`` are gathered.

        Raises:
            PeerLost: the engine's process did not come, or is gone.
        """
        buckets = divide(manifest, bucket_bytes)
        size = max(bucket.nbytes for bucket in buckets)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        with _named(manifest), self._visitor() as connection:
            _send_handles(connection, buffers)
            for number, bucket in enumerate(buckets):
                if number >= len(buffers):
                    _expect(connection, _TAKEN, _JOIN_S)
                bucket.fill(tensors, buffers[number % len(buffers)])
                _settle(device)
                connection.send_bytes(_FILLED)
            for _ in buckets[-len(buffers) :]:
                _expect(connection, _TAKEN, _JOIN_S)
            _expect(connection, _CLOSED, _JOIN_S)
        del buffers
        if device.type == "cuda":
            torch.cuda.ipc_collect()

    @contextlib.contextmanager
    def _visitor(self) -> Iterator[Connection]:
        with self._server:
            visitor, _ = self._server.accept()
        with Connection(visitor.detach()) as connection:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            yield connection


@dataclass(frozen=True)
class Handles:
    """What one engine is told: for each of its processes where the handles are, and with which key."""

    doors: tuple[tuple[int, bytes], ...]
    bucket_bytes: int
    timeout_s: float
    """How long to wait for a bucket; the rank may be training."""

    def fetch(self, manifest: Manifest, device: torch.device, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy the tensors of an update to ``device``, as process ``worker`` (0 ..) of the engine.

        Raises:
            PeerLost: the rank is gone. RunError: a tensor is not what was sent.
        """
        port, key = self.doors[worker]
        for bucket, buffer in self._copies(manifest, port, key, device):
            yield from bucket.open(buffer)

    def _copies(self, manifest: Manifest, port: int, key: bytes, device) -> Iterator[tuple[Bucket, torch.Tensor]]:
        with _named(manifest), Client(("127.0.0.1", port), authkey=key) as connection:
            buffers = _open_handles(connection, device, self.timeout_s)
            for number, bucket in enumerate(divide(manifest, self.bucket_bytes)):
                _expect(connection, _FILLED, self.timeout_s)
                buffer = buffers[number % len(buffers)][: bucket.nbytes].clone()
                _settle(device)
                connection.send_bytes(_TAKEN)
                yield bucket, buffer
            buffers.clear()
            connection.send_bytes(_CLOSED)


@contextlib.contextmanager
def _named(manifest: Manifest) -> Iterator[None]:
    """What a connection that breaks means here."""
    try:
        yield
    except (EOFError, OSError, AuthenticationError) as error:
        what = str(error) or type(error).__name__
        raise PeerLost(f"weight update {manifest.version}: the other end of the shared memory is gone ({what})") from error


def _send_handles(connection: Connection, buffers: list[torch.Tensor]) -> None:
    # On a CPU: by name. Descriptors are passed by a server of multiprocessing's, whose key strangers do not share.
    before = shared.get_sharing_strategy()
    shared.set_sharing_strategy("file_system")
    try:
        connection.send([reduce_tensor(buffer) for buffer in buffers])
    finally:
        shared.set_sharing_strategy(before)


def _open_handles(connection: Connection, device: torch.device, timeout_s: float) -> list[torch.Tensor]:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"no handles within {timeout_s:.0f} s")
    buffers = []
    for rebuild, arguments in connection.recv():
        if rebuild is rebuild_cuda_tensor:  # each process counts the GPUs that it sees from 0
            arguments = (*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
        buffers.append(rebuild(*arguments))
    return buffers


def _expect(connection: Connection, word: bytes, timeout_s: float) -> None:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"{word.decode()} did not come within {timeout_s:.0f} s")
    said = connection.recv_bytes()
    if said != word:
        raise ConnectionError(f"{said!r} in place of {word!r}")


def _settle(device: torch.device) -> None:
    """Wait until what was queued on a GPU is done: another process cannot see its stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
