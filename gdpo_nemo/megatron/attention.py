"""Core attention without TransformerEngine: rotary embedding and torch SDPA over packed sequences.

A micro-batch is a pack of sequences laid end to end. SDPA wants a rectangle, so the pack is unrolled into rectangles of
sequences of similar length (right-padded: under a causal mask no real token sees the padding) and rolled up again.
Under context parallelism a rank holds two chunks of every sequence (zigzag: chunk r and chunk 2n-1-r, which balances
causal work); keys and values are gathered, and an explicit mask compares positions.

Where sequences begin with the same tokens, the pack may hold these once, with the first of them: the queries of the
others are their own tokens, the keys the shared ones and theirs, side by side by position. So a row of the pack can be
a key of several sequences, and gets the sum of their gradients.

The rotary embedding is applied here and not by Megatron's model code because the positions of a pack are known here
once for all layers; the frequencies come from transformers, so every published scaling rule is the original.
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

# A rectangle may hold this many times the tokens of its sequences before they are split over several: padding costs
# compute, and every further rectangle costs a kernel launch and copies.
_PADDING_ALLOWED = 1.3


@dataclass
class Packing(PackedSeqParams):
    """Megatron's packed-sequence parameters, plus what attention derives from them once per micro-batch."""

    positions: torch.Tensor | None = None
    """int64 [local tokens]: place of each local token in its own sequence. Only ``PackedAttention`` reads this and what
    follows."""
    rectangles: list["Rectangle"] = field(default_factory=list)
    order: torch.Tensor | None = None
    """int64 [tokens of all context ranks]: where each token of the pack is among what these ranks gather; None without
    context parallelism."""
    cos: torch.Tensor | None = None
    """[local tokens, 1, head size]"""
    sin: torch.Tensor | None = None


@dataclass
class Rectangle:
    """Sequences of similar length, and how their tokens move between the pack and a padded rectangle."""

    queries: torch.Tensor
    """int64 [sequences, query length]: row of each query in the local pack (padding repeats row 0)."""
    queries_back: torch.Tensor
    """int64 [queries]: place of each local token of these sequences in the flattened rectangle."""
    rows: torch.Tensor
    """int64 [queries]: the local rows these places belong to, in the same order."""
    keys: torch.Tensor
    """int64 [sequences, key length] into the gathered pack."""
    keys_back: torch.Tensor
    key_rows: torch.Tensor
    mask: torch.Tensor | None = None
    """bool [sequences, 1, query length, key length] under context parallelism or where sequences share tokens, else
    None (plain causal)."""
    shares: bool = False
    """Whether a row may be a key of several sequences."""


_ALONE = "rectangle"
_SHARING = "sharing"
"""Names under which the arrays of rectangles travel."""


