"""Gradients by reward component: which component's part of the advantages changes which expected reward.

The loss of an update is linear in the advantages (``algorithms.loss_settings.TermLoss``), and the advantages are the
sum of one term per component. So the gradient is the sum of one gradient per component, and of the gradient of the
regularisation (KL and entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gdpo_nemo.algorithms.loss_settings import LossSettings, TermLoss
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import GradientProducts, Trajectory, UpdateResult
from gdpo_nemo.rollouts.credit import TurnAdvantages, reward_columns, spread
from gdpo_nemo.utils.errors import RunError

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import Advantages
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.config.schema import Config
    from gdpo_nemo.data.records import Group

METRICS = {
    "gradient/NAME/norm": (
        "",
        "Norm of the gradient of component NAME's part of the advantages, or of the regularisation (KL, entropy)",
    ),
    "gradient/NAME/cosine/NAME": (
        "",
        "Cosine of the gradients of component NAME and of the component at the end of the key",
    ),
    "gradient/NAME/change/NAME": (
        "reward",
        "First-order change of component NAME's expected reward by the other component's gradient in the update",
    ),
    "gradient/NAME/predicted_on_batch": (
        "reward",
        "First-order change of component NAME's reward by the step's first update, estimated on the update's samples",
    ),
    "gradient/NAME/measured_on_batch": (
        "reward",
        "The same change as predicted_on_batch, from the probabilities of these samples after the update",
    ),
    "gradient/residual": (
        "",
        "Relative difference between the norm of the sum of the component gradients and grad_norm",
        {
            "max": 0.01,
            "advisory": True,
            "why": "the parts of the gradient do not sum to the gradient",
            "remedy": "gdpo.component_gradient_period: 0, and report the config as a bug",
        },
    ),
}
REGULARISATION = "regularisation"
"""Name of the part of the gradient that belongs to no component."""
FEWEST_UPDATES = 10
"""Number of updates after which Adam's second moments are averages of enough gradients for the metrics of changes."""
_ROUNDING = 1e-9
"""Largest difference between an advantage and the sum of its terms, relative to the terms."""


