"""Computation of one advantage per sequence from reward vectors: the public function and its result.

    advantages = compute_advantages({"correct": [1, 0, 0, 1], "short": [0, 1, None, 1]}, group_ids=[7, 7, 7, 7])

The default path of GDPO (arXiv 2601.05242, equations 4 to 7) is short if no reward is missing and no sequence failed::

    terms = np.zeros_like(rewards)                        # rewards: float64 [sequences, components]
    signal = np.zeros(len(rewards), dtype=bool)
    for group in np.unique(group_ids):
        rows = group_ids == group                         # the samples of one prompt
        varies = np.ptp(rewards[rows], axis=0) > 0        # a constant reward ranks no sample
        signal[rows] = (varies & (weights != 0)).any()
        centred = rewards[rows] - rewards[rows].mean(axis=0)
        deviation = rewards[rows].std(axis=0, ddof=1) + 1e-6
        terms[rows] = np.where(varies, centred / deviation, 0)
    advantages = terms @ weights
    trained = advantages[signal]
    advantages[signal] = (trained - trained.mean()) / (trained.std(ddof=1) + 1e-6)

The rest of this module and ``estimators`` handle missing rewards, failed sequences, rounding, published variants and a
KL penalty. The driver computes all advantages of the global batch at once, in float64 NumPy on the CPU, because batch
statistics per rank or per micro-batch would differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from gdpo_nemo.algorithms.diagnostics import Diagnostics, diagnose
from gdpo_nemo.algorithms.estimators import Terms
from gdpo_nemo.algorithms.noise import check_table
from gdpo_nemo.algorithms.selection import DEFAULT_EPSILON, run_estimator, select
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import RewardTable, build_table


@dataclass(frozen=True)
class BatchScale:
    """Statistics of a batch norm, in the table's row order."""

    rows: np.ndarray
    """bool [sequences], rows that the statistics include."""
    unit: np.ndarray
    """float64 [included rows], weight of each row in the statistics."""
    divisor: float
    """Divisor of the advantages; infinite if all advantages are set to 0."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch, in the caller's row order."""

    values: torch.Tensor
    """float64 [sequences]. Exactly 0 for rows without a training signal, without rewards or with `valid` False."""
    components: torch.Tensor
    """float64 [sequences, components]: weighted term of each component.

    `values` is the sum of these terms minus the KL in the reward, after the batch norm.
    """
    names: tuple[str, ...]
    """Component names, in column order. A family is one component."""
    has_signal: torch.Tensor
    """bool [sequences]. True for rows with a weighted component that is present and varies within the group."""
    _table: RewardTable = field(repr=False, compare=False)
    _epsilon: float | None = field(repr=False, compare=False, default=None)
    """Epsilon in the components' z-scores. None if the sum of the rewards was normalised instead."""
    _noise: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)
    """`Settings.noise`."""
    _scale: BatchScale | None = field(repr=False, compare=False, default=None)
    """Batch norm of the advantages. None if there is none."""
    _find_advantaged: Callable[[], np.ndarray] | None = field(repr=False, compare=False, default=None)
    """Function that returns `has_advantage`, in the table's row order."""
    _columns: np.ndarray | None = field(repr=False, compare=False, default=None)
    """float64 [columns, sequences]: weighted term of each column of the table, in the table's row order."""

    @cached_property
    def criteria(self) -> dict[str, np.ndarray]:
        """Weighted terms of each family's criteria: float64 [sequences, criteria]. `components` has their sum."""
        assert self._columns is not None
        put = self._table.groups.put
        return {name: put(self._columns[part]).T for name, part in self._table.families.items()}

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """Diagnostics of the rewards' effect on the advantages, computed on first access."""
        take = self._table.groups.take
        terms = np.ascontiguousarray(take(self.components.numpy()).T)
        has_signal, has_advantage = take(self.has_signal.numpy()), take(self.has_advantage)
        values = take(self.values.numpy())
        return diagnose(self._table, terms, has_signal, has_advantage, values, self._epsilon, noise=self._noise)

    @cached_property
    def has_advantage(self) -> np.ndarray:
        """Rows to which the estimator gives an advantage other than 0 before the batch norm: bool [sequences].

        The KL in the reward does not count, nor does a rest of rewards that cancel up to rounding and the effect of
        epsilon. In contrast to `has_signal`, rows whose terms cancel are not included.
        """
        assert self._find_advantaged is not None
        return self._table.groups.put(self._find_advantaged())

    @property
    def scale(self) -> float:
        """Factor of the batch norm, by which the terms in `components` are multiplied in `values`."""
        return 1.0 if self._scale is None else 1.0 / self._scale.divisor

    @cached_property
    def contributions(self) -> np.ndarray:
        """Contribution of each component to `values`, after the batch norm: float64 [sequences, components].

        `values` minus the sum of the contributions is the contribution of the KL in the reward.
        """
        terms = self.components.numpy()
        if self._scale is None:
            return terms
        groups = self._table.groups
        terms = groups.take(terms)
        rows, unit = self._scale.rows, self._scale.unit
        scaled = np.zeros_like(terms)
        if len(unit):
            scaled[rows] = (terms[rows] - np.average(terms[rows], axis=0, weights=unit)) / self._scale.divisor
        return np.ascontiguousarray(groups.put(np.ascontiguousarray(scaled.T)).T)


