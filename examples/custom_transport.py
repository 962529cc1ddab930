"""Custom weight transport: ``weights.transport=examples/custom_transport.py:CompressedTransport``.

Weights are sent as one compressed file in the run's folder, for nodes that share only a slow disk. The transport runs
on the driver, the sender on each policy rank, and the receiver in each engine.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdpo_nemo import MemoryReceiver, Receiver, RunError, Sender, Transport, pack, unpack


class CompressedTransport(Transport):
    """Driver part of the transport."""

    uses_buckets = False
    refuses = {
        "colocated": "compresses on the host, and colocated engines share their devices with the policy; use ipc"
    }

    def prepare(self, version):
        """Gather the weights on all ranks, write them on rank 0, and delete the file of the previous version."""
        self.options.folder.mkdir(parents=True, exist_ok=True)
        before = set(self.options.folder.glob("version_*.zlib"))
        self._file = self.options.folder / f"version_{version}.zlib"
        written = self.policy.start_sender(CompressedSender, "write", str(self._file), version)
        self.manifest = self.policy.wait(written, f"writing {self._file}")[0]
        for old in before - {self._file}:
            old.unlink()

    def send(self, engines):
        """Let the engines read the file. The policy does not take part."""
        receiver = CompressedReceiver(str(self._file))
        return [engine.update_weights.remote(self.manifest, receiver) for engine in engines.values()], []

    def close(self):
        """Delete the files."""
        shutil.rmtree(self.options.folder, ignore_errors=True)


class CompressedSender(Sender):
    """Sender on each policy rank."""

    def write(self, file, version):
        """Write the file on rank 0 and return the manifest. Other ranks only take part in gathering and return None."""
        with self.gathered() as tensors:
            if self.rank:
                return None
            manifest, buffer = pack(tensors, version, self.policy.adapters)
        partial = Path(f"{file}.partial")
        partial.write_bytes(zlib.compress(buffer, level=1))
        partial.rename(file)
        return manifest


@dataclass(frozen=True)
class CompressedReceiver(Receiver):
    """Receiver in each engine and each of its processes."""

    file: str

    @contextlib.contextmanager
    def opened(self, manifest, in_process, *data):
        """Decompress the file once per engine, so that its processes load the weights from memory."""
        with MemoryReceiver().opened(manifest, in_process, self._buffer(manifest)) as receiver:
            yield receiver

    def receive(self, manifest, device, worker):
        """Return names and tensors, which are compared with the manifest."""
        return unpack(manifest, self._buffer(manifest))

    def _buffer(self, manifest):
        try:
            return np.frombuffer(bytearray(zlib.decompress(Path(self.file).read_bytes())), np.uint8)
        except (OSError, zlib.error) as error:
            raise RunError(f"weight update {manifest.version}: {self.file} cannot be read ({error})") from error
