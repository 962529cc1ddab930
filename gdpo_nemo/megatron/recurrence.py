"""Recurrent token mixing over packs in plain torch, without the CUDA kernels of mamba_ssm, causal_conv1d and fla.

A pack is a concatenation of sequences, and no state may pass from one sequence to the next. The sequences of a pack are
therefore padded on the right to rectangles, the same that ``PackedAttention`` uses, and every row of a rectangle starts
with an empty state. Sequences whose first tokens are stored with another sequence get these tokens back in their row,
so each sequence continues from the state of the shared prompt. Only the recurrence repeats the shared tokens. The
linear layers around it compute each token once.

A recurrence is computed in chunks: products of matrices inside a chunk, and a loop over the states between chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gdpo_nemo.megatron.attention import GatherContext, _PadInput, _UnpadOutput
from gdpo_nemo.megatron.packing import Packing, Rectangle

CHUNK = 64
"""Tokens of a chunk. A longer chunk costs more products, and a shorter one more steps of the loop."""


def over_sequences(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, packing: Packing, context: dist.ProcessGroup
) -> torch.Tensor:
    """Apply a causal function of complete sequences to the sequences of a pack.

    Args:
        function: maps [sequences, length, width] to [sequences, length, ...]. A token's output must not depend on later
            tokens, because these may be padding.
        x: [local tokens, width].
        context: context-parallel group. Each rank computes all tokens and returns its own.

    Returns:
        [local tokens, ...], the outputs of the local tokens.
    """
    if context.size() > 1:
        x = GatherContext.apply(x, packing.order, context)
    positions: Any = packing.positions
    outputs, moves = [], []
    for rectangle in packing.rectangles:
        if rectangle.shares and torch.is_grad_enabled():
            # Recompute in the backward pass: the copies of shared tokens would take as much memory as sharing saves.
            out = checkpoint(_on_rectangle, function, x, rectangle, use_reentrant=False, preserve_rng_state=False)
        else:
            out = _on_rectangle(function, x, rectangle)
        rows = rectangle.query_cells // rectangle.queries.size(1)
        moves.append((rows * rectangle.keys.size(1) + positions[rectangle.query_rows], rectangle.query_rows))
        outputs.append(out)
    return _UnpadOutput.apply(len(positions), moves, *outputs)


def _on_rectangle(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rectangle: Rectangle
) -> torch.Tensor:
    return function(_PadInput.apply(x, rectangle.keys, rectangle.key_cells, rectangle.key_rows, rectangle.shares))


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolve each channel of x [sequences, length, channels] with the tokens before, and apply SiLU.

    Args:
        weight: [channels, 1, kernel].
        bias: [channels].
    """
    padded = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=x.size(-1))).transpose(1, 2)


def _chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Pad x [sequences, length, ...] on the right with zeros, and split it to [sequences, chunks, chunk, ...]."""
    missing = -x.size(1) % chunk
    if missing:
        x = torch.cat((x, x.new_zeros(x.size(0), missing, *x.shape[2:])), 1)
    return x.unflatten(1, (-1, chunk))


def state_space_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute Mamba-2's state space model (arXiv 2405.21060, section 6) in float32.

    The state of a head, [size, state], is ``exp(decay * step_t) * state + step_t * x_t b_t'``, and the output is
    ``state c_t + skip * x_t``.

    Args:
        x: [sequences, length, groups, heads of a group, size].
        step: float32 [sequences, length, groups, heads of a group], positive.
        decay: float32 [groups, heads of a group], negative.
        b, c: [sequences, length, groups, state], shared by the heads of a group.
        skip: [groups, heads of a group].

    Returns:
        float32, same shape as ``x``.
    """
    length = x.size(1)
    chunk = min(chunk, length)
    x, b, c = x.float(), b.float(), c.float()
    inputs, b, c = _chunks(x * step[..., None], chunk), _chunks(b, chunk), _chunks(c, chunk)
    # log of the product of the decays from the start of the chunk, [sequences, chunks, groups, heads, chunk]
    total = _chunks(decay * step, chunk).cumsum(2).permute(0, 1, 3, 4, 2)
    weights = torch.einsum("zktgn,zksgn->zkgts", c, b)[:, :, :, None] * _decays_between(total)
    y = torch.einsum("zkghts,zksghp->zktghp", weights, inputs)
    added = torch.einsum("zksgn,zkghs,zksghp->zkghpn", b, (total[..., -1:] - total).exp(), inputs)
    leaving = total[..., -1].exp()
    state = torch.zeros_like(added[:, 0])
    entering = []
    for number in range(added.size(1)):
        entering.append(state)
        state = leaving[:, number, ..., None, None] * state + added[:, number]
    y = y + torch.einsum("zktgn,zkghpn,zkght->zktghp", c, torch.stack(entering, 1), total.exp())
    return y.flatten(1, 2)[:, :length] + skip.float()[..., None] * x


