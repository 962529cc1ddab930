"""Transport through Ray's object store: one flat buffer, which engines on rank 0's node map without copying it.

Every other node fetches the buffer once.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gdpo_nemo.weights.manifest import Manifest, pack, unpack
from gdpo_nemo.weights.transports.base import Receiver, Sender, Tensors, Transport


class MemoryTransport(Transport):
    """Transport that stores the complete update in the object store until the next ``prepare``."""

    uses_buckets = False

    def prepare(self, version: int) -> None:
        """Pack the weights, and set ``manifest`` and ``buffer`` to references to the result."""
        packed = self.policy.start_sender(MemorySender, "pack", version, num_returns=2)
        self.policy.wait([manifest for manifest, _ in packed], "exporting weights")
        self.manifest, self.buffer = packed[0]

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Make each engine load from the buffer. The policy does not take part."""
        receiver = MemoryReceiver()
        return [e.update_weights.remote(self.manifest, receiver, self.buffer) for e in engines.values()], []


class MemorySender(Sender):
    """Sender that packs the weights."""

    _memory: np.ndarray | None = None
    """Buffer of the last update, which is reused. Ray has copied its content before ``pack`` is called again."""

    def pack(self, version: int) -> tuple[Manifest, np.ndarray] | tuple[None, None]:
        """Return (manifest, flat buffer) on rank 0. Other ranks participate in gathering and return (None, None)."""
        with self.gathered() as tensors:
            if self.rank:
                return None, None
            manifest, self._memory = pack(tensors, version, self.policy.adapters, self._memory)
            return manifest, self._memory


@dataclass(frozen=True)
class MemoryReceiver(Receiver):
    """Receiver that reads the flat buffer of an update.

    Set ``buffer`` for an engine whose only worker is its main process, and ``path`` for separate worker processes.
    """

    buffer: np.ndarray | None = None
    """uint8 [bytes], the flat buffer."""
    path: str | None = None
    """File in shared memory that contains the flat buffer."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Make the buffer in ``data`` available to the workers in the block."""
        (buffer,) = data
        if in_process:
            yield MemoryReceiver(buffer)
            return
        path = _shared_file(buffer)
        try:
            yield MemoryReceiver(path=path)
        finally:
            os.unlink(path)

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors as views of the buffer. Every worker reads the complete buffer."""
        if self.path is not None:
            return unpack(manifest, np.memmap(self.path, np.uint8, "r"))
        if self.buffer is None:
            raise ValueError("the receiver has no buffer for the weights")
        return unpack(manifest, self.buffer)


def _shared_file(buffer: np.ndarray) -> str:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    # The run's cleanup finds the file by the name of the run's temporary folder.
    prefix = f"gdpo_nemo_weights_{os.path.basename(tempfile.gettempdir())}_"
    with tempfile.NamedTemporaryFile(prefix=prefix, dir=folder, delete=False) as file:
        file.write(memoryview(buffer))
    return file.name
