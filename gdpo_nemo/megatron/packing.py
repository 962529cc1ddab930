"""Packs: index arrays of sequences that are concatenated without padding, computed once per micro-batch.

SDPA requires rectangular inputs, so sequences of similar length are right-padded to one rectangle, and the outputs are
packed again. With a causal mask, real tokens never attend to the padding. Under context parallelism, rank r of n holds
chunks r and 2n-1-r of every sequence. This zigzag order balances the work of causal attention.

If several sequences begin with the same tokens, the pack may contain these tokens only once, in the first of these
sequences. The queries of the other sequences are then only their unshared tokens. The keys of these sequences are the
shared and the unshared tokens, ordered by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

# Maximum size of a rectangle as a multiple of its number of real tokens. Padding costs compute, and every additional
# rectangle costs a kernel launch and copies.
_PADDING_ALLOWED = 1.3


@dataclass
class Packing(PackedSeqParams):
    """Megatron's packed-sequence parameters, plus tensors that ``PackedAttention`` computes once per micro-batch."""

    positions: torch.Tensor | None = None
    """int64 [local tokens]: position of each local token in its sequence.

    Only ``PackedAttention`` reads this field and the fields below.
    """
    rope_positions: torch.Tensor | None = None
    """int64 [local tokens, 3]: position of each local token on the axes of M-RoPE (``PackedRows.rope_positions``)."""
    images: Any = None
    """Images for the vision tower (``vision.ImageInputs``), or None without images or after the first stage."""
    added: list[torch.Tensor] = field(default_factory=list)
    """Features of images that the first layers add to their outputs (``vision.Tie``).

    They belong to the micro-batch, because a pipeline recomputes layers of earlier micro-batches.
    """
    rectangles: list[Rectangle] = field(default_factory=list)
    """Padded batches of all sequences of the micro-batch."""
    order: torch.Tensor | None = None
    """int64 [tokens of all context ranks]: index of each token of the pack in the tokens gathered from these ranks.

    None without context parallelism.
    """
    rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Cosines and sines of each rotary embedding, [local tokens, 1, head size], by ``LayerAttention.rope``.

    The first layer with a rotary embedding computes them.
    """
    block_mask: Any = None
    """Mask for ``FlexAttention`` (``flex_attention.block_mask``), or None if another attention computes the pack."""
    window_block_mask: Any = None
    """Mask for ``FlexAttention`` in layers with a sliding window, or None if the model has no such layers."""
    routing: torch.Tensor | None = None
    """int16 [local tokens, MoE layers * experts per token]: experts that the sampler chose (``PackedRows.routing``)."""
    counted: set[int] = field(default_factory=set)
    """MoE layers that have compared their choice with the sampler's (``RouterReplay``)."""


@dataclass
class Rectangle:
    """Index arrays that move tokens between a pack and a padded batch of sequences of similar length."""

    queries: torch.Tensor
    """int64 [sequences, query length]: row of each query in the local pack (padding repeats row 0)."""
    query_cells: torch.Tensor
    """int64 [queries]: index of each query in the flattened rectangle, without padding."""
    query_rows: torch.Tensor
    """int64 [queries]: row of each query in the local pack, in the order of ``query_cells``."""
    keys: torch.Tensor
    """int64 [sequences, key length]: row of each key in the gathered pack (padding repeats row 0)."""
    key_cells: torch.Tensor
    """int64 [keys]: index of each key in the flattened rectangle, without padding."""
    key_rows: torch.Tensor
    """int64 [keys]: row of each key in the gathered pack, in the order of ``key_cells``."""
    mask: torch.Tensor | None = None
    """bool [sequences, 1, query length, key length], true if the query attends to the key.

    None selects a plain causal mask, which suffices unless context parallelism is used or sequences share tokens.
    """
    window_mask: torch.Tensor | None = None
    """Like ``mask``, for layers with a sliding window. None if no sequence is longer than the window."""
    shares: bool = False
    """True if a row may be a key in several sequences."""


# Name prefixes of the arrays of rectangles, for sequences without and with shared leading tokens.
_UNSHARED = "rectangle"
_SHARED = "sharing"


