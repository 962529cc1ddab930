"""Weights through a folder that all nodes see: safetensors files, written whole, read back by every engine.

Adapters alone are a folder that PEFT loads.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np
import torch

from gdpo_nemo.errors import RunError
from gdpo_nemo.weights.adapters import write_adapter
from gdpo_nemo.weights.buckets import neighbours
from gdpo_nemo.weights.manifest import Manifest, pack, unpack
from gdpo_nemo.weights.model_folder import save_tensors
from gdpo_nemo.weights.transports.memory import MemoryReceiver
from gdpo_nemo.weights.transports.transport import Receiver, Sender, Tensors, Transport


class FolderTransport(Transport):
    """safetensors files in a folder that all nodes see; the newest version stays until the next one is prepared."""

    _version: Path | None = None

    def prepare(self, version: int) -> None:
        """Write the weights from rank 0."""
        before = self._version
        self._version = self.options.folder / f"version_{version}"
        staged = self.policy.start_sender(FolderSender, "stage_weights", version)
        self.policy.wait(staged, "exporting weights")
        self.manifest = staged[0]
        written = self.policy.start_sender(
            FolderSender, "write", str(self._version), self.options.bucket_bytes, ranks=[0]
        )
        self.policy.wait(written, f"writing {self._version}")
        if before not in (None, self._version):
            shutil.rmtree(before, ignore_errors=True)

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Each engine reads the files; the policy is free."""
        receiver = FolderReceiver(str(self._version))
        return [engine.update_weights.remote(self.manifest, receiver) for engine in engines.values()], []

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.options.folder, ignore_errors=True)


class FolderSender(Sender):
    """Rank 0 holds the weights until they are written, so that the other ranks need not wait for the disk."""

    _staged: tuple[Manifest, np.ndarray] | None = None

    def stage_weights(self, version: int) -> Manifest | None:
        """Pack the weights on rank 0, where they stay until the next version; returns their manifest there."""
        with self.gathered() as tensors:
            if self.rank:
                return None
            memory = self._staged[1] if self._staged else None
            self._staged = pack(tensors, version, self.policy.adapters, memory)
        return self._staged[0]

    def write(self, folder: str, bucket_bytes: int) -> None:
        """Write the staged weights.

        Raises:
            RunError: none are staged, or they could not be written.
        """
        if self._staged is None:
            raise RunError("no weights were staged for the folder")
        write(folder, *self._staged, bucket_bytes)


def write(folder: str | Path, manifest: Manifest, buffer: np.ndarray, bucket_bytes: int) -> None:
    """Write an update as ``00000.safetensors``, ``00001.safetensors`` ...; a file takes tensors up to ``bucket_bytes``;
    adapters make one file whatever their size.

    The folder appears under its name when it is complete.

    Raises:
        RunError: it could not be written.
    """
    final = Path(folder)
    temporary = Path(f"{folder}.writing")
    tensors = dict(unpack(manifest, buffer))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        temporary.mkdir(parents=True)
        if manifest.adapters is not None:
            write_adapter(temporary, tensors, manifest.adapters)
        else:
            for number, bucket in enumerate(neighbours(manifest.entries, bucket_bytes)):
                save_tensors({e.name: tensors[e.name] for e in bucket}, temporary / f"{number:05d}.safetensors")
        temporary.rename(final)
    except OSError as error:
        raise RunError(f"weight update {manifest.version} could not be written to {folder}: {error}") from error


@dataclass(frozen=True)
class FolderReceiver(Receiver):
    """What an engine is told: where the files are."""

    path: str

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Read the files once an engine; its workers load from memory."""
        with MemoryReceiver().opened(manifest, in_process, self.read(manifest)) as inside:
            yield inside

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """The tensors as the files have them."""
        return unpack(manifest, self.read(manifest))

    def read(self, manifest: Manifest) -> np.ndarray:
        """Read uint8 [bytes] of an update, laid out as the manifest says.

        Raises:
            RunError: files or tensors are missing, as where the folder is not shared.
        """
        from safetensors import SafetensorError, safe_open

        buffer = np.zeros(manifest.nbytes, np.uint8)
        wanted = {entry.name: entry for entry in manifest.entries}
        try:
            for file in sorted(Path(self.path).glob("*.safetensors")):
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():
                        entry = wanted.pop(name)
                        data = shard.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy()
                        buffer[entry.offset : entry.offset + entry.nbytes] = data
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise RunError(f"weight update {manifest.version}: {self.path} cannot be read ({error})") from error
        if wanted:
            some = ", ".join(sorted(wanted)[:3])
            raise RunError(
                f"weight update {manifest.version}: {len(wanted)} tensors are not in {self.path}, for instance {some}"
            )
        return buffer