class ComponentGradients:
    """Gradients by component of one update. The constructor computes them, and ``metrics`` is called after the update.

    A gradient raises the rewards of the samples that it was computed from more than those of other samples. To estimate
    the change of the expected reward without this bias, the groups are divided into two halves: a gradient of one half
    is only compared with the policy gradient of the expected reward from the other half.

    Args:
        update: sequences of the update.
        groups: groups of the step.
        advantages: advantages of the step.
        loss: loss of the update.

    Raises:
        RunError: if the advantages are not the sum of the terms of their components.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        config: Config,
        update: Sequence[TrainSequence],
        groups: Sequence[Group],
        advantages: Advantages | TurnAdvantages,
        loss: LossSettings,
    ):
        self._policy = policy
        self._optimizer = config.policy.megatron_cfg.optimizer
        self._names = list(advantages.names)
        trajectories = [t for group in groups for t in group.trajectories]
        weighted = [k for k, name in enumerate(self._names) if config.gdpo.rewards.get(name)]
        terms = contributions(advantages, trajectories, weighted)
        if not config.gdpo.kl_in_reward:
            _check_sum(terms, config.gdpo.estimator)
        columns = reward_columns(trajectories, config)
        rewards = np.column_stack([columns[name] for name in self._names])
        untrained = set(range(len(trajectories))) - {s.trajectory for s in update if s.weight}
        rewards[list(untrained)] = np.nan
        ids = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
        self._scores, used = score_coefficients(rewards, ids)
        self._update = [_with_terms(s, terms[s.trajectory], self._scores[s.trajectory]) for s in update]
        halves: tuple[list[TrainSequence], ...] = ([], [])
        for s in self._update:
            halves[ids[s.trajectory] % 2].append(s)
        self._shares = [used[ids % 2 == half].sum(axis=0) / np.maximum(used.sum(axis=0), 1) for half in (0, 1)]
        """Share of each half in the samples with each component, by half: [components]."""
        count = len(weighted)
        self._parts = [self._names[k] for k in weighted]
        requested = [TermLoss(loss, "advantage", k) for k in range(count)]
        if config.gdpo.kl_in_reward or loss.reference_policy_kl_penalty or loss.entropy_bonus:
            self._parts.append(REGULARISATION)
            requested.append(TermLoss(loss, "regularisation", count))
        requested += [TermLoss(loss, "expected", count + 1 + k) for k in range(len(self._names))]
        self._before = policy.logprobs(self._update)
        if any(s.old_logprobs is not None for s in self._update):
            # policy.skip_zero_advantage leaves out sequences whose advantage is 0, although its terms may not be 0.
            for s, now in zip(self._update, self._before, strict=True):
                s.old_logprobs = now if s.old_logprobs is None else s.old_logprobs
        for number, half in enumerate(filter(None, halves)):
            policy.component_gradients(half, requested, first=number == 0)
        self._halves = sum(map(bool, halves))
        self.products: tuple[tuple[str, ...], np.ndarray] | None = None
        """Weighted components, and the inner products of their gradients, float64 [components, components]. None before
        ``metrics``, and if the update was skipped."""

    def metrics(self, result: UpdateResult) -> dict[str, float]:
        """Return the metrics ``gradient/...``, or an empty dictionary if the update was skipped.

        Args:
            result: result of the update.
        """
        if result.skipped:
            return {}
        found = self._policy.gradient_products()
        count = len(self._parts)
        products = _by_half(found.products, self._halves)[:, :count, :, :count].sum(axis=(0, 2))
        parts = len([part for part in self._parts if part != REGULARISATION])
        self.products = tuple(self._parts[:parts]), products[:parts, :parts]
        norms = np.sqrt(np.diag(products))
        row: dict[str, float] = {}
        for j, part in enumerate(self._parts):
            row[f"gradient/{part}/norm"] = norms[j]
            for i in range(j + 1, count):
                row[f"gradient/{part}/cosine/{self._parts[i]}"] = products[j, i] / max(norms[i] * norms[j], 1e-300)
        total = float(np.sqrt(max(products.sum(), 0.0)))
        row["gradient/residual"] = abs(total - result.grad_norm) / result.grad_norm if result.grad_norm else 0.0
        limit, beta = self._optimizer.clip_grad, self._optimizer.adam_beta1
        clip = min(1.0, limit / (total + 1e-6)) if limit else 1.0
        # Adam's update contains this share of the gradient. The momentum adds the other share to later updates, whose
        # weights differ.
        share = (1.0 - beta) / (1.0 - beta ** (found.earlier + 1))
        row |= self._changes(found, clip * share)
        return {key: float(value) for key, value in row.items()}

    def _changes(self, found: GradientProducts, factor: float) -> dict[str, float]:
        """Return the metrics of expected rewards. Gradients are those of losses, so an expected reward has -1 times the
        gradient.

        Args:
            factor: factor of the gradient in the update.
        """
        count = len(self._parts)
        scaled = factor * _by_half(found.scaled, self._halves)[:, count:, :, :count]
        on_batch = -found.moved.reshape(self._halves, -1)[:, count:].sum(axis=0)
        measured = self._measured()
        row = {}
        for k, name in enumerate(self._names):
            if not self._scores[:, k].any():
                continue
            row[f"gradient/{name}/predicted_on_batch"] = on_batch[k]
            row[f"gradient/{name}/measured_on_batch"] = measured[k]
            shares = [share[k] for share in self._shares]
            if self._halves < 2 or not all(shares) or found.earlier < FEWEST_UPDATES:
                continue
            crossed = scaled[0, k, 1] / shares[0] + scaled[1, k, 0] / shares[1]
            row |= {f"gradient/{name}/change/{part}": crossed[j] for j, part in enumerate(self._parts)}
        return row

    def _measured(self) -> np.ndarray:
        """Return the change of each expected reward, from the samples' probabilities before and after: [components]."""
        gaps = np.zeros(len(self._scores))
        for s, before, after in zip(self._update, self._before, self._policy.logprobs(self._update), strict=True):
            gaps[s.trajectory] += s.where_written(after.astype(np.float64) - before).sum()
        return np.asarray(np.expm1(gaps) @ self._scores)


