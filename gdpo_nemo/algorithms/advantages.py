"""From reward vectors to one advantage per sequence: the public function and its result.

    advantages = compute_advantages({"correct": [1, 0, 0, 1], "short": [0, 1, None, 1]}, group_ids=[7, 7, 7, 7])

Everything is float64 NumPy on the CPU of the driver, over the whole global batch at once: batch statistics taken per
rank or per micro-batch would be others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Callable

import numpy as np
import torch

from gdpo_nemo.algorithms.diagnostics import Diagnostics, diagnose
from gdpo_nemo.algorithms.estimators import Terms
from gdpo_nemo.algorithms.selection import DEFAULT_EPSILON, run_estimator, select
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import RewardTable, build_table


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch, in the caller's row order."""

    values: torch.Tensor
    """float64 [sequences]; exactly 0 for rows without signal, without rewards or outside `valid`."""
    components: torch.Tensor
    """float64 [sequences, components]; each component's weighted term. `values` is their sum, less the KL in the
    reward, after the batch norm."""
    names: tuple[str, ...]
    """Component names, in column order."""
    has_signal: torch.Tensor
    """bool [sequences]; rows with a weighted component that is present and varies within the group."""
    _table: RewardTable = field(repr=False, compare=False)
    _epsilon: float | None = field(repr=False, compare=False, default=None)
    """Of the components' z-scores; None where the sum of the rewards was normalised."""

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """What the rewards did to the advantages; measured when first asked for."""
        take = self._table.groups.take
        terms = np.ascontiguousarray(take(self.components.numpy()).T)
        return diagnose(self._table, terms, take(self.has_signal.numpy()), take(self.values.numpy()), self._epsilon)


def compute_advantages(
    rewards: Any,
    group_ids: Any,
    *,
    weights: Any = None,
    valid: Any = None,
    lengths: Any = None,
    kl: Any = None,
    kl_coefficient: float | None = None,
    estimator: str | Callable[..., Terms] = "gdpo",
    preset: str | None = None,
    batch_norm: bool | None = None,
    epsilon: float = DEFAULT_EPSILON,
    **options: Any,
) -> Advantages:
    """Advantages of every sequence of a global batch.

    With the defaults this is GDPO (arXiv 2601.05242): z-scores of every component within its group, their weighted
    sum, and the standardisation of that sum over the sequences that carry signal. The paper standardises over all
    sequences, those of groups without signal included, which makes the others' advantages larger; `preset="paper"` does
    that. Same input, same bits; another row order gives the same advantages up to the last digits of float64.

    KL in the reward is A <- A - kl_coefficient x (kl - mean of the group's kl), before the batch norm and never
    normalised itself: normalised, its coefficient would do nothing. It lends a row no signal of its own: batch
    statistics are taken over the same rows as without it, a row that it alone moves is divided by the same deviation,
    and a batch without any other signal stays 0 under batch norm. Estimators of the sum have it in the sum instead, as
    published.

    Args:
        rewards: [sequences, components] with NaN for "not applicable", or a mapping of name to [sequences] where None
            means the same.
        group_ids: integers [sequences], equal for the samples of one prompt, in any order; groups may differ in size.
        weights: per component, by name or in order; all 1 by default. Weight 0 keeps a component for the logs only: a
            row that has only such rewards counts as one without a reward.
        valid: bool [sequences]; rows that failed are False, count in no statistic and get 0.
        lengths: tokens per sequence [sequences]; only for variants that weight by tokens.
        kl: log-ratio of policy to reference, summed over each sequence [sequences]; NaN or None leaves a row out.
        kl_coefficient: beta, positive; given with `kl`.
        estimator: a name of `ESTIMATORS`, or a function like them: (table, settings, **options) -> `Terms`.
        preset: a name of `PRESETS`, a published variant of gdpo.
        batch_norm: standardise over the batch; None: as the estimator was published.
        epsilon: added to every standard deviation; a preset brings its own, which only a value unlike 1e-6 replaces.
        options: fields of `Settings`, or the estimator's own options.

    Raises:
        ValueError: the message says which name, row or component is wrong, and the nearest name that exists.
    """
    entry, settings, own = select(estimator, preset, batch_norm, epsilon, options)
    table = build_table(rewards, group_ids, weights, valid, lengths)
    if settings.missing != "exclude":
        table = _fill_missing(table, settings)
    if kl is not None or kl_coefficient is not None:
        table = table.with_kl(kl, kl_coefficient)
    terms = run_estimator(entry, table, settings, own, estimator)
    if not settings.batch_norm:
        values = terms.values - _penalty(table, terms)
    elif _cancelled(table, terms, settings, partial(entry.function, **own)):
        values = np.zeros_like(terms.values)
    else:
        values = _batch_scale(table, terms, settings)
    put = table.groups.put
    return Advantages(
        values=torch.from_numpy(put(values)),
        components=torch.from_numpy(put(terms.components).T),
        names=table.names,
        has_signal=torch.from_numpy(put(terms.has_signal)),
        _table=table,
        _epsilon=None if terms.total is not None else settings.epsilon,
    )


