"""Content of a weight update: names, shapes and checksums of its tensors, and the buckets in which they are sent."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest

import numpy as np
import torch

from gdpo_nemo.utils.errors import InfrastructureFailed, RunError
from gdpo_nemo.weights.adapters import Adapters
from gdpo_nemo.weights.pieces import Piece, Region


@dataclass(frozen=True)
class Entry:
    """A tensor, or a part of a tensor, in the flat buffer of a policy rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Position of the tensor in the buffer, in bytes."""
    nbytes: int
    crc32: int | None = None
    """Checksum of the bytes. None if checksums are sent together with the tensors (see ``Bucket``)."""
    region: Region | None = None
    """Position of a part in its tensor. None for a whole tensor."""
    rank: int = 0
    """Policy rank that sends the entry."""


@dataclass(frozen=True)
class Base:
    """Version to which an update is a difference. A receiver needs its buckets."""

    version: int
    sizes: tuple[int, ...]
    """Bytes of each encoded bucket, in the order of ``divide``."""


@dataclass(frozen=True)
class Manifest:
    """Version of an update, and metadata of its tensors under their Hugging Face names."""

    version: int
    entries: tuple[Entry, ...]
    """Entries of all sending ranks, in the order in which each rank sends them."""
    adapters: Adapters | None = None
    """LoRA settings if the tensors are A and B under PEFT's names, which the receiver merges into its base model."""
    keeper: str = ""
    """Name of the transport for whose next difference receivers keep a copy of the buckets. Empty: they keep none."""
    base: Base | None = None
    """None if the buckets are sent in full."""

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer of an update from one rank in bytes."""
        return max((e.offset + e.nbytes for e in self.entries), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Policy ranks that send entries, in ascending order."""
        return tuple(sorted({entry.rank for entry in self.entries}))

    def check_names(self, expected: Iterable[str], frozen: Iterable[str] = ()) -> None:
        """Check that the tensors have exactly the names that the receiver expects.

        Args:
            frozen: expected names that the update may leave out, all of them together.

        Raises:
            RunError: if a name is missing, unexpected or duplicated, or if parts of a tensor are missing.
        """
        missing: dict[str, int] = {}
        for entry in self.entries:
            whole = math.prod(entry.region.whole if entry.region else entry.shape)
            missing[entry.name] = missing.get(entry.name, whole or 1) - (math.prod(entry.shape) if whole else 1)
        expected_names = set(expected)
        if missing.keys().isdisjoint(frozen):
            expected_names -= set(frozen)
        twice = {name for name, elements in missing.items() if elements < 0}
        incomplete = {name for name, elements in missing.items() if elements > 0}
        for problem, wrong in (
            ("twice", twice),
            ("missing", expected_names - missing.keys()),
            ("incomplete", incomplete),
            ("unexpected", missing.keys() - expected_names),
        ):
            if wrong:
                examples = ", ".join(sorted(wrong)[:3])
                raise RunError(f"weight update {self.version}: {len(wrong)} tensors {problem}, for instance {examples}")


_ALIGNMENT = 64
"""Alignment of the tensors in bytes, a multiple of the size of every data type."""


def form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's data type and shape in the format of ``Entry``."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def weight_metadata(
    pieces: Iterable[tuple[str, torch.Tensor] | Piece], version: int, adapters: Adapters | None = None, rank: int = 0
) -> Manifest:
    """Return the manifest of what a policy rank sends, without checksums. It does not depend on the values."""
    entries = []
    offset = 0
    for piece in pieces:
        name, tensor, region = Piece(*piece)
        entries.append(Entry(name, *form(tensor), offset, tensor.nbytes, region=region, rank=rank))
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    return Manifest(version, tuple(entries), adapters)


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """Return the manifest of an update that the ranks of ``manifests`` send together."""
    entries = tuple(chain.from_iterable(manifest.entries for manifest in manifests))
    return Manifest(manifests[0].version, entries, manifests[0].adapters)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapters: Adapters | None = None
) -> tuple[Manifest, np.ndarray]:
    """Copy tensors into one uint8 buffer [bytes] on the CPU.

    Tensors are aligned to 64 bytes, and the manifest contains a checksum for each tensor.
    """
    entries = []
    offset = 0
    memory = np.empty(0, np.uint8)
    for name, tensor in tensors:
        data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
        entries.append(Entry(name, *form(tensor), offset, data.nbytes, zlib.crc32(data)))
        end = offset + data.nbytes
        stop = end + -data.nbytes % _ALIGNMENT
        if stop > memory.nbytes:
            memory = _enlarged(memory[:offset], stop)
        memory[offset:end] = data
        memory[end:stop] = 0
        offset = stop
    return Manifest(version, tuple(entries), adapters), memory[:offset]


def _enlarged(packed: np.ndarray, nbytes: int) -> np.ndarray:
    """Return a buffer of at least ``nbytes`` that starts with a copy of ``packed``.

    The size at least doubles, so that a model is copied at most twice. Pages that have not been written take no memory.
    """
    larger = np.empty(max(nbytes, 2 * packed.nbytes), np.uint8)
    larger[: packed.nbytes] = packed
    return larger


