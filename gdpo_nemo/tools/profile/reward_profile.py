"""Profile of reward components before training: signal, noise, redundancy, effective weights and proposed weights.

The input is rewards of samples of the start model, so no training step is needed. Shares of the advantages' variance
have standard errors over groups, because groups are independent samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from gdpo_nemo.algorithms.advantages import Advantages, compute_advantages
from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.algorithms.diagnostics import student_factor
from gdpo_nemo.algorithms.estimators import ESTIMATORS

DEAD_SHARE = 0.05
"""A component is reported as dead if it varies in at most this share of the groups and is not saturated."""
SATURATED = 0.95
"""A component is reported as saturated if its mean is at this position between its worst and best value, or above."""
NOISY_SHARE = 0.05
"""A component is reported as noisy if more than this share of its z-scores' variance changes in a repetition."""
REDUNDANT = 0.9
"""Two components are reported as redundant from this correlation of their z-scores on."""
OPPOSED = -0.5
"""Two components are reported as opposed from this correlation of their z-scores down."""
_IMBALANCE = 0.1
"""Weights are only changed if a component's share of the variance differs by more than this from its target."""
_ITERATIONS = 40
_LARGEST_CHANGE = 4.0


class Estimate(NamedTuple):
    """A share and its standard error over groups. Both are NaN if undefined."""

    value: float
    error: float


@dataclass(frozen=True)
class ComponentProfile:
    """Measurements of one component."""

    weight: float
    mean: float
    pass_rate: float
    """Share of the samples that have the best value. See `passes`."""
    live: Estimate
    """Share of the groups in which the component varies."""
    saturation: float
    """Position of the mean between the worst (0) and the best (1) value."""
    missing: float
    """Share of the samples without this component."""
    length: float
    """Correlation with the number of tokens within groups. NaN if undefined."""
    noise: float | None
    """Share of the z-scores' variance that changes when the same samples are verified again. None if not measured."""
    changed: float | None
    """Share of the samples with the component whose reward changes when they are verified again. None if not
    measured."""
    noise_std: float | None
    """Standard deviation of a sample's reward over verifications, which `gdpo.noise` reads (`algorithms.noise`). In a
    family, that of a criterion. None if not measured."""


@dataclass(frozen=True)
class Finding:
    """A problem of one component or of a pair of components."""

    kind: str
    """noisy, dead, saturated, redundant or opposed."""
    components: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Proposal:
    """Proposed weight of a component, and the reason in words."""

    weight: float
    reason: str


@dataclass(frozen=True)
class RewardProfile:
    """Result of `profile_rewards`. Dictionaries are by component, or by estimator and then by component."""

    groups: int
    samples: int
    """Number of samples that could be verified."""
    live: Estimate
    """Share of the groups in which a weighted component varies."""
    components: dict[str, ComponentProfile]
    correlation: dict[str, dict[str, float]]
    """Correlation of the z-scores of two components, over all samples that have both."""
    conflicts: dict[str, dict[str, float]]
    """Share of opposite signs among the samples with non-zero z-scores of both components."""
    effective: dict[str, dict[str, Estimate]]
    """Share of the advantages' variance (`Diagnostics.effective_weight`). The key `config` is the configured rule."""
    undefined: dict[str, str]
    """Estimators that cannot be applied to these rewards, with the reason."""
    findings: list[Finding]
    proposals: dict[str, Proposal]


