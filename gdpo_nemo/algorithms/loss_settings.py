"""Settings of the loss: the config section `loss_fn`, which every rank receives with an update.

The functions that look up its names in the registries are in `loss_selection.py`.

``gdpo-nemo explain loss_fn.KEY`` prints the docstring of a field. This module does not import torch, so that a config
can be checked quickly. The classes are not frozen, because OmegaConf makes sections of frozen classes read-only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from gdpo_nemo.algorithms.ranges import Range

KL_GRADIENTS = ("estimator", "score", "importance")
OLD_LOGPROBS = ("trainer", "sampler")


@dataclass
class OffPolicySettings:
    """Importance-sampling correction for the gap between the sampler's and the trainer's log-probs."""

    mode: str | None = None
    """none: no correction. truncate (TIS): weight tokens by the importance ratio of `level`, clipped at ratio_max. mask
    (MIS): weight tokens by the ratio of `level` if it is between ratio_min and ratio_max, otherwise by 0. icepop:
    weight tokens by their own token-level ratio; the ratio of `level` only decides which tokens are masked. A custom
    function is named by its import path, `file.py:name`, and called as (log_gap, fields, settings) -> weights. Null:
    truncate if stale samples (rollout.max_staleness above 0) are trained with loss_fn.old_logprobs trainer or type
    reinforce. For type gspo, this also changes level token to geometric. Otherwise, and for target_po or a custom loss,
    null means none."""
    level: str = "token"
    """Level of the importance ratio: token, sequence (product over the sequence) or geometric (geometric mean over the
    sequence)."""
    ratio_max: Annotated[float, Range(above=0, most=math.inf)] = 2.0
    """Upper bound of the importance ratio. truncate clips larger ratios to this bound, while mask and icepop mask
    tokens with a larger ratio."""
    ratio_min: Annotated[float, Range(0)] = 0.0
    """Lower bound of the importance ratio. mask and icepop mask tokens with a smaller ratio, while truncate ignores
    this bound."""
    sequence_mask_threshold: Annotated[float | None, Range()] = None
    """Mask a sequence with a negative advantage if its mean log-prob gap, sampler minus trainer, exceeds this value
    (DeepSeek-V3.2). Null: off."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a custom function, that is, its parameters after (log_gap, fields, settings)."""

    @property
    def correction(self) -> str:
        """Mode of the correction, or none if the mode is null. `resolved_loss` in the config package resolves null for
        a run."""
        return self.mode or "none"


