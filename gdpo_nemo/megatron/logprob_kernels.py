"""Triton kernels for fused log-probs: logits exist only as tiles in registers, accumulated in float32.

Import this module only to launch the kernels. During the import, Triton decides whether to compile the kernels or to
interpret them on a CPU (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Lower than any logit, but finite: inf - inf would be NaN in a part without valid columns.
_LOWEST = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """Tile of the logits that a program computes at once, and its compiler settings."""

    rows: int
    """Number of tokens."""
    columns: int
    """Number of vocabulary entries."""
    depth: int
    """Number of elements of the hidden dimension that are multiplied per iteration."""
    warps: int
    stages: int
    """Number of iterations whose loads are in flight at the same time (software pipelining)."""


# Largest tiles without register spills. ``tests/megatron/test_logprob_kernels.py`` checks the spills with ptxas.
_HALF = Tile(128, 128, 64, 8, 3)
_HALF_HOPPER = Tile(128, 256, 64, 8, 3)
_FLOAT = Tile(64, 64, 32, 4, 3)
ROWS_AT_ONCE = 16
"""Number of row tiles per group. The hidden states of a group stay in the L2 cache while its columns are processed."""
TILES_PER_PART = 8
"""Number of column tiles per part of the logits. A program processes them in turn and writes one set of statistics."""
ROWS_COMBINED = 128
"""Number of tokens per program of ``combine_parts``."""


def tile_for(dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """Return the tile for hidden states of ``dtype`` on a device with this CUDA compute capability."""
    if dtype == torch.float32:
        return _FLOAT
    return _HALF_HOPPER if capability[0] == 9 else _HALF


# Triton supports no keyword-only parameters, so the parameters of the kernels are positional.


@triton.jit
def _tile_of_program(program, row_tiles, parts, GROUP: tl.constexpr):
    """Return (row tile, part) of a program. All parts of ``GROUP`` row tiles precede those of the next row tiles."""
    group = program // (GROUP * parts)
    group_size = tl.minimum(row_tiles - group * GROUP, GROUP)
    offset = program % (GROUP * parts)
    return group * GROUP + offset % group_size, offset // group_size


@triton.jit
def _logits(
    hidden, weight, rows, columns, scale, HIDDEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Return float32 [M, N]: the scaled logits of ``rows`` and ``columns``, which must be valid indices."""
    depth = tl.arange(0, K)
    left = hidden + rows.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    right = weight + columns.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    x = tl.zeros((M, N), tl.float32)
    for start in range(0, HIDDEN, K):
        if HIDDEN % K == 0:
            a = tl.load(left + start)
            b = tl.load(right + start)
        else:
            valid = (start + depth < HIDDEN)[None, :]
            a = tl.load(left + start, mask=valid, other=0.0)
            b = tl.load(right + start, mask=valid, other=0.0)
        # ieee: multiply float32 inputs in full precision, regardless of torch's setting for matrix products.
        x = tl.dot(a, tl.trans(b), x, input_precision="ieee")
    return x * scale


