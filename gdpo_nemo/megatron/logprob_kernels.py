"""Triton kernels of ``fused_logprobs``: logits exist as tiles in registers only, accumulated in float32.

Import this where the kernels are launched and nowhere else: Triton decides at the import whether it compiles them or,
with ``TRITON_INTERPRET=1``, interprets them on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Below every logit, and finite: inf - inf, in a part that has no column, would be NaN.
_LOWEST = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """The piece of the logits that one program computes at once, and what the compiler is told about it."""

    rows: int
    columns: int
    depth: int
    """Elements of the hidden size that are multiplied per iteration."""
    warps: int
    stages: int
    """Depths of loads under way at once (software pipelining)."""


# The largest whose registers ptxas does not spill (``tests/megatron/test_logprob_kernels.py`` asks it).
_HALF = Tile(128, 128, 64, 8, 3)
_HALF_HOPPER = Tile(128, 256, 64, 8, 3)
_FLOAT = Tile(64, 64, 32, 4, 3)
ROWS_AT_ONCE = 16
"""Row tiles that run side by side over the same columns: their hidden states stay in the L2 cache meanwhile."""
TILES_PER_PART = 8
"""Column tiles that one program takes in turn; the statistics are written once for all of them."""
ROWS_COMBINED = 128
"""Tokens of one program of ``combine_parts``."""


def tile_for(dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """The tile for hidden states of ``dtype`` on a device of that CUDA capability."""
    if dtype == torch.float32:
        return _FLOAT
    return _HALF_HOPPER if capability[0] == 9 else _HALF


@triton.jit
def _place(program, row_tiles, parts, SIDE_BY_SIDE: tl.constexpr):
    """(row tile, part) of a program: ``SIDE_BY_SIDE`` row tiles go through all parts before the next ones begin."""
    group = program // (SIDE_BY_SIDE * parts)
    beside = tl.minimum(row_tiles - group * SIDE_BY_SIDE, SIDE_BY_SIDE)
    rest = program % (SIDE_BY_SIDE * parts)
    return group * SIDE_BY_SIDE + rest % beside, rest // beside


@triton.jit
def _logits(
    hidden, weight, rows, columns, scale, HIDDEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """float32 [M, N]: scaled logits of existing ``rows`` and ``columns``."""
    depth = tl.arange(0, K)
    left = hidden + rows.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    right = weight + columns.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    x = tl.zeros((M, N), tl.float32)
    for start in range(0, HIDDEN, K):
        if HIDDEN % K == 0:
            a = tl.load(left + start)
            b = tl.load(right + start)
        else:
            inside = (start + depth < HIDDEN)[None, :]
            a = tl.load(left + start, mask=inside, other=0.0)
            b = tl.load(right + start, mask=inside, other=0.0)
        # ieee: float32 models are float32 here, whatever torch's own products use.
        x = tl.dot(a, tl.trans(b), x, input_precision="ieee")
    return x * scale


@triton.jit(do_not_specialize=["tokens", "valid", "first"])
def part_statistics(
    hidden, weight, targets, out, tokens, valid, first, parts, scale,
    HIDDEN: tl.constexpr, ENTROPY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TILES: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """Write the statistics of each token in each part of ``TILES`` x ``N`` columns: float32 ``out`` [parts, 4, tokens].

    Those are the largest logit x; the sum of exp(x - largest); the sum of exp(x - largest) (x - largest), with
    ``ENTROPY``; and the target's logit, 0 where it is in another part. ``targets`` are global ids, of which ``first``
    is the shard's first; columns from ``valid`` on are padding.
    """
    row_tile, part = _place(tl.program_id(0), tl.cdiv(tokens, M), parts, SIDE_BY_SIDE)
    rows = row_tile * M + tl.arange(0, M)
    exists = rows < tokens
    # What does not exist is computed from what does and left out afterwards: loads in the loop need no mask.
    held = tl.minimum(rows, tokens - 1)
    local = tl.load(targets + held) - first
    peak = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    moment = tl.zeros((M,), tl.float32)
    picked = tl.zeros((M,), tl.float32)
    for number in range(TILES):
        start = (part * TILES + number) * N
        if start < valid:
            columns = start + tl.arange(0, N)
            x = _logits(hidden, weight, held, tl.minimum(columns, valid - 1), scale, HIDDEN, M, N, K)
            real = (columns < valid)[None, :]
            picked += tl.sum(tl.where(real & (columns[None, :] == local[:, None]), x, 0.0), 1)
            x = tl.where(real, x, _LOWEST)
            higher = tl.maximum(peak, tl.max(x, 1))
            x = x - higher[:, None]
            p = tl.where(real, tl.exp(x), 0.0)
            lower = peak - higher
            shrink = tl.exp(lower)
            if ENTROPY:
                moment = shrink * (moment + lower * total) + tl.sum(p * x, 1)
            total = shrink * total + tl.sum(p, 1)
            peak = higher
    place = out + part.to(tl.int64) * 4 * tokens + rows
    tl.store(place, peak, mask=exists)
    tl.store(place + tokens, total, mask=exists)
    tl.store(place + 2 * tokens, moment, mask=exists)
    tl.store(place + 3 * tokens, picked, mask=exists)


@triton.jit(do_not_specialize=["tokens"])
def combine_parts(statistics, out, tokens, parts, FINISH: tl.constexpr, ENTROPY: tl.constexpr, M: tl.constexpr):
    """Combine float32 ``statistics`` [parts, 4, tokens] into ``out`` [4, tokens]: those of one part, or with ``FINISH``
    log-prob, entropy (0 unless ``ENTROPY``), largest logit and log of the sum."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    exists = rows < tokens
    peak = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    moment = tl.zeros((M,), tl.float32)
    picked = tl.zeros((M,), tl.float32)
    for part in range(parts):
        place = statistics + tl.cast(part, tl.int64) * 4 * tokens + rows
        other = tl.load(place, mask=exists, other=_LOWEST)
        other_total = tl.load(place + tokens, mask=exists, other=1.0)
        higher = tl.maximum(peak, other)
        if ENTROPY:
            other_moment = tl.load(place + 2 * tokens, mask=exists, other=0.0)
            moment = tl.exp(peak - higher) * (moment + (peak - higher) * total)
            moment += tl.exp(other - higher) * (other_moment + (other - higher) * other_total)
        total = tl.exp(peak - higher) * total + tl.exp(other - higher) * other_total
        picked += tl.load(place + 3 * tokens, mask=exists, other=0.0)
        peak = higher
    if FINISH:
        log_sum = tl.log(total)
        # Large logits cancel first, before the small log_sum would be rounded away.
        tl.store(out + rows, (picked - peak) - log_sum, mask=exists)
        tl.store(out + tokens + rows, log_sum - moment / total if ENTROPY else moment, mask=exists)
        tl.store(out + 2 * tokens + rows, peak, mask=exists)
        tl.store(out + 3 * tokens + rows, log_sum, mask=exists)
    else:
        tl.store(out + rows, peak, mask=exists)
        tl.store(out + tokens + rows, total, mask=exists)
        tl.store(out + 2 * tokens + rows, moment, mask=exists)
        tl.store(out + 3 * tokens + rows, picked, mask=exists)


