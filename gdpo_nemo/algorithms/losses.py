"""Policy losses of single tokens, and the weights that make their sum a mean over the global batch.

Tensors are 1-D float32 [tokens]: the trained tokens of any number of sequences, however they were padded, packed or
split over ranks. The loss of an update is `sum_t weight[t] * loss[t]`, with weights that the driver computes once over
the whole update batch. Sums do not care how they are cut, so the gradient is that of one big batch under every
micro-batch size, packing and parallel layout.

A loss is a function (logprobs, fields, settings, **options) -> loss [tokens], or loss and a dict of further
measurements [tokens]; `LOSSES` below makes it a value of `loss_fn.type`. What it needs of a whole sequence it takes,
detached, from `fields.sequence_sums` and `sequence_means`. Use methods of tensors: the registry is read by every check
of a configuration, which must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gdpo_nemo.algorithms.token_fields import required

if TYPE_CHECKING:
    from torch import Tensor

    from gdpo_nemo.algorithms.loss_settings import LossSettings
    from gdpo_nemo.algorithms.token_fields import TokenFields

    TokenLoss = Tensor | tuple[Tensor, dict[str, Tensor]]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, which keeps float32 finite. Beyond it the gradient is 0."""


# -- weights --------------------------------------------------------------------------------------------------------


