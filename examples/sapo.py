"""Custom loss: SAPO, which replaces the hard clip of PPO by a smooth gate.

    uv run examples/run_gdpo.py loss_fn.type=examples/sapo.py:sapo run.name=sapo
    uv run examples/run_gdpo.py loss_fn.type=examples/sapo.py:sapo loss_fn.options.tau_neg=1.2 run.name=sapo

A loss is a function that returns one loss per trained token of a micro-batch. Its arguments are the tokens' log-probs
(with gradient), their fields (``gdpo_nemo.TokenFields``: advantages, old log-probs, the sampler's log-probs, sequence),
and the config section ``loss_fn``. Additional parameters of the function are set in ``loss_fn.options``. The trainer
then applies aggregation weights, corrections, KL and entropy, as for the built-in losses in
gdpo_nemo/algorithms/losses.py.

Soft adaptive policy optimization, arXiv 2511.20347: L = -A (4 / tau) sigmoid(tau (r - 1)) with r = pi / pi_old. tau is
tau_pos if A > 0 and tau_neg otherwise. On-policy, the gradient equals that of the other losses.
"""

import torch

from gdpo_nemo import LossSettings, TokenFields, importance_ratio


def sapo(
    logprobs: torch.Tensor, fields: TokenFields, settings: LossSettings, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> torch.Tensor:
    """Return -A (4 / tau) sigmoid(tau (r - 1)) for each token."""
    ratio = importance_ratio(logprobs - fields.old_logprobs)
    tau = torch.where(fields.advantages > 0, tau_pos, tau_neg)
    return -fields.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


sapo.skips_zero_advantage = True  # the loss is 0 if A is 0, and does not depend on other sequences