def compute_advantages(
    rewards: Any,
    group_ids: Any,
    *,
    weights: Any = None,
    valid: Any = None,
    lengths: Any = None,
    trajectory_ids: Any = None,
    kl: Any = None,
    kl_coefficient: float | None = None,
    criterion_weights: Mapping[str, Any] | None = None,
    family_scale: str = "sum",
    estimator: str | Callable[..., Terms] = "gdpo",
    preset: str | None = None,
    batch_norm: bool | None = None,
    epsilon: float = DEFAULT_EPSILON,
    **options: Any,
) -> Advantages:
    """Return the advantages of all sequences of a global batch.

    By default this is GDPO (arXiv 2601.05242): z-scores of each component within its group, their weighted sum, and
    standardisation of that sum over the sequences with a training signal. The paper standardises over all sequences,
    including groups without a signal, which enlarges the other advantages; `preset="paper"` reproduces this. Equal
    inputs give bitwise equal results. A different order of the rows changes only the last digits.

    With `kl`, the advantage becomes A - kl_coefficient x (kl - mean kl of the group). The KL term is applied before the
    batch norm and is not normalised itself, because normalisation would cancel the coefficient. The KL term does not
    count as a signal, so the rows of the batch statistics do not change. A row with KL but without a signal is divided
    by the same deviation as the other rows. With batch norm, the advantages of a batch without any signal stay 0.
    Estimators of the sum include the KL in the sum instead, as published.

    Args:
        rewards: [sequences, components], with NaN for a missing reward. A mapping of component name to [sequences] is
            also accepted, in which None also means a missing reward. A component in the mapping may be a family with
            the shape [sequences, criteria]: criterion j of a group is a component of this group only.
        group_ids: integers [sequences], equal for the samples of one prompt. Any order; groups may differ in size.
        weights: weight of each component, by name or in order; default 1. A component of weight 0 is only logged. A row
            whose rewards all have weight 0 is treated as a row without a reward.
        valid: bool [sequences]; False for failed rows, which are excluded from all statistics and get advantage 0.
        lengths: tokens per sequence [sequences]. Only needed by variants that weight by tokens.
        trajectory_ids: integers [sequences], for rows that are turns: the trajectory of each turn. A turn is then only
            compared with turns of the group's other trajectories. None: each row is a trajectory.
        kl: log-ratio of policy to reference, summed over each sequence [sequences]. NaN or None excludes a row.
        kl_coefficient: positive coefficient beta; required with `kl`.
        criterion_weights: weights of each family's criteria [sequences, criteria], equal within a group, and 0 for
            criteria that the group does not have. Default: 1 for criteria with a reward in the group. They multiply the
            weight of the family.
        family_scale: "sum" divides a group's criterion weights by the sum of their absolute values, so that a larger
            rubric does not have more influence. "none" leaves them unchanged.
        estimator: a name in `ESTIMATORS`, or a custom function (table, settings, **options) -> `Terms`.
        preset: a name in `PRESETS`, a published variant of gdpo.
        batch_norm: standardise over the batch; None: as in the publication of the estimator.
        epsilon: constant added to every standard deviation. With a preset, the default 1e-6 keeps the preset's value.
        options: fields of `Settings`, or options of the estimator.

    Raises:
        ValueError: if a name, row or component is invalid. The message contains the invalid value and the nearest
            existing name.
    """
    entry, settings, estimator_options = select(estimator, preset, batch_norm, epsilon, options)
    table = build_table(
        rewards, group_ids, weights, valid, lengths,
        trajectory_ids=trajectory_ids, criterion_weights=criterion_weights, family_scale=family_scale,
    )  # fmt: skip
    check_table(settings.noise, table)
    if settings.missing != "exclude":
        table = _fill_missing(table, settings)
    if kl is not None or kl_coefficient is not None:
        table = table.with_kl(kl, kl_coefficient)
    terms = run_estimator(entry, table, settings, estimator_options, estimator)
    compute = partial(entry.function, **estimator_options)
    values, scale = _scaled(table, terms, settings, compute)
    put = table.groups.put
    return Advantages(
        values=torch.from_numpy(put(values)),
        components=torch.from_numpy(put(table.by_component(terms.components)).T),
        names=table.components,
        has_signal=torch.from_numpy(put(terms.has_signal)),
        _table=table,
        _epsilon=None if terms.total is not None else settings.epsilon,
        _noise=settings.noise,
        _scale=scale,
        _find_advantaged=partial(_advantaged_rows, table, settings, compute),
        _columns=terms.components,
    )


