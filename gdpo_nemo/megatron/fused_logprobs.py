"""Log-probs and entropy straight from hidden states and the output layer's weight: logits are never in memory.

Forward, each program of a Triton kernel multiplies a tile of hidden states with the columns of one part of the
vocabulary after the other, in float32, and keeps the running maximum and sums of an online softmax (Milakov and
Gimelshein 2018); a second kernel combines the parts. Over tensor-parallel ranks one gather of four numbers a token is
all that crosses, and a rank's share is one more part. Backward, the gradient of the logits is recomputed for a slice of
the vocabulary at a time, and cuBLAS makes the gradients of hidden states and weight of it, which add up in float32.

What a token's values are does not depend on which other tokens are in the micro-batch: each row of a tile is summed in
the same order wherever it lies.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gdpo_nemo.megatron.logprobs import EntropyUse

_GRADIENT_BYTES = 256 << 20
"""The gradient of one slice of the logits may take this many bytes, in the model's precision."""
_ALIGNMENT = 16
"""Elements to which a row of that gradient is rounded up, as vectorised loads and cuBLAS want it."""


def why_not_fused() -> str | None:
    """What this process lacks for the fused kernels; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    return None


def _kernels() -> ModuleType:
    from gdpo_nemo.megatron import logprob_kernels  # Triton: seconds, and only where it runs

    return logprob_kernels


class _Options(NamedTuple):
    group: Any
    scale: float
    """1 / temperature."""
    first: int
    """Global id of this rank's first column."""
    valid: int
    """Columns of this rank that are no padding; may be 0."""


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, options, entropy):
        hidden = hidden.contiguous()
        results = _evaluate(hidden, weight, targets, options, entropy != "none")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, results)
        ctx.options = options
        if entropy == "none":
            return results[0], None
        values = results[1]
        if entropy == "value":
            ctx.mark_non_differentiable(values)
        return results[0], values

    @staticmethod
    def backward(ctx, by_logprob, by_entropy):
        hidden, weight, targets, results = ctx.saved_tensors
        main = _main_grad(weight) if ctx.needs_input_grad[1] else None
        by_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] and main is None else None
        if by_logprob is None:
            by_logprob = torch.zeros_like(results[0])
        gradients = by_logprob.contiguous(), None if by_entropy is None else by_entropy.contiguous()
        for columns, gradient in _slices(hidden, weight, targets, results, gradients, ctx.options):
            _add_product(by_hidden, gradient, weight[columns])
            if main is not None:
                _add_product(main[columns], gradient.t(), hidden)
            elif by_weight is not None:
                torch.mm(gradient.t(), hidden, out=by_weight[columns])
        return by_hidden.to(hidden.dtype), by_weight if main is None else _placeholder(weight), None, None, None


