"""Simulated inference engine.

In a step, every active sequence decodes one token, and steps with more sequences take longer.

Between two events, the number of active sequences is constant, so the progress of the sequences has a closed form. The
cost of an event is one heap operation, independent of the number of tokens since the last event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt


@dataclass(frozen=True)
class EngineRates:
    """Time model of a decoding step for n sequences with K tokens in the KV cache.

    The seconds are ``fixed`` + ``per_sequence`` n + max(``weights`` + ``per_token`` K, ``arithmetic`` n).
    """

    fixed: float
    per_sequence: float = 0.0
    weights: float = 0.0
    """Seconds to read the weights once."""
    per_token: float = 0.0
    """Seconds to read the keys and values of one token."""
    arithmetic: float = 0.0
    """Seconds of compute for one token of one sequence."""
    prefill: float = 0.0
    """Seconds to compute one token of a prompt, or of a sequence whose cache was discarded."""

    def step(self, sequences: int, resident: float = 0.0) -> float:
        """Return the seconds of a decoding step for ``sequences`` sequences with ``resident`` tokens in the cache."""
        moved = self.weights + self.per_token * resident
        return self.fixed + self.per_sequence * sequences + max(moved, self.arithmetic * sequences)


@dataclass(slots=True)
class Sequence:
    """State of one sample, which an engine processes turn by turn."""

    group: int
    prompt: float
    """Number of prompt tokens. Attention reads all prompt tokens, including tokens that another sequence computed."""
    prefill: float
    """Prompt tokens to compute at the start: the whole prompt for the first sequence of a group, otherwise 0."""
    tokens: float
    """Tokens of each turn."""
    turns: int
    """Remaining turns, including the current one."""
    verify_s: float = 0.0
    """Seconds to verify the sample."""
    engine: SimulatedEngine | None = None
    """Engine that runs the sequence. Later turns use the same engine."""
    cached: float = 0.0
    """Tokens in the KV cache."""
    version: int = -1
    """Weight version that generated the first token, or -1 before the sequence starts."""
    waiting_since: float = 0.0
    ended: bool = False
    """True if all turns are generated."""
    verified: bool = False
    """True if the sample has received its reward result."""
    dropped: bool = False
    """True if the sequence was aborted."""

    @property
    def written(self) -> float:
        """Generated tokens of all finished turns."""
        return self.cached - self.prompt


class SimulatedEngine:
    """Engine with active sequences in decoding slots, a queue, and one version of the weights."""

    def __init__(self, index: int, rates: EngineRates, slots: int):
        self.index = index
        self.rates = rates
        self.slots = slots
        self.version = 0
        self.pending: int | None = None
        """Weight version to load after all active sequences have ended (``kv: drain``)."""
        self.load = 0
        """Unfinished sequences on this engine, used for load balancing."""
        self.epoch = 0
        """Number of changes so far. An event that was scheduled in an earlier epoch is ignored."""
        self.active = 0
        """Number of sequences in decoding slots."""
        self.resident = 0.0
        """Tokens in the KV cache."""
        self.queue: deque[Sequence] = deque()
        self.queue_seconds = 0.0
        self.busy = 0.0
        """Seconds with at least one active sequence."""
        self.slot_seconds = 0.0
        self.peak = 0.0
        """Largest number of resident tokens."""
        self._now = 0.0
        self._stalled_until = 0.0
        self._progress = 0.0
        """Number of tokens that a sequence active since the start would have generated."""
        self._ends: list[tuple[float, int, Sequence]] = []
        self._order = 0

    def advance(self, now: float) -> None:
        """Decode the active sequences up to the time ``now``."""
        seconds = now - self._now
        if seconds <= 0:
            return
        if self.active:
            self.busy += seconds
            self.slot_seconds += seconds * self.active
            decoding = now - max(self._now, self._stalled_until)
            if decoding > 0:
                steps = self._steps(decoding)
                self._progress += steps
                self.resident += steps * self.active
                self.peak = max(self.peak, self.resident)
        self._now = now

    def stall(self, seconds: float) -> None:
        """Stop decoding for ``seconds`` from now, or from the end of the current stall."""
        self._stalled_until = max(self._stalled_until, self._now) + seconds
        self.epoch += 1

    def start_waiting(self) -> None:
        """Move sequences from the queue to free slots. Their prefill stalls all active sequences."""
        prefill = 0.0
        while self.queue and self.active < self.slots and self.pending is None:
            sequence = self.queue.popleft()
            if sequence.dropped:
                continue
            self.queue_seconds += self._now - sequence.waiting_since
            if sequence.version < 0:
                sequence.version = self.version
                sequence.cached = sequence.prompt
                prefill += sequence.prefill
            self.active += 1
            self.resident += sequence.cached
            self._order += 1
            heappush(self._ends, (self._progress + sequence.tokens, self._order, sequence))
            self.epoch += 1
        if prefill:
            self.stall(prefill * self.rates.prefill)

    def next_end(self) -> float | None:
        """Return the time at which the next active sequence ends if no other event occurs, or None without any."""
        while self._ends and self._ends[0][2].dropped:
            heappop(self._ends)
        if not self._ends:
            return None
        return max(self._now, self._stalled_until) + self._seconds(max(0.0, self._ends[0][0] - self._progress))

    def pop_ended(self) -> list[Sequence]:
        """Remove and return the sequences that have ended.

        At the time ``next_end``, at least one sequence has ended.
        """
        ended: list[Sequence] = []
        limit = self._progress + 1e-6
        while self._ends and (self._ends[0][2].dropped or self._ends[0][0] <= limit):
            sequence = heappop(self._ends)[2]
            if sequence.dropped:
                continue
            sequence.cached += sequence.tokens
            self._leave(sequence.cached)
            ended.append(sequence)
        return ended

    def drop(self, sequence: Sequence) -> None:
        """Abort an unfinished sequence at any stage. Call ``advance`` first."""
        for end, _, other in self._ends:
            if other is sequence:
                self._leave(sequence.cached + max(0.0, sequence.tokens - (end - self._progress)))
        sequence.dropped = True
        self.load -= 1

    def forget_cache(self) -> None:
        """Stall for recomputing the KV cache of all active sequences with new weights (``kv: recompute``)."""
        self.stall(self.resident * self.rates.prefill)

    def _leave(self, tokens: float) -> None:
        self.active -= 1
        self.resident = max(0.0, self.resident - tokens) if self.active else 0.0
        self.epoch += 1

    # -- closed form of many decoding steps -------------------------------------------------------------------------

    def _crossing(self) -> float:
        """Return the number of decoding steps until memory bandwidth, not compute, is the bottleneck.

        The cache grows with each step, so the bottleneck changes at most once.
        """
        rates = self.rates
        gap = rates.arithmetic * self.active - rates.weights - rates.per_token * self.resident
        if gap <= 0:
            return 0.0
        return gap / (rates.per_token * self.active) if rates.per_token else float("inf")

    def _seconds(self, steps: float) -> float:
        rates = self.rates
        n = self.active
        base = rates.fixed + rates.per_sequence * n
        first = min(steps, self._crossing())
        rest = steps - first
        resident = self.resident + first * n
        return (
            first * (base + rates.arithmetic * n)
            + rest * (base + rates.weights + rates.per_token * resident)
            + rates.per_token * n * rest * rest / 2
        )

    def _steps(self, seconds: float) -> float:
        """Return the number of decoding steps in ``seconds``, the inverse of ``_seconds``."""
        rates = self.rates
        n = self.active
        base = rates.fixed + rates.per_sequence * n
        first = self._crossing()
        bound = base + rates.arithmetic * n
        if first * bound >= seconds:
            return seconds / bound
        rest = seconds - first * bound
        linear = base + rates.weights + rates.per_token * (self.resident + first * n)
        square = rates.per_token * n / 2
        # Root of square x^2 + linear x = rest, in a form without cancellation for a tiny square.
        return first + 2 * rest / (linear + sqrt(linear * linear + 4 * square * rest))