@triton.jit(do_not_specialize=["tokens", "start", "count", "first"])
def logit_gradients(
    hidden, weight, targets, results, by_logprob, by_entropy, out,
    tokens, start, count, first, stride, scale,
    HIDDEN: tl.constexpr, ENTROPY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the unscaled logits of ``count`` columns from ``start`` on: ``out`` [tokens, stride], its
    first ``count`` columns.

    ``results`` is what ``combine_parts`` finished; ``by_logprob`` and ``by_entropy`` are float32 [tokens] gradients.
    """
    row_tile, column_tile = _place(tl.program_id(0), tl.cdiv(tokens, M), tl.cdiv(count, N), SIDE_BY_SIDE)
    rows = row_tile * M + tl.arange(0, M)
    exists = rows < tokens
    held = tl.minimum(rows, tokens - 1)
    places = column_tile * N + tl.arange(0, N)
    columns = start + places
    last = start + count - 1
    x = _logits(hidden, weight, held, tl.minimum(columns, last), scale, HIDDEN, M, N, K)
    largest = tl.load(results + 2 * tokens + held)
    log_sum = tl.load(results + 3 * tokens + held)
    log_p = (x - largest[:, None]) - log_sum[:, None]
    p = tl.exp(log_p)
    above = tl.load(by_logprob + held)
    local = tl.load(targets + held) - first
    # d logprob / d x = onehot - p;  d entropy / d x = -p (log p + entropy)
    gradient = tl.where(columns[None, :] == local[:, None], above[:, None], 0.0) - above[:, None] * p
    if ENTROPY:
        entropy = tl.load(results + tokens + held)
        gradient -= tl.load(by_entropy + held)[:, None] * p * (log_p + entropy[:, None])
    gradient *= scale
    place = out + rows.to(tl.int64)[:, None] * stride + places[None, :]
    tl.store(place, gradient.to(out.dtype.element_ty), mask=exists[:, None] & (places < count)[None, :])
