"""Asynchronous rollouts against synchronous ones: real engines, fleet and scheduler, with lengths that are given.

    uv run tests/benchmarks/asynchrony.py paced      steps at staleness 0, 1, 2 and 4, beside the simulator (3 min)
    uv run tests/benchmarks/asynchrony.py engines    the same with a faster trainer: engines are the bottleneck (2 min)
    uv run tests/benchmarks/asynchrony.py verifier   the trainer again, and a verifier that takes 2 s (2 min)
    uv run tests/benchmarks/asynchrony.py kill       one of two engines dies: tokens a second around it (1 min)
    uv run tests/benchmarks/asynchrony.py trl        long-tailed lengths beside TRL, nothing paced (4 min)

Several may be named; all but the last then share their engines. With ``--check`` the status is 1 where a bound is
missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import beside_trl
from engine_loss import lose_an_engine
from paced_run import Lengths, Pace, Rig, Timed, Work, rig

from gdpo_nemo.tools.simulation.engine import EngineRates
from gdpo_nemo.tools.simulation.records import LogNormal, Scenario
from gdpo_nemo.tools.simulation.simulation import simulate

FASTER = 2.5
IDLE = 0.05
SIMULATED = 0.15
"""Bounds: synchronous step over asynchronous, idle share of the trainer, error of the simulated step."""
PACED = Work(
    pace=Pace(Lengths(median=14, sigma=1.1, cap=120), fixed_s=0.030, per_sequence_s=0.0003),
    engines=2,
    slots=32,
    groups=8,
    samples=8,
    train_s=1.5,
)
"""The trainer, 1.5 s a step, is the bottleneck: the engines decode a step's tokens in 0.9 s when they are full, but the
longest sample takes 3.7 s."""
Case = tuple[int, "int | str", int, int]
"""max_staleness, depth, steps, of these to warm up."""
CASES: tuple[Case, ...] = ((0, "auto", 6, 1), (1, "auto", 8, 2), (2, "auto", 12, 3), (4, "auto", 20, 8), (4, 40, 20, 8))


def simulated(work: Work, case: Case, publish_s: float) -> float:
    """Seconds of a step that the simulator expects."""
    max_staleness, depth, steps, warm_up = case
    return simulate(
        Scenario(
            engines=work.engines,
            rates=EngineRates(work.pace.fixed_s, work.pace.per_sequence_s),
            slots=work.slots,
            groups=work.groups,
            samples=work.samples,
            lengths=work.pace.lengths,
            train_s=work.train_s,
            publish_s=publish_s,
            max_staleness=max_staleness,
            depth=depth if max_staleness else work.groups,
            kv="keep",
            verifier=LogNormal(work.verify_s),
            steps=steps,
            warm_up=warm_up,
            endless=False,
        )
    ).step_s


def compare(started: Rig, cases: Sequence[Case], bottleneck: str = "trainer") -> list[str]:
    """Run the cases, the synchronous one first; returns what missed a bound.

    Args:
        bottleneck: who must not be idle in the fastest case, ``trainer`` or ``engines``.
    """
    work = started.work
    print(
        f"{work.engines} vLLM engines paced to {work.pace.fixed_s * 1000:g} ms + {work.pace.per_sequence_s * 1000:g} "
        f"ms a sequence, {work.slots} slots each;\n{work.groups} groups of {work.samples} a step, "
        f"{work.pace.lengths.mean:.0f} tokens in the mean, {work.pace.lengths.cap} at most; trainer paced to "
        f"{work.train_s:g} s, verifier to {work.verify_s:g} s\n"
    )
    print(
        "  S  depth  s a step  faster  trainer idle  engines idle  tokens/s  oldest  publish s  simulated s  error",
        flush=True,
    )
    missed = []
    base = best = 0.0
    idle = 1.0
    for case in cases:
        max_staleness, depth, steps, warm_up = case
        found = started.run(max_staleness, steps, depth, warm_up)
        base = base or found.step_s
        expected = simulated(work, case, found.publish_s)
        error = expected / found.step_s - 1
        _row(case, found, base, expected, error)
        if base / found.step_s > best:
            best = base / found.step_s
            idle = found.trainer_idle if bottleneck == "trainer" else found.engine_idle
        if abs(error) > SIMULATED:
            missed.append(f"simulator at S={max_staleness}: {error:+.0%}")
    if best < FASTER:
        missed.append(f"only {best:.2f} times as fast")
    if idle > IDLE:
        missed.append(f"the bottleneck, {bottleneck}, is idle {idle:.1%} of the time")
    return missed


def _row(case: Case, found: Timed, base: float, expected: float, error: float) -> None:
    print(
        f"{case[0]:3d} {case[1]!s:>6} {found.step_s:9.2f} {base / found.step_s:7.2f} {found.trainer_idle:13.1%} "
        f"{found.engine_idle:13.1%} {found.tokens_per_second:9.0f} {found.staleness:7d} {found.publish_s:10.3f} "
        f"{expected:12.2f} {error:+6.1%}",
        flush=True,
    )


def paced(started: Rig) -> list[str]:
    """(a) and (f)."""
    return compare(started, CASES)


def engines(started: Rig) -> list[str]:
    """(a) with a trainer that is faster than full engines, whose 64 slots a batch of 128 samples keeps full."""
    cases: tuple[Case, ...] = ((0, "auto", 5, 1), (2, "auto", 10, 3), (4, "auto", 14, 5))
    return compare(started.changed(train_s=0.3, groups=16), cases, "engines")


def verifier(started: Rig) -> list[str]:
    """(b)."""
    return compare(started.changed(verify_s=2.0), (CASES[0], CASES[2], CASES[4]))


def kill(started: Rig) -> list[str]:
    """(d)."""
    return lose_an_engine(started.changed(train_s=0.2))


ON_ENGINES: dict[str, Callable[[Rig], list[str]]] = {
    "paced": paced,
    "engines": engines,
    "verifier": verifier,
    "kill": kill,
}


def main() -> int:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description="Benchmarks of asynchronous rollouts.")
    parser.add_argument("what", nargs="+", choices=[*ON_ENGINES, "trl"])
    parser.add_argument("--check", action="store_true", help="end with status 1 where a bound is missed")
    arguments = parser.parse_args()
    missed = []
    if on_engines := [name for name in arguments.what if name != "trl"]:
        with tempfile.TemporaryDirectory() as folder, rig(PACED, Path(folder)) as started:
            for name in on_engines:
                missed += timed(name, partial(ON_ENGINES[name], started))
    if "trl" in arguments.what:
        missed += timed("trl", beside_trl.compare)
    return 1 if missed and arguments.check else 0


def timed(name: str, measure: Callable[[], list[str]]) -> list[str]:
    """Run one benchmark; prints how long it took and what missed a bound."""
    start = time.monotonic()
    load = os.getloadavg()[0]
    missed = measure()
    took = f"\n{name}: {time.monotonic() - start:.0f} s, load average {load:.0f} to {os.getloadavg()[0]:.0f}"
    print(took + "".join(f"\nmissed: {line}" for line in missed) + "\n", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
