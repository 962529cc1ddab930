"""Weights by handles of shared memory, between a policy rank and the engine process on the same device.

The rank fills two buffers in turn, whose handles the engine's process opened once: CUDA IPC where they lie on a GPU, a
descriptor of shared memory on a CPU; the process copies a buffer and says so, and loads from its copy while the next
one is filled. They talk over a local socket, so that either notices at once when the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from typing import Iterator

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from gdpo_nemo.weights.buckets import Bucket, PeerLost, divide
from gdpo_nemo.weights.manifest import Manifest

_JOIN_S = 120.0
"""Time for the engine to come, and to copy one bucket; it is known to wait when the rank begins."""
_BUFFERS = 2
_FILLED = b"filled"
_TAKEN = b"taken"
_CLOSED = b"closed"
_DEVICE = 6
"""Place of the device's number among what ``rebuild_cuda_tensor`` is called with."""


class Lender:
    """The sending end, for one engine process; ``door`` is where and with which key it comes in."""

    def __init__(self):
        # A leading zero: an address that is no file.
        self.door: tuple[str, bytes] = (f"\0gdpo_nemo_{secrets.token_hex(8)}", secrets.token_bytes(16))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.door[0])
        self._server.listen()
        self._server.settimeout(_JOIN_S)

    def lend(
        self, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int, device: torch.device
    ) -> None:
        """Pass an update on, bucket by bucket, as ``tensors`` are gathered.

        Raises:
            PeerLost: the engine's process did not come, or is gone.
        """
        buckets = divide(manifest, bucket_bytes)
        buffers = [torch.empty(_largest(buckets), dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        with _named(manifest), self._visitor() as connection:
            _send_handles(connection, buffers)
            for number, bucket in enumerate(buckets):
                if number >= _BUFFERS:
                    _expect(connection, _TAKEN, _JOIN_S)
                bucket.fill(tensors, buffers[number % _BUFFERS])
                _settle(device)
                connection.send_bytes(_FILLED)
            for _ in buckets[-_BUFFERS:]:
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
            deliver_challenge(connection, self.door[1])
            answer_challenge(connection, self.door[1])
            yield connection


@dataclass(frozen=True)
class Handles:
    """What one engine is told: for each of its processes where the handles are, and with which key."""

    doors: tuple[tuple[str, bytes], ...]
    bucket_bytes: int
    timeout_s: float
    """How long to wait for a bucket; the rank may be training."""

    def fetch(self, manifest: Manifest, device: torch.device, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy the tensors of an update to ``device``, as process ``worker`` (0 ..) of the engine.

        Raises:
            PeerLost: the rank is gone. RunError: a tensor is not what was sent.
        """
        for bucket, buffer in self._copies(manifest, *self.doors[worker], device):
            yield from bucket.open(buffer)

    def _copies(self, manifest: Manifest, address: str, key: bytes, device) -> Iterator[tuple[Bucket, torch.Tensor]]:
        with _named(manifest), Client(address, "AF_UNIX", key) as connection:
            buckets = divide(manifest, self.bucket_bytes)
            _wait(connection, "handles", self.timeout_s)
            buffers = [_open_handle(connection, _largest(buckets), device) for _ in range(_BUFFERS)]
            for number, bucket in enumerate(buckets):
                _expect(connection, _FILLED, self.timeout_s)
                buffer = buffers[number % _BUFFERS][: bucket.nbytes].clone()
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
        raise PeerLost(
            f"weight update {manifest.version}: the other end of the shared memory is gone ({what})"
        ) from error


def _send_handles(connection: Connection, buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        if buffer.is_cuda:
            connection.send(reduce_tensor(buffer)[1])
        else:
            # A descriptor of memory without a name, which ends with the last process that has it, however that ends.
            descriptor, _ = buffer.untyped_storage()._share_fd_cpu_()
            send_handle(connection, descriptor, None)


def _open_handle(connection: Connection, size: int, device: torch.device) -> torch.Tensor:
    """The sender's uint8 [size]."""
    if device.type == "cuda":
        arguments = list(connection.recv())
        arguments[_DEVICE] = device.index  # each process counts the GPUs that it sees from 0
        return rebuild_cuda_tensor(*arguments)
    descriptor = recv_handle(connection)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _expect(connection: Connection, word: bytes, timeout_s: float) -> None:
    _wait(connection, word.decode(), timeout_s)
    said = connection.recv_bytes()
    if said != word:
        raise ConnectionError(f"{said!r} in place of {word!r}")


def _wait(connection: Connection, what: str, timeout_s: float) -> None:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"{what} did not come within {timeout_s:.0f} s")


def _largest(buckets: list[Bucket]) -> int:
    return max(bucket.nbytes for bucket in buckets)


def _settle(device: torch.device) -> None:
    """Wait until what was queued on a GPU is done: another process cannot see its stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
