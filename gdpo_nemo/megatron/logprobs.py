"""Log-probs and entropies of tokens under vocabulary parallelism, with and without fused kernels."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from gdpo_nemo.utils.errors import ConfigError

EntropyUse = Literal["none", "value", "gradient"]
"""Entropy mode: no entropy (none), entropy without a gradient (value), or entropy with a gradient (gradient)."""

MAX_CHUNK = 1024
"""Maximum number of tokens whose logits are converted to float32 at once."""
_CPU_LOGITS = 1 << 20
"""Number of logits that a CPU converts to float32 at once: 4 MiB, which fits into its caches.

With 1,024 tokens at once, every pass reads and writes main memory. Such chunks take 2.5 times as long for vocabularies
of 8,192 and 49,152. Chunks with a quarter or four times as many logits take at most a third longer than the fastest
chunks.
"""


class _Shard(NamedTuple):
    """Columns of the logits on this rank."""

    group: dist.ProcessGroup
    """Tensor-parallel group."""
    scale: float
    """1 / temperature."""
    first: int
    """Global token id of this rank's first column."""
    valid: int
    """Number of columns of this rank without padding; may be 0."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, width: int, temperature: float, vocab_size: int | None) -> _Shard:
        """Return the shard of a rank with ``width`` columns. For the other arguments, see ``token_logprobs``."""
        first = width * group.rank()
        vocab_size = width * group.size() if vocab_size is None else vocab_size
        return cls(group, 1.0 / temperature, first, min(width, max(0, vocab_size - first)))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, shard, chunk, entropy_use):
        width = logits.size(-1)
        scale, padding = shard.scale, width - shard.valid
        local = targets - shard.first
        owned = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)  # valid indices for gather; `owned` masks targets of other ranks
        with_entropy = entropy_use != "none"
        # peak: the rank's largest logit. Rows of sums, for d = logit - peak: sum of exp(d), the target's logit, sum of
        # exp(d) * d.
        peak = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        sums = torch.empty((3 if with_entropy else 2, *targets.shape), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits.size(0), chunk):
            x = _scaled(logits[rows], scale, padding)
            # On a rank with only padding, the maximum is -inf. A finite value prevents NaN in -inf - peak.
            torch.amax(x, -1, out=peak[rows]).clamp_(min=-1e30)
            sums[1, rows] = torch.where(owned[rows], x.gather(-1, local[rows, None]).squeeze(-1), 0.0)
            x.sub_(peak[rows, None])
            weights = x.exp()
            torch.sum(weights, -1, out=sums[0, rows])
            if with_entropy:
                # exp underflows to 0 if x is -inf (padding); 0 * -inf would be NaN.
                torch.sum(weights.mul_(x.clamp_(min=-1e30)), -1, out=sums[2, rows])
        peak = _merge(peak, sums, shard.group)
        log_sum = sums[0].log()
        log_z = log_sum + peak
        # Subtract the large logits first: otherwise the small log_sum would be lost to rounding.
        logprob = (sums[1] - peak) - log_sum
        entropy = log_sum - sums[2] / sums[0] if with_entropy else None
        # Decide in the forward pass: inspecting the gradient in the backward pass would make the CPU wait for the GPU.
        with_gradient = entropy_use == "gradient"
        if entropy is not None and not with_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, owned, log_z, entropy if with_gradient else None)
        ctx.options = scale, padding, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        logits, local, owned, log_z, entropy = ctx.saved_tensors
        scale, padding, chunk = ctx.options
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(log_z)
        out = torch.empty_like(logits)
        for rows in _chunks(logits.size(0), chunk):
            log_p = _scaled(logits[rows], scale, padding).sub_(log_z[rows, None])
            p = log_p.exp()
            # d logprob / d x = onehot - p;  d entropy / d x = -p (log p + entropy)
            grad = p * -grad_logprob[rows, None]
            # Most losses have no entropy term and skip these two operations on the whole vocabulary.
            if entropy is not None and grad_entropy is not None:
                log_p.clamp_(min=-1e30).add_(entropy[rows, None]).mul_(p)
                grad.sub_(log_p * grad_entropy[rows, None])
            grad.scatter_add_(-1, local[rows, None], (owned[rows] * grad_logprob[rows])[:, None])
            out[rows] = grad.mul_(scale).to(out.dtype)
        return out, None, None, None, None


def _suitable_chunk(logits: torch.Tensor) -> int:
    """Return the number of tokens to process at once.

    On a CPU, the float32 logits of these tokens fit into the caches. On a GPU, the number is ``MAX_CHUNK``, to keep the
    GPU busy.
    """
    if logits.device.type != "cpu":
        return MAX_CHUNK
    return max(1, min(MAX_CHUNK, _CPU_LOGITS // logits.size(-1)))


def _merge(peak: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce ``sums`` over the ranks in place, relative to the largest logit of all ranks. Return this logit.

    The reductions are not split into chunks: on a CPU, each reduction takes as long as reading a small chunk once.
    """
    largest = peak.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shift = peak.sub_(largest)
    factor = shift.exp()
    if len(sums) == 3:
        sums[2].addcmul_(sums[0], shift).mul_(factor)
    sums[0].mul_(factor)
    dist.all_reduce(sums, group=group)
    return largest


