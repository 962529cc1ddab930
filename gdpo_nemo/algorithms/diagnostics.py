"""What a batch's rewards did to its advantages, component by component.

The questions are those that a curve of the total reward hides: which component is dead in how many groups, how much of
the advantage each one really decides, where two of them pull in opposite directions, and how many differences summing
would have erased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.estimators import grpo
from gdpo_nemo.algorithms.groups import moments
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import RewardTable, build_table

SHRUNK_SHARE = 0.1
"""A component is called shrunk when epsilon takes more than this share of its z-scores."""
IGNORED_SHARE = 0.1
"""A component is called ignored when its effective weight is below this share of its nominal one."""


@dataclass(frozen=True)
class GroupSignal:
    """Which groups can teach what; the input of dynamic sampling."""

    ids: np.ndarray
    """int64 [groups], ascending."""
    dead: np.ndarray
    """bool [groups, components]; constant, or fewer than two present values."""
    weights: np.ndarray
    """float64 [components]"""

    @property
    def alive(self) -> np.ndarray:
        """bool [groups]; at least one weighted component varies. Ties of the *sum* do not kill a group."""
        return np.asarray(~self.dead[:, self.weights != 0].all(axis=1))


def groups_with_signal(rewards: Any, group_ids: Any, weights: Any = None, valid: Any = None) -> GroupSignal:
    """Dead components of every group, from the arguments of `compute_advantages`."""
    table = build_table(rewards, group_ids, weights, valid)
    return GroupSignal(table.groups.ids, dead_groups(table), table.weights)


def dead_groups(table: RewardTable) -> np.ndarray:
    """bool [groups, components]; where a component is constant or has fewer than two values."""
    columns = zip(table.columns, table.present, strict=True)
    return np.stack([moments(table.groups, column, present).constant for column, present in columns], axis=1)


def count_distinct(values: np.ndarray) -> int:
    """Number of different values, counting as equal what differs by less than 1e-5 of the largest.

    The epsilon of the normalisation sets values apart by 1e-6 that the formula without it would make equal.
    """
    if not len(values):
        return 0
    ordered = np.sort(values)
    return 1 + int((np.diff(ordered) > 1e-5 * np.abs(ordered[[0, -1]]).max()).sum())


METRICS = {
    "reward/NAME/mean": ("reward", "Component NAME, mean over the batch's samples that have it"),
    "reward/NAME/std": ("reward", "Component NAME, sample standard deviation over the batch"),
    "reward/NAME/dead_groups": (
        "share",
        "Groups in which component NAME is constant and so trains nothing",
        {
            "label": "dead groups",
            "max": 0.999,
            "at": "end",
            "required": True,
            "why": "constant in every group; not held against a component that stands still at the best it has been",
        },
    ),
    "reward/NAME/missing": ("share", "Samples to which component NAME does not apply"),
    "reward/NAME/effective_weight": (
        "share",
        "What component NAME makes of the advantages' variance, before the batch norm; negative: it is outvoted",
    ),
    "reward/NAME/saturation": ("share", "Where the mean of component NAME lies between the batch's worst and best"),
    "reward/NAME/conflicts": (
        "share",
        "Samples that component NAME and another pull in opposite directions, of those where both act; the worst pair",
    ),
    "advantage/std": ("", "Standard deviation of the advantages over the samples that carry signal"),
    "advantage/dead_groups": (
        "share",
        "Groups in which every weighted component is constant",
        {
            "max": 0.9,
            "advisory": True,
            "why": "most prompts train nothing: too easy, too hard, or a temperature too low",
            "remedy": "other prompts, gdpo.dynamic_sampling, more samples for each prompt",
        },
    ),
    "advantage/distinct": ("", "Different advantages in the batch", {"label": "distinct advantages"}),
    "advantage/distinct_if_summed": ("", "Different advantages if the weighted rewards had been summed first"),
}


@dataclass(frozen=True)
class Diagnostics:
    """Measurements of one batch. Arrays are float64 in the order of `names`, NaN where nothing can be measured."""

    names: tuple[str, ...]
    mean: np.ndarray
    """[components], over present rewards."""
    std: np.ndarray
    """[components], sample standard deviation over present rewards."""
    missing: np.ndarray
    """[components], share of valid rows without this reward."""
    saturation: np.ndarray
    """[components], (mean - smallest) / (largest - smallest) of the batch."""
    dead_groups: np.ndarray
    """[components], share of the groups that have this reward in which it is constant."""
    all_dead: float
    """Share of groups in which every weighted component is constant."""
    nominal_weight: np.ndarray
    """[components], |w_k| / sum |w|."""
    effective_weight: np.ndarray
    """[components], cov(term_k, A) / var(A) before the batch norm: shares of the advantage's variance, sum 1. Negative
    for a reward that is outvoted."""
    sign_conflicts: np.ndarray
    """[components, components], share of rows with both terms non-zero whose signs differ."""
    correlation: np.ndarray
    """[components, components], of the terms, over rows with both non-zero."""
    shrinkage: np.ndarray
    """[components], epsilon / (std + epsilon) with the median deviation of the groups in which it varies: the share of
    its z-scores that epsilon takes. NaN where z-scores are not of components."""
    advantage_std: float
    """Standard deviation of the advantages over the rows that carry signal."""
    distinct: int
    """Different advantages among the valid rows of the batch."""
    distinct_if_summed: int
    """The same if the weighted rewards had been summed first (GRPO)."""

    def metrics(self) -> dict[str, float]:
        """The metric row's keys `reward/<component>/...` and `advantage/...`; what was not measured is absent."""
        row = {"advantage/std": self.advantage_std, "advantage/dead_groups": self.all_dead}
        row["advantage/distinct"] = float(self.distinct)
        row["advantage/distinct_if_summed"] = float(self.distinct_if_summed)
        for k, name in enumerate(self.names):
            for key in ("mean", "std", "dead_groups", "missing", "effective_weight", "saturation"):
                row[f"reward/{name}/{key}"] = float(getattr(self, key)[k])
            if self.missing[k] == 1:
                del row[f"reward/{name}/effective_weight"]
            others = np.delete(self.sign_conflicts[k], k)
            row[f"reward/{name}/conflicts"] = float(np.max(others, where=np.isfinite(others), initial=-np.inf))
        return {key: value for key, value in row.items() if np.isfinite(value)}

    def describe(self) -> str:
        """The diagnosis as plain text: a line per component, a line per pair that disagrees, the alerts."""
        head = ("component", "weight", "effective", "dead groups", "missing", "saturation", "mean", "std")
        arrays = (self.nominal_weight, self.effective_weight, self.dead_groups, self.missing, self.saturation)
        lines = [f"{head[0]:<20}" + "".join(f"{title:>12}" for title in head[1:])]
        for k, name in enumerate(self.names):
            shares = "".join(f"{array[k]:>12.1%}" for array in arrays)
            lines.append(f"{name:<20}{shares}{self.mean[k]:>12.4g}{self.std[k]:>12.4g}")
        lines.append(
            f"{self.distinct} distinct advantages, {self.distinct_if_summed} if the rewards were summed; "
            f"{self.all_dead:.1%} of the groups carry no signal"
        )
        return "\n".join([*lines, *self._disagreements(), *self.alerts]).replace("nan%", "   -").replace("nan", "  -")

    def _disagreements(self) -> list[str]:
        """Pairs of components whose terms oppose each other in a third of the rows or more."""
        pairs = zip(*np.nonzero(np.triu(np.nan_to_num(self.sign_conflicts) >= 1 / 3, 1)), strict=True)
        return [
            f"{self.names[k]!r} and {self.names[m]!r} pull in opposite directions in {self.sign_conflicts[k, m]:.0%}"
            f" of the rows where both act (correlation {self.correlation[k, m]:+.2f})"
            for k, m in pairs
        ]

    @property
    def alerts(self) -> list[str]:
        """One sentence per component that trains nothing or is being ignored."""
        return [line for k in np.flatnonzero(self.nominal_weight) if (line := self._alert(int(k)))]

    def _alert(self, k: int) -> str | None:
        name = self.names[k]
        share = self.effective_weight[k]
        nominal = self.nominal_weight[k]
        if self.missing[k] == 1:
            return f"component {name!r} is missing in every row: it trains nothing"
        if self.dead_groups[k] == 1:
            return f"component {name!r} is constant in every group (mean {self.mean[k]:.4g}): it trains nothing"
        if self.shrinkage[k] > SHRUNK_SHARE:
            return (
                f"component {name!r} varies little more than epsilon (which takes {self.shrinkage[k]:.0%} of its "
                "z-scores): scale the reward up, or lower epsilon"
            )
        if share < 0:
            return f"component {name!r} is outvoted: the advantage moves against it (weight {nominal:.0%})"
        if share < IGNORED_SHARE * nominal:
            return f"component {name!r} is being ignored: {share:.1%} of the advantage variance at weight {nominal:.0%}"
        return None


