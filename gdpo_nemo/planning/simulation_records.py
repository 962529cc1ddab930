"""What a simulation is told and what it tells: scenario, lengths, steps and the account of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import erf, exp, inf, log, sqrt
from random import Random
from statistics import fmean
from typing import Any, Protocol

from gdpo_nemo.planning.simulated_engine import EngineRates
from gdpo_nemo.rollouts.depth import outstanding_bound

SCHEDULERS = ("continuous", "barrier")
KV = ("drain", "recompute", "keep")


class Draw(Protocol):
    """A distribution of one number a sample, drawn anew for every group."""

    @property
    def mean(self) -> float:
        """Its mean."""

    @property
    def longest(self) -> float:
        """Its largest value, or one that few samples exceed."""

    def of_group(self, seed: int, position: int, samples: int) -> list[float]:
        """The numbers of a group's samples: a function of seed and position."""


_LARGEST = 10**9
"""Seconds, or tokens: what is above is a slip."""


@dataclass(frozen=True)
class LogNormal:
    """``median`` x exp(``sigma`` z), cut at ``cap``; with sigma 0 a constant."""

    median: float
    sigma: float = 0.0
    cap: float = inf

    @classmethod
    def of_mean(cls, mean: float, sigma: float, cap: float = inf) -> LogNormal:
        """The one whose mean is ``mean`` after the cut.

        Raises:
            ValueError: no such distribution: the mean is not below the cap.
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
        """E[min(X, cap)]."""
        if not self.sigma or not self.median or self.cap == inf:
            return min(self.cap, self.median * exp(self.sigma * self.sigma / 2))
        z = (log(self.cap) - log(self.median)) / self.sigma
        below = self.median * exp(self.sigma * self.sigma / 2) * _normal(z - self.sigma)
        return below + self.cap * (1 - _normal(z))

    @property
    def longest(self) -> float:
        """The cap, or what one sample in a thousand exceeds."""
        return min(self.cap, self.median * exp(3.09 * self.sigma))

    def of_group(self, seed: int, position: int, samples: int) -> list[float]:
        """See ``Draw``."""
        if not self.sigma or not self.median:
            return [min(self.cap, self.median)] * samples
        random = Random((seed << 40) + position)
        mu = log(self.median)
        return [min(self.cap, random.lognormvariate(mu, self.sigma)) for _ in range(samples)]


def _normal(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


@dataclass(frozen=True)
class Measured:
    """Values that were seen, drawn with replacement."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the values."""
        return fmean(self.values)

    @property
    def longest(self) -> float:
        """Of the values."""
        return max(self.values)

    def of_group(self, seed: int, position: int, samples: int) -> list[float]:
        """See ``Draw``."""
        return Random((seed << 40) + position).choices(self.values, k=samples)


