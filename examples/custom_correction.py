"""A correction of your own: importance weights that fade with the age of the weights that sampled the token.

    uv run examples/run_gdpo.py rollout.max_staleness=2 loss_fn.old_logprobs=trainer run.name=by_age \\
        loss_fn.off_policy.mode=examples/custom_correction.py:by_age loss_fn.off_policy.options.half_life=1

A correction takes, for all trained tokens of a micro-batch, the gap of log-probs between trainer and sampler, what the
batch knows of the tokens (``gdpo_nemo.algorithms.TokenFields``; ``staleness`` is the age in versions) and the section
``loss_fn.off_policy``; it returns a weight per token. Its further parameters are ``loss_fn.off_policy.options``.
"""

import torch

from gdpo_nemo.algorithms import OffPolicySettings, TokenFields, importance_ratio


def by_age(
    log_gap: torch.Tensor, fields: TokenFields, settings: OffPolicySettings, half_life: float = 2.0
) -> torch.Tensor:
    """min(rho, ratio_max) halved every ``half_life`` versions."""
    return importance_ratio(log_gap).clamp(max=settings.ratio_max) * 0.5 ** (fields.staleness / half_life)


by_age.skips_zero_advantage = True  # a token's weight depends on no other sequence