def diagnose(
    table: RewardTable, terms: np.ndarray, has_signal: np.ndarray, values: np.ndarray, epsilon: float | None = None
) -> Diagnostics:
    """Measure one batch.

    Args:
        terms: float64 [components, sequences], weighted terms in the table's row order.
        has_signal: bool [sequences], rows that carry signal.
        values: float64 [sequences], the advantages.
        epsilon: what was added to the deviations of components within their groups; None where nothing was.
    """
    present = table.present
    count = present.sum(axis=1)
    dead = dead_groups(table)
    having = np.stack([table.groups.sum(row) > 0 for row in present], axis=1)
    inhabited = table.groups.sum(table.valid) > 0
    alive = ~dead[:, table.weights != 0].all(axis=1)
    mean, std, saturation = column_statistics(table)
    correlation, conflicts = _pairs(terms)
    summed = grpo(table, Settings(batch_norm=False)).values
    with np.errstate(divide="ignore", invalid="ignore"):
        return Diagnostics(
            names=table.names,
            mean=mean,
            std=std,
            missing=1.0 - count / table.valid.sum(),
            saturation=saturation,
            dead_groups=(dead & having).sum(axis=0) / having.sum(axis=0),
            all_dead=float(np.float64((~alive & inhabited).sum()) / inhabited.sum()),
            nominal_weight=np.abs(table.weights) / np.abs(table.weights).sum(),
            effective_weight=_variance_shares(terms[:, has_signal]),
            sign_conflicts=conflicts,
            correlation=correlation,
            shrinkage=_shrinkage(table, dead, epsilon),
            advantage_std=float(values[has_signal].std(ddof=1)) if has_signal.sum() > 1 else float("nan"),
            distinct=count_distinct(values[table.valid]),
            distinct_if_summed=count_distinct(summed[table.valid]),
        )


