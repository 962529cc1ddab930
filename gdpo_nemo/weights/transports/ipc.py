"""Transport through shared memory, from a policy rank to the engine process on the same device.

The rank fills two buffers alternately. The engine process opens the buffers' handles once per update: CUDA IPC handles
on a GPU, descriptors of shared memory on a CPU. The engine process copies a filled buffer, notifies the rank, and loads
from the copy while the rank fills the next buffer. The processes communicate over a local socket, so that each process
detects at once if the other process ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from gdpo_nemo.weights.manifest import Bucket, Manifest, PeerLost, divide
from gdpo_nemo.weights.transports.base import Receiver, Sender, StreamingTransport, Tensors

_JOIN_S = 120.0
"""Time limit for the engine to connect, and to copy one bucket. The engine already waits when the rank starts."""
_BUFFERS = 2
"""Number of buffers: the rank fills one buffer while the engine copies the other."""
_FILLED = b"filled"
_TAKEN = b"taken"
_CLOSED = b"closed"
Address = tuple[str, bytes]
"""Path of a local socket, and the key for authentication at this socket."""
_DEVICE = 6
"""Position of the device index in the arguments of ``rebuild_cuda_tensor``."""


class IpcTransport(StreamingTransport):
    """Transport through memory that a policy rank shares with the engine process on its device."""

    refuses = {
        "separate": "requires engines on the policy's devices, which conflicts with cluster.placement separate; use "
        "nccl, gloo, memory or folder"
    }

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Start sending the weights from the ranks that share devices with ``engines``.

        All ranks participate in gathering the weights.
        """
        shared = self.policy.shared
        listening: list[int] = []
        for number in engines:
            listening += shared[number]
        opened = self.policy.start_sender(IpcSender, "listen", ranks=listening)
        addresses = dict(zip(listening, self.policy.wait(opened, "opening handles")))
        bucket = self.options.bucket_bytes
        updates = []
        for number, engine in engines.items():
            of_engine = tuple(addresses[rank] for rank in shared[number])
            receiver = IpcReceiver(of_engine, bucket, self.policy.timeout_s)
            updates.append(engine.update_weights.remote(self.manifest, receiver))
        return updates, self.policy.start_sender(IpcSender, "send", self.manifest, bucket, listening)


class IpcSender(Sender):
    """Sender for the engine process on this rank's device."""

    def listen(self) -> Address:
        """Open a socket to which the engine process on this rank's device connects for the next ``send``."""
        self._server = IpcServer()
        return self._server.address

    def send(self, manifest: Manifest, bucket_bytes: int, listening: Sequence[int]) -> None:
        """Send the current weights from the ranks ``listening``. Other ranks only participate in gathering."""
        with self.gathered() as tensors:
            if self.rank in listening:
                server = self._server
                del self._server
                server.send(manifest, tensors, bucket_bytes, self.policy.runtime.device)


