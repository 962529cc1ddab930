"""From reward vectors to one advantage per sequence: the public function and its result.

    advantages = compute_advantages({"correct": [1, 0, 0, 1], "short": [0, 1, None, 1]}, group_ids=[7, 7, 7, 7])

Everything is float64 NumPy on the CPU of the driver, over the whole global batch at once: batch statistics taken per
rank or per micro-batch would be others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable

import numpy as np
import torch

from gdpo_nemo.algorithms.diagnostics import Diagnostics, diagnose
from gdpo_nemo.algorithms.estimators import Terms
from gdpo_nemo.algorithms.selection import DEFAULT_EPSILON, check_terms, select
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import RewardTable, build_table


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch, in the caller's row order."""

    values: torch.Tensor
    """float64 [sequences]; exactly 0 for rows without signal, without rewards or outside `valid`."""
    components: torch.Tensor
    """float64 [sequences, components]; each component's weighted term. `values` is their sum, after the batch norm."""
    names: tuple[str, ...]
    """Component names, in column order."""
    live: torch.Tensor
    """bool [sequences]; rows with a weighted component that is present and varies within the group."""
    _table: RewardTable = field(repr=False, compare=False)

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """What the rewards did to the advantages; measured when first asked for."""
        take = self._table.groups.take
        terms = np.ascontiguousarray(take(self.components.numpy()).T)
        return diagnose(self._table, terms, take(self.live.numpy()), take(self.values.numpy()))


def compute_advantages(
    rewards: Any,
    group_ids: Any,
    *,
    weights: Any = None,
    valid: Any = None,
    lengths: Any = None,
    estimator: str | Callable[..., Terms] = "gdpo",
    preset: str | None = None,
    batch_norm: bool | None = None,
    epsilon: float = DEFAULT_EPSILON,
    **options: Any,
) -> Advantages:
    """Advantages of every sequence of a global batch.

    With the defaults this is GDPO (arXiv 2601.05242): z-scores of every component within its group, their weighted
    sum, and the standardisation of that sum over the sequences that carry signal. Same input, same bits; another row
    order gives the same advantages up to the last digits of float64.

    Args:
        rewards: [sequences, components] with NaN for "not applicable", or a mapping of name to [sequences] where None
            means the same.
        group_ids: integers [sequences], equal for the samples of one prompt, in any order; groups may differ in size.
        weights: per component, by name or in order; all 1 by default. Weight 0 keeps a component for the logs only.
        valid: bool [sequences]; rows that failed are False, count in no statistic and get 0.
        lengths: tokens per sequence [sequences]; only for variants that weight by tokens.
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
    terms = check_terms(entry.function(table, settings, **own), table, estimator)
    values = _batch_scale(table, terms, settings) if settings.batch_norm else terms.values
    put = table.groups.put
    return Advantages(
        values=torch.from_numpy(put(values)),
        components=torch.from_numpy(put(terms.components).T),
        names=table.names,
        live=torch.from_numpy(put(terms.live)),
        _table=table,
    )


def _fill_missing(table: RewardTable, settings: Settings) -> RewardTable:
    """Missing rewards of valid rows refused, or turned into 0."""
    component, row = np.nonzero(~table.present & table.valid)
    if settings.missing == "error" and len(row):
        names = ", ".join(sorted({table.names[k] for k in component}))
        raise ValueError(f"this variant takes no missing rewards; {len(row)} are missing, in {names}")
    return table.zero_filled()


def _batch_scale(table: RewardTable, terms: Terms, settings: Settings) -> np.ndarray:
    """(A - mean) / (std + epsilon) over the sequences (or tokens) of the batch that count; the others stay 0."""
    rows = terms.live if settings.batch_rows == "live" else table.scored
    values = terms.values
    scaled = np.zeros_like(values)
    unit = _units(table, settings)[rows]
    if unit.sum() <= settings.ddof:
        return scaled
    counted = values[rows]
    mean = np.average(counted, weights=unit)
    deviation = counted - mean
    variance = (unit * deviation**2).sum() / (unit.sum() - settings.ddof)
    if variance == 0 or np.sqrt(variance) <= settings.residue * _term_size(terms):
        return scaled
    eps = settings.batch_eps
    divisor = np.sqrt(variance + eps) if settings.batch_epsilon_inside else np.sqrt(variance) + eps
    scaled[rows] = deviation / divisor
    return scaled


def _term_size(terms: Terms) -> float:
    """Root mean square, over live rows, of the length of a row's vector of terms; what cancellation is measured by.

    0 where the sum was normalised as a whole: no term of its own can leave a residue there.
    """
    if terms.total is not None:
        return 0.0
    flat = terms.components.ravel()
    return float(np.sqrt(flat @ flat / max(terms.live.sum(), 1)))


def _units(table: RewardTable, settings: Settings) -> np.ndarray:
    """How often each row counts in the batch statistics: once, or once per token. [sequences]"""
    if settings.batch_unit == "sequence":
        return np.ones(len(table.valid))
    if table.lengths is None:
        raise ValueError("this variant weights by tokens and needs `lengths`")
    return table.lengths
