"""Copies of the newest version in host memory: of its own buckets on a policy rank, of all buckets in an engine process.

A rank encodes the difference between its copy and the next version. An engine process applies it to its own copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from gdpo_nemo.weights.host_memory import HostCopies
from gdpo_nemo.weights.manifest import Bucket, Manifest, PeerLost, Pieces
from gdpo_nemo.weights.pieces import Piece


class Changes(NamedTuple):
    """Difference between two versions of a rank's buckets."""

    words: int
    """Number of 16-bit words."""
    changed: int
    """Number of words that changed."""
    sizes: tuple[int, ...]
    """Bytes of each encoded bucket, in the rank's order."""


class BaseMissing(PeerLost):
    """An engine cannot apply a difference. The weights can be sent again in full."""


class RankCopy:
    """Copy of a policy rank's buckets, and their difference from the version before.

    Args:
        device: device of the weights.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._copies = HostCopies(device)

    def take(self, buckets: Sequence[Bucket], pieces: Pieces, compare: bool) -> Changes | None:
        """Copy the current weights.

        Args:
            buckets: the rank's buckets.
            compare: True to encode the difference from the previous copy.

        Returns:
            The changes if ``compare`` is set.
        """
        if compare:
            raise NotImplementedError
        self._copies.begin([bucket.nbytes for bucket in buckets])
        for bucket in buckets:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            bucket.fill(pieces, buffer)
            self._copies.add(buffer)
        return None

    def full(self) -> Iterator[torch.Tensor]:
        """Yield the buckets, uint8 [bytes], on the device of the weights."""
        return self._copies.on_device()

    def difference(self) -> Iterator[torch.Tensor]:
        """Yield the encoded buckets, uint8 [bytes], on the device of the weights."""
        raise NotImplementedError


class EngineCopy:
    """Copy of all buckets in an engine process, from which it gets the next version by a difference."""

    def __init__(self) -> None:
        self.holds: tuple[str, int] | None = None
        """Name of the transport and version of the copy. None while it changes, or without a copy."""

    def pieces(
        self, manifest: Manifest, buckets: Sequence[Bucket], received: Iterable[torch.Tensor], device: torch.device
    ) -> Iterator[Piece]:
        """Yield the verified content of an update.

        The process keeps a copy of the result if ``Manifest.keeper`` is set. Otherwise, an older copy is dropped.

        Args:
            buckets: buckets of the update, in the order of ``divide``.
            received: the message of each bucket, uint8 [bytes]: the bucket, or its difference from ``Manifest.base``.
            device: device of the result.

        Raises:
            BaseMissing: if the process does not hold the base, or if the result of a difference has a wrong checksum.
            RunError: if the checksum of a bucket that was sent in full differs.
        """
        for bucket, message in zip(buckets, received, strict=True):
            yield from bucket.open(message.to(device))


_COPIES: dict[str, EngineCopy] = {}
"""Copies of the engine processes in this process, by their names."""


def engine_copy(name: str) -> EngineCopy:
    """Return the copy of an engine process, which is empty at first."""
    return _COPIES.setdefault(name, EngineCopy())
