"""Log-probs and entropy from logits that are sharded over the vocabulary.

Only two small reductions per token cross the tensor-parallel ranks; nothing of vocabulary size is gathered, and
float32 copies exist for one chunk of tokens at a time, forward and backward.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

EntropyUse = Literal["none", "value", "gradient"]
"""What is asked of the entropy: nothing, its value, or its value with a gradient."""

LARGEST_CHUNK = 1024
"""Tokens whose logits are held in float32 at once."""
_CACHED = 1 << 20
"""Logits, 4 MiB in float32: with 1,024 tokens at once, whose copies go to memory and back in every pass, vocabularies
of 8,192 and 49,152 take 2.5 times as long; a quarter as many and four times as many are within a third of the best."""


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, scale, vocab_size, chunk, entropy_use):
        width = logits.size(-1)
        first = width * group.rank()
        local = targets - first
        owned = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)  # a valid index for gather; `owned` discards what it picks elsewhere
        padding = max(0, first + width - vocab_size)  # columns past the real vocabulary, on the last rank(s)
        with_entropy = entropy_use != "none"
        # Rows: this rank's largest logit; sum of exp(logit - largest), the target's logit, sum of exp(d) d.
        peak = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        sums = torch.empty((3 if with_entropy else 2, *targets.shape), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits.size(0), chunk):
            x = _scaled(logits[rows], scale, padding)
            # A rank of padding alone has no largest logit: finite, so that -inf - peak is no NaN.
            torch.amax(x, -1, out=peak[rows]).clamp_(min=-1e30)
            sums[1, rows] = torch.where(owned[rows], x.gather(-1, local[rows, None]).squeeze(-1), 0.0)
            x.sub_(peak[rows, None])
            weights = x.exp()
            torch.sum(weights, -1, out=sums[0, rows])
            if with_entropy:
                # exp underflows to 0 where x is -inf (padding); 0 * -inf would be NaN.
                torch.sum(weights.mul_(x.clamp_(min=-1e30)), -1, out=sums[2, rows])
        peak = _merge(peak, sums, group)
        log_sum = sums[0].log()
        log_z = log_sum + peak
        # large logits cancel first, before the small log_sum would be rounded away
        logprob = (sums[1] - peak) - log_sum
        entropy = log_sum - sums[2] / sums[0] if with_entropy else None
        # Known here, without a look at the gradient that arrives, for which a GPU would have to be waited for.
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
            # Most losses have no entropy term; then this saves two passes over the vocabulary.
            if entropy is not None and grad_entropy is not None:
                log_p.clamp_(min=-1e30).add_(entropy[rows, None]).mul_(p)
                grad.sub_(log_p * grad_entropy[rows, None])
            grad.scatter_add_(-1, local[rows, None], (owned[rows] * grad_logprob[rows])[:, None])
            out[rows] = grad.mul_(scale).to(out.dtype)
        return out, None, None, None, None, None, None


def _suitable_chunk(logits: torch.Tensor) -> int:
    """Tokens whose float32 copies stay in a CPU's caches between one pass over them and the next; a GPU has to be kept
    busy instead."""
    if logits.device.type != "cpu":
        return LARGEST_CHUNK
    return max(1, min(LARGEST_CHUNK, _CACHED // logits.size(-1)))


def _merge(peak: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Bring every rank's ``sums`` to the largest logit of all ranks, which is returned, and add them up in place: two
    reductions for all chunks together, since each costs a CPU rank as much as a pass over a small chunk."""
    largest = peak.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    lower = peak.sub_(largest)
    factor = lower.exp()
    if len(sums) == 3:
        sums[2].addcmul_(sums[0], lower).mul_(factor)
    sums[0].mul_(factor)
    dist.all_reduce(sums, group=group)
    return largest


def _chunks(total: int, size: int):
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _scaled(logits: torch.Tensor, scale: float, padding: int) -> torch.Tensor:
    """A fresh float32 copy of ``logits * scale`` whose last ``padding`` columns cannot be chosen."""
    x = logits.to(torch.float32, copy=True)
    if scale != 1.0:
        x.mul_(scale)
    if padding:
        x[:, max(0, x.size(-1) - padding) :] = float("-inf")
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
    """Log-probability of each target, and the entropy of each distribution, under softmax(logits / temperature).

    Args:
        logits: [tokens, vocabulary / tensor-parallel ranks], this rank's columns.
        targets: int64 [tokens], global ids, already shifted (``targets[t]`` follows token t).
        group: tensor-parallel group.
        vocab_size: real vocabulary; padded columns beyond it get no probability.
        chunk: tokens handled at once; None: what suits the device. It changes no bit.
        entropy: what is asked of it; without a gradient, or not computed at all, it saves passes over the vocabulary.

    Returns:
        log-probs and entropies (None where not asked for), float32 [tokens] each, in nats, differentiable in
        ``logits``.
    """
    vocab_size = vocab_size if vocab_size is not None else logits.size(-1) * group.size()
    chunk = chunk or _suitable_chunk(logits)
    return _TokenLogprobs.apply(logits, targets, group, 1.0 / temperature, vocab_size, chunk, entropy)
