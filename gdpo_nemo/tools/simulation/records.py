"""Inputs and results of a simulation: scenario, sample lengths, steps and summary statistics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import erf, exp, inf, log, sqrt
from random import Random
from statistics import fmean
from typing import Any, Protocol

from gdpo_nemo.rollouts.depth import outstanding_bound
from gdpo_nemo.tools.simulation.engine import EngineRates

SCHEDULERS = ("continuous", "barrier")
KV = ("drain", "recompute", "keep")


class Distribution(Protocol):
    """Distribution of one number per sample, for example its length or verification time."""

    @property
    def mean(self) -> float:
        """Return the mean."""

    @property
    def longest(self) -> float:
        """Return the largest value, or a value that few samples exceed."""

    def sample_group(self, seed: int, prompt_index: int, samples: int) -> list[float]:
        """Return one value per sample of a group. The values depend only on seed and prompt index."""


_LARGEST = 10**9
"""Maximum accepted number of seconds or tokens."""


@dataclass(frozen=True)
class LogNormal:
    """Log-normal distribution ``median`` x exp(``sigma`` z), clipped at ``cap``.

    The value is constant if sigma is 0.
    """

    median: float
    sigma: float = 0.0
    cap: float = inf

    @classmethod
    def from_mean(cls, mean: float, sigma: float, cap: float = inf) -> LogNormal:
        """Return the distribution whose mean is ``mean`` after clipping.

        Raises:
            ValueError: if the mean is not between 0 and the cap.
        """
        if not sigma or cap == inf:
            return cls(mean * exp(-sigma * sigma / 2), sigma, cap)
        if not 0 < mean < cap:
            raise ValueError(f"a mean of {mean:g} is not between 0 and the cap of {cap:g}")
        low, high = log(mean) - sigma * sigma, log(cap) + 8 * sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(exp(middle), sigma, cap).mean < mean else (low, middle)
        return cls(exp(low), sigma, cap)

    @property
    def mean(self) -> float:
        """Return the mean after clipping, E[min(X, cap)]."""
        if not self.sigma or not self.median or self.cap == inf:
            return min(self.cap, self.median * exp(self.sigma * self.sigma / 2))
        z = (log(self.cap) - log(self.median)) / self.sigma
        below = self.median * exp(self.sigma * self.sigma / 2) * _normal(z - self.sigma)
        return below + self.cap * (1 - _normal(z))

    @property
    def longest(self) -> float:
        """Return the cap, or the value that one sample in a thousand exceeds."""
        return min(self.cap, self.median * exp(3.09 * self.sigma))

    def sample_group(self, seed: int, prompt_index: int, samples: int) -> list[float]:
        """Return one value per sample of a group. See ``Distribution.sample_group``."""
        if not self.sigma or not self.median:
            return [min(self.cap, self.median)] * samples
        random = Random((seed << 40) + prompt_index)
        mu = log(self.median)
        return [min(self.cap, random.lognormvariate(mu, self.sigma)) for _ in range(samples)]


def _normal(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


@dataclass(frozen=True)
class Scenario:
    """Settings of a simulated run. Durations are in seconds, lengths in tokens."""

    engines: int
    rates: EngineRates
    slots: int
    """Number of sequences that one engine decodes at once: max_num_seqs, or fewer if its KV cache is too small."""
    groups: int
    """Number of groups per step (P)."""
    samples: int
    """Number of samples per group (G)."""
    lengths: Distribution
    """Completion tokens of a sample, over all turns."""
    train_s: float
    """Seconds of training per step."""
    publish_s: float = 0.0
    """Seconds of one weight update.

    During the update, the trainer is busy and an engine that loads the weights is stopped.
    """
    prompt_tokens: float = 0.0
    max_staleness: int = 0
    window: int = 1
    """Reorder window W (``rollout.window``). A window of 1 keeps the prompt order."""
    depth: int | str = "auto"
    """Maximum number of outstanding groups, or ``auto``. The scheduler ``barrier`` ignores this setting."""
    kv: str = "keep"
    group_timeout_s: float | None = None
    scheduler: str = "continuous"
    verifier: Distribution = LogNormal(0.0)
    """Seconds to verify a sample."""
    verify_workers: int = 0
    """Number of samples that are verified in parallel. 0 means unlimited."""
    driver_s: float = 0.0
    """Seconds of driver work per sample. The driver processes one sample at a time."""
    reply_s: float = 0.0
    """Additional seconds if engines report each sample by itself (``group_timeout_s``) instead of with its group."""
    turns: int = 1
    turn_s: float = 0.0
    """Seconds between two turns, spent in the environment."""
    steps: int = 20
    warm_up: int | None = None
    """Number of initial steps to exclude from the means.

    None means half of ``steps`` if ``endless`` is True, otherwise 0.
    """
    endless: bool = True
    """True to continue sampling prompts after the last step, as in a longer run.

    If False, engines run out of work at the end.
    """
    seed: int = 0
    kv_tokens: float = inf
    """Number of tokens that fit into one engine's KV cache."""
    trace: bool = False
    """True to record the occupancy of each engine over time."""

    @property
    def skipped(self) -> int:
        """Number of initial steps that are excluded from the means."""
        if self.warm_up is not None:
            return self.warm_up
        return self.steps // 2 if self.endless else 0

    @property
    def driver_sample_s(self) -> float:
        """Seconds of driver work per sample."""
        return self.driver_s + (0.0 if self.group_timeout_s is None else self.reply_s)

    def check(self) -> None:  # noqa: C901
        """Raise ValueError if settings are invalid or inconsistent. The message names the setting."""
        for name in ("engines", "slots", "groups", "samples", "turns", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        durations = ("train_s", "publish_s", "driver_s", "reply_s", "turn_s")
        for name in (*durations, "prompt_tokens", "max_staleness", "verify_workers"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
            if getattr(self, name) > _LARGEST:
                raise ValueError(f"{name}: must be at most {_LARGEST:,}, got {getattr(self, name)}")
        if not self.rates.step(1) > 0:
            raise ValueError("rates: a decoding step must take more than 0 s")
        if not self.lengths.mean > 0:
            raise ValueError(f"lengths: mean must be more than 0 tokens, got {self.lengths.mean:g}")
        if self.group_timeout_s is not None and not self.group_timeout_s > 0:
            raise ValueError(f"group_timeout_s: must be more than 0, got {self.group_timeout_s:g}")
        if not 0 <= self.skipped < self.steps:
            raise ValueError(f"warm_up: must be between 0 and {self.steps - 1}, got {self.skipped}")
        for name, known in (("kv", KV), ("scheduler", SCHEDULERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.scheduler == "continuous":
            self._check_depth()

    def _check_depth(self) -> None:
        bound = outstanding_bound(self.groups, self.max_staleness, self.window)
        if isinstance(self.depth, str) and self.depth != "auto":
            raise ValueError(f"depth: must be auto or a number of groups, got {self.depth!r}")
        if isinstance(self.depth, int) and not self.groups <= self.depth <= bound:
            raise ValueError(
                f"depth: must be between {self.groups} (a batch) and {bound} groups (a staleness of "
                f"{self.max_staleness} with a window of {self.window}), got {self.depth}"
            )

    def changed(self, **changes: Any) -> Scenario:
        """Return a copy with some settings replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class StepRecord:
    """Record of one step. Totals are sums over all engines since the start of the run."""

    started: float
    """Time at which the trainer began to wait for the batch."""
    ended: float
    waited: float
    """Seconds that the trainer waited for the batch."""
    held_up: float
    """Seconds between the end of training and the start of the weight update."""
    prompt_indices: tuple[int, ...]
    """Prompt index of each trained group."""
    staleness: tuple[int, ...]
    """Staleness of each group: the weight version that is trained minus the oldest version that started a sample."""
    tokens: float
    depth: int
    outstanding: int
    """Number of admitted groups that are not trained, including this step's batch."""
    engine_busy: float
    """Total seconds in which an engine had an active sequence."""
    slot_seconds: float
    """Total seconds of occupied decoding slots."""
    queue_seconds: float
    """Total seconds that sequences waited for a slot."""
    driver_busy: float
    """Total seconds of driver work."""
    verifying: float
    """Total seconds of verification."""
    resident: float
    """Largest number of tokens in any engine's KV cache so far."""


@dataclass
class Trace:
    """Changes of engine occupancy over time as (seconds, engine index, active sequences)."""

    changes: list[tuple[float, int, int]] = field(default_factory=list)

    def record(self, now: float, engine: int, sequences: int) -> None:
        """Record that ``engine`` has ``sequences`` active sequences from the time ``now``."""
        self.changes.append((now, engine, sequences))


@dataclass(frozen=True)
class Result:
    """Result of a simulated run. Unless noted otherwise, statistics cover the steps after the warm-up."""

    scenario: Scenario
    steps: list[StepRecord]
    late: int
    """Number of samples that were aborted at their group's deadline."""
    trace: Trace | None = None

    @property
    def measured(self) -> list[StepRecord]:
        """Steps after the warm-up."""
        return self.steps[self.scenario.skipped :]

    @property
    def seconds(self) -> float:
        """Total seconds of the measured steps."""
        return self.steps[-1].ended - self._start

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.seconds / len(self.measured)

    @property
    def tokens_per_second(self) -> float:
        """Trained completion tokens per second."""
        return sum(step.tokens for step in self.measured) / self.seconds

    @property
    def trainer_idle(self) -> float:
        """Fraction of time in which the trainer waits for its batch or for the start of the weight update."""
        return sum(step.waited + step.held_up for step in self.measured) / self.seconds

    @property
    def held_up(self) -> float:
        """Fraction of time in which a weight update waits for the engines."""
        return sum(step.held_up for step in self.measured) / self.seconds

    @property
    def engine_idle(self) -> float:
        """Fraction of the engines' time without active sequences."""
        return max(0.0, 1 - self._increase("engine_busy") / (self.seconds * self.scenario.engines))

    @property
    def slots_used(self) -> float:
        """Mean fraction of decoding slots that are occupied."""
        return self._increase("slot_seconds") / (self.seconds * self.scenario.engines * self.scenario.slots)

    @property
    def queued(self) -> float:
        """Mean number of sequences that wait for a slot, summed over all engines."""
        return self._increase("queue_seconds") / self.seconds

    @property
    def driver(self) -> float:
        """Fraction of time in which the driver processes samples."""
        return self._increase("driver_busy") / self.seconds

    @property
    def verifiers(self) -> float:
        """Mean fraction of busy verifiers, or mean number of busy verifiers if ``verify_workers`` is 0."""
        return self._increase("verifying") / self.seconds / (self.scenario.verify_workers or 1)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the trained groups."""
        return fmean(age for step in self.measured for age in step.staleness)

    @property
    def staleness_max(self) -> int:
        """Maximum staleness over all steps, including the warm-up."""
        return max(age for step in self.steps for age in step.staleness)

    @property
    def depth(self) -> float:
        """Mean limit on the number of outstanding groups."""
        return fmean(step.depth for step in self.measured)

    @property
    def kv_use(self) -> float:
        """Peak use of an engine's KV cache relative to its capacity.

        If the ratio exceeds 1, vLLM would preempt sequences.
        """
        return self.steps[-1].resident / self.scenario.kv_tokens

    @property
    def longest_s(self) -> float:
        """Seconds of the longest sample on an otherwise idle engine."""
        return self.scenario.lengths.longest * self.scenario.rates.step(1)

    def figures(self) -> dict[str, float]:
        """Return all statistics by name."""
        names = ("step_s", "tokens_per_second", "trainer_idle", "held_up", "engine_idle", "slots_used", "queued",
                 "driver", "verifiers", "staleness_mean", "staleness_max", "depth", "kv_use", "longest_s")  # fmt: skip
        return {name: float(getattr(self, name)) for name in names} | {"late": float(self.late)}

    @property
    def _start(self) -> float:
        skipped = self.scenario.skipped
        return self.steps[skipped - 1].ended if skipped else 0.0

    def _increase(self, name: str) -> float:
        skipped = self.scenario.skipped
        before = float(getattr(self.steps[skipped - 1], name)) if skipped else 0.0
        return float(getattr(self.steps[-1], name)) - before
