"""Core attention without TransformerEngine: rotary embedding and torch SDPA over packed sequences.

A micro-batch is a pack: sequences concatenated without padding. SDPA requires rectangular inputs, so sequences of
similar length are right-padded to one rectangle, and the outputs are packed again. With a causal mask, real tokens
never attend to the padding. Under context parallelism, rank r of n holds chunks r and 2n-1-r of every sequence. This
zigzag order balances the work of causal attention. Keys and values are gathered from all context-parallel ranks, and an
explicit mask compares positions.

If several sequences begin with the same tokens, the pack may contain these tokens only once, in the first of these
sequences. The queries of the other sequences are then only their unshared tokens. The keys of these sequences are the
shared and the unshared tokens, ordered by position. A token can thus be a key in several sequences, and its gradient is
the sum over these sequences.

The rotary embedding is applied here instead of in Megatron's model code, so that cos and sin of a pack are computed
only once for all layers. The frequencies come from transformers, which implements every published scaling rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Mapping

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.utils.checkpoint import checkpoint

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
    rectangles: list["Rectangle"] = field(default_factory=list)
    """Padded batches of all sequences of the micro-batch."""
    order: torch.Tensor | None = None
    """int64 [tokens of all context ranks]: index of each token of the pack in the tokens gathered from these ranks.

    None without context parallelism.
    """
    cos: torch.Tensor | None = None
    """Cosines of the rotary embedding, [local tokens, 1, head size]; None until the first layer computes them."""
    sin: torch.Tensor | None = None
    """Sines of the rotary embedding, with the same shape as ``cos``."""
    block_mask: Any = None
    """Mask for ``FlexAttention`` (``flex_attention.block_mask``), or None if another attention computes the pack."""


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
    shares: bool = False
    """True if a row may be a key in several sequences."""


# Name prefixes of the arrays of rectangles, for sequences without and with shared leading tokens.
_UNSHARED = "rectangle"
_SHARED = "sharing"


def packing_arrays(
    lengths: list[int], rank: int, size: int, rectangles: bool, shared: list[int] | None = None
) -> dict[str, np.ndarray]:
    """Compute the index arrays of a pack on context-parallel rank ``rank`` of ``size``.

    Args:
        lengths: padded number of tokens of each sequence, which must be a multiple of 2 * size if size > 1.
        rectangles: True to include the arrays that ``PackedAttention`` needs. TransformerEngine's kernels need only the
            sequence bounds.
        shared: number of leading tokens of each sequence that are stored with the previous sequence. ``lengths`` does
            not include these tokens. None if no tokens are shared. Shared tokens require ``rectangles``.

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
        without_prefix = [i for i, count in enumerate(shared) if not count]
        with_prefix = [i for i, count in enumerate(shared) if count]
        unshared = _similar_lengths(without_prefix, lengths)
        sharing = _similar_areas(with_prefix, lengths, [len(rows) for rows in keys])
        for kind, groups in ((_UNSHARED, unshared), (_SHARED, sharing)):
            for number, members in enumerate(groups):
                masked = size > 1 or kind is _SHARED
                indices = _rectangle(members, positions, keys, bounds // size, masked=masked)
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
    members: list[int], positions: list[np.ndarray], key_rows: list[np.ndarray], starts: np.ndarray, masked: bool
) -> dict[str, np.ndarray]:
    """Return the array fields of a ``Rectangle`` by name.

    Args:
        members: indices of the rectangle's sequences.
        positions: positions of each sequence's local queries.
        key_rows: rows of each sequence's keys in the gathered pack, by position.
        starts: row of each sequence's first query in the local pack.
        masked: True to build a mask. Without a mask, queries and keys must be aligned, and is_causal selects a faster
            kernel.
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
    if masked:
        # Padded queries have position 0 and thus attend to the first key. A query without any key would yield NaN.
        arrays["mask"] = (np.arange(keys.width)[None, None, :] <= query_positions[:, :, None])[:, None]
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


class _PadInput(torch.autograd.Function):
    """Copy rows of a pack [tokens, ...] to a rectangle [sequences, width, ...].

    ``shares`` must be true if a row may be copied several times. The gradient of the row is then the sum over its
    copies.
    """

    @staticmethod
    def forward(ctx, pack, table, cells, rows, shares):
        ctx.save_for_backward(cells, rows)
        ctx.tokens = pack.size(0)
        ctx.shares = shares
        return pack.index_select(0, table.flatten()).view(*table.shape, *pack.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        cells, rows = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[2:])
        # Select only `cells`, without the padding: padding repeats row 0, but must not contribute to its gradient.
        moved = grad.flatten(0, 1).index_select(0, cells)
        out = out.index_add_(0, rows, moved) if ctx.shares else out.index_copy_(0, rows, moved)
        return out, None, None, None, None


class _UnpadOutput(torch.autograd.Function):
    """Copy rectangles [sequences, width, ...] back to a pack [tokens, ...], without their padding."""

    @staticmethod
    def forward(ctx, tokens, moves, *rectangles):
        ctx.moves = moves
        ctx.shapes = [r.shape for r in rectangles]
        pack = rectangles[0].new_empty(tokens, *rectangles[0].shape[2:])
        for (cells, rows), rectangle in zip(moves, rectangles):
            pack.index_copy_(0, rows, rectangle.flatten(0, 1).index_select(0, cells))
        return pack

    @staticmethod
    def backward(ctx, grad):
        out = []
        for (cells, rows), shape in zip(ctx.moves, ctx.shapes):
            rectangle = grad.new_zeros(shape[0] * shape[1], *shape[2:])
            out.append(rectangle.index_copy_(0, cells, grad.index_select(0, rows)).view(shape))
        return None, None, *out


class GatherContext(torch.autograd.Function):
    """Gather [local tokens, ...] from all context-parallel ranks into [all tokens, ...], in the order of the pack.

    The backward pass sums the gradients of this rank's tokens over the ranks (reduce-scatter).
    """

    @staticmethod
    def forward(ctx, x, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        by_rank = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(by_rank, x.contiguous(), group=group)
        return by_rank.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(0, order, grad)
        local = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None, None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to x [tokens, heads, size], given ``Packing.cos`` and ``Packing.sin``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), -1) * sin


class PackedAttention(MegatronModule):
    """Causal self-attention over a pack, with rotary embedding and context parallelism.

    Args:
        rotary: inverse frequencies [head size / 2] of the rotary embedding, and the scaling factor of cos and sin.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        *,
        rotary: tuple[torch.Tensor, float] | None,
        **unused,
    ):
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"packed attention must be causal, not {attn_mask_type}")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.context_group = groups.cp
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.rotary = rotary
        self._rotated = rotated

    def arrays(self, lengths: list[int], rank: int, size: int, shared: list[int]) -> dict[str, np.ndarray]:
        """Return the arrays of a pack that this attention needs. For the arguments, see ``packing_arrays``."""
        return packing_arrays(lengths, rank, size, rectangles=True, shared=shared)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: Packing | None = None,
        **unused,
    ):
        """Return the attention output, [local tokens, heads * size].

        Args:
            query: [local tokens, heads, size].
            key: [local tokens, query groups, size].
            value: same shape as ``key``.
        """
        packing: Any = packed_seq_params
        query = self._rotate(query, packing)
        key = self._rotate(key, packing)
        repeats = query.size(1) // key.size(1)
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if self.context_group.size() > 1:
            # Gather keys and values in one collective, after the rotation, which needs the positions of local tokens.
            both = GatherContext.apply(torch.stack((key, value), 1), packing.order, self.context_group)
            key, value = both.unbind(1)
        drop = self.dropout if self.training else 0.0
        outputs = [self._attend(query, key, value, rectangle, drop) for rectangle in packing.rectangles]
        moves = [(rectangle.query_cells, rectangle.query_rows) for rectangle in packing.rectangles]
        return _UnpadOutput.apply(query.size(0), moves, *outputs).flatten(1)

    def _rotate(self, x, packing):
        if self.rotary is None:
            return x
        if packing.cos is None:  # the first layer computes cos and sin for all layers
            frequencies, scaling = self.rotary
            if frequencies.device != x.device:  # copy only once, because each copy waits for the device
                frequencies = frequencies.to(x.device)
                self.rotary = frequencies, scaling
            angles = packing.positions.float()[:, None] * frequencies[None, :]
            angles = torch.cat((angles, angles), -1)[:, None, :]
            # Compute angles in float32: bfloat16 cannot distinguish positions above 256.
            packing.cos = (angles.cos() * scaling).to(x.dtype)
            packing.sin = (angles.sin() * scaling).to(x.dtype)
        return self._rotated(x, packing.cos, packing.sin)

    def _attend(self, query, key, value, rectangle: Rectangle, drop: float):
        if not rectangle.shares or not torch.is_grad_enabled():
            return self._attend_rectangle(query, key, value, rectangle, drop)
        # Recompute in the backward pass: the copies of shared keys and values would take as much memory as sharing
        # saves.
        return checkpoint(
            self._attend_rectangle, query, key, value, rectangle, drop, use_reentrant=False, preserve_rng_state=drop > 0
        )

    def _attend_rectangle(self, query, key, value, rectangle: Rectangle, drop: float):
        q = _PadInput.apply(query, rectangle.queries, rectangle.query_cells, rectangle.query_rows, False)
        k, v = (
            _PadInput.apply(x, rectangle.keys, rectangle.key_cells, rectangle.key_rows, rectangle.shares)
            for x in (key, value)
        )
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=rectangle.mask,
            is_causal=rectangle.mask is None,
            dropout_p=drop,
            scale=self.scale,
        )
        return out.transpose(1, 2)