def gated_delta_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    strength: torch.Tensor,
    decay: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute the gated delta rule (arXiv 2412.06464, section 3) in float32, for normalised keys.

    The state of a head, [key size, size], is ``state = exp(decay_t) * state``, followed by
    ``state + strength_t * k_t (v_t - k_t' state)'``, and the output is ``q_t' state``.

    Args:
        query, key: [sequences, length, groups, key size], shared by the heads of a group.
        value: [sequences, length, groups, heads of a group, size].
        strength: [sequences, length, groups, heads of a group], between 0 and 1.
        decay: float32, same shape as ``strength``, negative.

    Returns:
        float32, same shape as ``value``.
    """
    length = value.size(1)
    chunk = min(chunk, length)
    query, key, value, strength = (_chunks(x.float(), chunk) for x in (query, key, value, strength))
    total = _chunks(decay, chunk).cumsum(2).permute(0, 1, 3, 4, 2)
    between = _decays_between(total)
    strength = strength.permute(0, 1, 3, 4, 2)[..., None]
    # The token t of a chunk writes w_t = strength_t (v_t - k_t' state), where the state contains the writes of earlier
    # tokens of the chunk. The writes thus solve a triangular system, and are linear in the state before the chunk.
    system = strength * torch.einsum("zktgn,zksgn->zkgts", key, key)[:, :, :, None] * between
    keys = key.permute(0, 1, 3, 2, 4)[:, :, :, None]
    right = torch.cat((strength * value.permute(0, 1, 3, 4, 2, 5), strength * total.exp()[..., None] * keys), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, by_state = solved.split((value.size(-1), key.size(-1)), -1)
    leaving = total[..., -1].exp()[..., None, None]
    kept = keys * (total[..., -1:] - total).exp()[..., None]
    state = torch.zeros_like(kept[:, 0].mT @ written[:, 0])
    entering, writes = [], []
    for number in range(written.size(1)):
        entering.append(state)
        writes.append(written[:, number] - by_state[:, number] @ state)
        state = leaving[:, number] * state + kept[:, number].mT @ writes[-1]
    weights = torch.einsum("zktgn,zksgn->zkgts", query, key)[:, :, :, None] * between
    y = weights @ torch.stack(writes, 1)
    y = y + torch.einsum("zktgn,zkghnp,zkght->zkghtp", query, torch.stack(entering, 1), total.exp())
    return y.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :length]


def _decays_between(total: torch.Tensor) -> torch.Tensor:
    """Return exp(total[t] - total[s]) for s <= t and 0 for s > t, from total [..., chunk]: [..., t, s]."""
    difference = total[..., :, None] - total[..., None, :]
    allowed = torch.ones(difference.shape[-2:], dtype=torch.bool, device=total.device).tril()
    # Mask before exp: above the diagonal the exponent is positive, and its gradient could be infinite times 0.
    return difference.masked_fill(~allowed, -torch.inf).exp()
