"""Transport through Ray's object store: engines on a rank's node map the rank's messages without copying them.

Every other node fetches the messages once.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gdpo_nemo.weights.copies import engine_copy
from gdpo_nemo.weights.manifest import Manifest, divide, message_sizes, unpack
from gdpo_nemo.weights.pieces import assembled
from gdpo_nemo.weights.transports.base import Receiver, Tensors
from gdpo_nemo.weights.transports.shards import ShardSender, ShardTransport


class StoredTransport(ShardTransport):
    """Base of transports that store all messages of a delivery before the engines read them."""

    uses_buckets = False
    copies_full = True
    _stored: Mapping[bool, Any] = {}
    """Results of ``store`` for the prepared version: for messages in full (False) or as a difference (True)."""

    def prepare(self, version: int) -> None:
        """Store the weights in the form that the engines probably need."""
        super().prepare(version)
        difference = self._base is not None
        self._stored = {difference: self.store(difference)}

    def deliver(self, engines: Mapping[int, Any], manifest: Manifest, first: bool) -> tuple[list[Any], list[Any]]:
        """Make each engine read the stored messages. The policy takes part only if they are not stored yet."""
        difference = manifest.base is not None
        if difference not in self._stored:
            self._stored = {**self._stored, difference: self.store(difference)}
        updates = []
        for number, engine in engines.items():
            receiver, data = self.receiver(number, self._stored[difference])
            updates.append(engine.update_weights.remote(manifest, receiver, *data))
        return updates, []

    @abstractmethod
    def store(self, difference: bool) -> Any:
        """Store the messages of the prepared version, and return their location."""

    @abstractmethod
    def receiver(self, engine: int, stored: Any) -> tuple[Receiver, Sequence[Any]]:
        """Return the receiver of an engine, and additional arguments of ``Engine.update_weights``.

        Args:
            stored: result of ``store``.
        """


class MemorySender(ShardSender):
    """Sender that stores the messages of a rank."""

    def store(self, difference: bool) -> tuple[None, list[np.ndarray]]:
        """Return (None, the rank's messages, uint8 [bytes] each). The driver waits for the first value only."""
        return None, [message.numpy() for message in self.messages(difference)]


class MemoryTransport(StoredTransport):
    """Transport that stores the messages in the object store until the next ``prepare``."""

    sender = MemorySender

    def store(self, difference: bool) -> Sequence[Any]:
        """Store the messages of each rank as an object, and return the references."""
        stored = self.policy.start_sender(self.sender, "store", difference, ranks=self.manifest.ranks, num_returns=2)
        self.policy.wait([done for done, _ in stored], "exporting weights")
        return [messages for _, messages in stored]

    def receiver(self, engine: int, stored: Sequence[Any]) -> tuple[Receiver, Sequence[Any]]:
        """Return the receiver, and the references to the messages of each rank."""
        return MessageReceiver(engine, self.bucket_bytes), stored


@dataclass(frozen=True)
class MessageReceiver(Receiver):
    """Receiver that reads messages that have been stored.

    Set ``messages`` for an engine whose only worker is its main process, and ``path`` for separate worker processes.
    """

    engine: int
    """Number of the engine."""
    bucket_bytes: int
    messages: Sequence[np.ndarray] = ()
    """uint8 [bytes] each, in the order of ``divide``."""
    path: str | None = None
    """File in shared memory that contains the messages one after the other."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Make the messages of each rank in ``data`` available to the workers in the block."""
        by_rank = dict(zip(manifest.ranks, map(iter, data), strict=True))
        messages = [next(by_rank[bucket.rank]) for bucket in divide(manifest, self.bucket_bytes)]
        if in_process:
            yield replace(self, messages=messages)
            return
        with shared_file(messages) as path:
            yield replace(self, path=path)

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors.

        Raises:
            BaseMissing: if the process cannot apply a difference.
            RunError: if the checksum of a tensor differs.
        """
        buckets = divide(manifest, self.bucket_bytes)
        messages = self.messages
        if self.path is not None:
            flat = np.memmap(self.path, np.uint8, "r")
            messages = np.split(flat, np.cumsum(message_sizes(manifest, buckets))[:-1])
        received = (torch.frombuffer(memoryview(message), dtype=torch.uint8) for message in messages)
        member = f"process {worker} of engine {self.engine}"
        return assembled(engine_copy(member).pieces(manifest, buckets, received, device))


@dataclass(frozen=True)
class MemoryReceiver(Receiver):
    """Receiver that reads an update from ``pack``, for transports of users.

    Set ``buffer`` for an engine whose only worker is its main process, and ``path`` for separate worker processes.
    """

    buffer: np.ndarray | None = None
    """uint8 [bytes], the flat buffer."""
    path: str | None = None
    """File in shared memory that contains the flat buffer."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Make the buffer in ``data`` available to the workers in the block."""
        if in_process:
            yield MemoryReceiver(*data)
            return
        with shared_file(data) as path:
            yield MemoryReceiver(path=path)

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors as views of the buffer. Every worker reads the complete buffer."""
        if self.path is not None:
            return unpack(manifest, np.memmap(self.path, np.uint8, "r"))
        if self.buffer is None:
            raise ValueError("the receiver has no buffer for the weights")
        return unpack(manifest, self.buffer)


@contextlib.contextmanager
def shared_file(buffers: Sequence[np.ndarray]) -> Iterator[str]:
    """Provide the path of a file in shared memory with the given buffers, which is removed after the block."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    # The run's cleanup finds the file by the name of the run's temporary folder.
    prefix = f"gdpo_nemo_weights_{os.path.basename(tempfile.gettempdir())}_"
    with tempfile.NamedTemporaryFile(prefix=prefix, dir=folder, delete=False) as file:
        path = file.name
        try:
            for buffer in buffers:
                file.write(memoryview(buffer))
            file.flush()
            yield path
        finally:
            os.unlink(path)