def unpack(manifest: Manifest, buffer: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of an update from one rank. The tensors are read-only views of ``buffer``.

    Raises:
        RunError: if the buffer is too small or the checksum of a tensor differs.
    """
    if buffer.nbytes < manifest.nbytes:
        raise RunError(f"weight update {manifest.version}: {buffer.nbytes} of {manifest.nbytes} bytes arrived")
    flat = torch.frombuffer(memoryview(buffer), dtype=torch.uint8) if manifest.nbytes else torch.empty(0)
    for entry in manifest.entries:
        stop = entry.offset + entry.nbytes
        if zlib.crc32(buffer[entry.offset : stop]) != entry.crc32:
            raise RunError(f"weight update {manifest.version}: checksum of {entry.name} differs after transport")
        yield entry.name, flat[entry.offset : stop].view(getattr(torch, entry.dtype)).view(entry.shape)


_BLOCK = 1 << 20
_ROWS = 16
"""Number of blocks that a GPU processes together. The products of these blocks take 128 MiB."""
_PART = 1 << 17
"""Number of words that a CPU multiplies together. Larger products take five times as long, because of page faults."""
_CHAIN = 0x5851F42D4C957F2D
"""Multiplier that makes the checksum depend on the order of the blocks (of Knuth's generator MMIX)."""
_MULTIPLIER = 0x9E3779B97F4A7C15
"""Multiplier of the words' indices: 2^64 divided by the golden ratio, as in SplitMix64."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bytes, int64 [] on the tensor's device, without waiting for the device."""
    flat = tensor.detach().contiguous().flatten()
    return row_checksums(flat.view(_INTEGERS[flat.element_size()]).view(1, -1))[0]


def row_checksums(words: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each row, int64 [tensors], without waiting for the device.

    The rows are processed together. Launching separate kernels for each of the 18,432 expert matrices of Qwen3-30B-A3B
    would take longer than running them.

    Args:
        words: integers [tensors, words per tensor].
    """
    count = words.size(1)
    full = count // _BLOCK * _BLOCK  # number of words in full blocks
    sums = [_block_sums(words[:, :full].view(len(words), -1, _BLOCK))] if full else []
    if full < count:
        sums.append(_block_sums(words[:, full:].unsqueeze(1)))
    blocks = sum(part.size(1) for part in sums)
    powers = _powers(words.device, blocks)
    if not sums:
        return powers.new_zeros(len(words))
    return (torch.cat(sums, 1) * powers[1:]).sum(1) + count * powers[0]


def _is_on_cpu(words: torch.Tensor) -> bool:
    """Return whether to process the blocks individually, so that the products stay in the CPU's cache."""
    return words.device.type == "cpu"


def _block_sums(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each block, int64 [tensors, blocks].

    With a single block at a time, launching a kernel would take longer than running it on a GPU with 4 TB/s.

    Args:
        blocks: integers [tensors, blocks, at most ``_BLOCK`` words].
    """
    tensors, count, size = blocks.shape
    weights = _weights(blocks.device)[:size]
    at_once = max(1, (1 if _is_on_cpu(blocks) else _ROWS) * _BLOCK // size)
    if count <= at_once:
        return torch.cat([_weighted_sums(part, weights) for part in torch.split(blocks, at_once // count)])
    rows = []
    for row in torch.split(blocks, 1):
        rows.append(torch.cat([_weighted_sums(part, weights) for part in torch.split(row, at_once, 1)], 1))
    return torch.cat(rows)


def _weighted_sums(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of the last dimension of ``blocks``, int64 [tensors, blocks]."""
    if not _is_on_cpu(blocks):
        return (blocks * weights).sum(2)
    parts = zip(torch.split(blocks, _PART, 2), torch.split(weights, _PART))
    return torch.stack([(part * factors).sum(2) for part, factors in parts]).sum(0)


@functools.cache
def _powers(device: torch.device, blocks: int) -> torch.Tensor:
    """Return int64 [blocks + 1]: the powers of ``_CHAIN`` from the exponent ``blocks`` down to 0, modulo 2^64."""
    powers = [pow(_CHAIN, exponent, 1 << 64) for exponent in reversed(range(blocks + 1))]
    return torch.tensor([power - (power >> 63 << 64) for power in powers], dtype=torch.int64, device=device)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return int64 [_BLOCK]: odd weights whose low 33 bits are distinct and whose high bits are pseudo-random."""
    index = np.arange(_BLOCK, dtype=np.uint64)
    low = (2 * index + 1) * np.uint64(_MULTIPLIER)
    mixed = (index + np.uint64(1)) * np.uint64(_MULTIPLIER)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mask = np.uint64((1 << 33) - 1)
    return torch.from_numpy(((mixed & ~mask) | (low & mask)).view(np.int64)).to(device)


_SUM_BYTES = 8
Pieces = Iterator[tuple[str, torch.Tensor] | Piece]
"""Iterator over what a policy rank sends. A pair of a name and a tensor is a whole tensor."""


class PeerLost(InfrastructureFailed):
    """A peer of a weight transfer was lost. The weights can be sent again."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of an update that are sent together, followed by their checksums."""

    version: int
    entries: tuple[Entry, ...]

    @property
    def tensor_bytes(self) -> int:
        """Size of the padded tensors in bytes. The checksums follow."""
        last = self.entries[-1]
        return -(-(last.offset + last.nbytes - self.entries[0].offset) // _SUM_BYTES) * _SUM_BYTES

    @property
    def nbytes(self) -> int:
        """Size of padded tensors and checksums in bytes."""
        return self.tensor_bytes + _SUM_BYTES * len(self.entries)

    @property
    def rank(self) -> int:
        """Policy rank that sends the bucket."""
        return self.entries[0].rank

    def fill(self, pieces: Pieces, buffer: torch.Tensor) -> None:
        """Copy the bucket's tensors and their checksums to a buffer. See ``copy_from``."""
        self.copy_from(pieces, buffer)
        self.sent_checksums(buffer).copy_(self._checksums(buffer))

    def copy_from(self, pieces: Pieces, buffer: torch.Tensor) -> None:
        """Copy the bucket's tensors to a buffer, without checksums.

        Args:
            pieces: iterator over what the rank sends. The bucket takes its tensors from this iterator.
            buffer: uint8 [nbytes], on any device.

        Raises:
            RunError: if a tensor's name, data type, shape or position differs from the manifest.
        """
        sources = []
        missing = "no tensor", torch.empty(0)
        for entry in self.entries:
            name, tensor, region = Piece(*next(pieces, missing))
            if (name, *form(tensor), region) != (entry.name, entry.dtype, entry.shape, entry.region):
                raise RunError(
                    f"weight update {self.version}: the policy has {name} where its manifest has {entry.name}"
                )
            sources.append(tensor.detach())
        torch._foreach_copy_([view for _, view in self.views(buffer)], sources)

    def open(self, buffer: torch.Tensor) -> Iterator[Piece]:
        """Verify all checksums, then yield what the bucket contains. The tensors are views of ``buffer``.

        Raises:
            RunError: if the checksum of a tensor differs.
        """
        same = (self._checksums(buffer) == self.sent_checksums(buffer)).tolist()
        if not all(same):
            raise RunError(
                f"weight update {self.version}: checksum of {self.entries[same.index(False)].name} differs after "
                "transport"
            )
        for entry, (name, view) in zip(self.entries, self.views(buffer)):
            yield Piece(name, view, entry.region)

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) of the bucket without verification. The tensors are views of ``buffer``."""
        first = self.entries[0].offset
        parts = (buffer[e.offset - first : e.offset - first + e.nbytes] for e in self.entries)
        return [(e.name, part.view(getattr(torch, e.dtype)).view(e.shape)) for e, part in zip(self.entries, parts)]

    def _checksums(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the checksums of the tensors in ``buffer``, int64 [tensors]. Tensors of one size share kernels."""
        sums = []
        for (dtype, nbytes), run in groupby(self.entries, key=lambda entry: (entry.dtype, entry.nbytes)):
            entries = list(run)
            stride = nbytes + -nbytes % _ALIGNMENT
            start = buffer.storage_offset() + entries[0].offset - self.entries[0].offset
            rows = buffer.as_strided((len(entries), nbytes), (stride, 1), start)
            sums.append(row_checksums(rows.view(_INTEGERS[getattr(torch, dtype).itemsize])))
        return torch.cat(sums)

    def sent_checksums(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the checksums in ``buffer``, int64 [tensors], as a view."""
        return buffer[self.tensor_bytes : self.nbytes].view(torch.int64)


def divide(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Divide an update into buckets of at most ``bucket_bytes``. Each larger tensor gets a separate bucket.

    A bucket contains entries of one rank. The ranks take turns in the result, so that the parts of a tensor follow each
    other closely.
    """
    by_rank: dict[int, list[Entry]] = {}
    for entry in manifest.entries:
        by_rank.setdefault(entry.rank, []).append(entry)
    turns = zip_longest(*(group_entries(entries, bucket_bytes) for _, entries in sorted(by_rank.items())))
    return [Bucket(manifest.version, tuple(entries)) for entries in chain.from_iterable(turns) if entries]


def message_sizes(manifest: Manifest, buckets: Sequence[Bucket]) -> Sequence[int]:
    """Return the bytes of the message of each bucket, in the order of ``divide``."""
    return manifest.base.sizes if manifest.base else [bucket.nbytes for bucket in buckets]


def group_entries(entries: Sequence[Entry], bucket_bytes: int) -> list[list[Entry]]:
    """Divide consecutive tensors into groups of at most ``bucket_bytes``. Each larger tensor gets a separate group."""
    groups: list[list[Entry]] = []
    size = bucket_bytes
    for entry in entries:
        if not groups or size + entry.nbytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    return groups


def filled(manifest: Manifest, pieces: Pieces, bucket_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield a new buffer on ``device`` for every bucket of a rank. Each buffer is filled when it is requested."""
    for bucket in divide(manifest, bucket_bytes):
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        bucket.fill(pieces, buffer)
        yield buffer