def packing_arrays(
    lengths: list[int], rank: int, size: int, rectangles: bool, shared: list[int] | None = None
) -> dict[str, np.ndarray]:
    """Lay out sequences of ``lengths`` (padded tokens each, divisible by 2*size when size > 1) on context rank
    ``rank``.

    Args:
        rectangles: lay out what ``PackedAttention`` reads besides; TransformerEngine's kernels take the bounds alone.
        shared: leading tokens of each sequence that stand with the one before it, not counted in ``lengths``; None:
            none. Needs ``rectangles``.

    Returns:
        what ``packing_of`` makes a packing of, on whatever device it is by then.
    """
    if shared is not None and any(shared) and not rectangles:
        raise ValueError("TransformerEngine's attention has no sequences that share tokens (policy.share_prompts)")
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    arrays = {"bounds": bounds.astype(np.int32)}
    if rectangles:
        shared = [0] * len(lengths) if shared is None else shared
        positions = [before + local_positions(length, rank, size) for before, length in zip(shared, lengths)]
        arrays["positions"] = np.concatenate(positions)
        if size > 1:
            arrays["order"] = _gathered_rows(lengths, bounds, size)
        keys = _key_rows(lengths, bounds, shared)
        alone = _similar_lengths([i for i, before in enumerate(shared) if not before], lengths)
        sharing = _similar_areas([i for i, before in enumerate(shared) if before], lengths, list(map(len, keys)))
        for kind, groups in ((_ALONE, alone), (_SHARING, sharing)):
            for number, members in enumerate(groups):
                parts = _rectangle(members, positions, keys, bounds // size, masked=size > 1 or kind is _SHARING)
                arrays |= {f"{kind}.{number}.{name}": array for name, array in parts.items()}
    return arrays


def packing_of(lengths: list[int], arrays: Mapping[str, torch.Tensor]) -> Packing:
    """Make the packing of sequences of ``lengths`` from the arrays of ``packing_arrays``."""
    bounds = arrays["bounds"]
    packing = Packing(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        # The same objects, by which TransformerEngine knows that there is no padding between sequences.
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    packing.positions = arrays.get("positions")
    packing.order = arrays.get("order")
    for kind in (_ALONE, _SHARING):
        number = 0
        while f"{kind}.{number}.queries" in arrays:
            key = f"{kind}.{number}."
            parts = {f.name: arrays[key + f.name] for f in fields(Rectangle) if key + f.name in arrays}
            packing.rectangles.append(Rectangle(**parts, shares=kind is _SHARING))
            number += 1
    return packing


def local_positions(length: int, rank: int, size: int) -> np.ndarray:
    """int64 [length/size]: the positions of one sequence that context rank ``rank`` of ``size`` holds, in its order."""
    if size == 1:
        return np.arange(length)
    # Megatron's zigzag: under a causal mask late tokens attend to more keys, so each rank gets an early and a late
    # chunk.
    chunks = np.split(np.arange(length), 2 * size)
    return np.concatenate((chunks[rank], chunks[2 * size - 1 - rank]))


def _gathered_rows(lengths: list[int], bounds: np.ndarray, size: int) -> np.ndarray:
    """int64 [tokens]: the row of each token of the pack where the shares of ``size`` context ranks stand one below the
    other."""
    order = np.empty(bounds[-1], dtype=np.int64)
    for rank in range(size):
        first = rank * (bounds[-1] // size)
        for length, start in zip(lengths, bounds):
            places = start + local_positions(length, rank, size)
            order[places] = np.arange(length // size) + first + start // size
    return order


def _key_rows(lengths: list[int], bounds: np.ndarray, shared: list[int]) -> list[np.ndarray]:
    """For each sequence int64 [its tokens]: their rows in the whole pack, by position."""
    found: list[np.ndarray] = []
    for length, start, before in zip(lengths, bounds, shared):
        own = start + np.arange(length)
        found.append(np.concatenate((found[-1][:before], own)) if before else own)
    return found


def _similar_lengths(members: list[int], lengths: list[int]) -> list[list[int]]:
    """The members, grouped so that padding to each group's longest stays cheap."""
    # Longest first, so that the first member of a group is its width.
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
    """The members, grouped so that padding stays cheap though each has its own number of queries and of keys."""
    groups: list[list[int]] = []
    widths: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    for i in sorted(members, key=lambda i: (-keys[i], -queries[i])):
        mine = np.array((queries[i], keys[i]))
        for place, group in enumerate(groups):
            wide = np.maximum(widths[place], mine)
            if (wide * (len(group) + 1) <= _PADDING_ALLOWED * (tokens[place] + mine)).all():
                group.append(i)
                widths[place] = wide
                tokens[place] = tokens[place] + mine
                break
        else:
            groups.append([i])
            widths.append(mine)
            tokens.append(mine)
    return groups


def _rectangle(
    members: list[int], positions: list[np.ndarray], key_rows: list[np.ndarray], starts: np.ndarray, masked: bool
) -> dict[str, np.ndarray]:
    """The fields of a ``Rectangle``.

    Args:
        positions: of the queries of every sequence, whose rows begin at its ``starts`` in the local pack.
        key_rows: of every sequence, by position.
        masked: without a mask queries and keys are aligned, and is_causal picks a faster kernel.
    """
    queries = _Filler(max(len(positions[i]) for i in members))
    keys = _Filler(max(len(key_rows[i]) for i in members))
    query_positions = np.zeros((len(members), queries.width), np.int64)
    for place, i in enumerate(members):
        mine = positions[i]
        queries.add(np.arange(len(mine)) + starts[i])
        query_positions[place, : len(mine)] = mine
        keys.add(key_rows[i])
    names = ("queries", "queries_back", "rows", "keys", "keys_back", "key_rows")
    found = dict(zip(names, (*queries.arrays(), *keys.arrays())))
    if masked:
        # Padded queries count as position 0: they would see nothing and turn into NaN, so let them see the first key.
        found["mask"] = (np.arange(keys.width)[None, None, :] <= query_positions[:, :, None])[:, None]
    return found


class _Filler:
    """Collects rows of a pack into a right-padded rectangle of ``width``."""

    def __init__(self, width: int):
        self.width = width
        self.table: list[np.ndarray] = []
        self.back: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        self.back.append(np.arange(len(rows)) + len(self.table) * self.width)
        self.rows.append(rows)
        padded = np.zeros(self.width, np.int64)
        padded[: len(rows)] = rows
        self.table.append(padded)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.stack(self.table), np.concatenate(self.back), np.concatenate(self.rows)


class _Unroll(torch.autograd.Function):
    """Pack [tokens, ...] -> rectangle [sequences, width, ...]; a pure move, so the backward is the move back. With
    ``adds`` a row may be in several places, and its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, pack, table, back, rows, adds):
        ctx.save_for_backward(back, rows)
        ctx.tokens = pack.size(0)
        ctx.adds = adds
        return pack.index_select(0, table.flatten()).view(*table.shape, *pack.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        back, rows = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[2:])
        # By `back`, which skips the padding: it repeats row 0, and its gradient must not count there.
        moved = grad.flatten(0, 1).index_select(0, back)
        out = out.index_add_(0, rows, moved) if ctx.adds else out.index_copy_(0, rows, moved)
        return out, None, None, None, None


class _RollUp(torch.autograd.Function):
    """Rectangles -> pack [tokens, ...]: the inverse of unrolling every rectangle."""

    @staticmethod
    def forward(ctx, tokens, moves, *rectangles):
        ctx.moves = moves
        ctx.shapes = [r.shape for r in rectangles]
        pack = rectangles[0].new_empty(tokens, *rectangles[0].shape[2:])
        for (back, rows), rectangle in zip(moves, rectangles):
            pack.index_copy_(0, rows, rectangle.flatten(0, 1).index_select(0, back))
        return pack

    @staticmethod
    def backward(ctx, grad):
        out = []
        for (back, rows), shape in zip(ctx.moves, ctx.shapes):
            rectangle = grad.new_zeros(shape[0] * shape[1], *shape[2:])
            out.append(rectangle.index_copy_(0, back, grad.index_select(0, rows)).view(shape))
        return None, None, *out


class _GatherContext(torch.autograd.Function):
    """[local tokens, ...] on each context rank -> [all tokens, ...] in the order of the pack; the backward sums this
    rank's share."""

    @staticmethod
    def forward(ctx, x, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        shares = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(shares, x.contiguous(), group=group)
        return shares.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        shares = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(0, order, grad)
        mine = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, shares, group=ctx.group)
        return mine, None, None


class PackedAttention(MegatronModule):
    """Causal self-attention over a pack, with rotary embedding and context parallelism.

    Args:
        rotary: ``(inverse frequencies [head size / 2], attention scaling)`` of the model.
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
        rotary: tuple[torch.Tensor, float],
        **unused,
    ):
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"packed attention is causal, asked for {attn_mask_type}")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.context_group = groups.cp
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.rotary = rotary

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
        """query [local tokens, heads, size], key and value [local tokens, groups, size] -> [local tokens, heads *
        size]."""
        packing: Any = packed_seq_params
        query = self._rotate(query, packing)
        key = self._rotate(key, packing)
        repeats = query.size(1) // key.size(1)
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if self.context_group.size() > 1:
            # In one collective; rotated before, since positions are those of the local tokens.
            both = _GatherContext.apply(torch.stack((key, value), 1), packing.order, self.context_group)
            key, value = both.unbind(1)
        drop = self.dropout if self.training else 0.0
        outputs = [self._attended(query, key, value, rectangle, drop) for rectangle in packing.rectangles]
        moves = [(rectangle.queries_back, rectangle.rows) for rectangle in packing.rectangles]
        return _RollUp.apply(query.size(0), moves, *outputs).flatten(1)

    def _rotate(self, x, packing):
        if packing.cos is None:  # the first layer computes it, the others share it
            frequencies, scaling = self.rotary
            if frequencies.device != x.device:  # once: the copy waits for the device
                frequencies = frequencies.to(x.device)
                self.rotary = frequencies, scaling
            angles = packing.positions.float()[:, None] * frequencies[None, :]
            angles = torch.cat((angles, angles), -1)[:, None, :]
            # Angles in float32: bfloat16 cannot tell positions above 256 apart.
            packing.cos = (angles.cos() * scaling).to(x.dtype)
            packing.sin = (angles.sin() * scaling).to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return x * packing.cos + torch.cat((-right, left), -1) * packing.sin

    def _attended(self, query, key, value, rectangle: Rectangle, drop: float):
        if not rectangle.shares or not torch.is_grad_enabled():
            return self._attend(query, key, value, rectangle, drop)
        # Recomputed in the backward pass: the copies of shared keys and values would take as much memory as sharing
        # them saves.
        return checkpoint(
            self._attend, query, key, value, rectangle, drop, use_reentrant=False, preserve_rng_state=drop > 0
        )

    def _attend(self, query, key, value, rectangle: Rectangle, drop: float):
        q = _Unroll.apply(query, rectangle.queries, rectangle.queries_back, rectangle.rows, False)
        k, v = (
            _Unroll.apply(x, rectangle.keys, rectangle.keys_back, rectangle.key_rows, rectangle.shares)
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
