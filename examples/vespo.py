"""Sequence-level loss VESPO, which weights each sequence by a smooth kernel of its importance weight.

    uv run examples/run_gdpo.py loss_fn.type=examples/vespo.py:vespo rollout.max_staleness=2 run.name=vespo

If samples are stale, or with ``loss_fn.old_logprobs: sampler``, the ratio uses the sampler's log-probs. W is then the
complete off-policy correction, and ``loss_fn.off_policy`` is disabled. Sums over a sequence use ``fields``, which
includes the tokens on other context-parallel ranks.

Variational sequence-level soft policy optimization, arXiv 2602.10693: L = -A phi(W) log pi with the detached kernel
phi(W) = W^k exp(lambda (1 - W)) of W = prod_t pi / pi_old. k and lambda depend on the sign of A. The bounds on log W
are those of the authors' code.
"""

import math

import torch

from gdpo_nemo import LossSettings, TokenFields


def vespo(
    logprobs: torch.Tensor, fields: TokenFields, settings: LossSettings, k_pos: float = 2.0, lambda_pos: float = 3.0,
    k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Return -A phi(W) log pi for each token, and phi as the metric policy/kernel."""
    log_ratio = (logprobs.detach() - fields.old_logprobs).clamp(-20, 20)
    log_w = fields.sequence_sums(log_ratio).clamp(math.log(1e-8), 20)
    non_negative = fields.advantages >= 0
    k = torch.where(non_negative, k_pos, k_neg)
    rate = torch.where(non_negative, lambda_pos, lambda_neg)
    kernel = (rate + k * log_w - rate * log_w.exp()).exp()
    return -fields.advantages * kernel * logprobs, {"kernel": kernel}


vespo.skips_zero_advantage = True  # the loss is 0 if A is 0, and does not depend on other sequences
