"""Choice of the next prompt by the quotas of sources (``data.mix``) and by the signal of reward components
(``rollout.selection``).

With ``rollout.selection``, the pools contain for each prompt and component the running share of groups in which the
component varied, and the running mean reward. A prompt is chosen in two stages:

1. Quotas select a source, and then a difficulty that has prompts in this source. Both take turns by their shares.
2. The prompts with this source and difficulty are considered in the order of the run. Each is accepted with its
   probability, which is the weighted mean of its components' shares, and at least ``min_rate``. Without
   ``rollout.selection``, every prompt is accepted.

A pool continues with the next epoch of the order when its prompts of an epoch are used up, so a small source repeats
while a large source is still in its first epoch.

The choice depends only on the seed and the state. Without ``rollout.selection``, the state is that of the earlier
choices, so the prompts are the same at any staleness. With it, the random number of a place in the order is a function
of the seed and the place. A group changes the state when its prompt index is trained or dropped. A resumed run samples
outstanding groups again, so that each group is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.table import CONSTANT_RANGE
from gdpo_nemo.config.environment_algorithms import config_of
from gdpo_nemo.config.rollout_checks import DIFFICULTIES
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.mix import source_of_row
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Group
from gdpo_nemo.rollouts.credit import reward_columns

METRICS = {
    "selection/skipped": (
        "prompts",
        "Prompts that rollout.selection considered but did not sample since the previous batch",
    ),
    "selection/rate": ("share", "Mean probability with which rollout.selection samples a prompt that it considers"),
}
_STREAM = 2
"""Number in the seed that makes this random stream independent of other streams of the run's seed."""

Signals = Mapping[str, tuple[bool, float]]
"""For each component of a group: True if its rewards vary, and their mean."""
_Pool = tuple[int, int]
"""(index of the source, index of the difficulty). The index is 0 without quotas."""


def signals_of(group: Group, config: Config) -> Signals:
    """Return the signal of each component with a weight, for the samples of a group that can be trained.

    The rewards are those after ``gdpo.shaping``. A family of criteria counts as one component. A component without a
    reward in the group is omitted.
    """
    config = config_of(config, group.prompt.environment)
    samples = [t for t in group.trajectories if t.trains]
    signals = {}
    for name, column in (reward_columns(samples, config) if samples else {}).items():
        values = column[~np.isnan(column)]
        if config.gdpo.rewards.get(name) and len(values):
            signals[name] = (not is_constant(values), float(values.mean()))
    return signals


def is_constant(values: np.ndarray) -> bool:
    """Return True if the rewards of a group give no signal, as in the estimators."""
    return float(np.ptp(values)) <= CONSTANT_RANGE * max(1.0, float(np.abs(values).max()))


class Quotas:
    """Turns of several names by their shares (Tijdeman's solution of the chairman assignment problem).

    After any number n of turns of the same k names, the turns of a name differ from n times its share by at most
    1 - 1 / (2 k - 2). A name that cannot take part in a turn gives its share to the others and does not catch up later.
    A name with share 0 has no turns.

    Source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980).
    """

    def __init__(self, shares: Sequence[float]):
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self.credits = [0.0] * len(shares)
        """Turns that each name is owed."""

    def restore(self, credits: Mapping[str, float], names: Sequence[str]) -> None:
        """Restore the saved credits of the names. If the config has changed the names, all start at 0."""
        if set(credits) == set(names):
            self.credits = [credits[name] for name in names]

    def turn(self, present: Iterable[int]) -> int:
        """Return the index of the next name, out of those that take part in this turn."""
        indices = [index for index in sorted(present) if self._shares[index]]
        total = sum(self._shares[index] for index in indices)
        for index in indices:
            self.credits[index] += self._shares[index]
        slack = total / max(2 * len(indices) - 2, 1)
        # The tolerance covers rounding errors. No credit may be large enough if other names took part in earlier turns.
        owed = [index for index in indices if self.credits[index] >= slack * (1 - 1e-9)] or indices
        # Of these names, take the name whose credit would be the first to exceed total - slack.
        chosen = min(owed, key=lambda index: (total - slack - self.credits[index]) / self._shares[index])
        self.credits[chosen] -= total
        return chosen


@dataclass
class _Cursor:
    """Position of a pool in the order of the run."""

    place: int
    """First place that this pool has not considered yet."""
    epoch: int = -1
    order: np.ndarray | None = None
    """int64 [prompts]: prompts of the epoch, in order."""
    offsets: np.ndarray | None = None
    """int64 [prompts of the pool]: positions of the pool's prompts in ``order``, ascending. None if they must be
    computed again."""


