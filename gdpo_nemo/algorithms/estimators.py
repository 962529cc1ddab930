"""Advantage estimators. An estimator computes weighted terms per component from a reward table.

All estimators have the same steps: transform each component, apply the weights, mask rollouts, scale over the batch. An
estimator implements the first three steps, and `advantages.compute_advantages` implements the last step. Rows are in
the table's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gdpo_nemo.algorithms.noise import reliability
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import Groups, Moments, RewardTable, moments, nearest

ROUNDING = 1e-12
"""z-scores below this size are set to 0, because they are rounding noise of samples that equal the mean."""


@dataclass(frozen=True)
class Terms:
    """Result of an estimator. The advantage of a row, before the batch norm, is the sum of its terms."""

    components: np.ndarray
    """float64 [columns, sequences], weighted term of each column of the table."""
    has_signal: np.ndarray
    """bool [sequences], True for rows with a training signal. A row whose terms cancel to 0 still has a signal."""
    total: np.ndarray | None = None
    """float64 [sequences], sum of the terms, if the estimator can compute it more accurately than by summation."""
    holds_kl: bool = False
    """True if `total` includes the KL in the reward, as in estimators of the sum."""
    dropped: np.ndarray | None = None
    """bool [sequences], True for rows that the estimator drops. None: no rows."""
    batch_baseline: bool = False
    """True if the batch norm compares each row with the whole batch, so that a row with the sum 0 also has an
    advantage. False: rows are compared within their groups, and a row with the sum 0 has no advantage."""

    @property
    def values(self) -> np.ndarray:
        """float64 [sequences], sum of the terms."""
        return self.components.sum(axis=0) if self.total is None else self.total


def z_scores(table: RewardTable, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return z = (r - mean) / (std + epsilon) within each group, for each component separately (GDPO equation 4).

    Returns:
        z, float64 [columns, sequences], and bool [columns, sequences] that is True in groups that vary. Both arrays are
        0 for columns of weight 0.
    """
    z = np.zeros_like(table.columns)
    has_signal = np.zeros(table.columns.shape, dtype=bool)
    for k in table.weighted:
        z[k], has_signal[k] = _z_score(table, k, settings)
    if table.families:
        has_signal &= table.weights != 0
    return z, has_signal


