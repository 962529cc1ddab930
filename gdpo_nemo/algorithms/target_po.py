"""Target Policy Optimization (arXiv 2604.06159): move the policy's distribution over a group towards a target.

The loss couples all samples of a group, L = -sum_i q_i log p_i with p the softmax of the group's sequence log-probs, so
taken literally a group may not be split. Its gradient is not coupled: dL/dl_i = p_i - q_i. The driver therefore
computes that number from two forward passes without gradient, and the worker's loss is linear in its own log-probs,
whatever rank, pipeline stage or micro-batch they are on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gdpo_nemo.algorithms.groups import Groups

FLAT_STD = 1e-6
"""Scores with a smaller population standard deviation are only centred."""


def target_po_coefficients(
    sequence_logprobs: Any,
    old_sequence_logprobs: Any,
    scores: Any,
    group_ids: Any,
    valid: Any = None,
    lengths: Any = None,
    temperature: float = 1.0,
    length_normalize: bool = True,
    weights: Any = None,
) -> torch.Tensor:
    """The advantage of every sequence with which the worker's `target_po` loss has the gradient of eq. 1-4.

    u = (score - mean) / std of the group (population std), target q = softmax(log p_old + u / temperature),
    p = softmax of the current sequence log-probs; advantage = (q - p) / groups, divided by the length where
    log-probs are means, and by `weights`, by which the loss will multiply again.

    Args:
        sequence_logprobs: float [sequences], sum over trained tokens under the current policy.
        old_sequence_logprobs: the same under the policy that sampled; fixed while a batch is used repeatedly.
        scores: float [sequences], a reward or the advantages of `compute_advantages` (several rewards).
        group_ids: int64 [sequences].
        valid: bool [sequences]; others leave the statistics and both distributions and get 0. None: length > 0.
        lengths: trained tokens [sequences]; needed with length_normalize.
        temperature: eta > 0; large values keep the policy near the old one.
        length_normalize: use mean instead of summed log-probs, so that no long sample dominates p_old.
        weights: per-token weights [sequences] of `token_weights`; None: all 1.

    Returns:
        float64 [sequences]

    Raises:
        ValueError: temperature not positive, or lengths missing where they are needed.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if length_normalize and lengths is None:
        raise ValueError("length_normalize needs lengths")
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
    """Group scores with mean 0 and population standard deviation 1 over the counted rows; 0 elsewhere."""
    count = np.maximum(groups.sum(rows), 1)
    mean = groups.sum(np.where(rows, scores, 0.0)) / count
    centred = np.where(rows, scores - groups.rows(mean), 0.0)
    std = np.sqrt(groups.sum(centred**2) / count)
    return np.asarray(centred / groups.rows(np.where(std > FLAT_STD, std, 1.0)))


def _log_softmax(groups: Groups, logits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """log softmax over the counted rows of each group; -inf elsewhere."""
    masked = np.where(rows, logits, -np.inf)
    top = groups.max(masked)
    top = np.where(np.isfinite(top), top, 0.0)
    shifted = masked - groups.rows(top)
    total = groups.sum(np.exp(shifted))
    return np.asarray(shifted - groups.rows(np.log(np.where(total > 0, total, 1.0))))
