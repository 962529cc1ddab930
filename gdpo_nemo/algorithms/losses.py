"""Token-level policy losses, their input tensors, and token weights with which the loss is a mean over the global
batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from gdpo_nemo.algorithms.loss_settings import LossSettings

    TokenLoss = Tensor | tuple[Tensor, dict[str, Tensor]]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, so that float32 stays finite. Clamped values have no gradient."""


# -- weights --------------------------------------------------------------------------------------------------------


def _token_mean(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    return np.full(len(tokens), 1.0 / max(tokens.sum(), 1.0))


def _sequence_mean(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    return np.asarray(1.0 / (count * np.maximum(tokens, 1.0)))


def _constant(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    if not constant_length or constant_length <= 0:
        raise ValueError("aggregation 'constant' requires a positive constant_length")
    return np.full(len(tokens), 1.0 / (count * constant_length))


def _sequence_sum(tokens: np.ndarray, count: int, constant_length: int | None) -> np.ndarray:
    return np.full(len(tokens), 1.0 / count)


AGGREGATIONS: dict[str, Callable[[np.ndarray, int, int | None], np.ndarray]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "sequence_sum": _sequence_sum,
    "constant": _constant,
}
"""Functions (tokens [sequences], number of trained sequences, constant_length) -> weight per token of each sequence."""


def token_weights(lengths: object, aggregation: str, *, constant_length: int | None = None) -> np.ndarray:
    """Return the weight of a token in each sequence, with which the loss of an update is aggregated.

    * token_mean: 1 / (trained tokens of the batch), as in DAPO.
    * sequence_mean: 1 / (sequences x length), the mean over sequences of token means (GRPO equation 3).
    * sequence_sum: 1 / sequences, the mean over sequences of token sums. With the loss gspo this is LUSPO (arXiv
      2602.05261), in which a sequence is weighted in proportion to its length.
    * constant: 1 / (sequences x constant_length), the normalisation of ``dr_grpo``, which does not depend on the
      lengths.

    Args:
        lengths: number of trained tokens [sequences]. Masked sequences have length 0, get weight 0 and are not counted
            as sequences.

    Returns:
        float64 [sequences].

    Raises:
        ValueError: if the aggregation is unknown, a length is negative, or `constant` has no positive constant_length.
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
    """Return exp(log_ratio) [tokens], with the log-ratio clamped so that the result is finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_pg(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) with r = pi / pi_old (PPO, with clip-higher as in
    DAPO).

    With ratio_clip_c, the loss for A < 0 is at most -A x ratio_clip_c (dual clip, arXiv 1912.09729). ratio_clip_c
    should exceed 1 + ratio_clip_max, so that the dual clip applies only to tokens that the other clip does not affect.
    """
    ratio = importance_ratio(logprobs - required(fields.old_logprobs, "old_logprobs"))
    return _clipped(ratio, fields.advantages, settings)


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLoss:
    """Return the clipped loss of each token and its metrics.

    Metric `clipped` is 1 if a clip removes the token's gradient. With a dual clip, `clipped_dual` is 1 if the dual clip
    removes it.
    """
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
    """Clipped loss with one ratio per sequence, s = exp(mean_t log r_t) (GSPO, arXiv 2507.18071, equation 7).

    Each token has the value of s and its own gradient, s x grad(logprob_t) (GSPO-token, equation 14). All tokens of a
    sequence have equal weights, so their gradients sum to the gradient of the sequence form, and no gradient crosses
    ranks. Per-token importance corrections would make the weights unequal, so `check_loss` refuses them.
    """
    mean = fields.sequence_means(logprobs - required(fields.old_logprobs, "old_logprobs"))
    return _clipped(importance_ratio(mean + logprobs - logprobs.detach()), fields.advantages, settings)


def cispo(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """-A x stop_gradient(clip(r)) x logprob (CISPO, arXiv 2506.13585, equation 4).

    The clip limits the weight of a token, but every token keeps a gradient.
    """
    ratio = importance_ratio(logprobs.detach() - required(fields.old_logprobs, "old_logprobs"))
    bounded = ratio.clamp(1.0 - settings.ratio_clip_min, 1.0 + settings.ratio_clip_max)
    return -fields.advantages * bounded * logprobs, {"ratio": ratio, "clipped": (bounded != ratio).to(ratio.dtype)}


def kl_cov(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """-A r, plus kl_cov_coef x |log r| for tokens that `entropy.kl_cov` has selected (KL-Cov, arXiv 2505.22617,
    equation 13)."""
    log_ratio = logprobs - required(fields.old_logprobs, "old_logprobs")
    ratio = importance_ratio(log_ratio)
    loss = -fields.advantages * ratio
    if fields.chosen is not None:
        loss = loss + settings.kl_cov_coef * fields.chosen * log_ratio.abs()
    return loss, {"ratio": ratio.detach()}


def reinforce(logprobs: Tensor, fields: TokenFields, settings: LossSettings) -> TokenLoss:
    """-A x logprob (REINFORCE).

    With A = 1 this is the cross-entropy of supervised fine-tuning. This loss can train any objective of whole
    sequences, if the driver sets A to the objective's derivative with respect to the log-prob of the sequence.
    """
    return -fields.advantages * logprobs


# -- registry -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """Registry entry of a loss."""

    function: Callable[..., TokenLoss]
    reads: tuple[str, ...] = ()
    """Keys of `loss_fn` that this loss reads and some other losses do not read. It is an error to change a key that the
    selected loss does not read."""
    options: tuple[str, ...] = ()
    """Names of the loss's options, the keys of `loss_fn.options`."""
    has_ratio: bool = True
    """True if the loss weights tokens by pi / pi_old. Otherwise `loss_fn.old_logprobs` has no effect."""
    by_sequence: bool = False
    """True if the gradient is correct only when all tokens of a sequence have equal weights."""
    by_group: bool = False
    """True if the coefficients depend on all samples of a group, which must then be in the same update."""
    by_covariance: bool = False
    """True if the driver selects tokens of each update by the covariance of log-prob and advantage."""
    reads_staleness: bool = False
    """True if the loss may read `TokenFields.staleness`, which is created only then. Always True for a custom loss."""
    skips_zero_advantage: bool = False
    """True if a sequence with advantage 0 has no gradient and does not affect other sequences.

    `policy.skip_zero_advantage` may then skip such a sequence. A custom function declares this with an attribute of the
    same name.
    """


_CLIP = ("ratio_clip_min", "ratio_clip_max")
_TARGET = ("target_temperature", "target_length_normalize")
_CLIP_COV = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")

LOSSES: dict[str, Loss] = {
    "clipped_pg": Loss(clipped_pg, reads=(*_CLIP, "ratio_clip_c", "aggregation"), skips_zero_advantage=True),
    "gspo": Loss(gspo, reads=(*_CLIP, "ratio_clip_c", "aggregation"), by_sequence=True, skips_zero_advantage=True),
    "cispo": Loss(cispo, reads=(*_CLIP, "aggregation"), skips_zero_advantage=True),
    # The tokens that `entropy.clip_cov` selected have advantage 0.
    "clip_cov": Loss(
        clipped_pg,
        reads=(*_CLIP, "ratio_clip_c", "aggregation", *_CLIP_COV),
        by_covariance=True,
        skips_zero_advantage=True,
    ),
    "kl_cov": Loss(kl_cov, reads=("aggregation", "kl_cov_ratio", "kl_cov_coef"), by_covariance=True),
    # The driver sets the advantages to `target_po_coefficients`, which account for the token weights.
    "target_po": Loss(reinforce, reads=_TARGET, by_group=True, skips_zero_advantage=True),
    "reinforce": Loss(reinforce, reads=("aggregation",), has_ratio=False, skips_zero_advantage=True),
}


# -- KL to the reference --------------------------------------------------------------------------------------------


KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: (-d).expm1() + d,
    "abs": lambda d: d.abs(),
    "mse": lambda d: 0.5 * d * d,
}
"""Estimators of KL(pi || reference), as functions of d = logprob - reference logprob."""


def kl_penalty(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kind: str,
    *,
    weight: Tensor | None = None,
    input_clamp: float | None = LOG_RATIO_LIMIT,
    output_clamp: float | None = None,
) -> Tensor:
    """Return an estimate of KL(pi || reference) for each sampled token, from d = logprob - reference logprob.

    * k1 = d: unbiased, but its expected gradient is 0, so it constrains the policy as a reward but not as a loss.
    * k2 = mse = d^2 / 2: gradient d, which is unbiased for the reverse KL if on-policy.
    * k3 = exp(-d) - 1 + d: at least 0, gradient 1 - exp(-d), which is that of the forward KL.
    * abs = |d|: gradient sign(d).

    k1 to k3 are Schulman's estimators. d is clamped to +-input_clamp; clamped tokens have no gradient.

    Args:
        weight: factor of each estimate [tokens], with gradient (see ``score_weight``). The total gradient is then that
            of the sampled estimate of KL(pi || reference). Relative to the gradient of the log-prob, it is d + 1 for k1
            and d for k3. The gradient of the factor is removed if d is clamped.
        output_clamp: bound of the weighted estimate; clamped values have no gradient.

    Returns:
        Estimates [tokens].

    Raises:
        ValueError: if the kind is unknown.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown kind of KL {kind!r}; known: {', '.join(KL_KINDS)}")
    free = logprobs - reference_logprobs
    d = free if input_clamp is None else free.clamp(-input_clamp, input_clamp)
    factor = 1.0 if weight is None else weight.where(d == free, weight.detach())
    if weight is not None:
        d = d.where(weight != 0, 0.0)  # 0 * inf would be NaN
    kl = factor * KL_KINDS[kind](d)
    if output_clamp is None:
        return kl
    inside = kl.detach().abs() <= output_clamp
    # Mask the input of exp: the gradient of a clamped result would be 0 * inf.
    masked = factor * KL_KINDS[kind](d.where(inside, 0.0))
    return masked.where(inside, kl.detach().clamp(-output_clamp, output_clamp))


def score_weight(logprobs: Tensor, sampled_logprobs: Tensor | None = None) -> Tensor:
    """Return pi divided by the probability with which the token was sampled [tokens], with the gradient of pi. 0 if not
    finite.

    Args:
        sampled_logprobs: sampler's log-probs; None: those of pi, so that the weight is 1 and has only a gradient.
    """
    gap = logprobs - (logprobs.detach() if sampled_logprobs is None else sampled_logprobs)
    finite = gap.detach().exp().isfinite()
    # Mask the input of exp: the gradient of a masked result would be 0 * inf.
    return gap.where(finite, -math.inf).exp()


Reduce = Callable[["Tensor"], "Tensor"]
"""Function that sums a float64 [sequences] tensor over the ranks that share the sequences (context parallelism).

The function is only called with detached tensors, and does not propagate gradients.
"""


def required(values: Tensor | None, name: str) -> Tensor:
    """Return an optional tensor of ``TokenFields``.

    Raises:
        ValueError: if it is None.
    """
    if values is None:
        raise ValueError(f"requires {name}, which was not given")
    return values


@dataclass(frozen=True)
class LossMetrics:
    """Metrics over the trained tokens of one micro-batch."""

    sums: dict[str, Tensor]
    """Scalars that are summed over micro-batches and ranks. Divided by `tokens`, the sums are means."""
    maxima: dict[str, Tensor]
    """Scalars that are combined by maximum. Empty if the micro-batch has no trained token."""


def part_metric(number: int, name: str) -> str:
    """Return the name of a metric in `LossMetrics` for one part of a `LossByPart`."""
    return f"{number}:{name}"


class TokenInput(NamedTuple):
    """Properties of a field of `TokenInputs`."""

    dtype: type
    missing: float | None = None
    """Value for the sequences of an update that do not have the field. None: all sequences must have the field, or
    none."""


def _input(dtype: type, missing: float | None = None) -> Any:
    return field(default=None, metadata={"input": TokenInput(dtype, missing)})


@dataclass(kw_only=True)
class TokenInputs[Array]:
    """Optional inputs of losses with one value per token.

    The driver sets these fields in a `TrainSequence`, as arrays [completion tokens]. Values of masked tokens are not
    read. The ranks receive, split and pack every field that is set, and losses read it in `TokenFields`. A new input
    only needs a field here and code that sets it.
    """

    old_logprobs: Array | None = _input(np.float32)
    """Log-probs in the denominator of the ratio. None: those of the update's own forward pass (ratio 1).

    Losses and corrections always receive a tensor.
    """
    reference_logprobs: Array | None = _input(np.float32)
    """Log-probs of the reference model, for the KL penalty. None without a reference model."""
    old_values: Array | None = _input(np.float32)
    """Value of the state before each token, estimated before the step. None without a value head."""
    returns: Array | None = _input(np.float32)
    """Training targets of the value head, if there is one."""
    staleness: Array | None = _input(np.int32, missing=0)
    """Policy version in training minus the version that sampled the token. None if the difference is 0 for all tokens
    or is not used.

    Custom losses and corrections always receive a tensor.
    """
    chosen: Array | None = _input(bool, missing=False)
    """True for tokens that the driver has selected by covariance for the loss kl_cov. None: no tokens."""
    part: Array | None = _input(np.int32)
    """Part of the update to which the token belongs, which only `LossByPart` reads."""
    terms: Array | None = _input(np.float32)
    """[tokens, terms]; terms of the advantages, which only `TermLoss` reads."""


TOKEN_INPUTS: dict[str, TokenInput] = {f.name: f.metadata["input"] for f in fields(TokenInputs)}


@dataclass
class TokenFields(TokenInputs["Tensor"]):
    """Inputs of the loss of a micro-batch, in addition to the model's output. All tensors are [tokens] in the same
    order.

    Tokens may belong to any sequences, in any order. With context parallelism, each rank holds a part of the tokens.
    """

    advantages: Tensor
    """float32; advantage of the token's sequence, or the token's advantage if advantages are computed by turn."""
    weights: Tensor
    """float32; `token_weights` of the token's sequence, 0 for tokens that are not trained."""
    sequence_ids: Tensor
    """int64; index of the token's sequence in the micro-batch, equal on all ranks that share the sequence."""
    num_sequences: int
    """Number of sequences in the micro-batch, including those without tokens on this rank."""
    _: KW_ONLY
    sampler_logprobs: Tensor | None = None
    """float32; log-probs with which the tokens were sampled, NaN if unknown."""
    pairs: Tensor | None = None
    """int64; number of the pair of completions to which the token belongs, counted within the micro-batch from 1 to at
    most `num_sequences`.

    Negative for rejected completions. None for losses without pairs.
    """
    reduce: Reduce | None = None
    """Sum over the ranks that share the sequences. None if each rank has whole sequences."""

    def select(self, keep: Tensor) -> TokenFields:
        """Return the fields of the tokens for which ``keep`` (bool [tokens]) is True."""
        tensors = {name: value[keep] for name, value in vars(self).items() if hasattr(value, "detach")}
        return replace(self, **tensors)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Return the sum of a per-token tensor over the token's sequence, on all ranks: [tokens], detached.

        The sum is computed in float64, so that the order of additions, which is not fixed on a GPU, hardly affects the
        result.
        """
        return self._sums(values)[self.sequence_ids]

    def sequence_means(self, values: Tensor) -> Tensor:
        """Return the mean of a per-token tensor over the trained tokens of the token's sequence: [tokens], detached."""
        count = self._sums(values.new_ones(len(values)))
        return (self._sums(values) / count.clamp(min=1.0))[self.sequence_ids]

    def _sums(self, values: Tensor) -> Tensor:
        """Return the sum over each sequence: [sequences]."""
        partial = values.detach().double().new_zeros(self.num_sequences)
        partial.index_add_(0, self.sequence_ids, values.detach().double())
        return (partial if self.reduce is None else self.reduce(partial)).to(values.dtype)
