"""Advantage estimators: each maps a reward table to weighted terms per component.

All are parts of one pipeline: transform each component -> weight -> mask rollouts -> scale over the batch. An
estimator covers the first three; `advantages.compute_advantages` does the last. Rows are in the table's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gdpo_nemo.algorithms.groups import Groups, Moments, moments
from gdpo_nemo.algorithms.settings import Settings
from gdpo_nemo.algorithms.table import RewardTable, nearest

ROUNDING = 1e-12
"""z-scores smaller than this are rounding noise: samples that are exactly average."""


@dataclass(frozen=True)
class Terms:
    """What an estimator returns: a row's advantage before the batch scale is the sum of its terms."""

    components: np.ndarray
    """float64 [components, sequences]"""
    has_signal: np.ndarray
    """bool [sequences]; rows that carry signal. An advantage of 0 by cancellation is still signal."""
    total: np.ndarray | None = None
    """float64 [sequences]; the summed terms where they are known more exactly than by summing."""
    holds_kl: bool = False
    """Whether `total` has the KL in the reward in it already, as that of estimators of the sum has."""

    @property
    def values(self) -> np.ndarray:
        """float64 [sequences]"""
        return self.components.sum(axis=0) if self.total is None else self.total


def z_scores(table: RewardTable, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """z = (r - mean) / (std + epsilon) within each group, every component by itself (GDPO eq. 4).

    Returns:
        float64 and bool [components, sequences]: z, and where it comes from a group that varies. Components of
        weight 0 are not computed.
    """
    z = np.zeros_like(table.columns)
    has_signal = np.zeros(table.columns.shape, dtype=bool)
    for k in np.flatnonzero(table.weights):
        z[k], has_signal[k] = _z_score(table, k, settings)
    return z, has_signal


def _z_score(table: RewardTable, k: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    groups = table.groups
    present = table.present[k]
    stats = moments(groups, table.columns[k], present, settings.ddof, settings.exact_zero)
    if settings.leave_one_out:
        z = _leave_one_out(table, k, settings)
    else:
        z = stats.deviation
        z *= groups.rows(np.where(stats.constant, 0.0, _scale(table.columns[k][present], stats, settings)))
    # A value at the mean of its group has rounding noise for a z, with a sign that depends on the order of the rows.
    z[np.abs(z) < ROUNDING] = 0.0
    if settings.singleton == "raw":
        alone = groups.rows(stats.count == 1) & present
        z[alone] = table.columns[k, alone] / (1.0 + settings.epsilon)
        return z, present & (groups.rows(~stats.constant) | alone)
    return z, present & groups.rows(~stats.constant)


def _scale(values: np.ndarray, stats: Moments, settings: Settings) -> np.ndarray:
    """What ``scale_rewards`` multiplies the deviations by, float64 [groups]; ``values`` are all that are present."""
    if settings.scale_rewards == "none":
        return np.ones(len(stats.std))
    std = stats.std
    if settings.scale_rewards == "batch":
        std = np.full(len(stats.std), values.std(ddof=settings.ddof) if len(values) > settings.ddof else 0.0)
    return np.asarray(1.0 / np.maximum(std + settings.epsilon, 1e-300))


def _leave_one_out(table: RewardTable, k: int, settings: Settings) -> np.ndarray:
    """(r - mean of the others) / std of the others; not divided where the others are constant or a single one."""
    stats = moments(table.groups, table.columns[k], table.present[k], settings.ddof, settings.exact_zero)
    scores: np.ndarray = stats.deviation * _leave_one_out_scale(table.groups, stats, settings)
    return scores


def _leave_one_out_scale(groups: Groups, stats: Moments, settings: Settings) -> np.ndarray:
    """Factor per row from its distance to the group's mean to its leave-one-out score."""
    count = groups.rows(np.maximum(stats.count, 2)).astype(np.float64)
    squares = groups.rows(groups.sum(stats.deviation**2))
    others = squares - stats.deviation**2 * count / (count - 1)
    # The difference cancels to noise when this row is the group's only outlier.
    others[others <= 1e-12 * squares] = 0.0
    std = np.sqrt(others / np.maximum(count - 1 - settings.ddof, 1))
    std[count - 1 <= settings.ddof] = 0.0
    scale: np.ndarray = count / (count - 1)
    np.divide(scale, std + settings.epsilon, out=scale, where=std > 0)
    return scale


def weighted_terms(z: np.ndarray, has_signal: np.ndarray, weights: np.ndarray) -> Terms:
    """Scores and where they are signal (both [components, sequences]) times the weights [components]. Writes into
    ``z``."""
    z *= weights[:, None]
    return Terms(z, np.asarray(has_signal.any(axis=0)))


def gdpo(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k w_k z_k: each reward normalised in its group, weights after it (arXiv 2601.05242 eq. 4, 5, 7)."""
    weighted = np.flatnonzero(table.weights)
    if len(weighted) == 1 and settings.single_reward == "error":
        only = table.names[weighted[0]]
        raise ValueError(
            f"this variant of gdpo needs two components or more with a weight, got only {only!r}; use grpo"
        )
    if len(weighted) == 1 and settings.single_reward == "grpo":
        return grpo(table, settings)
    return weighted_terms(*z_scores(table, settings), table.weights)


def _summed(table: RewardTable, settings: Settings, scale: Callable[..., np.ndarray] | None = None) -> Terms:
    """Centre the weighted sum of a row's rewards in its group, then multiply by a factor.

    ``scale(stats, settings)`` gives it per group, or else ``scale_rewards`` does; with ``leave_one_out`` it is each
    row's own instead.

    The terms are the components' centred shares of that sum, so they show what each reward contributed. KL in the
    reward is part of the sum, as it was published, and of no term.
    """
    groups = table.groups
    total, scored = table.total()
    if table.kl_penalty is not None:
        total = total - table.kl_penalty
    stats = moments(groups, total, scored, settings.ddof, settings.exact_zero)
    if settings.leave_one_out:
        factor = np.where(groups.rows(stats.constant), 0.0, _leave_one_out_scale(groups, stats, settings))
    else:
        factors = _scale(total[scored], stats, settings) if scale is None else scale(stats, settings)
        factor = groups.rows(np.where(stats.constant, 0.0, factors))
    shares = table.columns * table.weights[:, None]
    for share in shares:
        share -= groups.rows(groups.sum(share) / np.maximum(stats.count, 1))
        share *= factor
        share[~scored] = 0.0
    return Terms(shares, scored & groups.rows(~stats.constant), stats.deviation * factor, holds_kl=True)


def grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = (r - mean) / (std + epsilon) of the weighted reward sum r = sum_k w_k r_k (arXiv 2402.03300).

    With the option ``leave_one_out`` mean and std are those of the group's other members, as NeMo-RL's default has it.
    """
    return _summed(table, settings)


def dr_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = r - mean of the weighted reward sum, not divided by its deviation (Dr. GRPO, arXiv 2503.20783)."""
    return _summed(table, settings, lambda stats, s: np.ones(len(stats.count)))


def rloo(table: RewardTable, settings: Settings) -> Terms:
    """A = r - mean of the other members' weighted reward sums (RLOO, arXiv 2402.14740) = n / (n - 1) (r - mean)."""
    return _summed(table, settings, lambda stats, s: stats.count / np.maximum(stats.count - 1, 1))


def gpg(table: RewardTable, settings: Settings, f_norm: float = 1.0) -> Terms:
    """A = alpha (r - mean) / f_norm, where alpha is the number of samples over that of samples in groups that vary
    (GPG, arXiv 2504.02546): what groups without a gradient take from the mean over the batch is given back. Its loss is
    ``reinforce``.

    Raises:
        ValueError: f_norm not positive.
    """
    if not f_norm > 0:
        raise ValueError(f"f_norm must be positive, got {f_norm}")

    def scale(stats: Moments, settings: Settings) -> np.ndarray:
        live = stats.count[~stats.constant].sum()
        return np.full(len(stats.count), stats.count.sum() / max(live, 1) / f_norm)

    return _summed(table, settings, scale)


def reinforce_plus_plus(table: RewardTable, settings: Settings, minus_baseline: bool = True) -> Terms:
    """A = r - mean of the group (REINFORCE++-baseline), or r itself, standardised over the batch (arXiv 2501.03262).

    NeMo-RL and OpenRLHF take the batch's statistics over tokens and all scored samples: ``batch_unit: token`` and
    ``batch_rows: scored``. Without the baseline every scored sample carries signal.
    """
    if minus_baseline:
        return dr_grpo(table, settings)
    total, scored = table.total()
    if table.kl_penalty is not None:
        total = total - table.kl_penalty
    shares = table.columns * table.weights[:, None]
    return Terms(shares, scored, np.where(scored, total, 0.0), holds_kl=True)


def mo_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k w_k z_k without batch norm, so each reward has the same variance (MO-GRPO, arXiv 2509.22047)."""
    return weighted_terms(*z_scores(table, settings), table.weights)


def gd2po(table: RewardTable, settings: Settings, mode: str = "hard", tau: float = 0.2) -> Terms:
    """GDPO without the rollouts whose rewards contradict each other (GD2PO, arXiv 2606.16771).

    hard: a rollout is dropped when two of its terms w_k z_k have opposite signs. snr: only if moreover
    |sum_k w_k z_k| < tau x sum_k |w_k z_k|. What is kept is multiplied by the kept share of its group. The original
    whitens over kept tokens: `batch_unit="token"` with `lengths`.
    """
    if mode not in ("hard", "snr"):
        raise ValueError(f"mode must be 'hard' or 'snr', got {mode!r}")
    terms = gdpo(table, settings)
    components = terms.components
    conflict = (components > 0).any(axis=0) & (components < 0).any(axis=0)
    if mode == "snr":
        conflict &= np.abs(components.sum(axis=0)) < tau * np.abs(components).sum(axis=0)
    scored = table.scored
    groups = table.groups
    share = groups.sum(scored & ~conflict) / np.maximum(groups.sum(scored), 1)
    components *= np.where(conflict, 0.0, groups.rows(share))
    return Terms(components, terms.has_signal & ~conflict)


def dvao(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k v_k z_k with v_k = w_k std_k / sum_l |w_l| std_l per group: rewards count by how much they vary in the
    group, and |A| stays below GRPO's (DVAO, arXiv 2605.25604)."""
    z, has_signal = z_scores(table, settings)
    spread = table.weights[:, None] * _group_stds(table, settings)
    share = spread / np.maximum(np.abs(spread).sum(axis=0), 1e-300)
    for row, part in zip(z, share, strict=True):
        row *= table.groups.rows(part)
    return Terms(z, np.asarray(has_signal.any(axis=0)))


def _group_stds(table: RewardTable, settings: Settings) -> np.ndarray:
    """Standard deviation of every weighted component in every group, [components, groups]."""
    stds = np.zeros((len(table.names), len(table.groups)))
    for k in np.flatnonzero(table.weights):
        stds[k] = moments(table.groups, table.columns[k], table.present[k], settings.ddof).std
    return stds


def sa_mrpo(
    table: RewardTable,
    settings: Settings,
    gamma: float = 0.5,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Terms:
    """GDPO with weights w_k (1 - s_k)^gamma, where s_k = (batch mean - min) / (max - min) is the saturation of a
    bounded reward (SA-MRPO, arXiv 2608.16072). gamma 0 is GDPO; the paper uses ddof 0.

    Args:
        bounds: (min, max) of the reward by component name; (0, 1) where not given.

    Raises:
        ValueError: a reward outside its bounds, or bounds of an unknown component.
    """
    limits = dict.fromkeys(table.names, (0.0, 1.0))
    for name, limit in (bounds or {}).items():
        if name not in limits:
            raise ValueError(f"bounds of unknown component {name!r}; {nearest(name, table.names)}")
        limits[name] = limit
    weights = table.weights.copy()
    for k in np.flatnonzero(weights):
        low, high = limits[table.names[k]]
        values = table.columns[k, table.present[k]]
        if not len(values):
            continue
        if not low < high or values.min() < low or values.max() > high:
            raise ValueError(
                f"sa_mrpo: rewards of {table.names[k]!r} span [{values.min()}, {values.max()}], outside the bounds "
                f"({low}, {high}); give `bounds`"
            )
        weights[k] *= (1.0 - (values.mean() - low) / (high - low)) ** gamma
    return weighted_terms(*z_scores(table, settings), weights)


def corr_grpo(table: RewardTable, settings: Settings) -> Terms:
    """A = (r - mean) / sqrt(sum_lm rho_lm + epsilon), r the weighted sum and rho the Pearson correlations of the
    components in the group, constant ones dropped (CorrGRPO, arXiv 2609.36820): GRPO's direction, another scale.

    The sum of all correlations is the variance of the sum of the standardised components; missing entries deviate by 0.
    """
    groups = table.groups
    summed = np.zeros(table.columns.shape[1])
    for k in np.flatnonzero(table.weights):
        stats = moments(groups, table.columns[k], table.present[k])
        summed += stats.deviation * groups.rows(1.0 / np.where(stats.std > 0, stats.std, 1.0))
    squares = groups.sum(summed**2)
    return _summed(
        table,
        settings,
        lambda stats, s: 1.0 / np.sqrt(squares / np.maximum(stats.count - 1, 1) + max(s.epsilon, 1e-300)),
    )


def dara(table: RewardTable, settings: Settings, cap: float = 5.0, asymmetric: bool = False) -> Terms:
    """GDPO with rare signals amplified: w_k times min(cap, sqrt(max_l pi_l / pi_k)), where pi_k is the share of groups
    in which component k varies (DARA, arXiv 2610.00574). asymmetric: only positive terms are amplified.
    """
    z, has_signal = z_scores(table, settings)
    groups = table.groups
    density = np.array([(groups.sum(row) > 0).mean() for row in has_signal])
    factor = np.minimum(cap, np.sqrt(density.max() / np.where(density > 0, density, 1.0)))
    factor[density == 0] = 1.0
    terms = weighted_terms(z, has_signal, table.weights)
    amplified = terms.components * factor[:, None]
    if asymmetric:
        amplified = np.where(terms.components > 0, amplified, terms.components)
    return Terms(amplified, terms.has_signal)


@dataclass(frozen=True)
class Estimator:
    """An entry of the registry."""

    function: Callable[..., Terms]
    batch_norm: bool
    """Whether its published form standardises over the batch."""
    options: tuple[str, ...] = ()
    """Its own options, beyond those of `Settings`."""


ESTIMATORS: dict[str, Estimator] = {
    "gdpo": Estimator(gdpo, batch_norm=True),
    "grpo": Estimator(grpo, batch_norm=False),
    "dr_grpo": Estimator(dr_grpo, batch_norm=False),
    "rloo": Estimator(rloo, batch_norm=False),
    "gpg": Estimator(gpg, batch_norm=False, options=("f_norm",)),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, batch_norm=True, options=("minus_baseline",)),
    "mo_grpo": Estimator(mo_grpo, batch_norm=False),
    "gd2po": Estimator(gd2po, batch_norm=True, options=("mode", "tau")),
    "dvao": Estimator(dvao, batch_norm=False),
    "sa_mrpo": Estimator(sa_mrpo, batch_norm=True, options=("gamma", "bounds")),
    "corr_grpo": Estimator(corr_grpo, batch_norm=False),
    "dara": Estimator(dara, batch_norm=True, options=("cap", "asymmetric")),
}