class IpcServer:
    """Sender of an update to one engine process."""

    def __init__(self) -> None:
        # A leading zero byte makes the address abstract, so that no socket file is created.
        self.address: Address = (f"\0gdpo_nemo_{secrets.token_hex(8)}", secrets.token_bytes(16))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address[0])
        self._server.listen()
        self._server.settimeout(_JOIN_S)

    def send(self, manifest: Manifest, tensors: Tensors, bucket_bytes: int, device: torch.device) -> None:
        """Send an update in buckets while ``tensors`` are gathered.

        Raises:
            PeerLost: if the engine process did not connect or has ended.
        """
        buckets = divide(manifest, bucket_bytes)
        buffers = [torch.empty(_largest(buckets), dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        with _as_peer_lost(manifest), self._accepted() as connection:
            _send_handles(connection, buffers)
            for number, bucket in enumerate(buckets):
                if number >= _BUFFERS:
                    _expect(connection, _TAKEN, _JOIN_S)
                bucket.fill(tensors, buffers[number % _BUFFERS])
                _synchronize(device)
                connection.send_bytes(_FILLED)
            for _ in buckets[-_BUFFERS:]:
                _expect(connection, _TAKEN, _JOIN_S)
            _expect(connection, _CLOSED, _JOIN_S)
        del buffers
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # unannotated in torch

    @contextlib.contextmanager
    def _accepted(self) -> Iterator[Connection]:
        with self._server:
            peer, _ = self._server.accept()
        with Connection(peer.detach()) as connection:
            deliver_challenge(connection, self.address[1])
            answer_challenge(connection, self.address[1])
            yield connection


@dataclass(frozen=True)
class IpcReceiver(Receiver):
    """Receiver that copies buckets from memory shared with a policy rank."""

    addresses: tuple[Address, ...]
    """Address of the sending rank, for each process of the engine."""
    bucket_bytes: int
    timeout_s: float
    """Time limit for waiting for a bucket from the rank, which may be training."""

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield verified copies of an update's tensors on ``device``, in process ``worker`` (from 0) of the engine.

        Raises:
            PeerLost: if the rank has ended.
            RunError: if the checksum of a tensor differs.
        """
        for bucket, buffer in self._copies(manifest, *self.addresses[worker], device):
            for piece in bucket.open(buffer):
                yield piece.name, piece.values

    def _copies(
        self, manifest: Manifest, address: str, key: bytes, device: torch.device
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        with _as_peer_lost(manifest), Client(address, "AF_UNIX", key) as connection:
            buckets = divide(manifest, self.bucket_bytes)
            _wait(connection, "handles", self.timeout_s)
            buffers = [_open_handle(connection, _largest(buckets), device) for _ in range(_BUFFERS)]
            for number, bucket in enumerate(buckets):
                _expect(connection, _FILLED, self.timeout_s)
                buffer = buffers[number % _BUFFERS][: bucket.nbytes].clone()
                _synchronize(device)
                connection.send_bytes(_TAKEN)
                yield bucket, buffer
            buffers.clear()
            connection.send_bytes(_CLOSED)


@contextlib.contextmanager
def _as_peer_lost(manifest: Manifest) -> Iterator[None]:
    """Convert connection errors in the block to PeerLost."""
    try:
        yield
    except (EOFError, OSError, AuthenticationError) as error:
        reason = str(error) or type(error).__name__
        raise PeerLost(
            f"weight update {manifest.version}: the other process of the transfer has ended ({reason})"
        ) from error


def _send_handles(connection: Connection, buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        if buffer.is_cuda:
            connection.send(reduce_tensor(buffer)[1])  # type: ignore[no-untyped-call]  # unannotated in torch
        else:
            # The descriptor refers to unnamed memory, which the kernel frees when the last process that uses it ends.
            descriptor, _ = buffer.untyped_storage()._share_fd_cpu_()
            send_handle(connection, descriptor, None)


def _open_handle(connection: Connection, size: int, device: torch.device) -> torch.Tensor:
    """Return the sender's buffer, uint8 [size]."""
    if device.type == "cuda":
        arguments = list(connection.recv())
        arguments[_DEVICE] = device.index  # each process counts its visible GPUs from 0
        tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]  # unannotated in torch
        return tensor
    descriptor = recv_handle(connection)
    try:
        untyped: Any = torch.UntypedStorage  # the method is missing in torch's stubs
        storage = untyped._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _expect(connection: Connection, message: bytes, timeout_s: float) -> None:
    _wait(connection, message.decode(), timeout_s)
    received = connection.recv_bytes()
    if received != message:
        raise ConnectionError(f"expected {message!r}, got {received!r}")


def _wait(connection: Connection, what: str, timeout_s: float) -> None:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"{what} did not arrive within {timeout_s:.0f} s")


def _largest(buckets: list[Bucket]) -> int:
    return max(bucket.nbytes for bucket in buckets)


def _synchronize(device: torch.device) -> None:
    """Wait for queued GPU work, because another process cannot synchronise with this process's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