@triton.jit(do_not_specialize=["tokens", "valid", "first"])
def part_statistics(
    hidden, weight, targets, out, tokens, valid, first, parts, scale,
    HIDDEN: tl.constexpr, ENTROPY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the statistics of each token in each part of the logits to float32 ``out`` [parts, 4, tokens].

    A part has ``TILES`` x ``N`` columns. The four statistics are the largest logit x, the sum of exp(x - largest), the
    sum of exp(x - largest) * (x - largest), and the target's logit. The third statistic is 0 without ``ENTROPY``. The
    fourth statistic is 0 if the target is in another part.

    Args:
        targets: global token ids.
        valid: number of columns of the shard without padding.
        first: global id of the shard's first column.
    """
    row_tile, part = _tile_of_program(tl.program_id(0), tl.cdiv(tokens, M), parts, GROUP)
    rows = row_tile * M + tl.arange(0, M)
    exists = rows < tokens
    # Out-of-range indices read the last valid row or column, and their results are discarded, so loads in the loop need
    # no mask.
    clamped = tl.minimum(rows, tokens - 1)
    local = tl.load(targets + clamped) - first
    peak = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    moment = tl.zeros((M,), tl.float32)
    target_logit = tl.zeros((M,), tl.float32)
    for number in range(TILES):
        start = (part * TILES + number) * N
        if start < valid:
            columns = start + tl.arange(0, N)
            x = _logits(hidden, weight, clamped, tl.minimum(columns, valid - 1), scale, HIDDEN, M, N, K)
            is_valid = (columns < valid)[None, :]
            target_logit += tl.sum(tl.where(is_valid & (columns[None, :] == local[:, None]), x, 0.0), 1)
            x = tl.where(is_valid, x, _LOWEST)
            new_peak = tl.maximum(peak, tl.max(x, 1))
            x = x - new_peak[:, None]
            p = tl.where(is_valid, tl.exp(x), 0.0)
            shift = peak - new_peak
            factor = tl.exp(shift)
            if ENTROPY:
                moment = factor * (moment + shift * total) + tl.sum(p * x, 1)
            total = factor * total + tl.sum(p, 1)
            peak = new_peak
    pointer = out + part.to(tl.int64) * 4 * tokens + rows
    tl.store(pointer, peak, mask=exists)
    tl.store(pointer + tokens, total, mask=exists)
    tl.store(pointer + 2 * tokens, moment, mask=exists)
    tl.store(pointer + 3 * tokens, target_logit, mask=exists)


@triton.jit(do_not_specialize=["tokens"])
def combine_parts(statistics, out, tokens, parts, FINISH: tl.constexpr, ENTROPY: tl.constexpr, M: tl.constexpr):
    """Combine float32 ``statistics`` [parts, 4, tokens] of ``part_statistics`` into ``out`` [4, tokens].

    The result contains the same four statistics. With ``FINISH``, the result instead contains the log-prob, the entropy
    (0 unless ``ENTROPY``), the largest logit, and the log of the sum of exp(x - largest).
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    exists = rows < tokens
    peak = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    moment = tl.zeros((M,), tl.float32)
    target_logit = tl.zeros((M,), tl.float32)
    for part in range(parts):
        pointer = statistics + tl.cast(part, tl.int64) * 4 * tokens + rows
        other = tl.load(pointer, mask=exists, other=_LOWEST)
        other_total = tl.load(pointer + tokens, mask=exists, other=1.0)
        new_peak = tl.maximum(peak, other)
        if ENTROPY:
            other_moment = tl.load(pointer + 2 * tokens, mask=exists, other=0.0)
            moment = tl.exp(peak - new_peak) * (moment + (peak - new_peak) * total)
            moment += tl.exp(other - new_peak) * (other_moment + (other - new_peak) * other_total)
        total = tl.exp(peak - new_peak) * total + tl.exp(other - new_peak) * other_total
        target_logit += tl.load(pointer + 3 * tokens, mask=exists, other=0.0)
        peak = new_peak
    if FINISH:
        log_sum = tl.log(total)
        # Subtract the large logits first: otherwise the small log_sum would be lost to rounding.
        tl.store(out + rows, (target_logit - peak) - log_sum, mask=exists)
        tl.store(out + tokens + rows, log_sum - moment / total if ENTROPY else moment, mask=exists)
        tl.store(out + 2 * tokens + rows, peak, mask=exists)
        tl.store(out + 3 * tokens + rows, log_sum, mask=exists)
    else:
        tl.store(out + rows, peak, mask=exists)
        tl.store(out + tokens + rows, total, mask=exists)
        tl.store(out + 2 * tokens + rows, moment, mask=exists)
        tl.store(out + 3 * tokens + rows, target_logit, mask=exists)


@triton.jit(do_not_specialize=["tokens", "start", "count", "first"])
def logit_gradients(
    hidden, weight, targets, results, by_logprob, by_entropy, out,
    tokens, start, count, first, stride, scale,
    HIDDEN: tl.constexpr, ENTROPY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Write the gradient with respect to the unscaled logits of ``count`` columns, starting at column ``start``.

    Args:
        results: output of ``combine_parts`` with ``FINISH``.
        by_logprob: float32 [tokens], gradient with respect to the log-probs.
        by_entropy: float32 [tokens], gradient with respect to the entropies.
        out: [tokens, stride]; the gradient fills the first ``count`` columns.
    """
    row_tile, column_tile = _tile_of_program(tl.program_id(0), tl.cdiv(tokens, M), tl.cdiv(count, N), GROUP)
    rows = row_tile * M + tl.arange(0, M)
    exists = rows < tokens
    clamped = tl.minimum(rows, tokens - 1)
    offsets = column_tile * N + tl.arange(0, N)
    columns = start + offsets
    last = start + count - 1
    x = _logits(hidden, weight, clamped, tl.minimum(columns, last), scale, HIDDEN, M, N, K)
    largest = tl.load(results + 2 * tokens + clamped)
    log_sum = tl.load(results + 3 * tokens + clamped)
    log_p = (x - largest[:, None]) - log_sum[:, None]
    p = tl.exp(log_p)
    grad_logprob = tl.load(by_logprob + clamped)
    local = tl.load(targets + clamped) - first
    # d logprob / d x = onehot - p;  d entropy / d x = -p (log p + entropy)
    gradient = tl.where(columns[None, :] == local[:, None], grad_logprob[:, None], 0.0) - grad_logprob[:, None] * p
    if ENTROPY:
        entropy = tl.load(results + tokens + clamped)
        gradient -= tl.load(by_entropy + clamped)[:, None] * p * (log_p + entropy[:, None])
    gradient *= scale
    pointer = out + rows.to(tl.int64)[:, None] * stride + offsets[None, :]
    tl.store(pointer, gradient.to(out.dtype.element_ty), mask=exists[:, None] & (offsets < count)[None, :])
