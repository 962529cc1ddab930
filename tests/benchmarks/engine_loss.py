"""One of two engines dies in the middle of a run: tokens a second of both around it, and what was drawn again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from paced_run import Rig

from gdpo_nemo.cluster.engine_client import EngineClient, EngineState, PendingRequest
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.session import ray

BEFORE_S = 8
AFTER_S = 10
"""Seconds that are watched before the death, and after the replacement is at work."""
_LIMIT_S = 600.0
_EVERY_S = 0.05
PAUSE_S = 1.0
"""Most time between two steps of the other engine."""
LESS_BUSY = 0.1
"""Most by which the share of its time in decode steps may fall."""
RECOVERED = 0.9
"""Least share of the tokens a second that both engines draw again at the end."""


@dataclass
class Watch:
    """Tokens of every engine over time, and who was given which request."""

    fleet: EngineFleet
    seen: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """(seconds, tokens that each engine has drawn, dead processes of it included)."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, those that the other engine has spent in decode steps)."""
    given: Counter[str] = field(default_factory=Counter)
    """How often a request was given to an engine."""
    lost: set[str] = field(default_factory=set)
    """Requests that dead engines had."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def follow(self) -> None:
        """Note the tokens, until ``end``."""
        gone = [0] * len(self.fleet.clients)
        last = [0] * len(self.fleet.clients)
        while not self._ended.wait(_EVERY_S):
            for client in self.fleet.clients:
                now = client.report.decoded_tokens
                if now < last[client.index]:  # a new process counts from 0
                    gone[client.index] += last[client.index]
                last[client.index] = now
            now_s = time.monotonic()
            self.seen.append((now_s, tuple(map(sum, zip(gone, last)))))
            self.busy.append((now_s, self.fleet.clients[1].report.busy_s))

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

    def busy_share(self, start: float, end: float) -> float:
        """Share of the time that the other engine spent in decode steps."""
        spent = [busy for seen, busy in self.busy if start <= seen <= end]
        return (spent[-1] - spent[0]) / (end - start)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Note which requests are given to engines in the block, and which engines lose them."""
        adopt = EngineClient.adopt
        reassign = self.fleet.reassign

        def counted(client: EngineClient, pending: PendingRequest) -> None:
            self.given[pending.name] += 1
            adopt(client, pending)

        def noted(client: EngineClient, reason: str) -> None:
            self.lost |= client.pending.keys()
            reassign(client, reason)

        EngineClient.adopt = counted  # type: ignore[method-assign]
        self.fleet.reassign = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            EngineClient.adopt = adopt  # type: ignore[method-assign]
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
    pause_s: float = 0.0
    """Longest time between two steps of the other engine while the first was away."""


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
    client = fleet.clients[0]
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
                ray.get(fleet.clients[1].actor.longest_pause.remote())
                os.kill(fleet.process_locations()[0][1], signal.SIGKILL)
                loss.killed = time.monotonic()
            elif loss.killed and not loss.back and client.replaced and client.state is EngineState.READY:
                loss.back = now
                loss.pause_s = ray.get(fleet.clients[1].actor.longest_pause.remote())
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
    share = watch.busy_share(start, loss.killed), watch.busy_share(loss.killed, loss.back)
    again = {name for name, times in watch.given.items() if times > 1}
    print(
        f"\nback after {loss.back - loss.killed:.1f} s; tokens/s {before:.0f} before, "
        f"{fmean(other[BEFORE_S : BEFORE_S + down]):.0f} in between, {after:.0f} after ({after / before:.0%})\n"
        f"{len(watch.given)} samples asked for, {len(watch.lost)} of them in the engine that died, {len(again)} drawn "
        f"again\nthe other engine: {share[0]:.0%} of its time in decode steps before, {share[1]:.0%} in between; at "
        f"most {loss.pause_s:.2f} s between two steps, weights included"
    )
    return _wrong(loss, again, share[0] - share[1], after / before)


def _wrong(loss: Loss, again: set[str], less_busy: float, recovered: float) -> list[str]:
    wrong = []
    if again != loss.watch.lost or not again:
        wrong.append(f"{len(again)} samples were drawn again, {len(loss.watch.lost)} were lost")
    if max(loss.watch.given.values()) > 2:
        wrong.append("a sample was drawn three times")
    if loss.positions != list(range(len(loss.positions))):
        wrong.append("a group was trained twice, or never")
    if loss.pause_s > PAUSE_S or less_busy > LESS_BUSY:
        wrong.append(f"the other engine paused for {loss.pause_s:.2f} s, and was {less_busy:.0%} less busy")
    if recovered < RECOVERED:
        wrong.append(f"only {recovered:.0%} of the tokens a second came back")
    return wrong