class PromptPools:
    """Choice of the prompts of a run. Not thread-safe.

    Args:
        prompts: training prompts.
        saved: result of ``state`` from the checkpoint, or None.
        start: first place in the order of the run, without a saved state.
    """

    def __init__(self, config: Config, prompts: PromptSource, saved: Mapping[str, Any] | None = None, start: int = 0):
        self._section = config.rollout.selection
        self._seed = config.run.seed
        self._prompts = prompts
        weights = {name: weight for name, weight in config.gdpo.rewards.items() if weight}
        self._names = list(weights)
        self._weights = np.array(list(weights.values()))
        shape = (len(prompts), len(weights))
        self._seen = np.zeros(len(prompts), bool)
        """True for prompts with at least one recorded group."""
        self._rates = np.ones(shape)
        """Running share of groups in which the component varied: [prompts, components]."""
        self._means = np.full(shape, np.nan)
        """Running mean reward, NaN if unknown: [prompts, components]."""
        self._lows = np.full(len(weights), np.nan)
        self._highs = np.full(len(weights), np.nan)
        """Smallest and largest mean reward of a group so far, NaN if unknown: [components]."""
        sources, difficulties = config.data.mix, self._section.difficulties
        self._source = np.zeros(len(prompts), np.int64)
        """Index of each prompt's source."""
        if sources:
            numbers = {name: number for number, name in enumerate(sources)}
            found = [source_of_row(prompt.environment, prompt.fields, config.data) for prompt in prompts.head()]
            self._source = np.array([numbers[name] for name in found])
        self._source_names = list(sources) or [""]
        self._level_names = list(DIFFICULTIES) if difficulties else [""]
        self._turns = Quotas(list(sources.values()) or [1.0])
        shares = [difficulties.get(name, 1.0) for name in self._level_names]
        self._turns_of_source = [Quotas(shares) for _ in self._source_names]
        self._start = start
        self._cursors: dict[_Pool, _Cursor] = {}
        self._members: dict[_Pool, np.ndarray] = {}
        """bool [prompts] for each pool that has prompts. Empty if it must be computed again."""
        self._skipped = 0
        if saved:
            self._restore(saved)

    def draw(self) -> int:
        """Choose the next prompt. Returns its place in the order of the run, as in ``PromptSource.batch``."""
        if not self._members:
            self._members = self._find_members()
            for cursor in self._cursors.values():
                cursor.offsets = None
        source = self._turns.turn(range(len(self._source_names)))
        level = self._turns_of_source[source].turn(level for name, level in self._members if name == source)
        cursor = self._cursors.setdefault((source, level), _Cursor(self._start))
        while True:
            place = self._next_place(cursor, self._members[source, level])
            if not self._section.enabled or self._random(place) < self.probability(self._index(place, cursor)):
                return place
            self._skipped += 1

    def _next_place(self, cursor: _Cursor, members: np.ndarray) -> int:
        """Return the first place from the cursor on with a prompt of the pool, and move the cursor behind it."""
        while True:
            epoch, offset = divmod(cursor.place, len(self._prompts))
            order = self._order(epoch, cursor)
            if cursor.offsets is None:
                cursor.offsets = np.flatnonzero(members[order])
            number = int(np.searchsorted(cursor.offsets, offset))
            if number < len(cursor.offsets):
                place = cursor.place + int(cursor.offsets[number]) - offset
                cursor.place = place + 1
                return place
            cursor.place += len(self._prompts) - offset

    def index(self, place: int) -> int:
        """Return the index of the prompt at a place in the order of the run."""
        epoch = place // len(self._prompts)
        # Pools may be in different epochs, so the cursors store the order of their own epoch.
        cursors = (cursor for cursor in self._cursors.values() if cursor.epoch == epoch)
        return self._index(place, next(cursors, _Cursor(place)))

    def _index(self, place: int, cursor: _Cursor) -> int:
        epoch, offset = divmod(place, len(self._prompts))
        return int(self._order(epoch, cursor)[offset])

    def _order(self, epoch: int, cursor: _Cursor) -> np.ndarray:
        """Return the prompts of an epoch in order, which the cursor keeps: int64 [prompts]."""
        if cursor.order is None or cursor.epoch != epoch:
            cursor.epoch, cursor.order, cursor.offsets = epoch, self._prompts.order(epoch), None
        return cursor.order

    def probability(self, index: int) -> float:
        """Return the probability with which the prompt is sampled when it is next in the order."""
        weights = np.abs(self._weights)
        return max(self._section.min_rate, float(self._rates[index] @ weights / weights.sum()))

    def _random(self, place: int) -> float:
        return float(np.random.default_rng([self._seed, _STREAM, place]).random())

    def _find_members(self) -> dict[_Pool, np.ndarray]:
        levels = self.difficulties() if self._section.difficulties else np.zeros(len(self._prompts), np.int64)
        members = {}
        for source in range(len(self._source_names)):
            for level in range(len(self._level_names)):
                chosen = (self._source == source) & (levels == level)
                if chosen.any():
                    members[source, level] = chosen
        return members

    def difficulties(self) -> np.ndarray:
        """Return the index of each prompt's difficulty in ``DIFFICULTIES``: int64 [prompts].

        The running mean of a component is placed between the smallest and largest mean of a group so far, which are 0
        and 1. With a negative weight, they are 1 and 0. The weighted mean over the components is below 1/3 for hard
        prompts, and at least 2/3 for easy ones. Components without a known range do not count.
        """
        spread = self._highs - self._lows
        with np.errstate(invalid="ignore", divide="ignore"):
            ease = (self._means - self._lows) / spread
        ease = np.where(self._weights < 0, 1.0 - ease, ease)
        counts = np.isfinite(ease)
        weights = np.abs(self._weights) * counts
        total = weights.sum(axis=1)
        mean = (np.where(counts, ease, 0.0) * weights).sum(axis=1)
        mean = np.where(total > 0, mean / np.where(total > 0, total, 1.0), 0.5)
        level = 1 + np.digitize(mean, [1 / 3, 2 / 3])
        return np.where(self._seen, level, 0)

    def update(self, index: int, signals: Signals) -> None:
        """Record a group of the prompt with this index."""
        memory = self._section.memory
        self._seen[index] = True
        for column, name in enumerate(self._names):
            varies, mean = signals.get(name, (False, np.nan))
            self._rates[index, column] = memory * self._rates[index, column] + (1.0 - memory) * varies
            if np.isnan(mean):
                continue
            before = self._means[index, column]
            self._means[index, column] = mean if np.isnan(before) else memory * before + (1.0 - memory) * mean
            self._lows[column] = np.fmin(self._lows[column], mean)
            self._highs[column] = np.fmax(self._highs[column], mean)
        if self._section.difficulties:
            self._members = {}

    def measure(self) -> dict[str, float]:
        """Return the metrics of ``rollout.selection`` since the last call."""
        if not self._section.enabled:
            return {}
        skipped, self._skipped = self._skipped, 0
        weights = np.abs(self._weights)
        rates = np.maximum(self._rates @ weights / weights.sum(), self._section.min_rate)
        return {"selection/skipped": float(skipped), "selection/rate": float(rates.mean())}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as plain values. Unknown numbers are None."""
        prompts = []
        for index in np.flatnonzero(self._seen).tolist():
            prompts.append([index, self._rates[index].tolist(), _plain(self._means[index])])
        cursors = []
        for (source, level), cursor in self._cursors.items():
            cursors.append([self._source_names[source], self._level_names[level], cursor.place])
        levels = {}
        for name, turns in zip(self._source_names, self._turns_of_source):
            levels[name] = dict(zip(self._level_names, turns.credits))
        return {
            "start": self._start,
            "components": self._names,
            "lows": _plain(self._lows),
            "highs": _plain(self._highs),
            "prompts": prompts,
            "cursors": cursors,
            "sources": dict(zip(self._source_names, self._turns.credits)),
            "difficulties": levels,
            "skipped": self._skipped,
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state. Components and quotas that the config has changed start anew."""
        columns = []
        for column, name in enumerate(self._names):
            if name in saved["components"]:
                columns.append((column, saved["components"].index(name)))
        for column, old in columns:
            self._lows[column] = _number(saved["lows"][old])
            self._highs[column] = _number(saved["highs"][old])
        for index, rates, means in saved["prompts"]:
            self._seen[index] = True
            for column, old in columns:
                self._rates[index, column] = rates[old]
                self._means[index, column] = _number(means[old])
        names = [list(saved["sources"]), *(list(levels) for levels in saved["difficulties"].values())]
        self._start = saved["start"]
        if names != [self._source_names, *[self._level_names] * len(self._source_names)]:
            # The pools of other quotas begin behind all prompts that were considered.
            self._start = max([self._start, *(place for _, _, place in saved["cursors"])])
        for source, level, place in saved["cursors"]:
            if source in self._source_names and level in self._level_names:
                pool = self._source_names.index(source), self._level_names.index(level)
                self._cursors[pool] = _Cursor(place)
        self._skipped = saved["skipped"]
        self._turns.restore(saved["sources"], self._source_names)
        for name, turns in zip(self._source_names, self._turns_of_source):
            turns.restore(saved["difficulties"].get(name, {}), self._level_names)


def _plain(values: np.ndarray) -> list[float | None]:
    """Return the values for JSON, which has no NaN."""
    return [None if np.isnan(value) else value for value in values.tolist()]


def _number(value: float | None) -> float:
    return np.nan if value is None else value