@dataclass(frozen=True)
class Scenario:
    """One run to simulate. Seconds, tokens, and counts as in the config."""

    engines: int
    rates: EngineRates
    slots: int
    """Sequences that one engine decodes at once: max_num_seqs, or fewer where its cache has no room for them."""
    groups: int
    """P: groups of a step."""
    samples: int
    """G: samples of a group."""
    lengths: Draw
    """Tokens that a sample's turns have together."""
    train_s: float
    """Seconds of a step's training."""
    publish_s: float = 0.0
    """Seconds of one publication: the trainer is busy, an engine that takes the weights stands still."""
    prompt_tokens: float = 0.0
    max_staleness: int = 0
    window: int = 1
    """W; 1 keeps the order."""
    depth: int | str = "auto"
    """Groups that may be outstanding, or ``auto``. Without effect under ``barrier``."""
    kv: str = "keep"
    group_timeout_s: float | None = None
    scheduler: str = "continuous"
    verifier: Draw = LogNormal(0.0)
    """Seconds that judging a sample takes."""
    verify_workers: int = 0
    """Samples judged at once; 0: all."""
    driver_s: float = 0.0
    """Seconds of the driver that one sample takes; it handles one at a time."""
    turns: int = 1
    turn_s: float = 0.0
    """Seconds between two turns, which the environment takes."""
    steps: int = 20
    warm_up: int | None = None
    """Steps that the means leave out. None: half of them where the run goes on, else none."""
    endless: bool = True
    """Whether prompts go on after the last step, as in the middle of a long run; else its engines run empty."""
    seed: int = 0
    kv_tokens: float = inf
    """Tokens for which one engine's cache has room."""
    trace: bool = False
    """Keep when how many sequences were in which engine."""

    @property
    def skipped(self) -> int:
        """Steps that the means leave out."""
        return self.warm_up if self.warm_up is not None else self.steps // 2 if self.endless else 0

    def check(self) -> None:
        """Raise ValueError, with what is wrong, where the figures make no run."""
        for name in ("engines", "slots", "groups", "samples", "turns", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("train_s", "publish_s", "prompt_tokens", "driver_s", "turn_s", "max_staleness", "verify_workers"):
            if not 0 <= getattr(self, name):
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
            if getattr(self, name) > _LARGEST:
                raise ValueError(f"{name}: must be at most {_LARGEST:,}, got {getattr(self, name)}")
        if not self.rates.step(1) > 0:
            raise ValueError("rates: a decoding step takes no time")
        if not self.lengths.mean > 0:
            raise ValueError(f"lengths: must be more than 0 tokens, got {self.lengths.mean:g}")
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
            raise ValueError(f"depth: {self.depth!r} is neither auto nor a number of groups")
        if isinstance(self.depth, int) and not self.groups <= self.depth <= bound:
            raise ValueError(
                f"depth: must be between {self.groups} (a batch) and {bound} groups (a staleness of "
                f"{self.max_staleness} with a window of {self.window}), got {self.depth}"
            )

    def changed(self, **changes: Any) -> Scenario:
        """A copy with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class StepRecord:
    """One step; sums are since the start of the run, over all engines."""

    started: float
    """When the trainer began to wait for the batch."""
    ended: float
    waited: float
    """Seconds until the batch was complete."""
    held_up: float
    """Seconds until the trained weights could be sent."""
    positions: tuple[int, ...]
    staleness: tuple[int, ...]
    """Of each group: the version that trains it minus the oldest that wrote a token of it."""
    tokens: float
    depth: int
    outstanding: int
    """Groups admitted and not trained, just before the batch counted as trained."""
    engine_busy: float
    slot_seconds: float
    queue_seconds: float
    driver_busy: float
    verifying: float
    resident: float
    """Most tokens that one engine's cache has held so far."""


@dataclass
class Trace:
    """(seconds, engine, sequences) at every change of an engine's occupancy."""

    changes: list[tuple[float, int, int]] = field(default_factory=list)

    def occupied(self, now: float, engine: int, sequences: int) -> None:
        """Note how many sequences an engine has from now on."""
        self.changes.append((now, engine, sequences))


@dataclass(frozen=True)
class Result:
    """What a simulated run came to. Means are over the steps after the warm-up."""

    scenario: Scenario
    steps: list[StepRecord]
    late: int
    """Samples aborted at their group's deadline."""
    trace: Trace | None = None

    @property
    def measured(self) -> list[StepRecord]:
        """The steps that count."""
        return self.steps[self.scenario.skipped :]

    @property
    def seconds(self) -> float:
        """Of the steps that count."""
        return self.steps[-1].ended - self._start

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / len(self.measured)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens trained."""
        return sum(step.tokens for step in self.measured) / self.seconds

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits, for its batch or to be allowed to send the weights."""
        return sum(step.waited + step.held_up for step in self.measured) / self.seconds

    @property
    def held_up(self) -> float:
        """Share of the time in which trained weights wait for the engines."""
        return sum(step.held_up for step in self.measured) / self.seconds

    @property
    def engine_idle(self) -> float:
        """Share of the engines' time without any sequence."""
        return max(0.0, 1 - self._grown("engine_busy") / (self.seconds * self.scenario.engines))

    @property
    def slots_used(self) -> float:
        """Share of the decoding slots that have a sequence, on average."""
        return self._grown("slot_seconds") / (self.seconds * self.scenario.engines * self.scenario.slots)

    @property
    def queued(self) -> float:
        """Sequences that wait for a slot, on average over all engines."""
        return self._grown("queue_seconds") / self.seconds

    @property
    def driver(self) -> float:
        """Share of the time in which the driver is busy with samples."""
        return self._grown("driver_busy") / self.seconds

    @property
    def verifiers(self) -> float:
        """Verifiers busy on average: as a share where their number is limited, else how many."""
        return self._grown("verifying") / self.seconds / (self.scenario.verify_workers or 1)

    @property
    def staleness_mean(self) -> float:
        """Of the trained groups."""
        return fmean(age for step in self.measured for age in step.staleness)

    @property
    def staleness_max(self) -> int:
        """Of all steps, the warm-up included."""
        return max(age for step in self.steps for age in step.staleness)

    @property
    def depth(self) -> float:
        """Groups that might be outstanding, on average."""
        return fmean(step.depth for step in self.measured)

    @property
    def kv_use(self) -> float:
        """Fullest cache of an engine as a share of its room; above 1 it would have had to throw sequences out."""
        return self.steps[-1].resident / self.scenario.kv_tokens

    @property
    def longest_s(self) -> float:
        """Seconds that the longest sample takes alone: no scheduler makes it faster."""
        return self.scenario.lengths.longest * self.scenario.rates.step(1)

    def account(self) -> dict[str, float]:
        """Every figure by name."""
        names = ("step_s", "tokens_per_second", "trainer_idle", "held_up", "engine_idle", "slots_used", "queued",
                 "driver", "verifiers", "staleness_mean", "staleness_max", "depth", "kv_use", "longest_s")  # fmt: skip
        return {name: float(getattr(self, name)) for name in names} | {"late": float(self.late)}

    @property
    def _start(self) -> float:
        skipped = self.scenario.skipped
        return self.steps[skipped - 1].ended if skipped else 0.0

    def _grown(self, name: str) -> float:
        skipped = self.scenario.skipped
        before = float(getattr(self.steps[skipped - 1], name)) if skipped else 0.0
        return float(getattr(self.steps[-1], name)) - before
