"""Copies of the newest version in host memory: its own buckets on a policy rank, all buckets in an engine process.

A rank encodes the difference between its copy and the next version. An engine process applies it to its own copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights import difference
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

    The message of a bucket consists of the checksums of its new tensors and its encoded words. A bucket that would not
    become smaller is sent in full.

    Args:
        device: device of the weights.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._copies = HostCopies(device)
        self._spare = torch.empty(0, dtype=torch.uint8)
        """Buffer for one bucket on a CPU. The first access to new memory takes longer than filling it."""
        self._is_complete = False
        self._messages: list[torch.Tensor | None] = []
        """Message of each bucket in host memory. None for buckets that are sent in full."""

    def take(self, buckets: Sequence[Bucket], pieces: Pieces, compare: bool) -> Changes | None:
        """Copy the current weights.

        All buckets are sent in full after a call that failed, which leaves an incomplete copy.

        Args:
            buckets: the rank's buckets.
            compare: True to encode the difference from the previous copy.

        Returns:
            The changes if ``compare`` is set.
        """
        words = changed = sum(bucket.tensor_bytes // 2 for bucket in buckets)
        if compare and self._is_complete:
            changed = self._compare(buckets, pieces)
        else:
            for _ in self.stream(buckets, pieces):
                pass
        if not compare:
            return None
        sizes = (b.nbytes if m is None else m.nbytes for b, m in zip(buckets, self._messages))
        return Changes(words, changed, tuple(sizes))

    def _compare(self, buckets: Sequence[Bucket], pieces: Pieces) -> int:
        """Encode the difference from the previous copy, and replace this copy. Return the number of changed words."""
        self._is_complete = False
        self._messages = []
        changed = 0
        self._copies.begin([bucket.nbytes for bucket in buckets])
        for bucket in buckets:
            buffer = self._buffer(bucket.nbytes, True)
            bucket.fill(pieces, buffer)
            message, count = encoded(bucket, buffer, self._copies.replaced())
            changed += count
            self._messages.append(message)
            self._copies.add(buffer)
        self._is_complete = True
        return changed

    def _buffer(self, nbytes: int, compares: bool) -> torch.Tensor:
        """Return zeros, uint8 [nbytes], so that the padding of tensors does not change.

        On a CPU, this is the memory of the next copy unless the copy is still needed for a comparison.
        """
        if self._device.type != "cpu":  # the memory of the last buffer may still be read by a copy
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        if not compares:
            return self._copies.replaced().zero_()
        if self._spare.nbytes < nbytes:
            self._spare = torch.empty(nbytes, dtype=torch.uint8)
        return self._spare[:nbytes].zero_()

    def messages(self, difference: bool) -> Iterator[torch.Tensor]:
        """Yield the message of each bucket, uint8 [bytes], in host memory.

        Args:
            difference: False to yield the buckets in full.
        """
        for bucket, message in zip(self._copies.in_host_memory(), self._messages, strict=True):
            yield message if difference and message is not None else bucket

    def stream(self, buckets: Sequence[Bucket], pieces: Pieces) -> Iterator[torch.Tensor]:
        """Copy the current weights without a comparison, and yield each bucket, uint8 [bytes], when it is copied."""
        self._is_complete = False
        self._messages = [None] * len(buckets)
        self._copies.begin([bucket.nbytes for bucket in buckets])
        for bucket in buckets:
            buffer = self._buffer(bucket.nbytes, False)
            bucket.fill(pieces, buffer)
            self._copies.add(buffer)
            yield buffer
        self._is_complete = True


def encoded(bucket: Bucket, new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return (message from which ``patch`` makes ``new`` from ``old``, uint8 [bytes]; number of changed words).

    The message is in host memory. It is None if it would not be smaller than the bucket.
    """
    end = bucket.tensor_bytes
    words, changed = difference.encode(new[:end].view(torch.int16), old[:end].view(torch.int16))
    if bucket.nbytes - end + words.nbytes >= bucket.nbytes:
        return None, changed
    return torch.cat([new[end:], words]).cpu(), changed


def patch(bucket: Bucket, buffer: torch.Tensor, message: torch.Tensor) -> None:
    """Change a bucket in place to its next version, including the checksums.

    Raises:
        ValueError: if the message does not belong to such a bucket.
    """
    checksums = bucket.sent_checksums(buffer).view(torch.uint8)
    if message.nbytes < checksums.nbytes:
        raise ValueError(f"expected at least {checksums.nbytes} bytes, got {message.nbytes}")
    difference.apply(buffer[: bucket.tensor_bytes].view(torch.int16), message[checksums.nbytes :])
    checksums.copy_(message[: checksums.nbytes])


class EngineCopy:
    """Copy of all buckets in an engine process, from which it gets the next version by a difference."""

    def __init__(self) -> None:
        self.holds: tuple[str, int] | None = None
        """Name of the transport and version of the copy. None while it changes, or without a copy."""
        self._copies: HostCopies | None = None

    def pieces(
        self, manifest: Manifest, buckets: Sequence[Bucket], received: Iterable[torch.Tensor], device: torch.device
    ) -> Iterator[Piece]:
        """Yield the verified content of an update. The tensors are valid until the next update.

        The process keeps a copy of the result if ``Manifest.keeper`` is set. Otherwise, an older copy is dropped.

        Args:
            buckets: buckets of the update, in the order of ``divide``.
            received: the message of each bucket, uint8 [bytes]: the bucket, or its difference from ``Manifest.base``.
            device: device of the result.

        Raises:
            BaseMissing: if the process does not hold the base, or if the result of a difference has a wrong checksum.
            RunError: if the checksum of a bucket that was sent in full differs.
        """
        held, self.holds = self.holds, None
        if manifest.base and held != (manifest.keeper, manifest.base.version):
            raise BaseMissing(
                f"weight update {manifest.version}: the engine does not hold version {manifest.base.version}"
            )
        copies = self._copies = self._memory(buckets, device) if manifest.keeper else None
        for bucket, message in zip(buckets, received, strict=True):
            buffer = message.to(device)
            if copies is None or manifest.base is None:
                if message.nbytes != bucket.nbytes:
                    raise RunError(
                        f"weight update {manifest.version}: {message.nbytes} of {bucket.nbytes} bytes arrived"
                    )
                content = list(bucket.open(buffer))
            else:
                buffer, content = self._patched(bucket, copies, buffer)
            if copies is not None:
                copies.add(buffer)
            yield from content
        if copies is not None:
            self.holds = manifest.keeper, manifest.version

    def _memory(self, buckets: Sequence[Bucket], device: torch.device) -> HostCopies:
        copies = self._copies or HostCopies(device)
        copies.begin([bucket.nbytes for bucket in buckets])
        return copies

    def _patched(self, bucket: Bucket, copies: HostCopies, message: torch.Tensor) -> tuple[torch.Tensor, list[Piece]]:
        """Return (bucket, its verified content) after a difference. Drop the copy if that is not possible."""
        buffer = message
        try:
            if message.nbytes != bucket.nbytes:
                buffer = copies.replaced()
                patch(bucket, buffer, message)
            return buffer, list(bucket.open(buffer))
        except (ValueError, RunError) as error:
            self._copies = None
            first = bucket.entries[0].name
            raise BaseMissing(
                f"weight update {bucket.version}: the difference of the bucket of {first} failed: {error}"
            ) from error


_COPIES: dict[str, EngineCopy] = {}
"""Copies of the engine processes in this process, by their names."""


def engine_copy(name: str) -> EngineCopy:
    """Return the copy of an engine process, which is empty at first."""
    return _COPIES.setdefault(name, EngineCopy())
