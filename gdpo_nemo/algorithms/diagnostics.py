"""Diagnostics of a batch: the effect of each reward component on the advantages. Statistics of held-out prompts: pass@k
and confidence intervals."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.estimators import grpo
from gdpo_nemo.algorithms.noise import pooled_reliability
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import CONSTANT_RANGE, RewardTable, moments

SHRUNK_SHARE = 0.1
"""A component is reported as shrunk if epsilon reduces its z-scores by more than this fraction."""
OPPOSED_ERRORS = 3.0
"""Two components are reported as opposed if opposite signs are more frequent than for independent components by more
than this number of standard errors. Unrelated components have opposite signs in about half of the samples."""
IGNORED_SHARE = 0.1
"""A component is reported as ignored if its effective weight is below this fraction of its nominal weight."""
RELIABLE_SHARE = 0.1
"""A component is reported as mostly noise if its reliability is below this fraction."""


def dead_groups(table: RewardTable) -> np.ndarray:
    """Return a bool array [groups, components], True if a component is constant or has fewer than two values in a
    group."""
    columns = zip(table.columns, table.present, strict=True)
    return np.stack([moments(table.groups, column, present).constant for column, present in columns], axis=1)


def count_distinct(values: np.ndarray) -> int:
    """Return the number of distinct values. Two values are considered equal if they differ by less than 1e-5 of the
    largest value.

    Without this tolerance, values that are equal in the formula would be considered different, because the epsilon of
    the normalisation separates them by about 1e-6.
    """
    if not len(values):
        return 0
    ordered = np.sort(values)
    return 1 + int((np.diff(ordered) > 1e-5 * np.abs(ordered[[0, -1]]).max()).sum())


METRICS = {
    "reward/NAME/mean": ("reward", "Mean of component NAME over the samples of the batch that have this reward"),
    "reward/NAME/met": (
        "share",
        "Rewards of family NAME that are 1, or 0 for criteria with a negative weight: criteria that are met",
        {"label": "met"},
    ),
    "reward/NAME/std": ("reward", "Sample standard deviation of component NAME over the batch"),
    "reward/NAME/dead_groups": (
        "share",
        "Groups in which component NAME is constant (range at most 1e-9 x max(1, |reward|)): no training signal",
        {
            "label": "dead groups",
            "max": 0.999,
            "at": "end",
            "required": True,
            "why": "constant in every group; not checked for a component that stays at its best value",
        },
    ),
    "reward/NAME/missing": ("share", "Samples to which component NAME does not apply"),
    "reward/NAME/weight": (
        "",
        "Weight that multiplied component NAME in this step; 0 for a component that is not in gdpo.rewards",
    ),
    "reward/NAME/effective_weight": (
        "share",
        "Contribution of component NAME to the advantages' variance, before the batch norm; negative: outvoted",
    ),
    "reward/NAME/saturation": (
        "share",
        "Position of component NAME's mean between the smallest (0) and largest (1) value of the batch",
    ),
    "reward/NAME/reliability": (
        "share",
        "Share of component NAME's variance within groups, over the batch, that is not measurement error (gdpo.noise)",
    ),
    "reward/NAME/conflicts": (
        "share",
        "Samples on which component NAME and another have opposite signs, among those with both nonzero; the worst "
        "pair",
    ),
    "advantage/std": ("", "Standard deviation of the advantages over the samples with a training signal"),
    "advantage/dead_groups": (
        "share",
        "Groups in which the rewards give no sample an advantage (without the KL in the reward)",
        {
            "max": 0.9,
            "advisory": True,
            "why": "most prompts give no training signal: they are too easy or too hard, or the temperature is too low",
            "remedy": "other prompts, gdpo.dynamic_sampling, more samples per prompt",
        },
    ),
    "advantage/distinct": ("", "Number of distinct advantages in the batch", {"label": "distinct advantages"}),
    "advantage/distinct_if_summed": ("", "Number of distinct advantages if the weighted rewards were summed first"),
}


_BY_COMPONENT = (
    "mean", "std", "met", "dead_groups", "missing", "weight", "effective_weight", "saturation", "reliability",
)  # fmt: skip
"""Fields of `Diagnostics` that are metrics of a component."""


@dataclass(frozen=True)
class Diagnostics:
    """Diagnostics of one batch. Arrays are float64, with components in the order of `names`, and NaN if undefined."""

    names: tuple[str, ...]
    mean: np.ndarray
    """[components], mean of the present rewards."""
    std: np.ndarray
    """[components], sample standard deviation of the present rewards."""
    missing: np.ndarray
    """[components], fraction of valid rows without this reward."""
    saturation: np.ndarray
    """[components], (mean - smallest) / (largest - smallest) reward in the batch."""
    low: np.ndarray
    """[components], smallest reward in the batch."""
    high: np.ndarray
    """[components], largest reward in the batch."""
    met: np.ndarray
    """[components], fraction of a family's rewards that are 1, or 0 for criteria with a negative weight. NaN for other
    components."""
    dead_groups: np.ndarray
    """[components], fraction of the groups with this reward in which it is constant."""
    too_small: np.ndarray
    """[components], 1 if the component differs within a group by more than rounding, but by so little that it counts as
    constant (`table.CONSTANT_RANGE`)."""
    all_dead: float
    """Fraction of groups in which no row has an advantage (`Advantages.has_advantage`)."""
    weight: np.ndarray
    """[components], weights w_k of the estimator."""
    effective_weight: np.ndarray
    """[components], cov(term_k, A) / var(A) before the batch norm.

    This is the component's fraction of the advantage variance. The fractions sum to 1. A fraction is negative if the
    reward is outvoted.
    """
    sign_conflicts: np.ndarray
    """[components, components], fraction of rows in which the terms have opposite signs, among rows with both terms
    non-zero."""
    opposition: np.ndarray
    """[components, components], sign_conflicts minus the expected fraction for independent signs with the same
    frequencies, in standard errors."""
    correlation: np.ndarray
    """[components, components], correlation of the terms over rows with both terms non-zero."""
    shrinkage: np.ndarray
    """[components], epsilon / (std + epsilon), the fraction by which epsilon reduces the z-scores.

    std is the median deviation over the groups in which the component varies. NaN if the estimator computes no z-scores
    of components.
    """
    reliability: np.ndarray
    """[components], share of the variance within groups that is not measurement error (`noise.pooled_reliability`)."""
    advantage_std: float
    """Standard deviation of the advantages over rows with a training signal."""
    distinct: int
    """Number of distinct advantages among the valid rows."""
    distinct_if_summed: int
    """Number of distinct advantages if the weighted rewards were summed before normalisation (GRPO)."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics `reward/<component>/...` and `advantage/...`. Undefined values are left out."""
        row = {"advantage/std": self.advantage_std, "advantage/dead_groups": self.all_dead}
        row["advantage/distinct"] = float(self.distinct)
        row["advantage/distinct_if_summed"] = float(self.distinct_if_summed)
        for k, name in enumerate(self.names):
            for key in _BY_COMPONENT:
                row[f"reward/{name}/{key}"] = float(getattr(self, key)[k])
            if self.missing[k] == 1:
                del row[f"reward/{name}/effective_weight"]
            others = np.delete(self.sign_conflicts[k], k)
            row[f"reward/{name}/conflicts"] = float(np.max(others, where=np.isfinite(others), initial=-np.inf))
        return {key: value for key, value in row.items() if np.isfinite(value)}

    def describe(self) -> str:
        """Return the diagnostics as text: one line per component, one per pair of conflicting components, and the
        alerts."""
        head = ("component", "weight", "effective", "dead groups", "missing", "saturation", "mean", "std")
        arrays = (self.nominal_weight, self.effective_weight, self.dead_groups, self.missing, self.saturation)
        lines = [f"{head[0]:<20}" + "".join(f"{title:>12}" for title in head[1:])]
        for k, name in enumerate(self.names):
            shares = "".join(f"{array[k]:>12.1%}" for array in arrays)
            lines.append(f"{name:<20}{shares}{self.mean[k]:>12.4g}{self.std[k]:>12.4g}")
        lines.append(
            f"{self.distinct} distinct advantages, {self.distinct_if_summed} if the rewards were "
            f"summed; {self.all_dead:.1%} of the groups have no training signal"
        )
        return "\n".join([*lines, *self._disagreements(), *self.alerts]).replace("nan%", "   -").replace("nan", "  -")

    def _disagreements(self) -> list[str]:
        """Return a sentence for each pair of components whose terms have opposite signs more often than independent
        terms."""
        pairs = zip(*np.nonzero(np.triu(np.nan_to_num(self.opposition) > OPPOSED_ERRORS, 1)), strict=True)
        return [
            f"{self.names[k]!r} and {self.names[m]!r} pull in opposite directions in {self.sign_conflicts[k, m]:.0%}"
            f" of the samples in which both terms are non-zero (correlation {self.correlation[k, m]:+.2f})"
            for k, m in pairs
        ]

    @property
    def nominal_weight(self) -> np.ndarray:
        """[components], |w_k| / sum |w|."""
        return np.asarray(np.abs(self.weight) / np.abs(self.weight).sum())

    @property
    def alerts(self) -> list[str]:
        """One sentence for each component that has no training signal, is shrunk, outvoted or ignored."""
        return [line for k in np.flatnonzero(self.nominal_weight) if (line := self._alert(int(k)))]

    def _alert(self, k: int) -> str | None:
        name = self.names[k]
        share = self.effective_weight[k]
        nominal = self.nominal_weight[k]
        if self.missing[k] == 1:
            return f"component {name!r} is missing in every row, so it has no training signal"
        if self.dead_groups[k] == 1 and self.too_small[k]:
            return (
                f"component {name!r} differs within groups by at most {CONSTANT_RANGE:g} x max(1, |reward|), which "
                f"counts as constant, so it has no training signal; scale the reward up, or remove its offset"
            )
        if self.dead_groups[k] == 1:
            return (
                f"component {name!r} is constant in every group (mean {self.mean[k]:.4g}), so it has no training signal"
            )
        if self.shrinkage[k] > SHRUNK_SHARE:
            return (
                f"component {name!r} varies little more than epsilon, which shrinks its z-scores "
                f"by {self.shrinkage[k]:.0%}; scale the reward up, or lower epsilon"
            )
        if self.reliability[k] < RELIABLE_SHARE:
            return (
                f"component {name!r} is mostly noise (gdpo.noise): {self.reliability[k]:.0%} of its variance within "
                f"groups is not measurement error"
            )
        if share < 0:
            return f"component {name!r} is outvoted: the advantage moves against it (weight {nominal:.0%})"
        if share < IGNORED_SHARE * nominal:
            return f"component {name!r} is being ignored: {share:.1%} of the advantage variance at weight {nominal:.0%}"
        return None


