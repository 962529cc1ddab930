"""Encoding of the 16-bit words that changed in a buffer since an older version of it.

The buffer is divided into blocks of 65,536 words. An encoded difference consists of these sections in this order:

* header, int32 [blocks]: the number of changed words, or -1 if the block is sent in full,
* words of the blocks that are sent in full, int16,
* positions in the block of the changed words, uint16, for blocks in which less than 1/16 of the words changed,
* bitmaps of the changed words, uint8 [8,192] each, for the other blocks with changes,
* values, int8: the integer differences of the blocks with positions, then those of the blocks with bitmaps,
* escaped values, int16: the integer differences outside -127..127, in the same order. Their int8 value is -128.

Integer differences wrap at 16 bits. The sections with 16-bit words start at even offsets, and the size is a multiple of
8 bytes. A block is sent in full if that is not larger. bfloat16 weights mostly move by a few units in the last place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_BLOCK = 1 << 16
_BITMAP = _BLOCK // 8
"""Bytes of a bitmap."""
_DENSE = _BITMAP // 2
"""Number of changed words in a block from which a bitmap is not larger than the positions."""
_IN_FULL = -1
_ESCAPE = -128
_ALIGNMENT = 8
_PACK = 0x0102040810204080
"""Multiplier that collects the lowest bits of 8 bytes in the highest byte of an int64."""
_EACH = 0x0101010101010101
"""Lowest bit of each byte of an int64."""
_OWN = 0x8040201008040201 - (1 << 64)
"""Bit 0 of the lowest byte of an int64, bit 1 of the next one, and so on."""


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return (encoded difference, uint8 [bytes]; number of changed words).

    The size is at most that of ``new``, 4 bytes for each block, and 7 bytes of padding.

    Args:
        new: int16 [words].
        old: int16 [words], on the same device.
    """
    at_once = _words_at_once(new)
    chunks = [_encode_chunk(*pair) for pair in zip(torch.split(new, at_once), torch.split(old, at_once))]
    parts = [chunk.header for chunk in chunks]
    parts += [chunk.full for chunk in chunks]
    parts += [chunk.positions for chunk in chunks]
    parts += [chunk.bitmaps for chunk in chunks]
    parts += [chunk.values[kind] for kind in (0, 1) for chunk in chunks]
    parts.append(new.new_zeros(sum(part.nbytes for part in parts) % 2, dtype=torch.uint8))
    parts += [chunk.escaped[kind] for kind in (0, 1) for chunk in chunks]
    parts.append(new.new_zeros(-sum(part.nbytes for part in parts) % _ALIGNMENT, dtype=torch.uint8))
    return torch.cat([part.view(torch.uint8) for part in parts]), sum(chunk.changed for chunk in chunks)


