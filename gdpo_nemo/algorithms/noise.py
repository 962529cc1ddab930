"""Measurement errors of rewards: reliability of a component within a group, and correction of a verifier's errors.

    noise: {quality: 0.12, correct: {false_positive: 0.1, false_negative: 0.2}}

The z-score of a group divides by the standard deviation of the group, so the errors of a judge become full-size
advantages in a group whose samples are equally good. With the standard deviation of the error, a group's z-scores are
multiplied by its reliability, the share of the variance that is not error (Kelley's formula)::

    reliability = max(0, 1 - noise^2 / variance of the group)

A verifier that returns 0 or 1 and is wrong at known rates has the error variance p fn (1 - fn) + (1 - p) fp (1 - fp) in
a group in which a share p of the samples is right. Its rewards are first corrected without bias (arXiv 2510.18924)::

    r' = (r - fp) / (1 - fp - fn)

The reliability is computed for each group, because the groups of a batch have unlike variances: with one value for the
batch, groups without any difference keep the errors at the size of the other groups' signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.algorithms.table import Groups, Moments, RewardTable, moments, nearest
from gdpo_nemo.utils.files import read_json_object

FILE = "from"
"""Key of `gdpo.noise` with the path of a profile."""
MEASURED = "noise_std"
"""Field of a component in the file of a profile: standard deviation of its error, or null if it was not measured."""


@dataclass(frozen=True)
class FlipRates:
    """Known error rates of a verifier that returns 0 or 1."""

    false_positive: float = 0.0
    """Probability of the reward 1 for a wrong sample."""
    false_negative: float = 0.0
    """Probability of the reward 0 for a right sample."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not _is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{field.name} must be at least 0 and below 1, got {value!r}")
        if self.false_positive + self.false_negative >= 1:
            raise ValueError("false_positive + false_negative must be below 1; otherwise the rewards contain no signal")

    @property
    def contrast(self) -> float:
        """Difference between the mean rewards of right and wrong samples."""
        return 1 - self.false_positive - self.false_negative

    def correct(self, rewards: np.ndarray) -> np.ndarray:
        """Return rewards whose mean is the share of right samples. NaN stays NaN."""
        return (rewards - self.false_positive) / self.contrast

    def variance(self, right: np.ndarray) -> np.ndarray:
        """Return the error variance of corrected rewards, given the share of right samples."""
        false_positive = self.false_positive * (1 - self.false_positive)
        false_negative = self.false_negative * (1 - self.false_negative)
        return np.asarray((right * false_negative + (1 - right) * false_positive) / self.contrast**2)


def read_noise(name: str, value: Any) -> float | FlipRates:
    """Return the noise of a component: the standard deviation of its error, or the error rates of its verifier.

    Raises:
        ValueError: if the value is invalid. The message begins with the key within `gdpo`.
    """
    if isinstance(value, Mapping):
        known = tuple(field.name for field in fields(FlipRates))
        for key in value:
            if key not in known:
                raise ValueError(f"noise.{name}.{key}: unknown rate; {nearest(str(key), known)}")
        try:
            return FlipRates(**value)
        except ValueError as error:
            raise ValueError(f"noise.{name}: {error}") from None
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(
            f"noise.{name}: must be a standard deviation of at least 0, or {{false_positive: 0.1, false_negative: "
            f"0.2}}, got {value!r}"
        )
    return float(value)