def diagnose(
    table: RewardTable,
    terms: np.ndarray,
    has_signal: np.ndarray,
    has_advantage: np.ndarray,
    values: np.ndarray,
    epsilon: float | None = None,
    *,
    noise: Mapping[str, Any] | None = None,
) -> Diagnostics:
    """Compute the diagnostics of one batch.

    Args:
        terms: float64 [components, sequences], weighted terms in the table's row order. A family has one term.
        has_signal: bool [sequences], rows with a training signal.
        has_advantage: bool [sequences], see `Advantages.has_advantage`.
        values: float64 [sequences], advantages.
        epsilon: constant added to the deviations of components within their groups; None if no epsilon was added.
        noise: measurement error of components (`Settings.noise`).
    """
    dead = dead_groups(table)
    having = np.stack([table.groups.sum(row) > 0 for row in table.present], axis=1)
    count = table.by_component
    inhabited = table.groups.sum(table.valid) > 0
    alive = table.groups.sum(has_advantage) > 0
    correlation, conflicts, opposition = _pairs(terms)
    summed = grpo(table, Settings(batch_norm=False)).values
    with np.errstate(divide="ignore", invalid="ignore"):
        return Diagnostics(
            names=table.components,
            **column_statistics(table.by_score()),
            missing=_missing(table),
            met=_met(table),
            dead_groups=count((dead & having).sum(axis=0)) / count(having.sum(axis=0)),
            too_small=count(_too_small(table, dead)) > 0,
            all_dead=float(np.float64((~alive & inhabited).sum()) / inhabited.sum()),
            weight=table.component_weights,
            effective_weight=_variance_shares(terms[:, has_signal]),
            sign_conflicts=conflicts,
            opposition=opposition,
            correlation=correlation,
            shrinkage=_shrinkage(table, dead, epsilon),
            reliability=pooled_reliability(table, noise or {}),
            advantage_std=float(values[has_signal].std(ddof=1)) if has_signal.sum() > 1 else float("nan"),
            distinct=count_distinct(values[table.valid]),
            distinct_if_summed=count_distinct(summed[table.valid]),
        )