def _fill_missing(table: RewardTable, settings: Settings) -> RewardTable:
    """Replace missing rewards of valid rows by 0, or raise ValueError, depending on `settings.missing`. Components of
    weight 0 stay missing."""
    component, row = np.nonzero(table.gaps)
    if settings.missing == "error" and len(row):
        names = ", ".join(sorted({table.names[k] for k in component}))
        raise ValueError(f"this variant does not support missing rewards; {len(row)} are missing, in {names}")
    return table.zero_filled()


def _penalty(table: RewardTable, terms: Terms) -> np.ndarray:
    """Return the KL penalty of each row that the terms do not include: [sequences]."""
    if table.kl_penalty is None or terms.holds_kl:
        return np.zeros_like(terms.values)
    return table.kl_penalty


def _scaled(
    table: RewardTable, terms: Terms, settings: Settings, compute: Callable[..., Terms]
) -> tuple[np.ndarray, BatchScale | None]:
    """Return the advantages, [sequences], and the scale of the batch norm, or None if it is not applied."""
    as_grpo = settings.single_reward == "grpo" and len(table.weighted) == 1
    if not settings.batch_norm or as_grpo:
        return terms.values - _penalty(table, terms), None
    if _cancelled(table, terms, settings, compute):
        return np.zeros_like(terms.values), BatchScale(*_counted(table, terms, settings), np.inf)
    return _batch_scale(table, terms, settings)


def _batch_scale(table: RewardTable, terms: Terms, settings: Settings) -> tuple[np.ndarray, BatchScale]:
    """Return (A - mean) / (std + epsilon) over the rows of the batch statistics: [sequences]. Other rows stay 0."""
    rows, unit = _counted(table, terms, settings)
    penalty = _penalty(table, terms)
    values = (terms.values - penalty)[rows]
    mean, variance = _moments(values, unit, settings.ddof)
    eps = settings.batch_eps
    divisor = np.sqrt(variance + eps) if settings.batch_epsilon_inside else np.sqrt(variance) + eps
    if not 0 < divisor < np.inf:
        raise ValueError(f"cannot standardise advantages up to {np.abs(values).max():.3g} with deviation {divisor:.3g}")
    # A row with KL but without a signal is divided but not shifted, because the mean is over rows with a signal.
    scaled: np.ndarray = 0.0 - penalty / divisor
    scaled[rows] = (values - mean) / divisor
    return scaled, BatchScale(rows, unit, float(divisor))