def _token_mean(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    return np.full(len(tokens), 1.0 / max(tokens.sum(), 1.0))


def _sequence_mean(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    return np.asarray(1.0 / (count * np.maximum(tokens, 1.0)))


def _constant(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    if not constant_length or constant_length <= 0:
        raise ValueError("aggregation 'constant' needs a positive constant_length")
    return np.full(len(tokens), 1.0 / (count * constant_length))


def _sequence_sum(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    return np.full(len(tokens), 1.0 / count)


AGGREGATIONS: dict[str, Callable[[np.ndarray, int, int | None], np.ndarray]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "sequence_sum": _sequence_sum,
    "constant": _constant,
}
"""(tokens [sequences], sequences that are trained, constant_length) -> weight of a token of each sequence."""


def token_weights(lengths: object, aggregation: str, *, constant_length: int | None = None) -> np.ndarray:
    """Weight of each trained token of a sequence, over the whole update batch.

    * token_mean: 1 / (trained tokens of the batch), as DAPO does;
    * sequence_mean: 1 / (sequences x length), the mean of the sequences' token means (GRPO eq. 3);
    * sequence_sum: 1 / sequences, the mean of the sequences' token sums; with the loss gspo this is LUSPO (arXiv
      2602.05261), whose sequences count by their length;
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
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
    trained = tokens > 0
    return np.where(trained, AGGREGATIONS[aggregation](tokens, max(int(trained.sum()), 1), constant_length), 0.0)


# -- losses ---------------------------------------------------------------------------------------------------------


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio [tokens], kept finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_pg(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) with r = pi / pi_old (PPO; clip-higher is DAPO's).

    For A < 0 the loss is at most -A x ratio_clip_c (dual clip, arXiv 1912.09729), which must exceed 1 + ratio_clip_max
    to act only where the other clip does not.
    """
    ratio = importance_ratio(logprobs - required(fields.old_logprobs, "old_logprobs"))
    return _clipped(ratio, fields.advantages, settings)


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLoss:
    """The loss, with the metrics `ratio`, `clipped`, 1 where a clip removes the gradient, and with a dual clip
    `clipped_dual`, 1 where it is that one."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - settings.ratio_clip_min, 1.0 + settings.ratio_clip_max)
    loss = plain.maximum(bounded)
    clipped = bounded > plain
    metrics = {"ratio": ratio.detach()}
    if settings.ratio_clip_c is not None:
        ceiling = -advantages * settings.ratio_clip_c
        over = (advantages < 0) & (loss > ceiling)
        loss = ceiling.where(over, loss)
        clipped = clipped | over
        metrics["clipped_dual"] = over.to(ratio.dtype)
    return loss, {**metrics, "clipped": clipped.to(ratio.dtype)}


def gspo(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """The clipped loss with one ratio per sequence, s = exp(mean_t log r_t) (GSPO, arXiv 2507.18071 eq. 7).

    Each token carries the value of s and its own gradient, s x grad(logprob_t) (GSPO-token, eq. 14). As the weights of
    a sequence's tokens are equal, the sum over them is the gradient of the sequence form, and no gradient has to cross
    ranks. Importance corrections by token would make them unequal; `LossSettings` refuses those.
    """
    mean = fields.sequence_means(logprobs - required(fields.old_logprobs, "old_logprobs"))
    return _clipped(importance_ratio(mean + logprobs - logprobs.detach()), fields.advantages, settings)


def cispo(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """-A x stop_gradient(clip(r)) x logprob: the clip bounds the weight, every token keeps a gradient (CISPO,
    arXiv 2506.13585 eq. 4)."""
    ratio = importance_ratio(logprobs.detach() - required(fields.old_logprobs, "old_logprobs"))
    bounded = ratio.clamp(1.0 - settings.ratio_clip_min, 1.0 + settings.ratio_clip_max)
    return -fields.advantages * bounded * logprobs, {"ratio": ratio, "clipped": (bounded != ratio).to(ratio.dtype)}


def kl_cov(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """-A r, and for the tokens that `covariance.kl_cov` chose kl_cov_coef x |log r| besides (KL-Cov, arXiv 2505.22617
    eq. 13)."""
    log_ratio = logprobs - required(fields.old_logprobs, "old_logprobs")
    ratio = importance_ratio(log_ratio)
    loss = -fields.advantages * ratio
    if fields.chosen is not None:
        loss = loss + settings.kl_cov_coef * fields.chosen * log_ratio.abs()
    return loss, {"ratio": ratio.detach()}


def reinforce(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """-A x logprob (REINFORCE). With A = 1 it is the cross-entropy of supervised fine-tuning; and any objective of
    whole sequences is trained by it whose derivative by each sequence's log-prob the driver puts into A."""
    return -fields.advantages * logprobs


# -- registry -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """An entry of the registry."""

    function: Callable[..., TokenLoss]
    reads: tuple[str, ...] = ()
    """Keys of `loss_fn` that matter to it alone; to change one that no loss in use reads is refused."""
    options: tuple[str, ...] = ()
    """Its own options, the keys of `loss_fn.options`."""
    has_ratio: bool = True
    """True if it weighs tokens by pi / pi_old. Without a ratio `loss_fn.old_logprobs` corrects nothing."""
    by_sequence: bool = False
    """Whether its gradient is right only where the tokens of a sequence have equal weights."""
    by_group: bool = False
    """Whether its coefficients couple the samples of a group, which then have to be in one update."""
    by_covariance: bool = False
    """Whether the driver chooses tokens of every update by the covariance of their log-prob and advantage."""
    reads_staleness: bool = False
    """Whether it reads `TokenFields.staleness`, which is made and sent only then. One of one's own may."""
    skips_zero_advantage: bool = False
    """Whether a sequence of advantage 0 gets no gradient from it and reaches that of no other sequence, so that
    `policy.skip_zero_advantage` may leave it out. A function of one's own says so by an attribute of this name."""


_CLIP = ("ratio_clip_min", "ratio_clip_max")
_TARGET = ("target_temperature", "target_length_normalize")
_CLIP_COV = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")

LOSSES: dict[str, Loss] = {
    "clipped_pg": Loss(clipped_pg, reads=(*_CLIP, "ratio_clip_c", "aggregation"), skips_zero_advantage=True),
    "gspo": Loss(gspo, reads=(*_CLIP, "ratio_clip_c", "aggregation"), by_sequence=True, skips_zero_advantage=True),
    "cispo": Loss(cispo, reads=(*_CLIP, "aggregation"), skips_zero_advantage=True),
    # The tokens that `covariance.clip_cov` chose have the advantage 0.
    "clip_cov": Loss(
        clipped_pg,
        reads=(*_CLIP, "ratio_clip_c", "aggregation", *_CLIP_COV),
        by_covariance=True,
        skips_zero_advantage=True,
    ),
    "kl_cov": Loss(kl_cov, reads=("aggregation", "kl_cov_ratio", "kl_cov_coef"), by_covariance=True),
    # The advantages hold the coefficients of `target_po_coefficients`, which weigh the sequences themselves.
    "target_po": Loss(reinforce, reads=_TARGET, by_group=True, skips_zero_advantage=True),
    "reinforce": Loss(reinforce, reads=("aggregation",), has_ratio=False, skips_zero_advantage=True),
}
LOSS_KEYS = tuple(dict.fromkeys(key for loss in LOSSES.values() for key in loss.reads))
"""Keys of `loss_fn` that some losses read and others do not."""


# -- KL to the reference --------------------------------------------------------------------------------------------


KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: (-d).expm1() + d,
    "abs": lambda d: d.abs(),
    "mse": lambda d: 0.5 * d * d,
}
"""Estimators of KL(pi || reference) from d = logprob - reference logprob."""


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
            clamped. Weighted by it, the gradients are those of the sampled estimate of KL(pi || reference): k1's is
            d + 1 and k3's is d, times that of the log-prob.
        output_clamp: bound of the weighted estimate; beyond it the gradient is 0.

    Returns:
        [tokens]

    Raises:
        ValueError: unknown kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown kind of KL {kind!r}; known: {', '.join(KL_KINDS)}")
    free = logprobs - reference_logprobs
    d = free if input_clamp is None else free.clamp(-input_clamp, input_clamp)
    kl = KL_KINDS[kind](d)
    if weight is not None:
        kl = weight.where(d == free, weight.detach()) * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def score_weight(logprobs: Tensor, drawn_under: Tensor | None = None) -> Tensor:
    """pi over the probability that the token was drawn with [tokens], with the gradient of pi; 0 where that is not
    finite.

    Args:
        drawn_under: log-probs of the sampler; None: pi itself, so that the weight is 1 and only its gradient counts.
    """
    weight = (logprobs - (logprobs.detach() if drawn_under is None else drawn_under)).exp()
    return weight.where(weight.isfinite(), weight.new_zeros(len(weight)))