def _missing(table: RewardTable) -> np.ndarray:
    """Return the fraction of valid rows without each component's reward: [components]. In a family, each criterion of a
    row counts."""
    expected = np.broadcast_to(table.valid, table.present.shape)
    if table.shares is not None:
        expected = expected & (table.shares != 0)
    count = table.by_component((table.present & expected).sum(axis=1))
    return np.asarray(1.0 - count / table.by_component(expected.sum(axis=1)))


def _met(table: RewardTable) -> np.ndarray:
    """Return `Diagnostics.met`."""
    met = np.full(len(table.components), np.nan)
    for k, name in enumerate(table.components):
        if name in table.families:
            assert table.shares is not None
            part = table.families[name]
            judged = table.present[part] & (table.shares[part] != 0)
            best = np.where(table.shares[part] > 0, 1.0, 0.0)
            met[k] = (np.abs(table.columns[part] - best) <= CONSTANT_RANGE)[judged].mean() if judged.any() else np.nan
    return met


def column_statistics(table: RewardTable) -> dict[str, Any]:
    """Return the fields of `Diagnostics` that describe each component's present rewards, each [components]. NaN if
    undefined."""
    names = ("mean", "std", "saturation", "low", "high")
    result = np.full((len(names), len(table.names)), np.nan)
    for k, (column, present) in enumerate(zip(table.columns, table.present, strict=True)):
        values = column if present.all() else column[present]
        if not len(values):
            continue
        low = values.min()
        high = values.max()
        result[3:, k] = low, high
        result[0, k] = values.mean()
        if len(values) > 1:
            result[1, k] = values.std(ddof=1) if high > low else 0.0
        if high > low:
            result[2, k] = (result[0, k] - low) / (high - low)
    return dict(zip(names, result))