@dataclass
class LossSettings:
    """Policy-gradient loss. All means are over the global batch and do not depend on the parallel layout."""

    # The driver applies `aggregation`, `constant_length`, `old_logprobs`, `mask_truncated`, `target_*` and `*_cov_*`.
    # Ranks receive only the results: token weights, old log-probs, advantages and selected tokens. The driver also sets
    # `entropy_bonus` to the current coefficient of `use_adaptive_entropy`.
    type: str = "clipped_pg"
    """clipped_pg, gspo, cispo, clip_cov, kl_cov, target_po or reinforce. A custom function is named by its import path,
    `file.py:name` (see `examples/sapo.py`). gspo supports only off_policy corrections that weight whole sequences: mode
    truncate or mask at level sequence or geometric."""
    ratio_clip_min: Annotated[float, Range(0, 1)] = 0.2
    """Lower clip range: the importance ratio is clipped at 1 - ratio_clip_min."""
    ratio_clip_max: Annotated[float, Range(0)] = 0.28
    """Upper clip range: the importance ratio is clipped at 1 + ratio_clip_max."""
    ratio_clip_c: Annotated[float | None, Range(above=1)] = None
    """Dual-clip bound for negative advantages, above 1; null: off."""
    aggregation: str = "token_mean"
    """Reduction of token losses to one loss. token_mean: mean over all tokens. sequence_mean: mean over the sequences
    of each sequence's token mean. sequence_sum: mean over the sequences of each sequence's token sum (with type gspo:
    LUSPO). constant: token sum divided by the number of sequences and constant_length, as in dr_grpo."""
    constant_length: Annotated[int | None, Range(1)] = None
    """Divisor for `aggregation: constant`, in tokens. Null: the maximum number of tokens that the policy may generate
    in a trajectory. This number is rollout.turns.max_tokens, or if that key is null, policy.generation.max_new_tokens
    times rollout.turns.max_turns."""
    old_logprobs: str | None = None
    """Source of the old log-probs in the importance ratio: trainer or sampler. Null: trainer if rollout.max_staleness
    is 0 or with type reinforce, which has no ratio; otherwise sampler."""
    reference_policy_kl_penalty: Annotated[float, Range(0)] = 0.0
    """Coefficient of the KL penalty to the initial model. With 0, the loss needs no reference model."""
    reference_policy_kl_type: str = "k3"
    """Estimator of the KL divergence to the initial model: k1, k2, k3, abs or mse."""
    reference_policy_kl_gradient: str = "estimator"
    """Gradient of the KL penalty. estimator: only the gradient of the estimator. score: also the gradient of the
    sampling probability, through a weight of pi over its detached value. With k1 or k3, this is the gradient of the
    reverse KL, as in NeMo-RL. importance: like score, but the weight is pi over the sampler's probability (NeMo-RL's
    use_on_policy_kl_approximation)."""
    kl_input_clamp_value: Annotated[float | None, Range(above=0)] = 20.0
    """Clamp the log-ratio to the initial model to plus or minus this value before the KL estimator; null: no clamping.
    """
    kl_output_clamp_value: Annotated[float | None, Range(above=0)] = None
    """Clamp the KL estimate of each token to plus or minus this value, with no gradient outside this range; null: no
    clamping."""
    entropy_bonus: Annotated[float, Range()] = 0.0
    """Coefficient of the entropy bonus, which is added to the objective. With use_adaptive_entropy, this is the initial
    coefficient."""
    use_adaptive_entropy: bool = False
    """Adapt the entropy coefficient after every update by entropy_coef_delta: raise it if the entropy is at most
    entropy_target, otherwise lower it. An update uses the coefficient only if the entropy of the previous update was at
    most the target. Otherwise the update uses the coefficient 0 (as in Skywork-OR1 and TRL)."""
    entropy_target: Annotated[float, Range(above=0)] = 0.2
    """Target entropy for use_adaptive_entropy, in nats per token."""
    entropy_coef_delta: Annotated[float, Range(above=0)] = 0.005
    """Change of the entropy coefficient per update, with use_adaptive_entropy."""
    entropy_coef_min: Annotated[float, Range(0)] = 0.0
    """Minimum of the adaptive entropy coefficient."""
    entropy_coef_max: Annotated[float, Range(0)] = 1.0
    """Maximum of the adaptive entropy coefficient."""
    mask_truncated: bool = False
    """Exclude samples that reached the length limit from the loss."""
    target_temperature: Annotated[float, Range(above=0)] = 1.0
    """Temperature eta of the target distribution in target_po."""
    target_length_normalize: bool = True
    """Divide the sequence log-probs in target_po by the sequence length."""
    clip_cov_ratio: Annotated[float, Range(above=0, most=1)] = 0.0002
    """Fraction of an update's tokens whose gradient clip_cov removes, at least one token. The paper uses 2e-4."""
    clip_cov_lb: Annotated[float, Range()] = 1.0
    """Lower bound of the covariance between log-prob and advantage. clip_cov selects only tokens with a covariance
    between both bounds."""
    clip_cov_ub: Annotated[float, Range()] = 5.0
    """Upper bound of the covariance between log-prob and advantage, for clip_cov."""
    kl_cov_ratio: Annotated[float, Range(above=0, most=1)] = 0.002
    """Fraction of an update's tokens on which kl_cov puts a KL penalty to the old policy, at least one token. kl_cov
    selects the tokens with the largest covariance. The paper uses 2e-3 for 7B and 2e-4 for 32B models."""
    kl_cov_coef: Annotated[float, Range(0)] = 1.0
    """Coefficient of kl_cov's penalty, which is the absolute log-ratio to the old policy."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a custom loss function, that is, its parameters after (logprobs, fields, settings)."""
    off_policy: OffPolicySettings = field(default_factory=OffPolicySettings)

    @property
    def reads_every_sequence(self) -> str | None:
        """Reason why the loss gives sequences with advantage 0 a gradient, as a message with the key; otherwise
        None."""
        if self.reference_policy_kl_penalty:
            return "loss_fn.reference_policy_kl_penalty applies to every sequence"
        if self.entropy_bonus or self.use_adaptive_entropy:
            return (
                f"loss_fn.{'entropy_bonus' if self.entropy_bonus else 'use_adaptive_entropy'} applies to every sequence"
            )
        return None


@dataclass(frozen=True)
class LossByPart:
    """Sum of policy-gradient losses, each of which reads the tokens of one part of an update (`TokenFields.part`)."""

    parts: tuple[LossSettings, ...]

    @property
    def entropy_bonus(self) -> float:
        """Entropy bonus of a part that has one, because the entropies need a gradient in this case; otherwise 0."""
        return next((part.entropy_bonus for part in self.parts if part.entropy_bonus), 0.0)

    @property
    def reads_every_sequence(self) -> str | None:
        """Reason why a part gives sequences with advantage 0 a gradient."""
        return next((part.reads_every_sequence for part in self.parts if part.reads_every_sequence), None)


@dataclass(frozen=True)
class TermLoss:
    """Objective of which only the gradient is computed: one term of a policy-gradient loss, or an expected reward.

    The losses in `algorithms.losses` are proportional to the size of the advantage A of a token: given the sign of A,
    which decides about clipping, the loss is linear in A. For A = sum_k a_k, the term of a_k is therefore a_k times the
    loss of an advantage of sign(A), divided by sign(A), and the terms sum to the loss.
    """

    loss: LossSettings
    part: str
    """advantage: the term of the advantages `TokenFields.terms[:, index]`. regularisation: the same, plus the KL
    penalty and the entropy bonus. expected: -sum_t terms[t, index] logprob_t, without the token weights."""
    index: int

    @property
    def entropy_bonus(self) -> float:
        """Entropy bonus in this term."""
        return self.loss.entropy_bonus if self.part == "regularisation" else 0.0

    @property
    def reads_every_sequence(self) -> str | None:
        """Reason why sequences with advantage 0 must not be skipped."""
        return "a sequence with advantage 0 may have terms that are not 0"
