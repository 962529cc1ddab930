"""One of two engines dies in the middle of a run: tokens a second of both around it, and what was drawn again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Iterator

from paced_run import Rig

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.lane import Lane, LaneState, PendingRequest

BEFORE_S = 8
AFTER_S = 10
"""Seconds that are watched before the death, and after the replacement is at work."""
_LIMIT_S = 600.0
_EVERY_S = 0.05
_PAUSE = 0.5
"""Least share of its tokens that the other engine has to draw in every second: its own start takes a core."""
RECOVERED = 0.9
"""Least share of the tokens a second that both engines draw again at the end."""


@dataclass
class Watch:
    """Tokens of every engine over time, and who was given which request."""

    fleet: EngineFleet
    seen: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """(seconds, tokens that each engine has drawn, dead processes of it included)."""
    given: Counter[str] = field(default_factory=Counter)
    """How often a request was given to an engine."""
    lost: set[str] = field(default_factory=set)
    """Requests that dead engines had."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def follow(self) -> None:
        """Note the tokens, until ``end``."""
        gone = [0] * len(self.fleet.lanes)
        last = [0] * len(self.fleet.lanes)
        while not self._ended.wait(_EVERY_S):
            for lane in self.fleet.lanes:
                now = lane.report.decoded_tokens
                if now < last[lane.index]:  # a new process counts from 0
                    gone[lane.index] += last[lane.index]
                last[lane.index] = now
            self.seen.append((time.monotonic(), tuple(map(sum, zip(gone, last)))))

    def end(self) -> None:
        """End ``follow``."""
        self._ended.set()

    def rates(self, engine: int, start: float, seconds: int) -> list[float]:
        """Tokens of an engine in each of the seconds from ``start`` on."""
        return [
            self._drawn(engine, start + second + 1) - self._drawn(engine, start + second) for second in range(seconds)
        ]

    def _drawn(self, engine: int, at: float) -> float:
        return max((tokens[engine] for seen, tokens in self.seen if seen <= at), default=0)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Note which requests are given to engines in the block, and which engines lose them."""
        adopt = Lane.adopt
        reassign = self.fleet.reassign

        def counted(lane: Lane, pending: PendingRequest) -> None:
            self.given[pending.name] += 1
            adopt(lane, pending)

        def noted(lane: Lane, reason: str) -> None:
            self.lost |= lane.pending.keys()
            reassign(lane, reason)

        Lane.adopt = counted  # type: ignore[method-assign]
        self.fleet.reassign = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Lane.adopt = adopt  # type: ignore[method-assign]
            self.fleet.reassign = reassign  # type: ignore[method-assign]


@dataclass
class Loss:
    """What a death came to."""

    watch: Watch
    killed: float
    back: float
    """When the dead engine died, and when its replacement was at work."""
    positions: list[int]
    """Trained, in order."""


def lose_an_engine(started: Rig) -> list[str]:
    """Kill engine 0 of two; prints the account and returns what is wrong with it."""
    watch = Watch(started.fleet)
    thread = threading.Thread(target=watch.follow, daemon=True)
    thread.start()
    with watch.counting():
        loss = _run(started, watch)
    watch.end()
    thread.join()
    return _account(loss)


def _run(started: Rig, watch: Watch) -> Loss:
    fleet = started.fleet
    lane = fleet.lanes[0]
    loss = Loss(watch, 0.0, 0.0, [])
    config = started.work.config(started.model, max_staleness=4, depth=5 * started.work.groups)
    with started.stream(config) as stream:
        started.publish(0, "drain")
        stream.schedule(0)
        begun = time.monotonic()
        step = 0
        while not loss.back or time.monotonic() < loss.back + AFTER_S + 1:
            rollout = stream.get_batch(step)
            assert rollout is not None
            loss.positions += [group.position for group in rollout.groups]
            time.sleep(started.work.train_s)
            started.publish(step + 1)
            step += 1
            stream.schedule(step)
            now = time.monotonic()
            if not loss.killed and now > begun + BEFORE_S + 2:
                os.kill(fleet.process_locations()[0][1], signal.SIGKILL)
                loss.killed = time.monotonic()
            elif loss.killed and not loss.back and lane.replaced and lane.state is LaneState.READY:
                loss.back = now
            if now > begun + _LIMIT_S:
                raise SystemExit(f"the engine was not back {_LIMIT_S:.0f} s after the start of the run")
    return loss


def _account(loss: Loss) -> list[str]:
    watch = loss.watch
    down = int(loss.back - loss.killed)
    start = loss.killed - BEFORE_S
    seconds = BEFORE_S + down + AFTER_S
    dead, other = (watch.rates(engine, start, seconds) for engine in (0, 1))
    print("second  killed  other  tokens/s")
    shown = sorted({*range(BEFORE_S + 6), *range(BEFORE_S, seconds - AFTER_S, 3), *range(seconds - AFTER_S, seconds)})
    for second in shown:
        print(f"{second - BEFORE_S:+6d} {dead[second]:7.0f} {other[second]:6.0f} {dead[second] + other[second]:9.0f}")
    before = fmean(dead[:BEFORE_S]) + fmean(other[:BEFORE_S])
    after = fmean(dead[-AFTER_S + 2 :]) + fmean(other[-AFTER_S + 2 :])
    lowest = min(other[BEFORE_S:])
    again = {name for name, times in watch.given.items() if times > 1}
    print(
        f"\nback after {loss.back - loss.killed:.1f} s; tokens/s {before:.0f} before, "
        f"{fmean(other[BEFORE_S : BEFORE_S + down]):.0f} in between, {after:.0f} after ({after / before:.0%})\n"
        f"{len(watch.given)} samples asked for, {len(watch.lost)} of them in the engine that died, {len(again)} drawn "
        f"again; the other engine drew at least {lowest:.0f} tokens in every second"
    )
    return _wrong(loss, again, lowest / fmean(other[:BEFORE_S]), after / before)


def _wrong(loss: Loss, again: set[str], lowest: float, recovered: float) -> list[str]:
    wrong = []
    if again != loss.watch.lost or not again:
        wrong.append(f"{len(again)} samples were drawn again, {len(loss.watch.lost)} were lost")
    if max(loss.watch.given.values()) > 2:
        wrong.append("a sample was drawn three times")
    if loss.positions != list(range(len(loss.positions))):
        wrong.append("a group was trained twice, or never")
    if lowest < _PAUSE:
        wrong.append(f"the other engine fell to {lowest:.0%} of its tokens a second")
    if recovered < RECOVERED:
        wrong.append(f"only {recovered:.0%} of the tokens a second came back")
    return wrong