def _shrinkage(table: RewardTable, dead: np.ndarray, epsilon: float | None) -> np.ndarray:
    """Return the fraction by which epsilon reduces the z-scores of each weighted component. NaN if the component varies
    in no group."""
    share = np.full(len(table.components), np.nan)
    if epsilon is None:
        return share
    stds: dict[str, list[np.ndarray]] = {}
    for k in table.weighted:
        if not dead[:, k].all():
            found = moments(table.groups, table.columns[k], table.present[k]).std[~dead[:, k]]
            stds.setdefault(table.names[k], []).append(found)
    for name, parts in stds.items():
        share[table.components.index(name)] = epsilon / (np.median(np.concatenate(parts)) + epsilon)
    return share


_ROUNDING = 1e-12
"""Differences of rewards below this fraction of the largest reward of the group are rounding noise."""


def _too_small(table: RewardTable, dead: np.ndarray) -> np.ndarray:
    """Return `Diagnostics.too_small`."""
    groups = table.groups
    found = np.zeros(len(table.names))
    for k, (column, present) in enumerate(zip(table.columns, table.present, strict=True)):
        low = groups.min(np.where(present, column, np.inf))
        high = groups.max(np.where(present, column, -np.inf))
        several = dead[:, k] & (groups.sum(present) > 1)
        largest = np.maximum(np.abs(low), np.abs(high))[several]
        found[k] = ((high - low)[several] > _ROUNDING * largest).any()
    return found