def apply(words: torch.Tensor, encoded: torch.Tensor) -> None:
    """Change ``words``, int16 [words], in place from the old to the new version.

    Args:
        encoded: uint8 [bytes], on the same device. It is not changed.

    Raises:
        ValueError: if ``encoded`` is not a difference of so many words. The content of ``words`` is undefined then.
    """
    blocks = -(-words.numel() // _BLOCK)
    lengths = _lengths(words.numel(), torch.device("cpu"))
    sections = _Sections(encoded)
    counts = sections.take(blocks, torch.int32).to("cpu", torch.int64)
    if bool(((counts < _IN_FULL) | (counts > lengths)).any()):
        raise ValueError("a number of changed words is out of range")
    sparse = counts.where(counts < _DENSE, 0).clamp(min=0)
    dense = (counts >= _DENSE).nonzero().squeeze(1)
    in_full = counts == _IN_FULL
    full = sections.take(int(lengths[in_full].sum()), torch.int16)
    positions = sections.take(int(sparse.sum()), torch.int16)
    bitmaps = sections.take(len(dense) * _BITMAP, torch.uint8).view(-1, _BITMAP)
    values = _Values(sections, positions.numel() + int(counts[dense].sum()))
    sections.finish()
    _copy_full(words, in_full, full)
    _apply_positions(words, positions, sparse, values)
    at_once = _words_at_once(words) // _BLOCK
    for chosen, bits in zip(torch.split(dense, at_once), torch.split(bitmaps, at_once)):
        _apply_bitmaps(words, bits, chosen.to(words.device), counts[chosen].to(words.device), values)


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _words_at_once(words: torch.Tensor) -> int:
    """Return the number of words to process together. On a CPU they stay in the cache; a GPU needs more work."""
    return (32 if _is_on_cpu(words) else 128) * _BLOCK


def _lengths(words: int, device: torch.device) -> torch.Tensor:
    """Return the number of words of each block, int64 [blocks]."""
    starts = torch.arange(0, words, _BLOCK, device=device)
    return (words - starts).clamp(max=_BLOCK)


def _indices(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices of the elements of ``mask`` that are set, int64, ascending."""
    if _is_on_cpu(mask):
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # up to nine times as fast as torch
    return mask.nonzero().squeeze(1)


def _compare(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> None:
    """Set ``mask`` to True for the words that changed."""
    if _is_on_cpu(mask):
        np.not_equal(new.numpy(), old.numpy(), out=mask.numpy())  # twice as fast as torch
    else:
        torch.ne(new, old, out=mask)


def _block_counts(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return how many of the ascending indices are in each block, int64 [blocks]."""
    return torch.searchsorted(indices, torch.arange(blocks + 1, device=indices.device) * _BLOCK).diff()


def _complete_blocks(words: torch.Tensor) -> torch.Tensor:
    """Return the blocks of ``words`` without an incomplete last one, int16 [blocks, words], as a view."""
    return words[: words.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)


# -- encoding ---------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Sections of some blocks. Each pair has the values of blocks with positions and with bitmaps."""

    header: torch.Tensor
    full: torch.Tensor
    positions: torch.Tensor
    bitmaps: torch.Tensor
    values: tuple[torch.Tensor, torch.Tensor]
    escaped: tuple[torch.Tensor, torch.Tensor]
    changed: int


def _encode_chunk(new: torch.Tensor, old: torch.Tensor) -> _Chunk:
    lengths = _lengths(new.numel(), new.device)
    blocks = len(lengths)
    mask = new.new_empty(blocks * _BLOCK, dtype=torch.bool)
    mask[new.numel() :] = False
    _compare(new, old, mask[: new.numel()])
    indices = _indices(mask)
    values = new.index_select(0, indices) - old.index_select(0, indices)
    narrow = values.to(torch.int8)
    escapes = _indices((narrow != values) | (narrow == _ESCAPE))
    narrow.index_fill_(0, escapes, _ESCAPE)
    counts = _block_counts(indices, blocks)
    size = (2 * counts).clamp(max=_BITMAP) + counts + 2 * _block_counts(indices[escapes], blocks)
    kinds = (counts >= _DENSE).to(torch.int8).masked_fill(size >= 2 * lengths, 2)
    header = counts.to(torch.int32).masked_fill(kinds == 2, _IN_FULL)
    dense, full = (_indices(kinds == kind) for kind in (1, 2))
    by_kind = [(narrow, indices, values[escapes]), (narrow[:0], indices[:0], values[:0])]
    if len(dense) == int((counts > 0).sum()):
        by_kind.reverse()
    elif len(dense) + len(full):
        kind_of = kinds.repeat_interleave(counts, output_size=indices.numel())
        for kind in (0, 1):
            chosen = _indices(kind_of == kind)
            by_kind[kind] = narrow[chosen], indices[chosen], values[escapes[kind_of[escapes] == kind]]
    return _Chunk(
        header,
        _full_words(new, full),
        by_kind[0][1].to(torch.int16),
        _packed(mask.view(blocks, _BLOCK)[dense]),
        (by_kind[0][0], by_kind[1][0]),
        (by_kind[0][2], by_kind[1][2]),
        indices.numel(),
    )


def _full_words(words: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the words of the given blocks, int16 [words]."""
    complete = _complete_blocks(words)
    last = words[complete.numel() :] if (blocks == len(complete)).any() else words[:0]
    return torch.cat([complete[blocks[blocks < len(complete)]].flatten(), last])


def _packed(masks: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``masks``, bool [any], as uint8 [bytes]."""
    return (masks.flatten().view(torch.int64) * _PACK >> 56).to(torch.uint8)


# -- applying ---------------------------------------------------------------------------------------------------


class _Sections:
    """Reader of an encoded difference, which checks the sizes of its sections."""

    def __init__(self, encoded: torch.Tensor):
        self._encoded = encoded
        self._start = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next section with ``count`` elements, as a view."""
        self._start += -self._start % dtype.itemsize
        start, self._start = self._start, self._start + count * dtype.itemsize
        if self._start > self._encoded.numel():
            raise ValueError(f"expected at least {self._start} bytes, got {self._encoded.numel()}")
        return self._encoded[start : self._start].view(dtype)

    def finish(self) -> None:
        """Check that only padding follows."""
        expected = self._start + -self._start % _ALIGNMENT
        if expected != self._encoded.numel():
            raise ValueError(f"expected {expected} bytes, got {self._encoded.numel()}")


class _Values:
    """Values of an encoded difference, which are taken in order."""

    def __init__(self, sections: _Sections, count: int):
        self._narrow = sections.take(count, torch.int8)
        self._escaped = sections.take(int(torch.count_nonzero(self._narrow == _ESCAPE)), torch.int16)
        self._start = self._escapes = 0

    def take(self, count: int) -> torch.Tensor:
        """Return the next values, int16 [count]."""
        narrow = self._narrow[self._start : self._start + count]
        self._start += count
        values = narrow.to(torch.int16)
        places = _indices(narrow == _ESCAPE)
        start, self._escapes = self._escapes, self._escapes + len(places)
        return values.index_copy_(0, places, self._escaped[start : self._escapes])


def _copy_full(words: torch.Tensor, in_full: torch.Tensor, full: torch.Tensor) -> None:
    complete = _complete_blocks(words)
    blocks = in_full[: len(complete)].nonzero().squeeze(1).to(words.device)
    complete.index_copy_(0, blocks, full[: len(blocks) * _BLOCK].view(-1, _BLOCK))
    if full.numel() > len(blocks) * _BLOCK:
        words[complete.numel() :] = full[len(blocks) * _BLOCK :]


def _apply_positions(words: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor, values: _Values) -> None:
    counts = counts.to(words.device)
    starts = torch.arange(len(counts), device=words.device) * _BLOCK
    indices = starts.repeat_interleave(counts, output_size=positions.numel())
    indices += positions.to(torch.int64) & (_BLOCK - 1)
    _add(words, indices, values.take(len(indices)))


def _apply_bitmaps(
    words: torch.Tensor, bitmaps: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, values: _Values
) -> None:
    indices = _indices(_unpacked(bitmaps))
    if not torch.equal(_block_counts(indices, len(blocks)), counts):
        raise ValueError("a bitmap differs from the number of changed words")
    offsets = (blocks - torch.arange(len(blocks), device=words.device)) * _BLOCK
    indices += offsets.repeat_interleave(counts, output_size=len(indices))
    _add(words, indices, values.take(len(indices)))


def _unpacked(bitmaps: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``bitmaps``, uint8 [any], as bool [bits]. See ``_packed``."""
    bits = bitmaps.flatten().to(torch.int64) * _EACH & _OWN
    return ((bits + 0x7F * _EACH) >> 7 & _EACH).view(torch.bool)  # bit 7 of each byte is set by a carry


def _add(words: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to the words with the given indices, which are ascending if they are valid."""
    if indices.numel() and int(indices.max()) >= words.numel():
        raise ValueError("a position is out of range")
    words.scatter_(0, indices, words.index_select(0, indices) + values)
