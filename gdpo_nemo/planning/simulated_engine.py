"""One engine of the simulation: sequences decode together, each a token a step, and a step takes longer the more there
are.

Between two events the number of sequences is constant, so that their common progress has a closed form: an event costs
a heap operation, however many tokens lie between it and the last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt


@dataclass(frozen=True)
class EngineRates:
    """Seconds of a decoding step: ``fixed`` + ``per_sequence`` n + max(``weights`` + ``per_token`` K, ``arithmetic`` n)
    for n sequences with K resident tokens."""

    fixed: float
    per_sequence: float = 0.0
    weights: float = 0.0
    """Reading the weights once."""
    per_token: float = 0.0
    """Reading keys and values of one token."""
    arithmetic: float = 0.0
    """Computing one token."""
    prefill: float = 0.0
    """Computing one token of a prompt, or of a sequence whose cache was thrown away."""

    def step(self, sequences: int, resident: float = 0.0) -> float:
        """Seconds of one step."""
        moved = self.weights + self.per_token * resident
        return self.fixed + self.per_sequence * sequences + max(moved, self.arithmetic * sequences)


@dataclass(slots=True)
class Sequence:
    """One sample, as an engine sees it: a turn at a time."""

    group: int
    prompt: float
    """Tokens of the prompt: its attention reads them, whoever computed them."""
    prefill: float
    """Tokens to compute when it starts: the prompt of the group's first sequence, of the others nothing."""
    tokens: float
    """Tokens of each turn."""
    turns: int
    """Turns left, that under way included."""
    verify_s: float = 0.0
    """Seconds that judging it takes."""
    engine: SimulatedEngine | None = None
    """The engine that has it; later turns go there, too."""
    held: float = 0.0
    """Tokens in the cache."""
    version: int = -1
    """Of the weights that wrote its first token."""
    waiting_since: float = 0.0
    ended: bool = False
    """All turns are written."""
    judged: bool = False
    dropped: bool = False
    """Aborted, wherever it was."""

    @property
    def written(self) -> float:
        """Tokens of all turns, once they are written."""
        return self.held - self.prompt


class SimulatedEngine:
    """Sequences in decoding slots, a queue before them, and weights of one version."""

    def __init__(self, index: int, rates: EngineRates, slots: int):
        self.index = index
        self.rates = rates
        self.slots = slots
        self.version = 0
        self.pending: int | None = None
        """A version that waits until the running sequences have ended (``drain``)."""
        self.load = 0
        """Sequences given to it and not ended, which the choice of an engine goes by."""
        self.epoch = 0
        """Raised at every change, so that an announced completion that no longer holds is known."""
        self.active = 0
        self.resident = 0.0
        self.queue: deque[Sequence] = deque()
        self.queue_seconds = 0.0
        self.busy = 0.0
        """Seconds with at least one sequence."""
        self.slot_seconds = 0.0
        self.peak = 0.0
        """Most tokens that were resident."""
        self._now = 0.0
        self._stalled_until = 0.0
        self._progress = 0.0
        """Tokens that a sequence active from the start on would have written."""
        self._ends: list[tuple[float, int, Sequence]] = []
        self._order = 0

    def advance(self, now: float) -> None:
        """Let the active sequences decode until ``now``."""
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
        """Nothing decodes for ``seconds`` from now, or from the end of a stall under way."""
        self._stalled_until = max(self._stalled_until, self._now) + seconds
        self.epoch += 1

    def start_waiting(self) -> None:
        """Move sequences from the queue to free slots; prefill holds everybody up."""
        prefill = 0.0
        while self.queue and self.active < self.slots and self.pending is None:
            sequence = self.queue.popleft()
            if sequence.dropped:
                continue
            self.queue_seconds += self._now - sequence.waiting_since
            if sequence.version < 0:
                sequence.version = self.version
                sequence.held = sequence.prompt
                prefill += sequence.prefill
            self.active += 1
            self.resident += sequence.held
            self._order += 1
            heappush(self._ends, (self._progress + sequence.tokens, self._order, sequence))
            self.epoch += 1
        if prefill:
            self.stall(prefill * self.rates.prefill)

    def next_end(self) -> float | None:
        """The time at which the next active sequence ends if nothing else happens."""
        while self._ends and self._ends[0][2].dropped:
            heappop(self._ends)
        if not self._ends:
            return None
        return max(self._now, self._stalled_until) + self._seconds(max(0.0, self._ends[0][0] - self._progress))

    def pop_ended(self) -> list[Sequence]:
        """The sequences that have ended by now; there is at least one when the announced completion has come."""
        ended: list[Sequence] = []
        limit = self._progress + 1e-6
        while self._ends and (self._ends[0][2].dropped or self._ends[0][0] <= limit):
            sequence = heappop(self._ends)[2]
            if sequence.dropped:
                continue
            sequence.held += sequence.tokens
            self._leave(sequence.held)
            ended.append(sequence)
        return ended

    def drop(self, sequence: Sequence) -> None:
        """Abort a sequence that has not ended, wherever it is; call ``advance`` before."""
        for end, _, other in self._ends:
            if other is sequence:
                self._leave(sequence.held + max(0.0, sequence.tokens - (end - self._progress)))
        sequence.dropped = True
        self.load -= 1

    def forget_cache(self) -> None:
        """Compute the cache of all active sequences again, under new weights (``recompute``)."""
        self.stall(self.resident * self.rates.prefill)

    def _leave(self, tokens: float) -> None:
        self.active -= 1
        self.resident = max(0.0, self.resident - tokens) if self.active else 0.0
        self.epoch += 1

    # -- the law of a step, over many steps ---------------------------------------------------------------------

    def _crossing(self) -> float:
        """Steps from now on in which arithmetic, not memory, sets the time; the cache grows, so that memory follows."""
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
        """The inverse of ``_seconds``."""
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
        # The root of square x^2 + linear x = rest, in the form that does not cancel where square is tiny.
        return first + 2 * rest / (linear + sqrt(linear * linear + 4 * square * rest))