def profile_rewards(
    rewards: Mapping[str, np.ndarray],
    group_ids: np.ndarray,
    *,
    weights: Mapping[str, float],
    valid: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    repeats: Mapping[str, np.ndarray] | None = None,
    repeated: np.ndarray | None = None,
    errors: Mapping[str, float | None] | None = None,
    better: Mapping[str, int] | None = None,
    rule: Mapping[str, Any] | None = None,
) -> RewardProfile:
    """Profile the rewards of one set of samples.

    Args:
        rewards: float64 [samples] by component, NaN for a missing reward.
        group_ids: integers [samples], equal for the samples of one prompt.
        weights: weight of each component. A component without an entry has the weight 0.
        valid: bool [samples], False for samples that could not be verified.
        lengths: tokens [samples].
        repeats: rewards of the same samples in further verifications, float64 [verifications, samples] by component.
        repeated: bool [verifications, samples], False for samples that a further verification could not verify. They
            are left out of noise and changed rewards. None means that all could be verified.
        errors: standard deviation of a sample's reward over verifications, by component. See `error_deviation`.
        better: 1 or -1 by component, see `component_weights.directions`. None means the signs of the weights.
        rule: arguments of `compute_advantages` for the configured rule: estimator, preset, epsilon and options.

    Raises:
        ValueError: if the rewards are invalid, or no sample has a reward.
    """
    names, rule = list(rewards), rule or {}
    better = directions(weights, {}, {}) if better is None else better
    weight = {name: float(weights.get(name, 0.0)) for name in names}
    valid = np.ones(len(group_ids), bool) if valid is None else np.asarray(valid)
    lengths = np.ones(len(group_ids)) if lengths is None else np.asarray(lengths, np.float64)
    batch = _Batch(rewards, group_ids, valid, lengths)
    equal = batch.advantages(dict.fromkeys(names, 1.0))
    components = _components(batch, equal, weight, better, repeats or {}, repeated=repeated, errors=errors or {})
    correlation = _correlations(equal.components.numpy(), batch.present())
    findings = _findings(components, correlation, equal.components.numpy())
    configured = batch.advantages(weight, **rule)
    effective, undefined = {"config": _effective(configured, group_ids)}, {}
    for estimator in ESTIMATORS:
        try:
            effective[estimator] = batch.effective(weight, estimator=estimator)
        except ValueError as error:
            undefined[estimator] = str(error)
    factor = student_factor(_distinct(group_ids[configured.has_signal.numpy()]))
    proposals = _propose(components, findings, effective["config"], factor, partial(batch.effective, **rule))
    conflicts = _by_pair(names, equal.diagnostics.sign_conflicts)
    groups = _distinct(group_ids[valid])
    live = _share(1.0 - configured.diagnostics.all_dead, groups)
    samples, pairs = int(valid.sum()), (_by_pair(names, correlation), conflicts)
    return RewardProfile(groups, samples, live, components, *pairs, effective, undefined, findings, proposals)


@dataclass(frozen=True)
class _Batch:
    """Samples whose advantages are computed by several rules. See `profile_rewards` for the fields."""

    rewards: Mapping[str, np.ndarray]
    group_ids: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray

    def advantages(self, weights: Mapping[str, float], **rule: Any) -> Advantages:
        """Compute the advantages. ``rule`` are further arguments of `compute_advantages`."""
        return compute_advantages(
            self.rewards, self.group_ids, weights=weights, valid=self.valid, lengths=self.lengths, **rule
        )

    def effective(self, weights: Mapping[str, float], **rule: Any) -> dict[str, Estimate]:
        """Return each component's share of the variance of the advantages."""
        return _effective(self.advantages(weights, **rule), self.group_ids)

    def present(self) -> np.ndarray:
        """Return which verified samples have each component: bool [samples, components]."""
        return np.asarray(~np.isnan(np.stack(list(self.rewards.values()), axis=1)) & self.valid[:, None])


