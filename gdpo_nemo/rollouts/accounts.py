"""All that a run counts of its prompts, under one owner: positions, the prompts that they draw, groups used again."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.rollout_bounds import new_groups, resolved_bound, resolved_window
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group
from gdpo_nemo.rollouts.ledger import Ledger, LedgerState
from gdpo_nemo.rollouts.replay_buffer import Load, ReplayBuffer
from gdpo_nemo.rollouts.reroll import DealState, PromptDeal

NO_SIGNAL = "no signal"
LATE = "late"
SURPLUS = "surplus"
"""Reasons for which a position is dropped: gdpo.dynamic_sampling found no signal in its group, or did not need it;
fewer than rollout.min_valid of its samples were done in time."""
_UNBOUNDED = 2**30


class Accounts:
    """The accounts of one run; not thread-safe.

    Args:
        saved: what ``state`` gave, of the checkpoint; empty at the start of a run and in older checkpoints.
        position: prompts that the steps so far consumed.
        step: steps done.
        limit: prompts of the whole run; None: no end.
        load: reads groups of earlier steps back.
    """

    def __init__(
        self, config: Config, saved: Mapping[str, Any], position: int, step: int, limit: int | None, load: Load
    ):
        start = LedgerState.of(saved, position)
        exact = config.rollout.max_staleness == 0
        self._limit = limit
        self._step = step
        self._groups = config.gdpo.num_prompts_per_step
        self.ledger = Ledger(
            new_groups(config),
            # A synchronous step replaces groups before it is trained; nothing is stale then, however many they are.
            _UNBOUNDED if exact else resolved_bound(config),
            resolved_window(config),
            start,
            limit,
            step,
            config.rollout.sync_every - 1,
        )
        self.consumed = start.position + len(start.retired)
        """Positions trained or dropped."""
        dynamic = config.gdpo.dynamic_sampling
        after = dynamic.reroll_after if dynamic.enabled else 0
        self._deal = PromptDeal(after, dynamic.max_rerolls, DealState.of(saved.get("deal", {}), start.position))
        self._rerolls = after > 0
        section = config.rollout.replay_buffer
        self._used_again = section.groups
        self._buffer = ReplayBuffer(section.reuse, section.max_age, config.run.seed)
        self._buffer.restore(saved.get("replay_buffer", ()), load)
        self._buffered: list[list[int]] = self._buffer.state()
        self.again: list[Group] = []
        """Groups of earlier steps that the next batch has."""
        self._draw_again()

    @property
    def wanted(self) -> int:
        """New groups of the next batch."""
        return self._groups - len(self.again)

    @property
    def prompts_left(self) -> float:
        """Prompts that were never admitted."""
        if self._limit is None:
            return float("inf")
        return self._deal.positions(self._limit, self._step) - self.consumed - len(self.ledger)

    def begin(self, step: int, trained: Sequence[Group]) -> None:
        """Account for the groups that step number ``step`` trained for the first time, and begin the next."""
        positions = sorted({group.position for group in trained})
        self.ledger.trained(positions)
        self.consumed += len(positions)
        if self._rerolls:
            self._deal.done(positions)
        self._step = step
        if self._used_again:
            self._buffer.add(step, trained)
            self._draw_again()
        if self._limit is not None:
            self.ledger.limit = self._deal.positions(self._limit, step)

    def _draw_again(self) -> None:
        # Before the draw, which a resumed run repeats.
        self._buffered = self._buffer.state()
        drawn = self._buffer.draw(self._used_again, self._step) if self._used_again else []
        # Copies: the samples of the step that had them first may still be on their way to the disk.
        self.again = [replace(group, trajectories=[replace(t) for t in group.trajectories]) for group in drawn]

    def admit(self, version: int, most: int) -> list[tuple[int, int]]:
        """Admit positions as ``Ledger.admit`` does. Returns (position, place of its prompt in the data)."""
        admitted = self.ledger.admit(version, most)
        if not self._rerolls:
            return [(position, position) for position in admitted]
        return [(position, self._deal.deal(position, self._step)) for position in admitted]

    def drop(self, position: int, reason: str) -> None:
        """Give a position up."""
        self.ledger.drop(position, reason)
        self.consumed += 1
        if self._rerolls and reason == NO_SIGNAL:
            self._deal.no_signal(position, self._step)
        elif self._rerolls:
            self._deal.done([position])

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, in plain values."""
        state = asdict(self.ledger.state())
        if self._rerolls:
            state["deal"] = asdict(self._deal.state())
        if self._used_again:
            state["replay_buffer"] = self._buffered
        return state
