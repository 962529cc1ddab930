"""A loss of one's own: SAPO, whose gates fade the gradient out smoothly where a clip would cut it.

    uv run examples/run_gdpo.py loss_fn.type=examples/sapo.py:sapo run.name=sapo
    uv run examples/run_gdpo.py loss_fn.type=examples/sapo.py:sapo loss_fn.options.tau_neg=1.2 run.name=sapo

A loss takes the log-probs of all trained tokens of a micro-batch (with their gradient), what the batch knows of them
(``gdpo_nemo.algorithms.TokenFields``: advantages, old and sampler's log-probs, which sequence) and the section
``loss_fn``; it returns a loss per token. Its further parameters are the keys of ``loss_fn.options``. What follows, the
weights of the mean, corrections, KL and entropy, is as with the built-in ones in gdpo_nemo/algorithms/losses.py.

Soft adaptive policy optimization, arXiv 2511.20347: L = -A (4 / tau) sigmoid(tau (r - 1)), r = pi / pi_old, tau being
tau_pos where A > 0 and tau_neg elsewhere. On-policy its gradient is that of the other losses.
"""

import torch

from gdpo_nemo.algorithms import LossSettings, TokenFields, importance_ratio


def sapo(
    logprobs: torch.Tensor, fields: TokenFields, settings: LossSettings, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> torch.Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1))."""
    ratio = importance_ratio(logprobs - fields.old_logprobs)
    tau = torch.where(fields.advantages > 0, tau_pos, tau_neg)
    return -fields.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


sapo.skips_zero_advantage = True  # it is 0 where A is, and takes nothing from other sequences