def _counted(table: RewardTable, terms: Terms, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the batch statistics, bool [sequences], and the weight of each of these rows: 1 or its number
    of tokens."""
    rows = terms.has_signal if settings.batch_rows == "live" else table.scored
    if settings.batch_rows == "kept" and terms.dropped is not None:
        rows = rows & ~terms.dropped
    if settings.batch_unit == "sequence":
        return rows, np.ones(int(rows.sum()))
    if table.lengths is None:
        raise ValueError("this variant weights by tokens and requires `lengths`")
    return rows, table.lengths[rows]


def _moments(values: np.ndarray, unit: np.ndarray, ddof: int) -> tuple[float, float]:
    """Return mean and variance of values with the weights ``unit``, computed in two passes."""
    mean = np.average(values, weights=unit)
    return mean, (unit * (values - mean) ** 2).sum() / (unit.sum() - ddof)


def _advantaged_rows(table: RewardTable, settings: Settings, compute: Callable[..., Terms]) -> np.ndarray:
    """Return `Advantages.has_advantage`, in the table's row order."""
    table = replace(table, kl_penalty=None)
    with np.errstate(all="ignore"):
        terms = compute(table, settings)
        rows = _counted(table, terms, settings)[0] if settings.batch_norm else np.ones(len(table.valid), bool)
        if terms.batch_baseline:
            return rows
        values, sizes = np.abs(terms.values), np.abs(terms.components).sum(axis=0)
        small = (values > 0) & (values <= _SMALL * sizes)
        # Estimators that normalise the sum have no separate terms in which epsilon could leave a remainder.
        if terms.total is None and small.any():
            sharp = compute(table, _without_epsilon(settings))
            values[small] = np.abs(sharp.values[small])
            sizes[small] = np.abs(sharp.components).sum(axis=0)[small]
    return np.asarray(rows & (values > Settings.residue * sizes))


def _without_epsilon(settings: Settings) -> Settings:
    """Return the settings with a negligible epsilon, to compute what remains without the effect of epsilon."""
    return replace(settings, epsilon=settings.epsilon * _LESS_EPSILON, exact_zero=True)


_SMALL = 0.1
"""Cancellation is checked only if the deviation of the advantages is below this fraction of the size of their terms."""
_LESS_EPSILON = 1e-9
"""Factor that makes epsilon negligible. The factor is not 0, because a custom estimator may divide by epsilon."""


def _cancelled(table: RewardTable, terms: Terms, settings: Settings, recompute: Callable[..., Terms]) -> bool:
    """Return True if the batch has nothing to standardise.

    A batch has nothing to standardise if it has no rows or no deviation, or if the rewards cancel up to the effect of
    epsilon. Epsilon is added to unequal deviations, so opposed rewards of different scale do not cancel exactly. The
    terms are computed again with a negligible epsilon, to see whether the remainder exceeds the effect of epsilon.
    """
    rows, unit = _counted(table, terms, settings)
    if unit.sum() <= settings.ddof:
        return True
    variance = _moments(terms.values[rows], unit, settings.ddof)[1]
    if variance == 0:
        return True
    # Estimators that normalise the sum have no separate terms in which epsilon could leave a remainder.
    if terms.total is not None or not settings.residue or not np.sqrt(variance) <= _SMALL * _term_size(terms) < np.inf:
        return False
    with np.errstate(all="ignore"):
        sharp = recompute(table, _without_epsilon(settings))
    variance = _moments(sharp.values[rows], unit, settings.ddof)[1]
    return bool(np.sqrt(variance) <= settings.residue * _term_size(sharp))


def _term_size(terms: Terms) -> float:
    """Return the size of the terms, which is the scale for detecting cancellation: the root mean square of the norms of
    all rows with a training signal."""
    flat = terms.components.ravel()
    return float(np.sqrt(flat @ flat / max(terms.has_signal.sum(), 1)))