def check_noise(noise: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check the noise of all components.

    Args:
        names: known components.

    Raises:
        ValueError: if a value is invalid, or a component is unknown. The message begins with the key within `gdpo`.
    """
    known = tuple(names)
    for name, value in noise.items():
        if name not in known:
            raise ValueError(f"noise.{name}: not a component; {nearest(str(name), known)}")
        if isinstance(read_noise(name, value), FlipRates) and is_family(name):
            raise ValueError(f"noise.{name}: a family has no error rates; use the standard deviation of a criterion")


def check_table(noise: Mapping[str, Any], table: RewardTable) -> None:
    """Check the noise of a table's components, and that rewards with error rates are corrected.

    Raises:
        ValueError: see `check_noise`. Also if a reward is neither of the two corrected values.
    """
    check_noise(noise, table.components)
    for name, rates in error_rates(noise).items():
        k = table.names.index(name)
        values = table.columns[k][table.present[k]]
        if not np.isclose(values[:, None], rates.correct(np.array([0.0, 1.0]))).any(axis=1).all():
            raise ValueError(f"noise.{name}: the rewards of a verifier with error rates must be corrected first")


def error_rates(noise: Mapping[str, Any]) -> dict[str, FlipRates]:
    """Return the components whose verifiers have known error rates."""
    read = {name: read_noise(name, value) for name, value in noise.items() if isinstance(value, Mapping)}
    return {name: rates for name, rates in read.items() if isinstance(rates, FlipRates)}


def corrected(columns: Mapping[str, np.ndarray], noise: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the rewards by component, with those of verifiers with known error rates corrected.

    Args:
        columns: float64 [sequences] by component, NaN for a missing reward.

    Raises:
        ValueError: if a reward of such a verifier is neither 0 nor 1.
    """
    result = dict(columns)
    for name, rates in error_rates(noise).items():
        if name not in columns:
            continue
        values = columns[name]
        (others,) = np.nonzero(~np.isnan(values) & (values != 0) & (values != 1))
        if len(others):
            raise ValueError(
                f"gdpo.noise.{name}: error rates require rewards of 0 or 1, got {values[others[0]]:g} for sample "
                f"{others[0]}; use a standard deviation"
            )
        result[name] = rates.correct(values)
    return result


def reliability(noise: Any, groups: Groups, values: np.ndarray, stats: Moments) -> np.ndarray:
    """Return the share of each group's variance that is not measurement error, from 0 to 1: float64 [groups].

    Args:
        noise: standard deviation or error rates, see `read_noise`.
        values: float64 [sequences], rewards of the component, corrected if there are error rates; 0 if missing.
        stats: statistics of the same rewards.
    """
    variance = stats.std**2
    error = _error_variance(noise, groups, values, stats)
    share = np.zeros(len(variance))
    np.divide(error, variance, out=share, where=variance > 0)
    return np.asarray(np.maximum(0.0, 1.0 - share))


def pooled_reliability(table: RewardTable, noise: Mapping[str, Any]) -> np.ndarray:
    """Return the share of each component's variance within all groups of the batch that is not measurement error:
    float64 [components], from 0 to 1. NaN for a component without noise or variance. A family has one value.

    The mean of the groups' reliabilities would be above 0 for rewards that are only noise, because the variance of a
    small group is often above its expectation.
    """
    error, variance = np.zeros((2, len(table.names)))
    for k, name in enumerate(table.names):
        if name not in noise:
            continue
        stats = moments(table.groups, table.columns[k], table.present[k])
        degrees = np.maximum(stats.count - 1, 0)
        variance[k] = degrees @ stats.std**2
        error[k] = degrees @ _error_variance(noise[name], table.groups, table.columns[k], stats)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 1.0 - table.by_component(error) / table.by_component(variance)
    return np.where(np.isfinite(share), np.maximum(share, 0.0), np.nan)


def _error_variance(noise: Any, groups: Groups, values: np.ndarray, stats: Moments) -> np.ndarray:
    """Return the variance of the measurement error in each group: float64 [groups]."""
    read = read_noise("", noise)
    if isinstance(read, FlipRates):
        return read.variance(np.clip(groups.sum(values) / np.maximum(stats.count, 1), 0.0, 1.0))
    return np.full(len(stats.std), read**2)


def resolved(noise: Mapping[str, Any], rewards: Mapping[str, float]) -> dict[str, Any]:
    """Return `gdpo.noise` with the key `from` replaced by the measurements in its file. Other keys have priority.

    Components of the file that are not in `gdpo.rewards` are ignored.

    Raises:
        ConfigError: if the file cannot be read.
        ValueError: if the file is not that of a profile, or lacks the noise of a component with a weight that has no
            key. The message begins with the key within `gdpo`.
    """
    if not isinstance(noise.get(FILE), str):
        return dict(noise)
    path = Path(noise[FILE]).expanduser()
    content = read_json_object(path, f"gdpo.noise.{FILE}")
    profile = content.get("profile")
    components = profile.get("components") if isinstance(profile, Mapping) else None
    if not isinstance(components, Mapping):
        raise ValueError(f"noise.{FILE}: {path} is not a profile.json of gdpo-nemo profile")
    found = {name: value for name, value in noise.items() if name != FILE}
    for name, weight in rewards.items():
        if name in found:
            continue
        one = components.get(name)
        value = one.get(MEASURED) if isinstance(one, Mapping) else None
        if value is not None:
            found[name] = value
        elif weight:
            raise ValueError(
                f"noise.{FILE}: {path} has no measured noise of {name!r}; profile the same environments with --repeat "
                f"above 0, or set gdpo.noise.{name}"
            )
    check_noise(found, {**rewards, **found})
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
