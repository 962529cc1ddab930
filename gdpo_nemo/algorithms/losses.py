"""Policy losses of single tokens, and the weights that make their sum a mean over the global batch.

Tensors are 1-D float32 [tokens]: the trained tokens of any number of sequences, however they were padded, packed or
split over ranks. The loss of an update is `sum_t weight[t] * loss[t]`, with weights that the driver computes once over
the whole update batch. Sums do not care how they are cut, so the gradient is that of one big batch under every
micro-batch size, packing and parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gdpo_nemo.algorithms.loss_settings import AGGREGATIONS, KL_KINDS

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, which keeps float32 finite. Beyond it the gradient is 0."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a float64 [sequences] tensor over the ranks that share the sequences (context parallelism). Values only: it is
called on detached tensors, so no gradient has to pass through it."""


def token_weights(lengths: object, aggregation: str, *, constant_length: int | None = None) -> np.ndarray:
    """Weight of each trained token of a sequence, over the whole update batch.

    * token_mean: 1 / (trained tokens of the batch), as DAPO does;
    * sequence_mean: 1 / (sequences x length), the mean of the sequences' token means (GRPO eq. 3);
    * constant: 1 / (sequences x constant_length), the length-free normaliser of Dr. GRPO.

    Args:
        lengths: trained tokens per sequence [sequences], 0 for sequences that are masked. Those get weight 0 and do
            not count as sequences.

    Returns:
        float64 [sequences].

    Raises:
        ValueError: unknown aggregation, negative lengths, or `constant` without a positive constant_length.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if tokens.ndim != 1 or (tokens < 0).any():
        raise ValueError("lengths must be one non-negative number of tokens per sequence")
    trained = tokens > 0
    count = max(int(trained.sum()), 1)
    if aggregation == "token_mean":
        return np.where(trained, 1.0 / max(tokens.sum(), 1.0), 0.0)
    if aggregation == "sequence_mean":
        return np.where(trained, 1.0 / (count * np.maximum(tokens, 1.0)), 0.0)
    if aggregation == "constant":
        if not constant_length or constant_length <= 0:
            raise ValueError("aggregation 'constant' needs a positive constant_length")
        return np.where(trained, 1.0 / (count * constant_length), 0.0)
    raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio [tokens], kept finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_min: float,
    clip_max: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - clip_min, 1 + clip_max)) with r = pi / pi_old (PPO; clip-higher is DAPO's).

    Args:
        logprobs, old_logprobs, advantages: float32 [tokens]; only `logprobs` carries a gradient.
        dual_clip: for A < 0 the loss is at most -A x dual_clip (arXiv 1912.09729); must exceed 1 + clip_max to act
            only where the other clip does not.

    Returns:
        loss [tokens] and metrics [tokens]: `ratio`, and `clipped`, 1 where a clip removes the gradient.
    """
    return _clipped(importance_ratio(logprobs - old_logprobs), advantages, clip_min, clip_max, dual_clip)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_min: float, clip_max: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_min, 1.0 + clip_max)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return loss, {"ratio": ratio.detach(), "clipped": clipped.to(ratio.dtype)}


def sequence_sums(values: Tensor, sequence_ids: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """Sum of a detached per-token tensor over each sequence, on all ranks that share it: [sequences].

    Added up in float64, so that the order of the additions, which a GPU does not fix, hardly reaches the result.
    """
    partial = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    partial.index_add_(0, sequence_ids, values.detach().double())
    return (partial if reduce is None else reduce(partial)).to(values.dtype)


def sequence_means(values: Tensor, sequence_ids: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """Mean of a detached per-token tensor over the trained tokens of each sequence; 0 for empty ones: [sequences]."""
    total = sequence_sums(values, sequence_ids, num_sequences, reduce)
    count = sequence_sums(torch.ones_like(values), sequence_ids, num_sequences, reduce)
    return total / count.clamp(min=1.0)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    clip_min: float,
    clip_max: float,
    dual_clip: float | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss with one ratio per sequence, s = exp(mean_t log r_t) (GSPO, arXiv 2507.18071 eq. 7).

    Each token carries the value of s and its own gradient, s x grad(logprob_t) (GSPO-token, eq. 14). As the weights of
    a sequence's tokens are equal, the sum over them is the gradient of the sequence form, and no gradient has to cross
    ranks: `reduce` adds up detached partial sums. Importance corrections by token would make them unequal;
    `LossSettings` refuses those.
    """
    log_ratio = logprobs - old_logprobs
    mean = sequence_means(log_ratio, sequence_ids, num_sequences, reduce)[sequence_ids]
    ratio = importance_ratio(mean + logprobs - logprobs.detach())
    return _clipped(ratio, advantages, clip_min, clip_max, dual_clip)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_min: float, clip_max: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A x stop_gradient(clip(r)) x logprob: the clip bounds the weight, every token keeps a gradient (CISPO,
    arXiv 2506.13585 eq. 4)."""
    ratio = importance_ratio(logprobs.detach() - old_logprobs)
    bounded = ratio.clamp(1.0 - clip_min, 1.0 + clip_max)
    return -advantages * bounded * logprobs, {"ratio": ratio, "clipped": (bounded != ratio).to(ratio.dtype)}


def kl_penalty(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kind: str,
    *,
    weight: Tensor | None = None,
    input_clamp: float | None = LOG_RATIO_LIMIT,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimator of KL(pi || reference) per sampled token, d = logprob - reference logprob (Schulman's k1 to k3).

    * k1 = d: unbiased, but its expected gradient is 0: as a loss it does not hold the policy, as a reward it does;
    * k2 = mse = d^2 / 2: gradient d, which is unbiased for the reverse KL on-policy;
    * k3 = exp(-d) - 1 + d: never negative, gradient 1 - exp(-d), that of the forward KL;
    * abs = |d|: gradient sign(d).

    d is clamped to +-input_clamp; outside the gradient is 0, for all kinds.

    Args:
        weight: factor of every estimate [tokens], with a gradient (see ``score_weight``); it loses it where d is
        clamped.
            Weighted by it, the gradients are those of the sampled estimate of KL(pi || reference): k1's is d + 1 and
            k3's is d, times that of the log-prob.
        output_clamp: bound of the weighted estimate; beyond it the gradient is 0.

    Returns:
        [tokens]

    Raises:
        ValueError: unknown kind.
    """
    free = logprobs - reference_logprobs
    d = free if input_clamp is None else free.clamp(-input_clamp, input_clamp)
    kl = _kl_estimate(d, kind)
    if weight is not None:
        kl = torch.where(d == free, weight, weight.detach()) * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def _kl_estimate(d: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return d
    if kind in ("k2", "mse"):
        return 0.5 * d * d
    if kind == "k3":
        return torch.expm1(-d) + d
    if kind == "abs":
        return d.abs()
    raise ValueError(f"unknown kind of KL {kind!r}; known: {', '.join(KL_KINDS)}")


def score_weight(logprobs: Tensor, drawn_under: Tensor | None = None) -> Tensor:
    """pi over the probability that the token was drawn with [tokens], with the gradient of pi; 0 where that is not
    finite.

    Args:
        drawn_under: log-probs of the sampler; None: pi itself, so that the weight is 1 and only its gradient counts.
    """
    weight = (logprobs - (logprobs.detach() if drawn_under is None else drawn_under)).exp()
    return torch.where(torch.isfinite(weight), weight, torch.zeros_like(weight))
