"""Transport through files in a folder that all nodes share. Each rank writes a file, and every engine reads all files.

If an update consists of adapters, PEFT can load the folder of the update.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.adapters import write_adapter
from gdpo_nemo.weights.manifest import Manifest, divide, message_sizes
from gdpo_nemo.weights.transports.base import Receiver
from gdpo_nemo.weights.transports.memory import MessageReceiver, StoredTransport
from gdpo_nemo.weights.transports.shards import ShardSender


class FolderSender(ShardSender):
    """Sender that writes the messages of a rank."""

    def write(self, prefix: str, version: int, bucket_bytes: int, difference: bool) -> None:
        """Write the rank's messages one after the other. Adapters are also written in PEFT's format.

        The file is written under a temporary name, and renamed when it is complete.

        Raises:
            RunError: if the file could not be written.
        """
        path = Path(_file(prefix, self.rank))
        temporary = path.with_suffix(".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                for message in self.messages(difference):
                    file.write(memoryview(message.numpy()))
            if self.policy.adapters is not None:
                buckets = zip(divide(self.metadata(version), bucket_bytes), self.messages(False))
                matrices = chain.from_iterable(bucket.views(message) for bucket, message in buckets)
                write_adapter(path.parent, dict(matrices), self.policy.adapters)
            temporary.rename(path)
        except OSError as error:
            raise RunError(f"weight update {version} could not be written to {path.parent}: {error}") from error


class FolderTransport(StoredTransport):
    """Transport through files in a shared folder. The newest version remains until the next ``prepare``."""

    sender = FolderSender
    _version: Path | None = None

    def prepare(self, version: int) -> None:
        """Write the weights, and remove the previous version."""
        previous = self._version
        self._version = self.options.folder / f"version_{version}"
        shutil.rmtree(self._version, ignore_errors=True)  # of a run that was stopped
        super().prepare(version)
        if previous not in (None, self._version):
            shutil.rmtree(previous, ignore_errors=True)

    def store(self, difference: bool) -> str:
        """Write the messages of each rank, and return the common beginning of the files' names."""
        prefix = f"{self._version}/{'difference' if difference else 'full'}_"
        version = self.manifest.version
        written = self.policy.start_sender(
            self.sender, "write", prefix, version, self.bucket_bytes, difference, ranks=self.manifest.ranks
        )
        self.policy.wait(written, f"writing {self._version}")
        return prefix

    def receiver(self, engine: int, stored: str) -> tuple[Receiver, Sequence[Any]]:
        """Return the receiver, which needs no additional arguments."""
        return FolderReceiver(engine, self.bucket_bytes, prefix=stored), ()

    def close(self) -> None:
        """Remove the folder with the files."""
        shutil.rmtree(self.options.folder, ignore_errors=True)


def _file(prefix: str, rank: int) -> str:
    return f"{prefix}{rank:05d}.bin"


@dataclass(frozen=True)
class FolderReceiver(MessageReceiver):
    """Receiver that reads the files of an update."""

    prefix: str = ""
    """Common beginning of the files' names."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Read the files once per engine, and provide a receiver that reads from memory.

        Raises:
            RunError: if a file is missing or incomplete, for example because the node does not share the folder.
        """
        buckets = divide(manifest, self.bucket_bytes)
        sizes: dict[int, list[int]] = {rank: [] for rank in manifest.ranks}
        for bucket, size in zip(buckets, message_sizes(manifest, buckets), strict=True):
            sizes[bucket.rank].append(size)
        messages = [_read(_file(self.prefix, rank), of_rank, manifest.version) for rank, of_rank in sizes.items()]
        receiver = MessageReceiver(self.engine, self.bucket_bytes)
        with receiver.opened(manifest, in_process, *messages) as opened:
            yield opened


def _read(path: str, sizes: Sequence[int], version: int) -> list[np.ndarray]:
    """Return the messages in a file, uint8 [bytes] each."""
    try:
        flat = np.fromfile(path, np.uint8)
    except OSError as error:
        raise RunError(f"weight update {version}: {path} cannot be read ({error})") from error
    if flat.nbytes != sum(sizes):
        raise RunError(f"weight update {version}: {path} has {flat.nbytes} of {sum(sizes)} bytes")
    return np.split(flat, np.cumsum(sizes)[:-1])
