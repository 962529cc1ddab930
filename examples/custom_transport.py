"""A transport of your own: ``weights.transport=examples/custom_transport.py:CompressedTransport``.

Weights go through one compressed file in the run's folder, for nodes that share nothing but a slow disk. The three
classes run in three places: on the driver, on every rank of the policy, in every engine.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdpo_nemo.errors import RunError
from gdpo_nemo.weights.manifest import pack, unpack
from gdpo_nemo.weights.transports.memory import MemoryReceiver
from gdpo_nemo.weights.transports.transport import Receiver, Sender, Transport


class CompressedTransport(Transport):
    """On the driver."""

    uses_buckets = False
    refuses = {
        "colocated": "compresses on the host, and colocated engines share their devices with the policy; use ipc"
    }

    def prepare(self, version):
        """All ranks gather, rank 0 writes; the file of the version before goes."""
        self.options.folder.mkdir(parents=True, exist_ok=True)
        before = set(self.options.folder.glob("version_*.zlib"))
        self._file = self.options.folder / f"version_{version}.zlib"
        written = self.policy.start_sender(CompressedSender, "write", str(self._file), version)
        self.manifest = self.policy.wait(written, f"writing {self._file}")[0]
        for old in before - {self._file}:
            old.unlink()

    def send(self, engines):
        """The engines read; the policy has no part in it."""
        receiver = CompressedReceiver(str(self._file))
        return [engine.update_weights.remote(self.manifest, receiver) for engine in engines.values()], []

    def close(self):
        """Remove what would outlast the run."""
        shutil.rmtree(self.options.folder, ignore_errors=True)


class CompressedSender(Sender):
    """On every rank of the policy."""

    def write(self, file, version):
        """The manifest on rank 0, which writes; the others take part in gathering."""
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
    """In every engine, and in each of its processes."""

    file: str

    @contextlib.contextmanager
    def opened(self, manifest, in_process, *data):
        """Once an engine: unpack the file, and let its processes load from memory."""
        with MemoryReceiver().opened(manifest, in_process, self._buffer(manifest)) as receiver:
            yield receiver

    def receive(self, manifest, device, worker):
        """Names and tensors, each checked against the manifest."""
        return unpack(manifest, self._buffer(manifest))

    def _buffer(self, manifest):
        try:
            return np.frombuffer(bytearray(zlib.decompress(Path(self.file).read_bytes())), np.uint8)
        except (OSError, zlib.error) as error:
            raise RunError(f"weight update {manifest.version}: {self.file} cannot be read ({error})") from error
