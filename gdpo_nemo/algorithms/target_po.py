"""Target Policy Optimization (arXiv 2604.06159): move the policy's distribution over a group towards a target
distribution.

The loss L = -sum_i q_i log p_i couples all samples of a group, because p is the softmax of the group's sequence
log-probs. Computed directly, the loss would require the whole group in one micro-batch. The gradient with respect to a
sequence log-prob, dL/dl_i = p_i - q_i, has no such coupling. The driver therefore computes this coefficient from two
forward passes without gradient. The workers' loss is then linear in the log-probs, so samples can be on any rank,
pipeline stage or micro-batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gdpo_nemo.algorithms.table import Groups

FLAT_STD = 1e-6
"""Scores whose population standard deviation is below this value are centred but not divided."""


def target_po_coefficients(
    sequence_logprobs: Any,
    old_sequence_logprobs: Any,
    scores: Any,
    group_ids: Any,
    *,
    valid: Any = None,
    lengths: Any = None,
    temperature: float = 1.0,
    length_normalize: bool = True,
    weights: Any = None,
) -> torch.Tensor:
    """Return the advantage of each sequence with which the workers' `target_po` loss has the gradient of equations 1-4.

    u = (score - mean) / std of the group (population std). The target is q = softmax(log p_old + u / temperature), and
    p is the softmax of the current sequence log-probs. The advantage is (q - p) / number of groups. The advantage is
    divided by the sequence length if log-probs are means, and by `weights`, because the loss multiplies by the token
    weights.

    Args:
        sequence_logprobs: float [sequences], log-probs of the current policy, summed over trained tokens.
        old_sequence_logprobs: summed log-probs of the policy that sampled. These log-probs do not change if a batch is
            trained repeatedly.
        scores: float [sequences], rewards, or for several rewards the advantages of `compute_advantages`.
        group_ids: int64 [sequences].
        valid: bool [sequences]. Other sequences are excluded from statistics and distributions and get 0. None:
            sequences with length > 0.
        lengths: trained tokens [sequences]; required by length_normalize.
        temperature: positive temperature eta; with large values the policy stays near the old policy.
        length_normalize: use mean instead of summed log-probs, so that long samples do not dominate p_old.
        weights: token weight of each sequence from `token_weights` [sequences]; None: all 1.

    Returns:
        Advantages, float64 [sequences].

    Raises:
        ValueError: if the temperature is not positive, or lengths are required but missing.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if length_normalize and lengths is None:
        raise ValueError("length_normalize requires lengths")
    current, old, score = (np.asarray(x, dtype=np.float64) for x in (sequence_logprobs, old_sequence_logprobs, scores))
    size = np.ones(len(score)) if lengths is None else np.asarray(lengths, dtype=np.float64)
    rows = size > 0 if valid is None else np.asarray(valid, dtype=bool) & (size > 0)
    divisor = np.maximum(size, 1.0) if length_normalize else np.ones(len(score))
    groups = Groups(np.asarray(group_ids, dtype=np.int64))
    rows = groups.take(rows)
    target = _log_softmax(groups, groups.take(old / divisor), rows)
    target = _log_softmax(groups, target + _whiten(groups, groups.take(score), rows) / temperature, rows)
    policy = _log_softmax(groups, groups.take(current / divisor), rows)
    pull = groups.put(np.where(rows, np.exp(target) - np.exp(policy), 0.0)) / (divisor * len(groups))
    if weights is not None:
        weight = np.asarray(weights, dtype=np.float64)
        pull = np.divide(pull, weight, out=np.zeros_like(pull), where=weight > 0)
    return torch.from_numpy(pull)


def _whiten(groups: Groups, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Normalise the scores of each group to mean 0 and population standard deviation 1 over ``rows``; 0 for other
    rows."""
    count = np.maximum(groups.sum(rows), 1)
    mean = groups.sum(np.where(rows, scores, 0.0)) / count
    centred = np.where(rows, scores - groups.rows(mean), 0.0)
    std = np.sqrt(groups.sum(centred**2) / count)
    return np.asarray(centred / groups.rows(np.where(std > FLAT_STD, std, 1.0)))


def _log_softmax(groups: Groups, logits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the log-softmax over the selected ``rows`` of each group; -inf for other rows."""
    masked = np.where(rows, logits, -np.inf)
    top = groups.max(masked)
    top = np.where(np.isfinite(top), top, 0.0)
    shifted = masked - groups.rows(top)
    total = groups.sum(np.exp(shifted))
    return np.asarray(shifted - groups.rows(np.log(np.where(total > 0, total, 1.0))))
