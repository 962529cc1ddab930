"""Prompt ledger: the prompt of each prompt index, and its stage: waiting, in flight, ready, trained or dropped."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from gdpo_nemo.config.rollout_checks import (
    admission_bound as admission_bound,
    new_groups,
    resolved_bound,
    resolved_window,
)
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Group
from gdpo_nemo.rollouts.prompt_pools import PromptPools, Signals, signals_of
from gdpo_nemo.rollouts.replay_buffer import Load, ReplayBuffer


class Stage(StrEnum):
    """Stage of an outstanding prompt index. The group of an outstanding index was neither trained nor dropped."""

    WAITING = "waiting"
    DRAWING = "drawing"
    READY = "ready"


@dataclass
class LedgerState:
    """State of a ``Ledger`` in a checkpoint."""

    position: int = 0
    """First prompt index whose group was neither trained nor dropped."""
    retired: list[int] = field(default_factory=list)
    """Prompt indices after ``position`` whose groups were trained or dropped, in ascending order."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """(prompt index, reason) of each index dropped since the last batch. The next batch reports these drops."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], position: int = 0) -> LedgerState:
        """Restore a state from the output of ``dataclasses.asdict``.

        In older checkpoints ``saved`` is empty. In this case, the groups of all indices before ``position``
        count as trained or dropped.
        """
        if not saved:
            return cls(position)
        dropped = [(int(p), str(reason)) for p, reason in saved.get("dropped", ())]
        return cls(int(saved["position"]), list(map(int, saved["retired"])), dropped)


@dataclass
class Entry:
    """An outstanding prompt index."""

    position: int
    version: int
    """Newest published weight version at admission. Engines with older weights must not sample this index."""
    stage: Stage = Stage.WAITING