def column_statistics(table: RewardTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, sample standard deviation and saturation of every component's present rewards; NaN where undefined."""
    result = np.full((3, len(table.names)), np.nan)
    for k, (column, present) in enumerate(zip(table.columns, table.present, strict=True)):
        values = column if present.all() else column[present]
        if not len(values):
            continue
        low = values.min()
        high = values.max()
        result[0, k] = values.mean()
        if len(values) > 1:
            result[1, k] = values.std(ddof=1) if high > low else 0.0
        if high > low:
            result[2, k] = (result[0, k] - low) / (high - low)
    return result[0], result[1], result[2]


def _shrinkage(table: RewardTable, dead: np.ndarray, epsilon: float | None) -> np.ndarray:
    """Share of each weighted component's z-scores that epsilon takes; NaN where it varies in no group."""
    share = np.full(len(table.names), np.nan)
    for k in np.flatnonzero(table.weights) if epsilon is not None else ():
        if not dead[:, k].all():
            std = np.median(moments(table.groups, table.columns[k], table.present[k]).std[~dead[:, k]])
            share[k] = epsilon / (std + epsilon)
    return share


def _variance_shares(terms: np.ndarray) -> np.ndarray:
    """cov(term_k, sum of terms) / var(sum of terms); NaN when the sum does not vary."""
    if terms.shape[1] < 2:
        return np.full(len(terms), np.nan)
    centred = terms - terms.mean(axis=1, keepdims=True)
    total = centred.sum(axis=0)
    variance = total @ total
    scale = np.abs(centred).sum(axis=0)
    if variance <= 1e-12 * (scale @ scale):
        return np.full(len(terms), np.nan)
    return np.asarray(centred @ total / variance)


def _pairs(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Correlation and share of opposite signs of every pair of components, [components, components] each.

    Terms have mean 0 in each group, so the correlation needs no centring; matrix products keep it cheap.
    """
    signs = np.sign(terms).astype(np.float32)
    active = np.abs(signs)
    both = (active @ active.T).astype(np.float64)
    agreement = (signs @ signs.T).astype(np.float64)
    power = (terms * terms) @ active.T.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return terms @ terms.T / np.sqrt(power * power.T), (both - agreement) / (2 * both)