def _z_score(table: RewardTable, k: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    groups = table.groups
    present = table.present[k]
    stats = moments(groups, table.columns[k], present, settings.ddof, settings.exact_zero)
    z = stats.deviation * _factor(groups, _scale(table.batch_values(k), stats, settings), stats, settings)
    # The z-score of a value that equals the group mean is rounding noise, whose sign depends on the order of the rows.
    z[np.abs(z) < ROUNDING] = 0.0
    has_signal = ~stats.constant
    if noise := settings.noise.get(table.names[k]):
        share = reliability(noise, groups, table.columns[k], stats)
        z *= groups.rows(share)
        has_signal &= share > 0
    if settings.singleton == "raw":
        single = groups.rows(stats.count == 1) & present
        z[single] = table.columns[k, single] / (1.0 + settings.epsilon)
        return z, present & (groups.rows(has_signal) | single)
    return z, present & groups.rows(has_signal)


def _scale(values: np.ndarray, stats: Moments, settings: Settings) -> np.ndarray:
    """Return the factor for the centred rewards of each group, depending on ``scale_rewards``: float64 [groups]."""
    if settings.scale_rewards == "none":
        return np.ones(len(stats.std))
    std = stats.std
    if settings.scale_rewards == "batch":
        std = np.full(len(stats.std), values.std(ddof=settings.ddof) if len(values) > settings.ddof else 0.0)
    return np.asarray(1.0 / np.maximum(std + settings.epsilon, 1e-300))


def _factor(groups: Groups, scale: np.ndarray, stats: Moments, settings: Settings) -> np.ndarray:
    """Return the factor that converts each row's deviation from the group mean to its score: float64 [sequences].

    Args:
        scale: result of `_scale`.
    """
    factor: np.ndarray = groups.rows(np.where(stats.constant, 0.0, scale))
    if settings.leave_one_out and groups.trajectories is None:
        return _leave_one_out(groups, factor, stats, settings)
    return factor


def _leave_one_out(groups: Groups, factor: np.ndarray, stats: Moments, settings: Settings) -> np.ndarray:
    """Return the factor of each row for (r - mean) / std, with mean and std of the group's other samples.

    The factor of the whole group is used if the other samples are constant, if there is only one other sample, or if
    ``scale_rewards`` is not group.
    """
    count = groups.rows(np.maximum(stats.count, 2)).astype(np.float64)
    centred: np.ndarray = count / (count - 1)  # converts r - mean of the group to r - mean of the other samples
    divided: np.ndarray = factor * centred
    if settings.scale_rewards != "group":
        return divided
    squares = groups.rows(groups.sum(stats.deviation**2))
    others = squares - stats.deviation**2 * count / (count - 1)
    # If this row is the group's only outlier, the difference is only rounding noise.
    others[others <= 1e-12 * squares] = 0.0
    std = np.sqrt(others / np.maximum(count - 1 - settings.ddof, 1))
    std[count - 1 <= settings.ddof] = 0.0
    score = centred if settings.equal_peers == "raw" else divided
    return np.where(std > 0, centred / np.maximum(std + settings.epsilon, 1e-300), score)


def weighted_terms(z: np.ndarray, has_signal: np.ndarray, weights: np.ndarray) -> Terms:
    """Multiply the scores of each component by its weight. Modifies ``z`` in place.

    Args:
        z: scores, float64 [components, sequences].
        has_signal: bool [components, sequences], True if the score comes from a group that varies.
        weights: float64 [components], or [components, sequences] as in a table with families.
    """
    z *= weights if weights.ndim == 2 else weights[:, None]
    return Terms(z, np.asarray(has_signal.any(axis=0)))


def gdpo(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k w_k z_k. Normalise each reward within its group, then apply the weights (arXiv 2601.05242, equations 4,
    5, 7)."""
    weighted = table.weighted
    if len(weighted) == 1 and settings.single_reward == "error":
        only = table.names[weighted[0]]
        raise ValueError(
            f"this variant of gdpo requires at least two components with a weight, got only {only!r}; use grpo"
        )
    if len(weighted) == 1 and settings.single_reward == "grpo":
        if settings.noise:
            raise ValueError("noise requires at least two components with a weight if single_reward is grpo")
        return grpo(table, settings)
    return weighted_terms(*z_scores(table, settings), table.weights)


def _summed(table: RewardTable, settings: Settings, scale: Callable[..., np.ndarray] | None = None) -> Terms:
    """Centre the weighted reward sum of each row within its group, and multiply it by a factor per group.

    The terms show the contribution of each component to the centred sum. The KL in the reward is included in the sum,
    as published, but in no term.

    Args:
        scale: function (stats, settings) that returns the factors, [groups]; None: according to ``scale_rewards`` and
            ``leave_one_out``.
    """
    groups = table.groups
    total, scored = table.total()
    if table.kl_penalty is not None:
        total = total - table.kl_penalty
    stats = moments(groups, total, scored, settings.ddof, settings.exact_zero)
    if scale is None:
        factor = _factor(groups, _scale(total[scored], stats, settings), stats, settings)
    else:
        factor = groups.rows(np.where(stats.constant, 0.0, scale(stats, settings)))
    shares = table.columns * table.row_weights
    for share in shares:
        share -= groups.baseline(share, scored)
        share *= factor
        share[~scored] = 0.0
    return Terms(shares, scored & groups.rows(~stats.constant), stats.deviation * factor, holds_kl=True)


def grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = (r - mean) / (std + epsilon) of the weighted reward sum r = sum_k w_k r_k (arXiv 2402.03300).

    With ``leave_one_out``, mean and std are those of the group's other samples, as in NeMo-RL's default.
    """
    return _summed(table, settings)


def dr_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = r - mean of the weighted reward sum, without division by the standard deviation (``dr_grpo``, arXiv
    2503.20783)."""
    return _summed(table, settings, lambda stats, s: np.ones(len(stats.count)))


def rloo(table: RewardTable, settings: Settings) -> Terms:
    """A = r - mean of the other samples' weighted reward sums = n / (n - 1) (r - mean) (RLOO, arXiv 2402.14740)."""
    if table.groups.trajectories is not None:  # the baseline excludes the row's trajectory
        return dr_grpo(table, settings)
    return _summed(table, settings, lambda stats, s: stats.count / np.maximum(stats.count - 1, 1))


def gpg(table: RewardTable, settings: Settings, f_norm: float = 1.0) -> Terms:
    """A = alpha (r - mean) / f_norm (GPG, arXiv 2504.02546).

    alpha = number of samples / number of samples in groups that vary. The factor alpha compensates for groups without a
    gradient, which are still included in the batch mean. Use it with the loss ``reinforce``.

    Raises:
        ValueError: if f_norm is not positive.
    """
    if not f_norm > 0:
        raise ValueError(f"f_norm must be positive, got {f_norm}")

    def scale(stats: Moments, settings: Settings) -> np.ndarray:
        live = stats.count[~stats.constant].sum()
        return np.full(len(stats.count), stats.count.sum() / max(live, 1) / f_norm)

    return _summed(table, settings, scale)


def reinforce_plus_plus(table: RewardTable, settings: Settings, minus_baseline: bool = True) -> Terms:
    """A = r - mean of the group (REINFORCE++-baseline), or A = r, standardised over the batch (arXiv 2501.03262).

    NeMo-RL and OpenRLHF compute the batch statistics over tokens and all scored samples: ``batch_unit: token`` and
    ``batch_rows: scored``. Without the baseline, every scored sample has a training signal.
    """
    if minus_baseline:
        return dr_grpo(table, settings)
    total, scored = table.total()
    if table.kl_penalty is not None:
        total = total - table.kl_penalty
    shares = table.columns * table.row_weights
    return Terms(shares, scored, np.where(scored, total, 0.0), holds_kl=True, batch_baseline=settings.batch_norm)


def mo_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k w_k z_k without batch norm, so that all rewards have the same variance (MO-GRPO, arXiv 2509.22047)."""
    return weighted_terms(*z_scores(table, settings), table.weights)


def gd2po(table: RewardTable, settings: Settings, mode: str = "hard", tau: float = 0.2) -> Terms:
    """GDPO without rollouts whose rewards conflict (GD2PO, arXiv 2606.16771).

    mode hard: drop a rollout if two of its terms w_k z_k have opposite signs. A family has one term, the sum of its
    criteria's terms. mode snr: drop it only if also |sum_k w_k
    z_k| < tau x sum_k |w_k z_k|. The remaining rollouts are multiplied by the fraction of their group that remains. The
    authors' code whitens over the tokens of all remaining rollouts, also of those in groups without a signal:
    `batch_rows="kept"` and `batch_unit="token"` with `lengths`.
    """
    if mode not in ("hard", "snr"):
        raise ValueError(f"mode must be 'hard' or 'snr', got {mode!r}")
    terms = gdpo(table, settings)
    components = table.by_component(terms.components)
    if table.families:  # The sign of criteria that cancel would depend on their order.
        sizes = table.by_component(np.abs(terms.components))
        components = np.where(np.abs(components) <= ROUNDING * sizes, 0.0, components)
    conflict = np.asarray((components > 0).any(axis=0) & (components < 0).any(axis=0))
    if mode == "snr":
        conflict &= np.abs(components.sum(axis=0)) < tau * np.abs(components).sum(axis=0)
    scored = table.scored
    groups = table.groups
    share = groups.sum(scored & ~conflict) / np.maximum(groups.sum(scored), 1)
    factor = np.where(conflict, 0.0, groups.rows(share))
    return Terms(terms.components * factor, terms.has_signal & ~conflict, dropped=np.asarray(conflict))


def dvao(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k v_k z_k with v_k = w_k std_k / sum_l |w_l| std_l per group (DVAO, arXiv 2605.25604).

    Each reward is weighted in proportion to its variation within the group. |A| is smaller than in GRPO.
    """
    z, has_signal = z_scores(table, settings)
    spread = table.group_weights * _group_stds(table, settings)
    share = spread / np.maximum(np.abs(spread).sum(axis=0), 1e-300)
    for row, part in zip(z, share, strict=True):
        row *= table.groups.rows(part)
    return Terms(z, np.asarray(has_signal.any(axis=0)))


def _group_stds(table: RewardTable, settings: Settings) -> np.ndarray:
    """Return the standard deviation of each weighted column in each group: [columns, groups]."""
    stds = np.zeros((len(table.names), len(table.groups)))
    for k in table.weighted:
        stds[k] = moments(table.groups, table.columns[k], table.present[k], settings.ddof).std
    return stds


def sa_mrpo(
    table: RewardTable,
    settings: Settings,
    gamma: float = 0.5,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Terms:
    """GDPO with the weights w_k (1 - s_k)^gamma (SA-MRPO, arXiv 2608.16072).

    s_k = (batch mean - min) / (max - min) is the saturation of a bounded reward. For a penalty, a component with a
    negative weight, it is (max - batch mean) / (max - min). With gamma 0 this is GDPO. The paper uses ddof 0. A family
    has one saturation, that of all its criteria.

    Args:
        bounds: (min, max) of each reward, by component name; default (0, 1).

    Raises:
        ValueError: if a reward is outside its bounds, or bounds are given for an unknown component.
    """
    limits = dict.fromkeys(table.names, (0.0, 1.0))
    for name, limit in (bounds or {}).items():
        if name not in limits:
            raise ValueError(f"bounds of unknown component {name!r}; {nearest(name, table.names)}")
        limits[name] = limit
    weights = table.weights.copy()
    for k in table.weighted:
        low, high = limits[table.names[k]]
        values = table.batch_values(k)
        if not len(values):
            continue
        if not low < high or values.min() < low or values.max() > high:
            raise ValueError(
                f"sa_mrpo: rewards of {table.names[k]!r} span [{values.min()}, {values.max()}], outside the bounds "
                f"({low}, {high}); set `bounds`"
            )
        left = _room(table, k, low, high)
        weights[k] *= (left / (high - low)) ** gamma
    return weighted_terms(*z_scores(table, settings), weights)


def _room(table: RewardTable, k: int, low: float, high: float) -> float:
    """Return the mean distance of a component's rewards from their best value."""
    values = table.batch_values(k)
    if table.families.get(table.names[k]) is None:
        best = high if table.row_weights[k, 0] > 0 else low
        return float(abs(best - values.mean()))
    part = table.families[table.names[k]]
    best = np.where(table.row_weights[part] > 0, high, low)[table.present[part]]
    return float(np.abs(best - values).mean())


def corr_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = (r - mean) / sqrt(sum_lm rho_lm + epsilon) (CorrGRPO, arXiv 2609.36820): GRPO with another scale.

    r is the weighted reward sum. rho_lm are the Pearson correlations between components within the group, without
    constant components. A component with a negative weight is negated. The sum of all rho_lm equals the variance of the
    sum of the standardised components. A missing reward has deviation 0.
    """
    groups = table.groups
    summed = np.zeros(table.columns.shape[1])
    for k in table.weighted:
        stats = moments(groups, table.columns[k], table.present[k])
        scale = np.sign(table.group_weights[k]) / np.where(stats.std > 0, stats.std, 1.0)
        summed += stats.deviation * groups.rows(scale)
    squares = groups.sum(summed**2)
    return _summed(
        table,
        settings,
        lambda stats, s: 1.0 / np.sqrt(squares / np.maximum(stats.count - 1, 1) + max(s.epsilon, 1e-300)),
    )


def dara(table: RewardTable, settings: Settings, cap: float = 5.0, asymmetric: bool = False) -> Terms:
    """GDPO with amplified rare signals (DARA, arXiv 2610.00574).

    w_k is multiplied by min(cap, sqrt(max_l pi_l / pi_k)). pi_k is the fraction of groups in which component k varies.
    For a family, it is the fraction of the criteria of all groups. With asymmetric, only positive terms are amplified.
    """
    z, has_signal = z_scores(table, settings)
    groups = table.groups
    density = np.array([(groups.sum(row) > 0).mean() for row in has_signal])
    for part in table.families.values():
        varies = np.add.reduceat(has_signal[part], groups.starts, axis=1) > 0
        density[part] = varies.sum() / max(np.count_nonzero(table.group_weights[part]), 1)
    factor = np.minimum(cap, np.sqrt(density.max() / np.where(density > 0, density, 1.0)))
    factor[density == 0] = 1.0
    terms = weighted_terms(z, has_signal, table.weights)
    amplified = terms.components * factor[:, None]
    if asymmetric:
        amplified = np.where(terms.components > 0, amplified, terms.components)
    return Terms(amplified, terms.has_signal)


@dataclass(frozen=True)
class Estimator:
    """Registry entry of an estimator."""

    function: Callable[..., Terms]
    batch_norm: bool
    """True if the published form standardises the advantages over the batch."""
    options: tuple[str, ...] = ()
    """Names of options that only this estimator has, in addition to `Settings`."""
    sums_rewards: bool = False
    """True if the estimator normalises the sum of the rewards instead of each component. It ignores `singleton`."""
    scale: Literal["settings", "own", "none"] = "settings"
    """Divisor of the centred rewards. settings: as in `scale_rewards` and `leave_one_out`. own: a standard deviation
    that the estimator defines. none: no standard deviation, so that `epsilon` has no effect."""
    drops_rows: bool = False
    """True if `Terms.dropped` may drop rows, so that `batch_rows` may be kept."""
    reads_single_reward: bool = False
    """True if the estimator reads the setting `single_reward`."""
    has_presets: bool = False
    """True if `PRESETS` are variants of this estimator."""


ESTIMATORS: dict[str, Estimator] = {
    "gdpo": Estimator(gdpo, batch_norm=True, reads_single_reward=True, has_presets=True),
    "grpo": Estimator(grpo, batch_norm=False, sums_rewards=True),
    "dr_grpo": Estimator(dr_grpo, batch_norm=False, sums_rewards=True, scale="none"),
    "rloo": Estimator(rloo, batch_norm=False, sums_rewards=True, scale="none"),
    "gpg": Estimator(gpg, batch_norm=False, options=("f_norm",), sums_rewards=True, scale="none"),
    "reinforce_plus_plus": Estimator(
        reinforce_plus_plus, batch_norm=True, options=("minus_baseline",), sums_rewards=True, scale="none"
    ),
    "mo_grpo": Estimator(mo_grpo, batch_norm=False),
    "gd2po": Estimator(gd2po, batch_norm=True, options=("mode", "tau"), drops_rows=True, reads_single_reward=True),
    "dvao": Estimator(dvao, batch_norm=False),
    "sa_mrpo": Estimator(sa_mrpo, batch_norm=True, options=("gamma", "bounds")),
    "corr_grpo": Estimator(corr_grpo, batch_norm=False, sums_rewards=True, scale="own"),
    "dara": Estimator(dara, batch_norm=True, options=("cap", "asymmetric")),
}


def about_options() -> str:
    """Return the names of each estimator's own options, for the description of `gdpo.options`."""
    return " ".join(f"{name}: {', '.join(entry.options)}." for name, entry in ESTIMATORS.items() if entry.options)


def about_batch_norm() -> str:
    """Return the estimators with a batch norm, for the description of `gdpo.batch_norm`."""
    *others, last = (name for name, entry in ESTIMATORS.items() if entry.batch_norm)
    return f"The batch norm is on for {', '.join(others)} and {last}, and off for the other estimators."