def _variance_shares(terms: np.ndarray) -> np.ndarray:
    """Return cov(term_k, sum of terms) / var(sum of terms): [components]. NaN if the sum does not vary."""
    if terms.shape[1] < 2:
        return np.full(len(terms), np.nan)
    centred = terms - terms.mean(axis=1, keepdims=True)
    total = centred.sum(axis=0)
    variance = total @ total
    scale = np.abs(centred).sum(axis=0)
    if variance <= 1e-12 * (scale @ scale):
        return np.full(len(terms), np.nan)
    return np.asarray(centred @ total / variance)


def _pairs(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return correlation, fraction of opposite signs, and its distance from independence in standard errors.

    All three are [components, components], over the rows with both terms non-zero. The distance is that of a binomial
    fraction whose expectation follows from the fraction of positive signs of each component in these rows.

    The terms are not centred, because their mean is 0 in each group. Matrix products keep the cost low.
    """
    signs = np.sign(terms).astype(np.float32)
    active = np.abs(signs)
    both = (active @ active.T).astype(np.float64)
    agreement = (signs @ signs.T).astype(np.float64)
    power = (terms * terms) @ active.T.astype(np.float64)
    positive = ((signs > 0).astype(np.float32) @ active.T).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        conflicts = (both - agreement) / (2 * both)
        share = positive / both
        expected = share * (1 - share.T) + (1 - share) * share.T
        opposition = (conflicts - expected) / np.sqrt(expected * (1 - expected) / both)
        return terms @ terms.T / np.sqrt(power * power.T), conflicts, opposition


def pass_at_k(values: Sequence[float], k: int, direction: int = 1) -> float:
    """Return the expected best of k values that are drawn from ``values`` without replacement.

    The best value is the largest, or the smallest if ``direction`` is -1 (`component_weights.directions`).

    For values 0 and 1 this is pass@k, 1 - C(n - c, k) / C(n, k) with c ones among n values (arXiv 2107.03374, equation
    1). The estimate is unbiased. In contrast, 1 - (1 - c / n)^k and the best of all n samples are biased.

    Raises:
        ValueError: if k is not between 1 and the number of values.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of values ({n}), got {k}")
    # The i-th worst value (from 0) is the best of C(i, k - 1) of the C(n, k) possible samples.
    ordered = sorted(values, reverse=direction < 0)
    return sum(value * (comb(i, k - 1) / comb(n, k)) for i, value in enumerate(ordered))


def present_values(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return the values of each prompt's samples, without prompts of which no sample has a value.

    Statistics of held-out prompts are means over these prompts. Prompts are independent samples and the samples of a
    prompt are not, so every prompt has the same weight, regardless of the number of its samples with a value.

    Args:
        rows: values of the samples of each prompt; None for a sample without a value.
    """
    present = []
    for row in rows:
        values = [value for value in row if value is not None]
        if values:
            present.append(values)
    return present


def mean_pass_at_k(rows: Sequence[Sequence[float | None]], k: int, direction: int = 1) -> float | None:
    """Return the mean of ``pass_at_k`` over the prompts with at least k values, or None if there are none.

    For k = 1, this is the mean over the prompts of the mean of their values. For ``rows`` see ``present_values``, and
    for ``direction`` see ``pass_at_k``.
    """
    found = [pass_at_k(values, k, direction) for values in present_values(rows) if len(values) >= k]
    return float(np.mean(found)) if found else None


@functools.cache
def student_factor(count: int) -> float:
    """Return the number of standard errors from a mean to the ends of its 95 % confidence interval.

    This is the quantile of Student's t distribution: 12.7 for two observations, 4.3 for three, and 2.0 from about 60
    on. The result is NaN for fewer than two observations.
    """
    import mpmath

    if count < 2:
        return float("nan")
    degrees = count - 1

    def excess(factor: float) -> float:
        within = degrees / (degrees + factor * factor)
        return float(mpmath.betainc(degrees / 2, 0.5, 0, within, regularized=True)) - 0.05

    return float(mpmath.findroot(excess, (1.9, 13.0), solver="anderson"))