def _fill_missing(table: RewardTable, settings: Settings) -> RewardTable:
    """Missing rewards of valid rows refused, or turned into 0; those of weight 0 stay missing."""
    component, row = np.nonzero(table.gaps)
    if settings.missing == "error" and len(row):
        names = ", ".join(sorted({table.names[k] for k in component}))
        raise ValueError(f"this variant takes no missing rewards; {len(row)} are missing, in {names}")
    return table.zero_filled()


def _penalty(table: RewardTable, terms: Terms) -> np.ndarray:
    """What KL in the reward takes from each row beyond the terms: [sequences]"""
    if table.kl_penalty is None or terms.holds_kl:
        return np.zeros_like(terms.values)
    return table.kl_penalty


def _batch_scale(table: RewardTable, terms: Terms, settings: Settings) -> np.ndarray:
    """(A - mean) / (std + epsilon) over the sequences (or tokens) of the batch that count; the others stay 0."""
    rows, unit = _counted(table, terms, settings)
    penalty = _penalty(table, terms)
    values = (terms.values - penalty)[rows]
    mean, variance = _moments(values, unit, settings.ddof)
    eps = settings.batch_eps
    divisor = np.sqrt(variance + eps) if settings.batch_epsilon_inside else np.sqrt(variance) + eps
    if not 0 < divisor < np.inf:
        raise ValueError(
            f"advantages up to {np.abs(values).max():.3g} with deviation {divisor:.3g} cannot be standardised"
        )
    # A row that only the KL moves is divided, not shifted: the mean is that of the rows that carry signal.
    scaled: np.ndarray = 0.0 - penalty / divisor
    scaled[rows] = (values - mean) / divisor
    return scaled


def _counted(table: RewardTable, terms: Terms, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the batch statistics, bool [sequences], and how often each of them counts: once, or once per token."""
    rows = terms.has_signal if settings.batch_rows == "live" else table.scored
    if settings.batch_unit == "sequence":
        return rows, np.ones(int(rows.sum()))
    if table.lengths is None:
        raise ValueError("this variant weights by tokens and needs `lengths`")
    return rows, table.lengths[rows]


def _moments(values: np.ndarray, unit: np.ndarray, ddof: int) -> tuple[float, float]:
    """Mean and variance of values that count ``unit`` times each, two-pass."""
    mean = np.average(values, weights=unit)
    return mean, (unit * (values - mean) ** 2).sum() / (unit.sum() - ddof)


_SMALL = 0.1
"""Cancellation is looked for where the advantages' deviation is below this share of the size of their terms."""
_LESS_EPSILON = 1e-9
"""By how much epsilon is reduced to see what is left without it. Not to 0, which an own estimator may divide by."""


def _cancelled(table: RewardTable, terms: Terms, settings: Settings, again: Callable[..., Terms]) -> bool:
    """Whether a batch has nothing to standardise: no row, no deviation, or rewards that cancel but for epsilon's trace.

    Epsilon adds to unlike deviations, so opposed rewards of unlike scale do not cancel to the last digit. Whether what
    is left is more than that shows by computing the terms once more with next to no epsilon.
    """
    rows, unit = _counted(table, terms, settings)
    if unit.sum() <= settings.ddof:
        return True
    variance = _moments(terms.values[rows], unit, settings.ddof)[1]
    if variance == 0:
        return True
    # What was normalised as a whole has no terms of its own that could leave a trace.
    if terms.total is not None or not settings.residue or not np.sqrt(variance) <= _SMALL * _term_size(terms) < np.inf:
        return False
    with np.errstate(all="ignore"):
        sharp = again(table, replace(settings, epsilon=settings.epsilon * _LESS_EPSILON, exact_zero=True))
    variance = _moments(sharp.values[rows], unit, settings.ddof)[1]
    return bool(np.sqrt(variance) <= settings.residue * _term_size(sharp))


def _term_size(terms: Terms) -> float:
    """Root mean square, over rows that carry signal, of the length of a row's vector of terms; what cancellation is
    measured by."""
    flat = terms.components.ravel()
    return float(np.sqrt(flat @ flat / max(terms.has_signal.sum(), 1)))