def _components(
    batch: _Batch,
    equal: Advantages,
    weight: Mapping[str, float],
    better: Mapping[str, int],
    repeats: Mapping[str, np.ndarray],
    *,
    repeated: np.ndarray | None,
    errors: Mapping[str, float | None],
) -> dict[str, ComponentProfile]:
    """Return the measurements of each component. ``equal`` are the advantages with equal weights."""
    z, present, found = equal.components.numpy(), batch.present(), equal.diagnostics
    length = _scores(batch.lengths, batch.group_ids, batch.valid)
    components = {}
    for k, (name, rewards) in enumerate(batch.rewards.items()):
        having, sign = present[:, k], better.get(name, 1)
        noise, changed = noise_of(rewards, repeats.get(name), batch.valid, repeated, batch.group_ids)
        passed = passes(rewards[having], sign)
        saturation = float(found.saturation[k])
        components[name] = ComponentProfile(
            weight[name],
            float(found.mean[k]),
            float(passed.mean()) if len(passed) else 0.0,
            _share(1.0 - float(found.dead_groups[k]), _distinct(batch.group_ids[having])),
            saturation if sign > 0 else 1.0 - saturation,
            float(found.missing[k]),
            float(_correlations(np.column_stack([z[:, k], length]), present[:, [k, k]])[0, 1]),
            noise,
            changed,
            errors.get(name),
        )
    return components


def _distinct(group_ids: np.ndarray) -> int:
    return len(np.unique(group_ids))


def _share(value: float, count: int) -> Estimate:
    """Return a share of ``count`` groups with its binomial standard error."""
    return Estimate(value, float(np.sqrt(value * (1.0 - value) / count)) if count else float("nan"))


def passes(values: np.ndarray, better: int) -> np.ndarray:
    """Return which samples have the best observed value of a component: bool [samples].

    The best value is the largest if `better` is 1, and the smallest if it is -1. If all values are equal, they pass if
    a reward is above 0, or if a penalty is not.
    """
    if not len(values):
        return np.zeros(0, bool)
    best = values.max() if better > 0 else values.min()
    constant = values.max() == values.min()
    return np.asarray(values == best if not constant or (best > 0) == (better > 0) else np.zeros(len(values), bool))


def _by_pair(names: list[str], matrix: np.ndarray) -> dict[str, dict[str, float]]:
    pairs: dict[str, dict[str, float]] = {name: {} for name in names}
    for (i, a), (j, b) in permutations(enumerate(names), 2):
        pairs[a][b] = float(matrix[i, j])
    return pairs


