"""Weights as a sequence of buckets: how an update passes from device to device without a second copy of the model.

A bucket is one flat buffer of neighbouring tensors with a checksum of each behind them. The sender fills it while its
model is gathered, the receiver loads from it; which tensors it holds, both know from the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch

from gdpo_nemo.errors import InfrastructureFailed, RunError
from gdpo_nemo.weights.checksum import checksum
from gdpo_nemo.weights.manifest import Entry, Manifest, form

_SUM_BYTES = 8


class PeerLost(InfrastructureFailed):
    """The other end broke off while weights were on their way. They can be sent again."""


@dataclass(frozen=True)
class Bucket:
    """Some neighbouring tensors of update ``version``."""

    version: int
    entries: tuple[Entry, ...]

    @property
    def _tensor_bytes(self) -> int:
        last = self.entries[-1]
        return -(-(last.offset + last.nbytes - self.entries[0].offset) // _SUM_BYTES) * _SUM_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, with their padding, and of their checksums."""
        return self._tensor_bytes + _SUM_BYTES * len(self.entries)

    def fill(self, tensors: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor) -> None:
        """Take as many tensors as the bucket has into ``buffer`` (uint8 [nbytes], on any device).

        Raises:
            RunError: they are not those of the manifest.
        """
        sums = []
        first = self.entries[0].offset
        for entry in self.entries:
            name, tensor = next(tensors, ("no tensor", torch.empty(0)))
            if (name, *form(tensor)) != (entry.name, entry.dtype, entry.shape):
                raise RunError(
                    f"weight update {self.version}: the policy has {name} where its manifest has {entry.name}"
                )
            start = entry.offset - first
            buffer[start : start + entry.nbytes].copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
            sums.append(checksum(tensor))
        self._sums(buffer).copy_(torch.stack(sums))

    def open(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as views of ``buffer``, once all of them are known to be whole.

        Raises:
            RunError: the bytes of a tensor are not those that were sent.
        """
        first = self.entries[0].offset
        views = {}
        for entry in self.entries:
            start = entry.offset - first
            part = buffer[start : start + entry.nbytes]
            views[entry.name] = part.view(getattr(torch, entry.dtype)).view(entry.shape)
        same = (torch.stack([checksum(view) for view in views.values()]) == self._sums(buffer)).tolist()
        if not all(same):
            raise RunError(
                f"weight update {self.version}: checksum of {self.entries[same.index(False)].name} differs after "
                "transport"
            )
        yield from views.items()

    def _sums(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self._tensor_bytes : self.nbytes].view(torch.int64)


def divide(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """The buckets of an update: at most ``bucket_bytes`` of tensors each, unless one alone is larger."""
    return [Bucket(manifest.version, tuple(entries)) for entries in neighbours(manifest.entries, bucket_bytes)]


def neighbours(entries: tuple[Entry, ...], bucket_bytes: int) -> list[list[Entry]]:
    """Neighbouring tensors, together at most ``bucket_bytes`` unless one alone is larger."""
    found: list[list[Entry]] = []
    size = bucket_bytes
    for entry in entries:
        if not found or size + entry.nbytes > bucket_bytes:
            found.append([])
            size = 0
        found[-1].append(entry)
        size += entry.nbytes
    return found


def filled(
    manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Every bucket of an update in a buffer of its own on ``device``, gathered as it is asked for."""
    for bucket in divide(manifest, bucket_bytes):
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        bucket.fill(tensors, buffer)
        yield buffer
