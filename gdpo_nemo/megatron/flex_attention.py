"""FlexAttention over packs with shared prefixes, for GPUs: TransformerEngine's attention cannot represent their mask.

In a pack with shared prefixes, the sequences form a tree, and the rows of the pack are in depth-first order. A token is
therefore a key for a contiguous range of rows: all rows from its own to the end of the last sequence that contains it.
The mask is thus one number per key. FlexAttention evaluates the mask in its kernel, skips empty blocks of the score
matrix, and does not evaluate the mask in full blocks.

torch has no compiled backward pass of FlexAttention for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from gdpo_nemo.megatron.attention import GatherContext, PackedAttention, rotated, rotated_pairs
from gdpo_nemo.megatron.packing import Packing, local_positions, packing_arrays, position_arrays

_BLOCK = 128
"""Rows and columns of a block of the score matrix. Blocks are empty, full or evaluated with the mask."""
# Name prefixes of the arrays of the masks without and with a sliding window.
_PREFIX = "mask."
_WINDOW_PREFIX = "window."


def end_rows(lengths: list[int], shared: list[int]) -> np.ndarray:
    """Return int32 [tokens]: the row after the last row of the pack that attends to each key.

    The query in row q attends to key k if k <= q < end_rows[k].

    Args:
        lengths: number of tokens of each sequence in the pack, without its shared tokens.
        shared: number of leading tokens of each sequence that are stored with the previous sequence.
    """
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    ends = np.empty(bounds[-1], np.int32)
    path = np.zeros(0, np.int64)  # rows of the current sequence's tokens, by position
    for start, end, count in zip(bounds, bounds[1:], shared):
        ends[path[count:]] = start  # the sequence does not contain these tokens, nor does any later sequence
        path = np.concatenate((path[:count], np.arange(start, end)))
    ends[path] = bounds[-1]
    return ends


def mask_arrays(
    lengths: list[int], shared: list[int], rank: int, size: int, window: int | None = None
) -> dict[str, np.ndarray]:
    """Compute the mask of a pack on context-parallel rank ``rank`` of ``size``, with the kind of each block.

    Args:
        lengths, shared: see ``end_rows``. Lengths include the tokens of all context-parallel ranks.
        window: see ``packing_arrays``.

    Returns:
        Arrays for ``block_mask``, which accepts them on any device.
    """
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    rows = np.concatenate([start + local_positions(n, rank, size) for start, n in zip(starts, lengths)])
    ends = end_rows(lengths, shared)
    first, last = _extremes(rows)
    nearest, farthest = _extremes(ends)
    keys = np.arange(0, len(ends), _BLOCK)
    # Under context parallelism, a block may contain distant rows. Some of its blocks are then evaluated needlessly.
    used = (keys <= last[:, None]) & (farthest > first[:, None])
    full = (keys + _BLOCK - 1 <= first[:, None]) & (nearest > last[:, None])
    # As with torch's create_block_mask, blocks with rows beyond the last row are not full.
    full &= np.arange(1, len(first) + 1)[:, None] * _BLOCK <= len(rows)
    arrays = {"ends": ends, "rows": rows.astype(np.int32)}
    if window is not None:
        positions = np.concatenate([count + np.arange(n) for count, n in zip(shared, lengths)])
        nearest_query, farthest_query = _extremes(positions[rows])
        nearest_key, farthest_key = _extremes(positions)
        # Positions in a block may be of several sequences, so some blocks are evaluated needlessly.
        used &= nearest_query[:, None] - farthest_key < window
        full &= farthest_query[:, None] - nearest_key < window
        arrays |= {"positions": positions.astype(np.int32), "window": np.array([window], np.int32)}
    for kind, blocks in (("", used & ~full), ("full_", full)):
        arrays[f"{kind}kv_num_blocks"], arrays[f"{kind}kv_indices"] = _compressed(blocks)
        arrays[f"{kind}q_num_blocks"], arrays[f"{kind}q_indices"] = _compressed(blocks.T)
    prefix = _PREFIX if window is None else _WINDOW_PREFIX
    return {prefix + name: array for name, array in arrays.items()}


def _extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and the maximum of each block of ``values``."""
    starts = np.arange(0, len(values), _BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _compressed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of true blocks in each row, int32 [1, 1, rows], and the columns of these blocks followed by the
    other columns, int32 [1, 1, rows, columns]."""
    columns = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(1, dtype=np.int32)[None, None], columns.astype(np.int32)[None, None]


def block_mask(arrays: Mapping[str, torch.Tensor], windowed: bool = False) -> Any:
    """Create a ``torch.nn.attention.flex_attention.BlockMask`` from the result of ``mask_arrays``.

    Return None if ``arrays`` contains no such mask.

    Args:
        windowed: True for the mask with a sliding window.
    """
    prefix = _WINDOW_PREFIX if windowed else _PREFIX
    if prefix + "ends" not in arrays:
        return None
    from torch.nn.attention.flex_attention import BlockMask

    tensors: dict[str, Any] = {}
    for name, tensor in arrays.items():
        if name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor
    ends, rows = tensors.pop("ends"), tensors.pop("rows")
    positions, window = tensors.pop("positions", None), tensors.pop("window", None)

    def attends(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        row = rows[query]
        return (key <= row) & (row < ends[key])

    def attends_in_window(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        row = rows[query]
        return (key <= row) & (row < ends[key]) & (positions[row] - positions[key] < window[0])

    mask_mod = attends_in_window if windowed else attends
    return BlockMask(seq_lengths=(len(rows), len(ends)), BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=mask_mod, **tensors)


@cache
def kernels(pairs: bool = False) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return FlexAttention and the rotary embedding, on GPUs compiled once for all layers and lengths.

    The rotary embedding is ``rotated``, or ``rotated_pairs`` if ``pairs`` is true.

    On CPUs, torch compiles only the forward pass of FlexAttention.
    """
    from torch.nn.attention.flex_attention import flex_attention

    functions: tuple[Any, Any] = flex_attention, rotated_pairs if pairs else rotated
    if torch.cuda.is_available():
        # The lengths of packs vary, so they are symbolic. Otherwise each length would be compiled.
        functions = torch.compile(functions[0], dynamic=True), torch.compile(functions[1], dynamic=True)
    return functions


def kernel_options(size: int) -> dict[str, int] | None:
    """Return options of FlexAttention's kernels for heads of this size, or None for torch's defaults.

    By default, the forward kernel for heads of size 512 needs 257 KiB of shared memory, and an H100 has 227 KiB.
    """
    return {"fwd_num_stages": 2, "fwd_num_warps": 8} if size > 256 else None


class FlexAttention(PackedAttention):
    """Causal self-attention over a pack with FlexAttention, which reads every key once for all sequences that share it.

    Args:
        unshared: builder of the attention for packs without shared prefixes. None uses FlexAttention for all packs.

    The other arguments are those of ``PackedAttention``.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, layers, unshared=None, **options):
        super().__init__(config, layer_number, attn_mask_type, attention_type, layers=layers, **options)
        if "v_channels" in options:  # Megatron pads the values of latent attention to the size of the keys
            options["v_channels"] = options["k_channels"]
        self.unshared = unshared and unshared(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            **options,
        )
        self._flex, self._rotated = kernels(self.layer.pairs)

    def arrays(self, lengths: list[int], rank: int, size: int, shared: list[int]) -> dict[str, np.ndarray]:
        """See ``PackedAttention.arrays``. The mask is included if FlexAttention computes the pack."""
        arrays = packing_arrays(lengths, rank, size, rectangles=False) | position_arrays(lengths, rank, size, shared)
        if any(shared) or self.unshared is None:
            arrays |= mask_arrays(lengths, shared, rank, size)
            if self.window is not None:
                arrays |= mask_arrays(lengths, shared, rank, size, self.window)
        return arrays

    def forward(self, query, key, value, attention_mask, *, packed_seq_params: Packing, attn_mask_type=None, **unused):
        """Return the attention output, [local tokens, heads * size]. For the arguments, see ``PackedAttention``."""
        packing: Any = packed_seq_params
        query = self._scale(self._rotate(query, packing), packing)
        key = self._rotate(key, packing)
        if packing.block_mask is None:
            return self.unshared(
                query, key, value, attention_mask, attn_mask_type=attn_mask_type, packed_seq_params=packing
            )
        if self.context_group.size() > 1:
            both = GatherContext.apply(torch.stack((key, value), 1), packing.order, self.context_group)
            key, value = both.unbind(1)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        options: dict[str, Any] = dict(scale=self.scale, enable_gqa=query.size(1) > key.size(1))
        options["kernel_options"] = kernel_options(query.size(-1))
        options["block_mask"] = packing.block_mask if self.layer.window is None else packing.window_block_mask
        if self.layer.score_cap is not None:
            options["score_mod"] = soft_cap(self.layer.score_cap)
        if not self.layer.sinks:
            return self._flex(query, key, value, **options)[0].transpose(0, 1).flatten(1)
        from torch.nn.attention.flex_attention import AuxRequest

        # A sink adds exp(sink) to the sum of exponentials, whose logarithm is lse, and thus scales the output.
        out, auxiliary = self._flex(query, key, value, **options, return_aux=AuxRequest(lse=True))
        share = torch.sigmoid(auxiliary.lse[0] - self.sinks.float()[:, None])
        return (out[0] * share.to(out.dtype)[..., None]).transpose(0, 1).flatten(1)


@cache
def soft_cap(cap: float) -> Callable[..., torch.Tensor]:
    """Return the score function of FlexAttention for a soft cap. Layers share a function, so it is compiled once."""

    def capped(score, batch, head, query, key):
        return cap * torch.tanh(score / cap)

    return capped
