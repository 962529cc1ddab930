"""Transport through safetensors files in a folder that all nodes share. Every engine reads all files.

If an update consists of adapters, PEFT can load the folder of the update.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdpo_nemo.models.hf_folder import save_tensors
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.adapters import write_adapter
from gdpo_nemo.weights.manifest import Manifest, group_entries, pack, unpack
from gdpo_nemo.weights.transports.base import Receiver, Sender, Tensors, Transport
from gdpo_nemo.weights.transports.memory import MemoryReceiver


class FolderTransport(Transport):
    """Transport through safetensors files in a shared folder. The newest version remains until the next ``prepare``."""

    _version: Path | None = None

    def prepare(self, version: int) -> None:
        """Write the weights from rank 0, and remove the previous version."""
        previous = self._version
        self._version = self.options.folder / f"version_{version}"
        staged = self.policy.start_sender(FolderSender, "stage_weights", version)
        self.policy.wait(staged, "exporting weights")
        self.manifest = staged[0]
        written = self.policy.start_sender(
            FolderSender, "write", str(self._version), self.options.bucket_bytes, ranks=[0]
        )
        self.policy.wait(written, f"writing {self._version}")
        if previous not in (None, self._version):
            shutil.rmtree(previous, ignore_errors=True)

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Make each engine read the files. The policy does not take part."""
        receiver = FolderReceiver(str(self._version))
        return [engine.update_weights.remote(self.manifest, receiver) for engine in engines.values()], []

    def close(self) -> None:
        """Remove the folder with the files."""
        shutil.rmtree(self.options.folder, ignore_errors=True)


class FolderSender(Sender):
    """Sender that packs the weights on rank 0 before it writes them. Other ranks do not wait for the disk."""

    _staged: tuple[Manifest, np.ndarray] | None = None
    """Packed weights of the newest version on rank 0."""

    def stage_weights(self, version: int) -> Manifest | None:
        """Pack the weights on rank 0, and keep them until the next version.

        Returns:
            The manifest on rank 0, and None on other ranks.
        """
        with self.gathered() as tensors:
            if self.rank:
                return None
            memory = self._staged[1] if self._staged else None
            self._staged = pack(tensors, version, self.policy.adapters, memory)
        return self._staged[0]

    def write(self, folder: str, bucket_bytes: int) -> None:
        """Write the weights that ``stage_weights`` has packed.

        Raises:
            RunError: if ``stage_weights`` was not called, or if the weights could not be written.
        """
        if self._staged is None:
            raise RunError("no weights were staged; call stage_weights before write")
        write(folder, *self._staged, bucket_bytes)


def write(folder: str | Path, manifest: Manifest, buffer: np.ndarray, bucket_bytes: int) -> None:
    """Write an update as ``00000.safetensors``, ``00001.safetensors`` and so on.

    A file contains tensors of at most ``bucket_bytes``, or a single larger tensor. Adapters are written to one file.
    The files are written to a temporary folder, which is renamed to ``folder`` when it is complete.

    Raises:
        RunError: if the update could not be written.
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
            for number, bucket in enumerate(group_entries(manifest.entries, bucket_bytes)):
                save_tensors({e.name: tensors[e.name] for e in bucket}, temporary / f"{number:05d}.safetensors")
        temporary.rename(final)
    except OSError as error:
        raise RunError(f"weight update {manifest.version} could not be written to {folder}: {error}") from error


@dataclass(frozen=True)
class FolderReceiver(Receiver):
    """Receiver that reads the files of an update."""

    path: str
    """Folder with the files of the version."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Read the files once per engine, and provide a receiver that reads from memory."""
        with MemoryReceiver().opened(manifest, in_process, self.read(manifest)) as receiver:
            yield receiver

    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors from the files."""
        return unpack(manifest, self.read(manifest))

    def read(self, manifest: Manifest) -> np.ndarray:
        """Read an update into a buffer with the layout of the manifest, uint8 [bytes].

        Raises:
            RunError: if files or tensors are missing, for example because the node does not share the folder.
        """
        from safetensors import SafetensorError, safe_open

        buffer = np.zeros(manifest.nbytes, np.uint8)
        unread = {entry.name: entry for entry in manifest.entries}
        try:
            for file in sorted(Path(self.path).glob("*.safetensors")):
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 - a shard is not a dictionary
                        entry = unread.pop(name)
                        data = shard.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy()
                        buffer[entry.offset : entry.offset + entry.nbytes] = data
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise RunError(f"weight update {manifest.version}: {self.path} cannot be read ({error})") from error
        if unread:
            examples = ", ".join(sorted(unread)[:3])
            raise RunError(
                f"weight update {manifest.version}: {len(unread)} tensors are not in {self.path}, for instance "
                f"{examples}"
            )
        return buffer
