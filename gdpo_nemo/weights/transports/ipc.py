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
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from gdpo_nemo.weights.buckets import Bucket, PeerLost, divide
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.transports.transport import Receiver, Sender, StreamingTransport, Tensors

_JOIN_S = 120.0
"""Limit for the engine to connect, and to copy one bucket; it waits already when the rank begins."""
_BUFFERS = 2
"""The rank fills one while the engine copies the other."""
_FILLED = b"filled"
_TAKEN = b"taken"
_CLOSED = b"closed"
Address = tuple[str, bytes]
"""Path of a local socket, and the key that a process must present there."""
_DEVICE = 6
"""Index of the device number among the arguments of ``rebuild_cuda_tensor``."""


class IpcTransport(StreamingTransport):
    """Buckets in memory that a policy rank and the engine process on its device share."""

    refuses = {
        "separate": "hands memory to the process on the same device, and with cluster.placement separate there is "
        "none; use nccl, gloo, memory or folder"
    }

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """The ranks beside these engines listen; all ranks gather, for those and for nobody else."""
        shared = self.policy.shared
        listening = [rank for number in engines for rank in shared[number]]
        opened = self.policy.start_sender(IpcSender, "listen", ranks=listening)
        addresses = dict(zip(listening, self.policy.wait(opened, "opening handles")))
        bucket = self.options.bucket_bytes
        receivers = {
            number: IpcReceiver(tuple(addresses[rank] for rank in shared[number]), bucket, self.policy.timeout_s)
            for number in engines
        }
        updates = [engine.update_weights.remote(self.manifest, receivers[n]) for n, engine in engines.items()]
        return updates, self.policy.start_sender(IpcSender, "send", self.manifest, bucket, listening)


class IpcSender(Sender):
    """Serves the engine process beside this rank."""

    def listen(self) -> Address:
        """Open the address to which the engine process beside this rank comes for the next ``send``."""
        self._server = IpcServer()
        return self._server.address

    def send(self, manifest: Manifest, bucket_bytes: int, listening: Sequence[int]) -> None:
        """Pass the current weights on, on the ranks that were made to listen; the others only gather along."""
        with self.gathered() as tensors:
            if self.rank in listening:
                server = self._server
                del self._server
                server.send(manifest, tensors, bucket_bytes, self.policy.runtime.device)


class IpcServer:
    """The sending end, for one engine process."""

    def __init__(self) -> None:
        # A leading zero: an address that is no file.
        self.address: Address = (f"\0gdpo_nemo_{secrets.token_hex(8)}", secrets.token_bytes(16))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address[0])
        self._server.listen()
        self._server.settimeout(_JOIN_S)

    def send(self, manifest: Manifest, tensors: Tensors, bucket_bytes: int, device: torch.device) -> None:
        """Pass an update on, bucket by bucket, as ``tensors`` are gathered.

        Raises:
            PeerLost: the engine's process did not come, or is gone.
        """
        buckets = divide(manifest, bucket_bytes)
        buffers = [torch.empty(_largest(buckets), dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        with _named(manifest), self._accepted() as connection:
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
    def _accepted(self) -> Iterator[Connection]:
        with self._server:
            peer, _ = self._server.accept()
        with Connection(peer.detach()) as connection:
            deliver_challenge(connection, self.address[1])
            answer_challenge(connection, self.address[1])
            yield connection


@dataclass(frozen=True)
class IpcReceiver(Receiver):
    """What one engine is told: for each of its processes where the handles are, and with which key."""

    addresses: tuple[Address, ...]
    bucket_bytes: int
    timeout_s: float
    """How long to wait for a bucket; the rank may be training."""

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Copy the tensors of an update to ``device``, as process ``worker`` (0 ..) of the engine.

        Raises:
            PeerLost: the rank is gone. RunError: a tensor is not what was sent.
        """
        for bucket, buffer in self._copies(manifest, *self.addresses[worker], device):
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
        untyped: Any = torch.UntypedStorage  # the method is missing in torch's stubs
        storage = untyped._new_shared_fd_cpu(descriptor, size)
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