def _chunks(total: int, size: int):
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _scaled(logits: torch.Tensor, scale: float, padding: int) -> torch.Tensor:
    """Return ``logits * scale`` as a new float32 tensor, with -inf in the last ``padding`` columns."""
    x = logits.to(torch.float32, copy=True)
    if scale != 1.0:
        x.mul_(scale)
    if padding:
        x[:, x.size(-1) - padding :] = float("-inf")
    return x


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int | None = None,
    entropy: EntropyUse = "gradient",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-prob of each target and the entropy of its distribution, softmax(logits / temperature).

    Args:
        logits: [tokens, vocabulary / tensor-parallel ranks], this rank's columns.
        targets: int64 [tokens], global token ids, already shifted (``targets[t]`` follows token t).
        group: tensor-parallel group.
        vocab_size: vocabulary size without padding. Padded columns have probability 0. None if no column is padded.
        chunk: number of tokens processed at once, or None for the device's default. All chunk sizes yield bit-identical
            results.
        entropy: entropy mode. ``none`` reads the logits the least often, and ``gradient`` reads them the most often.

    Returns:
        Log-probs and entropies in nats, float32 [tokens] each and differentiable in ``logits``. The entropies are None
        if ``entropy`` is ``none``.
    """
    shard = _Shard.of(group, logits.size(-1), temperature, vocab_size)
    return _TokenLogprobs.apply(logits, targets, shard, chunk or _suitable_chunk(logits), entropy)


_GRADIENT_BYTES = 256 << 20
"""Maximum size in bytes of the gradient of a slice of the logits, in the model's precision."""
_ALIGNMENT = 16
"""Multiple, in elements, to which rows of the gradient are padded, for vectorised loads and cuBLAS."""


