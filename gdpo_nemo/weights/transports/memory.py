"""Weights through Ray's object store: one flat buffer, mapped without a copy on the node of rank 0, pulled once by
every other node."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import numpy as np
import torch

from gdpo_nemo.weights.manifest import Manifest, pack, unpack
from gdpo_nemo.weights.transports.transport import Receiver, Sender, Tensors, Transport


class MemoryTransport(Transport):
    """The whole model in the object store, from the moment it is prepared to the next."""

    uses_buckets = False

    def prepare(self, version: int) -> None:
        """Pack the weights into ``manifest`` and ``buffer``, references both."""
        packed = self.policy.start_sender(MemorySender, "pack", version, num_returns=2)
        self.policy.wait([manifest for manifest, _ in packed], "exporting weights")
        self.manifest, self.buffer = packed[0]

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Each engine loads from the buffer; the policy is free."""
        receiver = MemoryReceiver()
        return [e.update_weights.remote(self.manifest, receiver, self.buffer) for e in engines.values()], []


class MemorySender(Sender):
    """Packs the weights."""

    _memory: np.ndarray | None = None
    """Of the last update. Ray has copied it into its store when ``pack`` is called again."""

    def pack(self, version: int) -> tuple[Manifest, np.ndarray] | tuple[None, None]:
        """(manifest, flat buffer) on rank 0; the other ranks gather along and return nothing."""
        with self.gathered() as tensors:
            if self.rank:
                return None, None
            manifest, self._memory = pack(tensors, version, self.policy.adapters, self._memory)
            return manifest, self._memory


@dataclass(frozen=True)
class MemoryReceiver(Receiver):
    """A flat buffer in the engine's process; where workers have processes of their own, a file in shared memory."""

    buffer: np.ndarray | None = None
    path: str | None = None

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Put the one buffer of ``data`` where the workers find it, for as long as they load."""
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
        """Views of the buffer; every worker reads all of it."""
        if self.path is not None:
            return unpack(manifest, np.memmap(self.path, np.uint8, "r"))
        if self.buffer is None:
            raise ValueError("a receiver without a buffer was asked for weights")
        return unpack(manifest, self.buffer)


def _shared_file(buffer: np.ndarray) -> str:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(prefix="gdpo_nemo_weights_", dir=folder, delete=False) as file:
        file.write(memoryview(buffer))
    return file.name
