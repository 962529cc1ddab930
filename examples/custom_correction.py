"""Custom off-policy correction: importance weights that decay with the staleness of a token.

    uv run examples/run_gdpo.py rollout.max_staleness=2 loss_fn.old_logprobs=trainer run.name=by_age \\
        loss_fn.off_policy.mode=examples/custom_correction.py:by_age loss_fn.off_policy.options.half_life=1

A correction is a function that returns one weight per trained token of a micro-batch. Its arguments are the difference
between the trainer's and the sampler's log-probs, the tokens' fields (``gdpo_nemo.TokenFields``), and the config
section ``loss_fn.off_policy``. The field ``staleness`` is the age of the sampling weights in versions. Additional
parameters of the function are set in ``loss_fn.off_policy.options``.
"""

import torch

from gdpo_nemo import OffPolicySettings, TokenFields, importance_ratio


def by_age(
    log_gap: torch.Tensor, fields: TokenFields, settings: OffPolicySettings, half_life: float = 2.0
) -> torch.Tensor:
    """Return min(rho, ratio_max), halved for every ``half_life`` versions of staleness."""
    return importance_ratio(log_gap).clamp(max=settings.ratio_max) * 0.5 ** (fields.staleness / half_life)


by_age.skips_zero_advantage = True  # a token's weight does not depend on other sequences