def why_not_fused() -> str | None:
    """Return the reason why the fused kernels cannot run in this process, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    return None


def use_fused_logprobs(setting: bool | None, logit_cap: float | None = None) -> bool:
    """Return whether to use the fused kernels.

    Args:
        setting: value of ``policy.megatron_cfg.fused_logprobs``. None uses the fused kernels if they can run on a GPU.
        logit_cap: soft cap of the model's logits, which the fused kernels do not support, or None.

    Raises:
        ConfigError: if the setting is true but the kernels cannot run in this process.
    """
    reason = why_not_fused() if logit_cap is None else "the model has a soft cap of its logits"
    if setting and reason:
        raise ConfigError(f"policy.megatron_cfg.fused_logprobs: true is not supported, because {reason}")
    if setting is None:
        # Never choose Triton's interpreter by default: it is a hundred times slower.
        return torch.cuda.is_available() and reason is None
    return setting


def _kernels() -> ModuleType:
    from gdpo_nemo.megatron import logprob_kernels  # Triton takes seconds to import and needs a supported device

    return logprob_kernels


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shard, entropy):
        hidden = hidden.contiguous()
        results = _evaluate(hidden, weight, targets, shard, entropy != "none")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, results)
        ctx.shard = shard
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
        for columns, gradient in _slices(hidden, weight, targets, results, gradients, ctx.shard):
            _add_product(by_hidden, gradient, weight[columns])
            if main is not None:
                _add_product(main[columns], gradient.t(), hidden)
            elif by_weight is not None:
                torch.mm(gradient.t(), hidden, out=by_weight[columns])
        if main is not None:
            by_weight = _placeholder_gradient(weight)
        return by_hidden.to(hidden.dtype), by_weight, None, None, None


def _evaluate(hidden, weight, targets, shard: _Shard, with_entropy: bool) -> torch.Tensor:
    """Return float32 [4, tokens]: log-prob, entropy, largest logit x, and log of the sum of exp(x - largest)."""
    tokens, size = hidden.shape
    results = hidden.new_empty((4, tokens), dtype=torch.float32)
    if not tokens:  # no rank of the group has tokens, so no rank waits for a collective
        return results
    kernels = _kernels()
    tile = kernels.tile_for(hidden.dtype, _capability(hidden))
    parts = max(1, -(-shard.valid // (tile.columns * kernels.TILES_PER_PART)))
    statistics = results.new_empty((parts, 4, tokens))
    grid = (-(-tokens // tile.rows) * parts,)
    inputs = hidden, weight, targets, statistics, tokens, shard.valid, shard.first, parts, shard.scale
    constants = _constants(tile, size, with_entropy)
    kernels.part_statistics[grid](*inputs, TILES=kernels.TILES_PER_PART, **constants)

    def combine(statistics: torch.Tensor, out: torch.Tensor, finish: bool) -> torch.Tensor:
        rows = kernels.ROWS_COMBINED
        kernels.combine_parts[(-(-tokens // rows),)](
            statistics, out, tokens, statistics.size(0), FINISH=finish, ENTROPY=with_entropy, M=rows
        )
        return out

    ranks = shard.group.size()
    if ranks > 1:
        local = combine(statistics, torch.empty_like(results), finish=False)
        statistics = results.new_empty((ranks, 4, tokens))
        dist.all_gather_into_tensor(statistics.view(-1), local.view(-1), group=shard.group)
    return combine(statistics, results, finish=True)


def _constants(tile: Any, size: int, with_entropy: bool) -> dict[str, Any]:
    """Return the arguments for which Triton compiles the kernels that compute logits.

    Args:
        tile: ``logprob_kernels.Tile``.
        size: hidden size.
    """
    group = _kernels().ROWS_AT_ONCE
    sizes = dict(HIDDEN=size, M=tile.rows, N=tile.columns, K=tile.depth, GROUP=group)
    return dict(sizes, ENTROPY=with_entropy, num_warps=tile.warps, num_stages=tile.stages)


def _slices(hidden, weight, targets, results, gradients, shard: _Shard):
    """Yield (columns of the shard, gradient of their logits [tokens, columns]).

    All gradients use the same buffer, so that each gradient overwrites the previous gradient.
    """
    tokens, size = hidden.shape
    if not tokens or not shard.valid:
        return
    kernels = _kernels()
    tile = kernels.tile_for(hidden.dtype, _capability(hidden))
    width = slice_width(tokens, shard.valid, hidden.element_size(), tile.columns)
    stride = -(-width // _ALIGNMENT) * _ALIGNMENT
    buffer = hidden.new_empty((tokens, stride))
    tensors = hidden, weight, targets, results, *gradients, buffer
    constants = _constants(tile, size, with_entropy=gradients[1] is not None)
    for start in range(0, shard.valid, width):
        count = min(width, shard.valid - start)
        grid = (-(-tokens // tile.rows) * -(-count // tile.columns),)
        columns = tokens, start, count, shard.first, stride, shard.scale
        kernels.logit_gradients[grid](*tensors, *columns, **constants)
        yield slice(start, start + count), buffer[:, :count]


def slice_width(tokens: int, columns: int, element_size: int, tile: int) -> int:
    """Return the number of columns in a slice of the backward pass.

    The number is a multiple of ``tile``, or ``columns`` if that is smaller. All slices have about the same width. The
    gradient of a slice fits into ``_GRADIENT_BYTES``, unless a single tile is larger.
    """
    max_width = max(tile, _GRADIENT_BYTES // (tokens * element_size) // tile * tile)
    even_width = -(-columns // -(-columns // max_width))
    return min(columns, -(-even_width // tile) * tile)


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (0, 0)


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute out += a @ b in the precision of ``out``, which may be higher than that of ``a`` and ``b``."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.device.type == "cpu":  # torch has no mixed-precision product on CPUs
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 buffer in which Megatron's data-parallel wrapper accumulates the weight's gradient.

    None if the weight has no such buffer.
    """
    main = getattr(weight, "main_grad", None)
    wrapped = hasattr(weight, "grad_added_to_main_grad")
    return main if wrapped and main is not None and main.dtype == torch.float32 else None


def _placeholder_gradient(weight: Any) -> torch.Tensor:
    """Return a placeholder for a gradient that was already added to ``main_grad``, to trigger the wrapper's hook.

    The hook ignores the placeholder's values, unless the weight is also the embedding. For an embedding, the hook adds
    the embedding's gradient plus the placeholder, which therefore consists of zeros.
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
    """Compute ``token_logprobs`` for the logits hidden @ weight.T, without storing these logits.

    Args:
        hidden: [tokens, hidden size], float32, bfloat16 or float16, equal on all tensor-parallel ranks. The gradient of
            ``hidden`` is this rank's contribution, which must be summed over the group.
        weight: [vocabulary / tensor-parallel ranks, hidden size], this rank's rows, in the precision of ``hidden``. If
            the weight has a float32 ``main_grad`` of Megatron's data-parallel wrapper, its gradient is added to this
            buffer. Otherwise autograd receives the gradient as usual.
        targets: int64 [tokens], global token ids.
        group: tensor-parallel group. All ranks must call this function with the same tokens.
        vocab_size: vocabulary size without padding. Padded columns have probability 0 and no gradient. None if no
            column is padded.
        entropy: entropy mode, as in ``token_logprobs``.

    Returns:
        Log-probs and entropies in nats, float32 [tokens] each. The entropies are None if ``entropy`` is ``none``.

    Raises:
        ValueError: if the precisions differ or the weight is not contiguous.
    """
    if hidden.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(f"hidden states are {hidden.dtype}, the weight is {weight.dtype}, or not contiguous")
    shard = _Shard.of(group, weight.size(0), temperature, vocab_size)
    return _FusedLogprobs.apply(hidden, weight, targets, shard, entropy)