class Ledger:
    """Prompt ledger of one run. Not thread-safe.

    Args:
        groups: P, number of groups that a step trains.
        bound: B, maximum number of outstanding indices. See ``admission_bound``.
        window: W. A group may be trained only if its index minus the oldest outstanding index is less than W.
        start: state to resume from, or None for the beginning of a run.
        limit: number of prompt indices in the whole run, or None for no limit.
        updates: number of updates before ``start``.
        late: L, number of updates by which published weights may lag behind the trainer. ``bound`` assumes this lag.
    """

    def __init__(
        self,
        groups: int,
        bound: int,
        window: int,
        start: LedgerState | None = None,
        *,
        limit: int | None = None,
        updates: int = 0,
        late: int = 0,
    ):
        start = start or LedgerState()
        if not groups <= bound or window < 1:
            raise ValueError(f"bound ({bound}) must be at least groups ({groups}), and window ({window}) at least 1")
        self.groups = groups
        self.bound = bound
        self.window = window
        self.limit = limit
        self.late = late
        self.updates = updates
        """Number of updates, including the updates before a resume. This number equals the version of the trainer's
        weights."""
        self.dropped: list[tuple[int, str]] = list(start.dropped)
        """(prompt index, reason) of each index dropped since the last call of ``take_dropped``."""
        self._outstanding: dict[int, Entry] = {}
        self._next = start.position
        """First prompt index that was never admitted."""
        self._retired = set(start.retired)
        """Indices after the first outstanding index whose groups were trained or dropped."""

    def __len__(self) -> int:
        """Return the number of outstanding indices."""
        return len(self._outstanding)

    def __getitem__(self, position: int) -> Entry:
        return self._outstanding[position]

    def __contains__(self, position: int) -> bool:
        return position in self._outstanding

    def count(self, *stages: Stage) -> int:
        """Return the number of outstanding indices that are in one of ``stages``."""
        # Copy the entries, because the status file asks from another thread.
        return sum(entry.stage in stages for entry in list(self._outstanding.values()))

    def admit(self, version: int, most: int | None = None) -> list[int]:
        """Admit prompt indices until enough indices are outstanding or the limit is reached.

        Args:
            version: version of the published weights. If this version lags behind by more than L updates, fewer indices
                are admitted.
            most: maximum number of outstanding indices, if this maximum is less than B. None means B.

        Returns:
            The admitted indices, in ascending order.
        """
        # B assumes that the published weights lag by at most L updates. Every further update makes the tokens of a new
        # group one version older, so the groups of these updates count as outstanding.
        room = self.bound - max(0, self.updates - version - self.late) * self.groups
        room = room if most is None else min(most, room)
        admitted = []
        while len(self._outstanding) < room:
            while self._next in self._retired:  # The group was trained or dropped before a resume.
                self._next += 1
            if self.limit is not None and self._next >= self.limit:
                break
            self._outstanding[self._next] = Entry(self._next, version)
            admitted.append(self._next)
            self._next += 1
        return admitted

    def move(self, position: int, stage: Stage) -> None:
        """Move an index to a later stage.

        Raises:
            ValueError: if ``stage`` is earlier than the current stage.
        """
        entry = self._outstanding[position]
        order = list(Stage)
        if order.index(stage) < order.index(entry.stage):
            raise ValueError(f"prompt index {position} cannot move from stage {entry.stage} back to {stage}")
        entry.stage = stage

    def drop(self, position: int, reason: str) -> None:
        """Drop an index, so that its group is never trained."""
        del self._outstanding[position]
        self._retired.add(position)
        self.dropped.append((position, reason))

    def get_batch(self, count: int | None = None) -> list[int] | None:
        """Select the indices of the groups that the next update trains.

        Indices are taken one at a time. Each selected index is the smallest ready index whose distance to the oldest
        outstanding index is less than W, ignoring the indices already taken.

        Args:
            count: number of indices to select. None means P.

        Returns:
            The selected indices in ascending order, or None if too few indices are ready.
        """
        count = self.groups if count is None else count
        ready = sorted(p for p, entry in self._outstanding.items() if entry.stage is Stage.READY)
        if len(ready) < count:
            return None
        outstanding = sorted(self._outstanding)
        taken = ready[:count]
        oldest = 0
        for number, position in enumerate(taken):
            # ``taken`` is sorted, so the first ``number`` outstanding indices are all taken if their last one is.
            while oldest < number and outstanding[oldest] == taken[oldest]:
                oldest += 1
            if position >= outstanding[oldest] + self.window:
                return None
        return taken

    def trained(self, positions: Iterable[int]) -> None:
        """Record an update that trained the groups of these indices."""
        for position in positions:
            del self._outstanding[position]
            self._retired.add(position)
        self.updates += 1
        first = min(self._outstanding, default=self._next)
        # ``first`` itself stays, because it may be an index that must not be admitted again after a resume.
        self._retired = {p for p in self._retired if p >= first}

    def take_dropped(self) -> list[tuple[int, str]]:
        """Return (prompt index, reason) of each index dropped since the last call, for the report of the next batch.

        ``trained`` does not clear this list, because indices dropped while a batch trains are reported with the next
        batch.
        """
        taken = self.dropped
        self.dropped = []
        return taken

    def state(self) -> LedgerState:
        """Return the state for a checkpoint. After a resume, outstanding indices are sampled again."""
        first = min(self._outstanding, default=self._next)
        # Without outstanding indices, the next index may be one that was trained or dropped before a resume.
        while first in self._retired:
            first += 1
        return LedgerState(first, sorted(p for p in self._retired if p >= first), list(self.dropped))


NO_SIGNAL = "no signal"
LOW_VARIANCE = "low variance"
LATE = "late"
SURPLUS = "surplus"
"""Reasons for dropping a prompt index.

``NO_SIGNAL``: gdpo.dynamic_sampling found no training signal in its group. ``LOW_VARIANCE``: its group is not among
those of rollout.selection.variance_top_p. ``SURPLUS``: the batch was full without its group. ``LATE``: fewer than
rollout.min_valid of its samples finished in time.
"""
_UNBOUNDED = 2**30


@dataclass(frozen=True)
class RunPosition:
    """Progress of a run at the start of this process. The default values describe the beginning of a run."""

    ledger: Mapping[str, Any] = field(default_factory=dict)
    """Prompt ledger after the earlier steps (``PromptTracker.state``). The mapping is empty for a new run and in older
    checkpoints."""
    position: int = 0
    """Number of prompts that the earlier steps trained or dropped."""
    step: int = 0
    """Number of finished steps. The next batch is number ``step``."""
    limit: int | None = None
    """Number of prompts in the whole run (``gdpo.max_num_epochs``). The value is None if only the number of steps
    limits the run."""
    updates: tuple[int, int] = (0, 1)
    """(finished, total) number of optimizer updates of the run. Reward functions receive this progress."""