def _correlations(z: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the correlation of each pair of columns over the rows that have both: [components, components].

    z-scores have mean 0 in each group. A group in which only one of the two varies reduces the correlation.
    """
    power = (z * z).T @ present.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(z.T @ z / np.sqrt(power * power.T))


def noise_of(
    first: np.ndarray, repeats: np.ndarray | None, valid: np.ndarray, repeated: np.ndarray | None, ids: np.ndarray
) -> tuple[float | None, float | None]:
    """Return (share of the z-scores' variance that does not repeat, share of changed rewards), None without repeats.

    The z-scores of two verifications correlate with 1 without noise, so the share is 1 minus their mean correlation.
    Both verifications are compared on the samples that both could verify, and that have the component in either.
    """
    agreements, changes = [], []
    for number, again in enumerate(() if repeats is None else repeats):
        both = valid if repeated is None else valid & repeated[number]
        having = both & ~(np.isnan(first) & np.isnan(again))
        if not having.any():
            continue
        z, other = (_scores(values, ids, both) for values in (first, again))
        power = float(np.sqrt((z @ z) * (other @ other)))
        agreements.append(float(z @ other) / power if power else float(not z.any() and not other.any()))
        changes.append(float(np.mean(first[having] != again[having])))
    if not changes:
        return None, None
    return max(0.0, 1.0 - float(np.mean(agreements))), float(np.mean(changes))


def error_deviation(verifications: np.ndarray) -> float | None:
    """Return the standard deviation of a reward over verifications of the same sample, or None without a repetition.

    The variances of all samples are averaged, weighted by their degrees of freedom.

    Args:
        verifications: float64 [verifications, rewards], NaN for a missing reward.
    """
    present = ~np.isnan(verifications)
    count = present.sum(axis=0)
    degrees = int(np.maximum(count - 1, 0).sum())
    if not degrees:
        return None
    # Differences from the first value keep equal rewards exactly equal.
    first = np.take_along_axis(verifications, present.argmax(axis=0)[None], axis=0)
    values = np.where(present, verifications - first, 0.0)
    centred = np.where(present, values - values.sum(axis=0) / np.maximum(count, 1), 0.0)
    return float(np.sqrt((centred**2).sum() / degrees))


def _scores(values: np.ndarray, ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the z-scores of one component within groups: float64 [samples]."""
    if np.isnan(values[valid]).all():
        return np.zeros(len(values))
    scored = compute_advantages({"component": values}, ids, weights={"component": 1.0}, valid=valid)
    return np.asarray(scored.components.numpy()[:, 0])


def _effective(advantages: Advantages, group_ids: np.ndarray) -> dict[str, Estimate]:
    """Return each component's share of the advantages' variance, with a standard error over groups.

    A share is a ratio of sums over groups, and the error is that of its linearisation.
    """
    shares = advantages.diagnostics.effective_weight
    live = advantages.has_signal.numpy()
    terms = advantages.components.numpy()[live]
    if not len(terms) or np.isnan(shares).any():
        return {name: Estimate(float(share), float("nan")) for name, share in zip(advantages.names, shares)}
    centred = terms - terms.mean(axis=0)
    total = centred.sum(axis=1)
    _, group = np.unique(group_ids[live], return_inverse=True)
    count = int(group.max()) + 1
    squares = np.bincount(group, total * total, count)
    result = {}
    for k, name in enumerate(advantages.names):
        residual = np.bincount(group, centred[:, k] * total, count) - shares[k] * squares
        error = np.sqrt((residual @ residual) * count / max(count - 1, 1)) / squares.sum()
        result[name] = Estimate(float(shares[k]), float(error) if count > 1 else float("nan"))
    return result


def _findings(components: Mapping[str, ComponentProfile], correlation: np.ndarray, z: np.ndarray) -> list[Finding]:
    """Return the findings about single components and then those about pairs. Components of weight 0 have none."""
    found = []
    for name, one in components.items():
        if one.weight and one.noise is not None and one.noise > NOISY_SHARE:
            found.append(
                Finding(
                    "noisy",
                    (name,),
                    f"{name} is noisy: {one.noise:.0%} of the variance of its z-scores changes if the same samples are "
                    f"verified again ({one.changed:.0%} of the rewards change)",
                )
            )
        if one.weight and (without := _without_signal(name, one)):
            found.append(without)
    names = list(components)
    for i, a in enumerate(names):
        for j in range(i + 1, len(names)):
            b, value = names[j], correlation[i, j]
            # The correlation of unrelated rewards has a standard deviation of about 1 / sqrt(samples).
            clear = abs(value) * np.sqrt(np.count_nonzero((z[:, i] != 0) | (z[:, j] != 0))) > 3
            if not (components[a].weight and components[b].weight and clear):
                continue
            aligned = value * np.sign(components[a].weight * components[b].weight)
            if aligned >= REDUNDANT:
                text = f"{a} and {b} are redundant: their z-scores correlate with {value:+.2f}, so they count twice"
                found.append(Finding("redundant", (a, b), text))
            if aligned <= OPPOSED:
                text = f"{a} and {b} are opposed: their z-scores correlate with {value:+.2f}, so they cancel each other"
                found.append(Finding("opposed", (a, b), text))
    return found


def _without_signal(name: str, one: ComponentProfile) -> Finding | None:
    """Return the finding that a component is saturated or dead."""
    if one.missing == 1:
        return Finding("dead", (name,), f"{name} is dead: no sample has this component")
    level = one.saturation if np.isfinite(one.saturation) else one.pass_rate
    share = f"it varies in {one.live.value:.0%} of the groups"
    if level >= SATURATED:
        text = f"{name} is saturated: its mean {one.mean:.3g} is near the best value, and {share}"
        return Finding("saturated", (name,), text)
    if one.live.value <= DEAD_SHARE:
        text = f"{name} is dead: {share} (mean {one.mean:.3g}), so it has almost no training signal"
        return Finding("dead", (name,), text)
    return None


def _propose(
    components: Mapping[str, ComponentProfile],
    findings: list[Finding],
    now: Mapping[str, Estimate],
    factor: float,
    effective: Any,
) -> dict[str, Proposal]:
    """Return weights that give each component the share that its weight promises, and the reasons.

    The target of component k is proportional to w_k^2 x live share x (1 - noise)^2 / number of redundant components,
    which is the share of independent components in GDPO. The weights are found by iteration and keep their sum.

    Args:
        factor: standard errors of a share up to which a difference from its target may be chance.
    """
    redundant = {name: _redundant_with(name, findings) for name in components}
    target = {}
    for name, one in components.items():
        if one.weight and one.live.value > DEAD_SHARE and one.missing < 1:
            target[name] = one.weight**2 * one.live.value * (1 - (one.noise or 0.0)) ** 2 / len(redundant[name])
    sum_of_targets = sum(target.values())
    target = {name: value / sum_of_targets for name, value in target.items()} if sum_of_targets else {}
    opposed: set[str] = set()
    opposed.update(*(finding.components for finding in findings if finding.kind == "opposed"))
    off = [name for name, value in target.items() if not _is_near(now[name], value, factor)]
    weights = {name: one.weight for name, one in components.items()}
    if off and not opposed and len(target) > 1:
        weights |= _balanced(weights, target, effective)
    proposals = {}
    for name, one in components.items():
        if not one.weight:
            continue
        if name not in target:
            reason = "no weight helps: it has almost no training signal"
        elif name in opposed:
            reason = (
                "no weight resolves the conflict: decide which component takes precedence, for example by a condition"
            )
        else:
            reason = _reason(name, one, redundant[name], now[name], target[name], factor)
        same = weights[name] == one.weight
        proposals[name] = Proposal(weights[name], reason or ("keep" if same else "balances the other changes"))
    return proposals


def _is_near(share: Estimate, target: float, factor: float) -> bool:
    """Return whether the difference of a share from its target is small or may be chance."""
    return abs(share.value - target) <= max(_IMBALANCE, factor * share.error)


def _redundant_with(name: str, findings: list[Finding]) -> set[str]:
    """Return the component and all components that are redundant with it, directly or through others."""
    found, pairs = {name}, [set(finding.components) for finding in findings if finding.kind == "redundant"]
    while new := set().union(*(pair for pair in pairs if pair & found), found) - found:
        found |= new
    return found


def _balanced(weights: Mapping[str, float], target: Mapping[str, float], effective: Any) -> dict[str, float]:
    """Return weights of the components in ``target`` whose effective weights are close to the targets."""
    current = dict(weights)
    for _ in range(_ITERATIONS):
        shares = effective(current)
        for name, value in target.items():
            ratio = value / shares[name].value if shares[name].value > 0 else 2.0
            bound = abs(weights[name]) / _LARGEST_CHANGE, abs(weights[name]) * _LARGEST_CHANGE
            size = np.clip(abs(current[name]) * np.sqrt(np.clip(ratio, 0.25, 4.0)), *bound)
            current[name] = float(np.sign(weights[name]) * size)
    factor = sum(abs(weights[name]) for name in target) / sum(abs(current[name]) for name in target)
    return {name: float(f"{current[name] * factor:.3g}") for name in target}


def _reason(name: str, one: ComponentProfile, same: set[str], now: Estimate, target: float, factor: float) -> str:
    """Describe why the weight of a component should change (empty if it should not)."""
    reasons = []
    if one.noise is not None and one.noise > NOISY_SHARE:
        reasons.append(f"{one.noise:.0%} of its variance is noise")
    if len(same) > 1:
        reasons.append(f"redundant with {', '.join(sorted(same - {name}))}")
    if abs(now.value - target) > max(_IMBALANCE, factor * now.error):
        reasons.append(f"it has {now.value:.0%} of the variance of the advantages instead of {target:.0%}")
    return "; ".join(reasons)