def _evaluate(hidden, weight, targets, options: _Options, with_entropy: bool) -> torch.Tensor:
    """float32 [4, tokens]: log-prob, entropy, largest logit, log of the sum of exp(x - largest)."""
    tokens, size = hidden.shape
    results = hidden.new_empty((4, tokens), dtype=torch.float32)
    if not tokens:  # of every rank of the group
        return results
    kernels = _kernels()
    tile = kernels.tile_for(hidden.dtype, _capability(hidden))
    parts = max(1, -(-options.valid // (tile.columns * kernels.TILES_PER_PART)))
    statistics = results.new_empty((parts, 4, tokens))
    kernels.part_statistics[(-(-tokens // tile.rows) * parts,)](
        hidden,
        weight,
        targets,
        statistics,
        tokens,
        options.valid,
        options.first,
        parts,
        options.scale,
        HIDDEN=size,
        ENTROPY=with_entropy,
        M=tile.rows,
        N=tile.columns,
        K=tile.depth,
        TILES=kernels.TILES_PER_PART,
        SIDE_BY_SIDE=kernels.ROWS_AT_ONCE,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

    def combine(found: torch.Tensor, out: torch.Tensor, finish: bool) -> torch.Tensor:
        rows = kernels.ROWS_COMBINED
        kernels.combine_parts[(-(-tokens // rows),)](
            found, out, tokens, found.size(0), FINISH=finish, ENTROPY=with_entropy, M=rows
        )
        return out

    ranks = options.group.size()
    if ranks > 1:
        mine = combine(statistics, torch.empty_like(results), finish=False)
        statistics = results.new_empty((ranks, 4, tokens))
        dist.all_gather_into_tensor(statistics.view(-1), mine.view(-1), group=options.group)
    return combine(statistics, results, finish=True)


def _slices(hidden, weight, targets, results, gradients, options: _Options):
    """Yield (columns of the shard, gradient of their logits [tokens, columns]), which the next one overwrites."""
    tokens, size = hidden.shape
    if not tokens or not options.valid:
        return
    kernels = _kernels()
    tile = kernels.tile_for(hidden.dtype, _capability(hidden))
    width = slice_width(tokens, options.valid, hidden.element_size(), tile.columns)
    stride = -(-width // _ALIGNMENT) * _ALIGNMENT
    buffer = hidden.new_empty((tokens, stride))
    by_logprob, by_entropy = gradients
    for start in range(0, options.valid, width):
        count = min(width, options.valid - start)
        kernels.logit_gradients[(-(-tokens // tile.rows) * -(-count // tile.columns),)](
            hidden,
            weight,
            targets,
            results,
            by_logprob,
            by_entropy,
            buffer,
            tokens,
            start,
            count,
            options.first,
            stride,
            options.scale,
            HIDDEN=size,
            ENTROPY=by_entropy is not None,
            M=tile.rows,
            N=tile.columns,
            K=tile.depth,
            SIDE_BY_SIDE=kernels.ROWS_AT_ONCE,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        yield slice(start, start + count), buffer[:, :count]


def slice_width(tokens: int, columns: int, element_size: int, tile: int) -> int:
    """Columns of one slice of the backward pass: within the budget, multiples of ``tile``, and about equally many in
    each slice."""
    most = max(tile, _GRADIENT_BYTES // (tokens * element_size) // tile * tile)
    share = -(-columns // -(-columns // most))
    return min(columns, -(-share // tile) * tile)


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (0, 0)


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b, in the precision of ``out``, which may be that of the accumulator."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.device.type == "cpu":  # has no product of two precisions
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The float32 buffer in which Megatron's data-parallel wrapper accumulates the weight's gradient."""
    main = getattr(weight, "main_grad", None)
    wrapped = hasattr(weight, "grad_added_to_main_grad")
    return main if wrapped and main is not None and main.dtype == torch.float32 else None


def _placeholder(weight: Any) -> torch.Tensor:
    """What autograd is handed for a gradient that is in ``main_grad`` already, so that the wrapper's hook runs.

    The hook leaves its values out, unless the weight is the embedding, too: then it adds what arrives, which are the
    embedding's gradient and these zeros.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return weight.new_zeros(()).expand_as(weight)
    return torch.empty_like(weight)


def fused_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    entropy: EntropyUse = "gradient",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target, and the entropy of each distribution, under softmax(logits / temperature), of the
    logits that ``hidden`` and ``weight`` would give.

    Args:
        hidden: [tokens, hidden size], float32, bfloat16 or float16, whole on every tensor-parallel rank. Its gradient
            is this rank's share, to be summed over the group.
        weight: [vocabulary / tensor-parallel ranks, hidden size], this rank's rows, in the same precision. Where
            Megatron's data-parallel wrapper gave it a float32 ``main_grad``, its gradient is added there; otherwise it
            is returned.
        targets: int64 [tokens], global ids.
        group: tensor-parallel group; all ranks call with the same tokens.
        vocab_size: real vocabulary; columns beyond it get no probability and no gradient.
        entropy: as in ``token_logprobs``.

    Returns:
        float32 [tokens] log-probs and entropies (None where not asked for), in nats.

    Raises:
        ValueError: precisions that differ, or a weight that is not contiguous.
    """
    if hidden.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(f"hidden states are {hidden.dtype}, the weight is {weight.dtype}, or not contiguous")
    width = weight.size(0)
    first = width * group.rank()
    vocab_size = width * group.size() if vocab_size is None else vocab_size
    options = _Options(group, 1.0 / temperature, first, min(width, max(0, vocab_size - first)))
    return _FusedLogprobs.apply(hidden, weight, targets, options, entropy)


def reference_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``fused_token_logprobs`` computes, by torch's own functions, for a whole weight and in its precision."""
    log_p = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