class PromptTracker:
    """Bookkeeping of a run's prompts: prompt ledger, prompt assignment and replay buffer. Not thread-safe.

    Args:
        at: progress of the run, from the checkpoint.
        load: function that reads groups of earlier steps from the run folder.
        prompts: training prompts, for ``data.mix`` and ``rollout.selection``.
    """

    def __init__(self, config: Config, at: RunPosition, load: Load, prompts: PromptSource):
        saved = at.ledger
        start = LedgerState.of(saved, at.position)
        exact = config.rollout.max_staleness == 0
        self._limit = at.limit
        self._step = at.step
        self._groups = config.gdpo.num_prompts_per_step
        self.ledger = Ledger(
            new_groups(config),
            # A synchronous step may replace groups before training. The groups are never stale, so the bound is
            # unnecessary.
            _UNBOUNDED if exact else resolved_bound(config),
            resolved_window(config.rollout),
            start,
            limit=at.limit,
            updates=at.step,
            late=config.rollout.sync_every - 1,
        )
        self.consumed = start.position + len(start.retired)
        """Number of prompt indices whose groups were trained or dropped."""
        dynamic = config.gdpo.dynamic_sampling
        after = dynamic.reroll_after if dynamic.enabled else 0
        deal = DealState.of(saved.get("deal", {}), start.position)
        self._pools: PromptPools | None = None
        draw = None
        self._selects = config.rollout.selection.enabled
        if self._selects or config.data.mix:
            self._pools = PromptPools(config, prompts, saved.get("pools"), deal.next_place)
            draw = self._pools.draw
        self._deal = PromptDeal(after, dynamic.max_rerolls, deal, draw)
        self._deals = after > 0 or self._pools is not None
        """True if the dataset row of a prompt index is not the row of the same number."""
        self._signals: dict[int, Signals] = {}
        """Signals of the outstanding groups that are verified, by prompt index."""
        section = config.rollout.replay_buffer
        self._reuse_count = section.groups
        self._buffer = ReplayBuffer(section.reuse, section.max_age, config.run.seed)
        self._buffer.restore(saved.get("replay_buffer", ()), load)
        self._buffered: list[list[int]] = self._buffer.state()
        self.reused_groups: list[Group] = []
        """Groups of earlier steps that are trained again in the next batch."""
        self._select_reused()

    @property
    def num_new_groups(self) -> int:
        """Number of new groups in the next batch."""
        return self._groups - len(self.reused_groups)

    @property
    def prompts_left(self) -> float:
        """Number of prompts that are not yet admitted. Infinite without a limit."""
        if self._limit is None:
            return float("inf")
        return self._deal.positions(self._limit, self._step) - self.consumed - len(self.ledger)

    def begin(self, step: int, trained: Sequence[Group]) -> None:
        """Record the groups that step number ``step`` trained for the first time, and prepare the next step."""
        positions = sorted({group.position for group in trained})
        self.ledger.trained(positions)
        self.consumed += len(positions)
        for position in positions:
            self._learn(position)
        if self._deals:
            self._deal.done(positions)
        self._step = step
        if self._reuse_count:
            self._buffer.add(step, trained)
            self._select_reused()
        if self._limit is not None:
            self.ledger.limit = self._deal.positions(self._limit, step)

    def _select_reused(self) -> None:
        # The state is saved before the selection, because a resumed run repeats the selection.
        self._buffered = self._buffer.state()
        selected = self._buffer.draw(self._reuse_count, self._step) if self._reuse_count else []
        # Copy the groups, because the groups of an earlier step may still be in the queue of the sample writer.
        self.reused_groups = [replace(group, trajectories=list(map(replace, group.trajectories))) for group in selected]

    def admit(self, version: int, most: int) -> list[tuple[int, int]]:
        """Admit prompt indices as ``Ledger.admit`` does. Returns (prompt index, dataset row of its prompt) pairs."""
        admitted = self.ledger.admit(version, most)
        if not self._deals:
            return [(position, position) for position in admitted]
        return [(position, self._deal.deal(position, self._step)) for position in admitted]

    def drop(self, position: int, reason: str) -> None:
        """Drop a prompt index."""
        self.ledger.drop(position, reason)
        self.consumed += 1
        self._learn(position)
        if self._deals and reason == NO_SIGNAL:
            self._deal.no_signal(position, self._step)
        elif self._deals:
            self._deal.done([position])

    def observe(self, group: Group, config: Config) -> None:
        """Note the signals of a verified group, which ``rollout.selection`` uses once the group is trained or dropped.

        Args:
            config: config with the weights in force in ``gdpo.rewards``.
        """
        if self._selects and (signals := signals_of(group, config)):
            self._signals[group.position] = signals

    def _learn(self, position: int) -> None:
        """Update the pools with the signals of a prompt index that is trained or dropped."""
        signals = self._signals.pop(position, None)
        if self._pools is not None and signals is not None:
            self._pools.update(self._pools.index(self._deal.row(position)), signals)

    def measure(self) -> dict[str, float]:
        """Return the metrics of ``rollout.selection`` since the last call."""
        return {} if self._pools is None else self._pools.measure()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as a dictionary of plain values."""
        state = asdict(self.ledger.state())
        if self._deals:
            state["deal"] = asdict(self._deal.state())
        if self._pools is not None:
            state["pools"] = self._pools.state()
        if self._reuse_count:
            state["replay_buffer"] = self._buffered
        return state


@dataclass
class DealState:
    """State of a ``PromptDeal`` in a checkpoint."""

    next_place: int = 0
    """First dataset row that was never assigned to a prompt index."""
    again: int = 0
    """Number of prompt indices that were rerolls of an earlier prompt."""
    dealt: list[tuple[int, int, int]] = field(default_factory=list)
    """(prompt index, dataset row, earlier rerolls) of each outstanding index."""
    due: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, dataset row, rerolls) of each prompt to be sampled again, in order. The reroll is due from this step
    on."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], position: int = 0) -> DealState:
        """Restore a state from the output of ``dataclasses.asdict``.

        In older checkpoints ``saved`` is empty. In this case, every index before ``position`` has the dataset row of
        the same number.
        """
        if not saved:
            return cls(position)
        dealt = [(int(p), int(row), int(rerolls)) for p, row, rerolls in saved["dealt"]]
        due = [(int(step), int(row), int(rerolls)) for step, row, rerolls in saved["due"]]
        return cls(int(saved["next_place"]), int(saved["again"]), dealt, due)


class PromptDeal:
    """Assignment of dataset rows to prompt indices, including rerolls. Not thread-safe.

    If a group has no training signal, its prompt may be sampled again at a later index, which is called a reroll.

    Args:
        after: number of steps between a group without a training signal and its reroll. 0 disables rerolls.
        most: maximum number of rerolls per prompt and epoch.
        start: state to resume from, or None for the beginning of a run.
        draw: function that chooses the next dataset row, or None to use the rows in order.
    """

    def __init__(
        self,
        after: int = 0,
        most: int = 1,
        start: DealState | None = None,
        draw: Callable[[], int] | None = None,
    ):
        if after < 0 or most < 1:
            raise ValueError(f"after {after} must be 0 or more, and most {most} at least 1")
        start = start or DealState()
        self.after = after
        self.most = most
        self._draw = draw
        self._next = start.next_place
        self._again = start.again
        self._dealt = {position: (row, rerolls) for position, row, rerolls in start.dealt}
        self._due = list(start.due)

    def deal(self, position: int, step: int) -> int:
        """Return the dataset row for an admitted prompt index, after ``step`` training steps.

        An index that was outstanding in the checkpoint keeps its prompt. Otherwise the index gets the reroll that has
        been due longest, or the next dataset row if no reroll is due.
        """
        if position not in self._dealt:
            if self._due and self._due[0][0] <= step:
                _, row, rerolls = self._due.pop(0)
                self._again += 1
            elif self._draw is not None:
                row, rerolls = self._draw(), 0
                self._next = max(self._next, row + 1)
            else:
                row, rerolls = self._next, 0
                self._next += 1
            self._dealt[position] = (row, rerolls)
        return self._dealt[position][0]

    def row(self, position: int) -> int:
        """Return the dataset row of an outstanding prompt index."""
        return self._dealt[position][0]

    def no_signal(self, position: int, step: int) -> bool:
        """Record that a prompt index was dropped after ``step`` steps because its group has no training signal.

        Returns:
            True if the prompt of this index is sampled again.
        """
        row, rerolls = self._dealt.pop(position)
        again = self.after > 0 and rerolls < self.most
        if again:
            # The list is sorted, so that the order does not depend on the order in which reward results arrive.
            insort(self._due, (step + self.after, row, rerolls + 1))
        return again

    def done(self, positions: Iterable[int]) -> None:
        """Record that the groups of these indices were trained, or were dropped for a reason other than a missing
        training signal."""
        for position in positions:
            del self._dealt[position]

    def positions(self, limit: int, step: int) -> int:
        """Return the number of prompt indices in a run of ``limit`` prompts, as known after ``step`` steps.

        This number is the sum of the prompts, the rerolls so far, and the rerolls that are due.
        """
        return limit + self._again + sum(due <= step for due, _, _ in self._due)

    def state(self) -> DealState:
        """Return the state for a checkpoint."""
        dealt = [(position, row, rerolls) for position, (row, rerolls) in sorted(self._dealt.items())]
        return DealState(self._next, self._again, dealt, list(self._due))
