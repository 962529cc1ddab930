"""A loss of whole sequences: VESPO, which weighs each sequence by a smooth kernel of its importance weight.

    uv run examples/run_gdpo.py loss_fn.type=examples/vespo.py:vespo rollout.max_staleness=2 run.name=vespo

Where samples are stale (or with ``loss_fn.old_logprobs: sampler``) the ratio starts from the sampler's log-probs, so W
is the whole correction and ``loss_fn.off_policy`` stays off. Sums over a sequence go through ``fields``, which adds up
what context-parallel ranks hold of it.

Variational sequence-level soft policy optimization, arXiv 2602.10693: L = -A phi(W) log pi with the kernel
phi(W) = W^k exp(lambda (1 - W)) of W = prod_t pi / pi_old, detached, and (k, lambda) by the sign of A. The bounds of
log W are those of the authors' code.
"""

import math

import torch

from gdpo_nemo.algorithms import LossSettings, TokenFields


def vespo(
    logprobs: torch.Tensor, fields: TokenFields, settings: LossSettings, k_pos: float = 2.0, lambda_pos: float = 3.0,
    k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """-A phi(W) log pi, and phi as the metric policy/kernel."""
    log_ratio = (logprobs.detach() - fields.old_logprobs).clamp(-20, 20)
    log_w = fields.sequence_sums(log_ratio).clamp(math.log(1e-8), 20)
    good = fields.advantages >= 0
    k = torch.where(good, k_pos, k_neg)
    rate = torch.where(good, lambda_pos, lambda_neg)
    kernel = (rate + k * log_w - rate * log_w.exp()).exp()
    return -fields.advantages * kernel * logprobs, {"kernel": kernel}


vespo.skips_zero_advantage = True  # it is 0 where A is, and takes nothing from other sequences