def packing_arrays(
    lengths: list[int],
    rank: int,
    size: int,
    rectangles: bool,
    shared: list[int] | None = None,
    window: int | None = None,
) -> dict[str, np.ndarray]:
    """Compute the index arrays of a pack on context-parallel rank ``rank`` of ``size``.

    Args:
        lengths: padded number of tokens of each sequence, which must be a multiple of 2 * size if size > 1.
        rectangles: True to include the arrays that ``PackedAttention`` needs. TransformerEngine's kernels need only the
            sequence bounds.
        shared: number of leading tokens of each sequence that are stored with the previous sequence. ``lengths`` does
            not include these tokens. None if no tokens are shared. Shared tokens require ``rectangles``.
        window: number of keys that a query attends to in layers with a sliding window, or None without such layers.

    Returns:
        Arrays for ``packing_of``, which accepts them on any device.
    """
    if shared is not None and any(shared) and not rectangles:
        raise ValueError("TransformerEngine's attention does not support shared prompts (policy.share_prompts)")
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    arrays = {"bounds": bounds.astype(np.int32)}
    if rectangles:
        shared = [0] * len(lengths) if shared is None else shared
        arrays |= position_arrays(lengths, rank, size, shared)
        positions = np.split(arrays["positions"], bounds[1:-1] // size)
        keys = _key_rows(lengths, bounds, shared)
        # A sequence without shared tokens has as many keys as queries, so a plain causal mask suffices for it.
        unshared = _similar_lengths(np.flatnonzero(np.equal(shared, 0)).tolist(), lengths)
        sharing = _similar_areas(np.flatnonzero(shared).tolist(), lengths, list(map(len, keys)))
        for kind, groups in ((_UNSHARED, unshared), (_SHARED, sharing)):
            for number, members in enumerate(groups):
                masked = size > 1 or kind is _SHARED
                indices = _rectangle(members, positions, keys, bounds // size, masked, window)
                arrays |= {f"{kind}.{number}.{name}": array for name, array in indices.items()}
    return arrays


def position_arrays(lengths: list[int], rank: int, size: int, shared: list[int]) -> dict[str, np.ndarray]:
    """Return ``Packing.positions``, and with context parallelism ``Packing.order``, by name.

    For the arguments, see ``packing_arrays``.
    """
    positions = [count + local_positions(length, rank, size) for count, length in zip(shared, lengths)]
    arrays = {"positions": np.concatenate(positions)}
    if size > 1:
        arrays["order"] = _gathered_rows(lengths, np.concatenate(([0], np.cumsum(lengths))), size)
    return arrays


def packing_of(lengths: list[int], arrays: Mapping[str, torch.Tensor]) -> Packing:
    """Create the ``Packing`` of sequences of ``lengths`` tokens from the result of ``packing_arrays``."""
    bounds = arrays["bounds"]
    packing = Packing(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        # Identical tensors tell TransformerEngine that the sequences follow each other without padding.
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    packing.positions = arrays.get("positions")
    packing.order = arrays.get("order")
    for kind in (_UNSHARED, _SHARED):
        number = 0
        while f"{kind}.{number}.queries" in arrays:
            key = f"{kind}.{number}."
            indices = {f.name: arrays[key + f.name] for f in fields(Rectangle) if key + f.name in arrays}
            packing.rectangles.append(Rectangle(**indices, shares=kind is _SHARED))
            number += 1
    return packing


def local_positions(length: int, rank: int, size: int) -> np.ndarray:
    """Return int64 [length/size]: the positions in a sequence that context-parallel rank ``rank`` of ``size`` holds."""
    if size == 1:
        return np.arange(length)
    # Megatron's zigzag order: with a causal mask, late tokens attend to more keys, so each rank gets one early and one
    # late chunk.
    chunks = np.split(np.arange(length), 2 * size)
    return np.concatenate((chunks[rank], chunks[2 * size - 1 - rank]))


def _gathered_rows(lengths: list[int], bounds: np.ndarray, size: int) -> np.ndarray:
    """Return int64 [tokens]: index of each token of the pack in the concatenated packs of all context ranks."""
    order = np.empty(bounds[-1], dtype=np.int64)
    for rank in range(size):
        first = rank * (bounds[-1] // size)
        for length, start in zip(lengths, bounds):
            tokens = start + local_positions(length, rank, size)
            order[tokens] = np.arange(length // size) + first + start // size
    return order


def _key_rows(lengths: list[int], bounds: np.ndarray, shared: list[int]) -> list[np.ndarray]:
    """Return int64 [tokens] for each sequence: the rows of its tokens in the gathered pack, by position.

    The tokens include the tokens that are shared with the previous sequence.
    """
    rows: list[np.ndarray] = []
    for length, start, count in zip(lengths, bounds, shared):
        unshared = start + np.arange(length)
        rows.append(np.concatenate((rows[-1][:count], unshared)) if count else unshared)
    return rows


def _similar_lengths(members: list[int], lengths: list[int]) -> list[list[int]]:
    """Group sequences so that padding each group to its longest sequence adds at most 30 % more tokens."""
    # Sort by decreasing length: the first member of a group is its longest sequence.
    order = sorted(members, key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups:
            group = groups[-1]
            tokens = sum(lengths[j] for j in group) + lengths[i]
            if lengths[group[0]] * (len(group) + 1) <= _PADDING_ALLOWED * tokens:
                group.append(i)
                continue
        groups.append([i])
    return groups


def _similar_areas(members: list[int], queries: list[int], keys: list[int]) -> list[list[int]]:
    """Group sequences like ``_similar_lengths``, but limit the padding of queries and the padding of keys."""
    groups: list[list[int]] = []
    widths: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    for i in sorted(members, key=lambda i: (-keys[i], -queries[i])):
        counts = np.array((queries[i], keys[i]))
        for index, group in enumerate(groups):
            width = np.maximum(widths[index], counts)
            if (width * (len(group) + 1) <= _PADDING_ALLOWED * (tokens[index] + counts)).all():
                group.append(i)
                widths[index] = width
                tokens[index] = tokens[index] + counts
                break
        else:
            groups.append([i])
            widths.append(counts)
            tokens.append(counts)
    return groups


def _rectangle(
    members: list[int],
    positions: list[np.ndarray],
    key_rows: list[np.ndarray],
    starts: np.ndarray,
    masked: bool,
    window: int | None,
) -> dict[str, np.ndarray]:
    """Return the array fields of a ``Rectangle`` by name.

    Args:
        members: indices of the rectangle's sequences.
        positions: positions of each sequence's local queries.
        key_rows: rows of each sequence's keys in the gathered pack, by position.
        starts: row of each sequence's first query in the local pack.
        masked: True to build a mask. Without a mask, queries and keys must be aligned, and is_causal selects a faster
            kernel.
        window: see ``packing_arrays``.
    """
    queries = _Filler(max(len(positions[i]) for i in members))
    keys = _Filler(max(len(key_rows[i]) for i in members))
    query_positions = np.zeros((len(members), queries.width), np.int64)
    for index, i in enumerate(members):
        count = len(positions[i])
        queries.add(np.arange(count) + starts[i])
        query_positions[index, :count] = positions[i]
        keys.add(key_rows[i])
    names = ("queries", "query_cells", "query_rows", "keys", "key_cells", "key_rows")
    arrays = dict(zip(names, (*queries.arrays(), *keys.arrays())))
    windowed = window is not None and keys.width > window
    if masked or windowed:
        # Padded queries have position 0 and thus attend to the first key. A query without any key would yield NaN.
        distance = (query_positions[:, :, None] - np.arange(keys.width))[:, None]
        if masked:
            arrays["mask"] = distance >= 0
        if windowed:
            arrays["window_mask"] = (distance >= 0) & (distance < window)
    return arrays


class _Filler:
    """Builder of a right-padded rectangle [sequences, width] from the rows of each sequence in a pack."""

    def __init__(self, width: int):
        self.width = width
        self.table: list[np.ndarray] = []
        self.cells: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        self.cells.append(np.arange(len(rows)) + len(self.table) * self.width)
        self.rows.append(rows)
        padded = np.zeros(self.width, np.int64)
        padded[: len(rows)] = rows
        self.table.append(padded)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.stack(self.table), np.concatenate(self.cells), np.concatenate(self.rows)