def _by_half(products: np.ndarray, halves: int) -> np.ndarray:
    """Split the axes of products of gradients: [half, gradient, half, gradient]."""
    count = len(products) // halves
    return products.reshape(halves, count, halves, count)


def contributions(
    advantages: Advantages | TurnAdvantages, trajectories: Sequence[Trajectory], weighted: Sequence[int]
) -> list[np.ndarray]:
    """Return the terms of each trajectory's advantages: the components ``weighted``, then the KL in the reward.

    Shape: float64 [1 or completion tokens, terms]. Terms of tokens that the policy did not write are 0.
    """
    if not isinstance(advantages, TurnAdvantages):
        return list(_terms(advantages, weighted)[:, None])
    starts = np.flatnonzero(advantages.rows.turn == 0)[1:]
    by_turn = np.split(_terms(advantages.of_turns, weighted), starts)
    return [terms if len(terms) == 1 else spread(t, terms) for t, terms in zip(trajectories, by_turn, strict=True)]


def _terms(advantages: Advantages, weighted: Sequence[int]) -> np.ndarray:
    terms = advantages.contributions[:, weighted]
    return np.column_stack([terms, advantages.values.numpy() - terms.sum(axis=1)])


def _check_sum(terms: Sequence[np.ndarray], estimator: str) -> None:
    """Check that nothing is left besides the components' terms."""
    largest = max((float(np.abs(rows[:, :-1]).max(initial=0.0)) for rows in terms), default=0.0)
    left = max((float(np.abs(rows[:, -1]).max(initial=0.0)) for rows in terms), default=0.0)
    if left > _ROUNDING * max(largest, 1.0):
        raise RunError(
            f"gdpo.component_gradient_period: the terms of gdpo.estimator {estimator} differ from its "
            f"advantages by up to {left:.2g}, so the gradient has no parts by component; set it to 0"
        )


def score_coefficients(rewards: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the coefficients c for which sum_i c_ik grad log p(i) estimates the gradient of the expected reward k.

    c_ik = (r_ik - mean of the group's other samples) / N_k, where N_k is the number of samples that have the component,
    as another sample of their group does (REINFORCE with leave-one-out baseline, arXiv 2402.14740).

    Args:
        rewards: float64 [samples, components], NaN if not applicable.
        ids: group of each sample: int64 [samples], from 0.

    Returns:
        Coefficients, float64 [samples, components], and a bool array of the same shape that is True for the N_k samples
        of each component. The other coefficients are 0.
    """
    coefficients = np.zeros_like(rewards)
    counted = np.zeros(rewards.shape, bool)
    for k, column in enumerate(rewards.T):
        present = np.isfinite(column)
        count = np.bincount(ids, present)
        sums = np.bincount(ids, np.where(present, column, 0.0))
        used = present & (count[ids] > 1)
        others = (sums[ids][used] - column[used]) / (count[ids][used] - 1)
        coefficients[used, k] = (column[used] - others) / used.sum()
        counted[:, k] = used
    return coefficients, counted


def _with_terms(sequence: TrainSequence, terms: np.ndarray, scores: np.ndarray) -> TrainSequence:
    """Return a copy of a sequence with its terms: those of the advantages, then the coefficients ``scores``."""
    tokens = len(sequence.completion_ids)
    by_token = np.broadcast_to(terms, (tokens, terms.shape[1])) if len(terms) == 1 else terms[sequence.indices]
    columns = np.column_stack([by_token, np.broadcast_to(scores, (tokens, len(scores)))])
    return replace(sequence, terms=columns.astype(np.float32))
