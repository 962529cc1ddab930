"""What one weight update consists of, so that both sides can prove they mean the same."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Iterable, Iterator

import numpy as np
import torch

from gdpo_nemo.errors import RunError
from gdpo_nemo.weights.adapters import Adapters


@dataclass(frozen=True)
class Entry:
    """One tensor inside the flat buffer of an update."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""
    nbytes: int
    crc32: int | None = None
    """Of the bytes; None where checksums are sent with the buckets (``buckets``)."""


@dataclass(frozen=True)
class Manifest:
    """All tensors of an update under their Hugging Face names, and the version they make up."""

    version: int
    entries: tuple[Entry, ...]
    adapters: Adapters | None = None
    """Given where the tensors are LoRA's matrices under PEFT's names, to be merged into the receiver's own weights."""

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer."""
        return max((e.offset + e.nbytes for e in self.entries), default=0)

    def check_names(self, expected: Iterable[str]) -> None:
        """Compare with the names the receiver expects.

        Raises:
            RunError: a name is missing, unexpected, or there twice.
        """
        names = [entry.name for entry in self.entries]
        wanted = set(expected)
        for problem, bad in (
            ("twice", {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set()),
            ("missing", wanted - set(names)),
            ("unexpected", set(names) - wanted),
        ):
            if bad:
                some = ", ".join(sorted(bad)[:3])
                raise RunError(f"weight update {self.version}: {len(bad)} tensors {problem}, for instance {some}")


_ALIGNMENT = 64


def form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """A tensor's dtype and shape, as an entry has them."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def weight_metadata(
    tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapters: Adapters | None = None
) -> Manifest:
    """The manifest of tensors without their checksums: what an update will consist of, whatever its values are."""
    entries = []
    offset = 0
    for name, tensor in tensors:
        entries.append(Entry(name, *form(tensor), offset, tensor.nbytes))
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    return Manifest(version, tuple(entries), adapters)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    adapters: Adapters | None = None,
    memory: np.ndarray | None = None,
) -> tuple[Manifest, np.ndarray]:
    """Copy tensors into one uint8 buffer [bytes] on the CPU, 64-byte aligned, with a checksum each.

    Args:
        memory: the buffer of an earlier update, which is overwritten: the first touch of a page costs ten times the
            copy into it. None: new memory.
    """
    entries = []
    offset = 0
    memory = np.empty(0, np.uint8) if memory is None else memory
    for name, tensor in tensors:
        data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
        entries.append(Entry(name, *form(tensor), offset, data.nbytes, zlib.crc32(data)))
        end = offset + data.nbytes
        stop = end + -data.nbytes % _ALIGNMENT
        if stop > memory.nbytes:
            memory = _grown(memory[:offset], stop)
        memory[offset:end] = data
        memory[end:stop] = 0
        offset = stop
    return Manifest(version, tuple(entries), adapters), memory[:offset]


def _grown(packed: np.ndarray, nbytes: int) -> np.ndarray:
    """``packed`` at the start of at least ``nbytes``. Doubled, so that a model is copied twice at most; pages that
    nothing is written to take no memory."""
    larger = np.empty(max(nbytes, 2 * packed.nbytes), np.uint8)
    larger[: packed.nbytes] = packed
    return larger


def unpack(manifest: Manifest, buffer: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an update as read-only views of ``buffer``.

    Raises:
        RunError: the bytes of a tensor are not those that were packed.
    """
    if buffer.nbytes < manifest.nbytes:
        raise RunError(f"weight update {manifest.version}: {buffer.nbytes} of {manifest.nbytes} bytes arrived")
    flat = torch.frombuffer(memoryview(buffer), dtype=torch.uint8) if manifest.nbytes else torch.empty(0)
    for entry in manifest.entries:
        stop = entry.offset + entry.nbytes
        if zlib.crc32(buffer[entry.offset : stop]) != entry.crc32:
            raise RunError(f"weight update {manifest.version}: checksum of {entry.name} differs after transport")
        yield entry.name, flat[entry.offset : stop].view(getattr(torch, entry.dtype)).view(entry.shape)
