"""What simulated runs say: a table, what limits each, and what would mend it, tried by simulating it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from gdpo_nemo.planning.simulation import simulate
from gdpo_nemo.planning.simulation_records import Result, Scenario
from gdpo_nemo.rollouts.depth import WAITING

_FULL = 0.8
"""Share from which on a server counts as the bottleneck: its queue grows without end near 1."""
_QUEUE = 0.05
"""Samples that wait for a slot, as a share of all slots, from which on there are too few; fewer wait in bursts only."""
_PUBLICATION = 0.25
_GAIN = 0.02
"""Share of a step's time below which a change is not worth a line."""


@dataclass(frozen=True)
class Row:
    """One simulated run and what it stands for."""

    gpus: int
    """0 on CPU."""
    engine_tensor: int
    result: Result

    def record(self) -> dict[str, Any]:
        """For ``--json``."""
        scenario = self.result.scenario
        chosen = {
            name: getattr(scenario, name)
            for name in ("scheduler", "engines", "max_staleness", "window", "kv", "slots", "train_s", "publish_s")
        }
        return {
            "gpus": self.gpus,
            "engine_tensor": self.engine_tensor,
            **chosen,
            **self.result.account(),
            "limit": limit(self.result),
        }


@dataclass(frozen=True)
class Change:
    """Something that could be set otherwise."""

    words: str
    scenario: Scenario


def limit(result: Result) -> str:
    """What sets the pace: trainer, driver, verifiers, drain, barrier, publication, engines or tail, by who is idle."""
    scenario = result.scenario
    if result.trainer_idle <= WAITING:
        return "publication" if scenario.publish_s > _PUBLICATION * result.step_s else "trainer"
    if result.driver > _FULL:
        return "driver"
    if scenario.verify_workers and result.verifiers > _FULL:
        return "verifiers"
    if result.slots_used > _FULL or result.queued > _QUEUE * scenario.engines * scenario.slots:
        return "engines"
    if scenario.publish_s > _PUBLICATION * result.step_s:
        return "publication"
    return "tail"


def table(rows: Sequence[Row]) -> str:
    """One line a run."""
    lines = [
        f"{'GPUs':>5} {'engines':>9} {'schedule':>10} {'S':>2} {'s a step':>9} {'tokens/s':>9} {'trainer':>8} "
        f"{'engines':>8} {'slots':>6} {'staleness':>10} {'depth':>6} {'KV':>5}  limit",
        f"{'':>5} {'':>9} {'':>10} {'':>2} {'':>9} {'':>9} {'idle':>8} {'idle':>8} {'used':>6} {'mean max':>10} "
        f"{'groups':>6} {'':>5}",
    ]
    for row in rows:
        result, scenario = row.result, row.result.scenario
        engines = f"{scenario.engines} x {row.engine_tensor}"
        stale = f"{result.staleness_mean:.2f} {result.staleness_max:>3}"
        lines.append(
            f"{row.gpus or '-':>5} {engines:>9} {scenario.scheduler:>10} {scenario.max_staleness:>2} "
            f"{result.step_s:>9.3g} {result.tokens_per_second:>9,.0f} {result.trainer_idle:>8.0%} "
            f"{result.engine_idle:>8.0%} {result.slots_used:>6.0%} {stale:>10} {result.depth:>6.0f} "
            f"{result.kv_use:>5.0%}  {limit(result)}"
        )
    return "\n".join(lines)


def account(row: Row) -> list[str]:
    """What limits a run, as sentences."""
    result, scenario = row.result, row.result.scenario
    sentences = [
        f"At max_staleness {scenario.max_staleness} a step takes {result.step_s:.3g} s: the trainer waits "
        f"{result.trainer_idle:.0%} of it, engines have nothing to decode {result.engine_idle:.0%} of it and fill "
        f"{result.slots_used:.0%} of their slots. {_reason(result)}"
    ]
    if result.kv_use > 1:
        sentences.append(
            f"The fullest cache would need {result.kv_use:.0%} of its room: engines would throw sequences out and "
            "compute them again, which is not simulated; fewer max_num_seqs or a larger cache avoid it."
        )
    if result.late:
        shares = result.late / (len(result.steps) * scenario.groups * scenario.samples)
        sentences.append(f"{result.late} samples ({shares:.1%}) are aborted at the deadline of their group.")
    return sentences


def _reason(result: Result) -> str:
    scenario = result.scenario
    longest = scenario.lengths.longest
    alone = f"the longest sample takes {result.longest_s:.3g} s alone ({longest:,.0f} tokens x "
    alone += f"{scenario.rates.step(1) * 1e3:.3g} ms)"
    return {
        "trainer": f"The trainer sets the pace: {scenario.train_s:.3g} s of training and {scenario.publish_s:.3g} s of "
        "publication a step.",
        "driver": f"The driver sets the pace: it is busy {result.driver:.0%} of the time, "
        f"{scenario.driver_s * 1e3:.3g} ms a sample.",
        "verifiers": f"The verifiers set the pace: {scenario.verify_workers} of them are busy {result.verifiers:.0%} "
        "of the time.",
        "engines": f"The engines' throughput sets the pace: {result.queued:,.0f} samples wait for a slot on average.",
        "publication": f"Publication sets the pace: {scenario.publish_s:.3g} s of every step.",
        "tail": f"The tail sets the pace: {alone}, and {result.depth / scenario.groups:.3g} times a batch may be "
        "outstanding.",
    }[limit(result)]


def candidates(result: Result) -> list[Change]:
    """What might help against the limit of a run, of what does not change its layout."""
    scenario = result.scenario
    found = []
    if scenario.scheduler == "barrier":
        found.append(Change("groups one by one in place of batches behind a barrier", _sound(scenario, "continuous")))
    kind = limit(result)
    if kind in ("tail", "engines", "verifiers"):
        for staleness in {scenario.max_staleness + 1, 2 * scenario.max_staleness}:
            if staleness > scenario.max_staleness:
                deeper = scenario.changed(max_staleness=staleness, depth="auto")
                found.append(Change(f"rollout.max_staleness={staleness}", deeper))
        if scenario.window > 1:
            found.append(Change("rollout.window=1 (more groups may be outstanding)", scenario.changed(window=1)))
        if isinstance(scenario.depth, int):
            found.append(Change("rollout.depth=auto", scenario.changed(depth="auto")))
    if kind != "trainer" and scenario.kv != "keep" and scenario.max_staleness:
        found.append(Change("rollout.kv=keep", scenario.changed(kv="keep")))
    if kind == "tail" and scenario.scheduler == "continuous":
        deadline = round(result.longest_s / 2, 1)
        if deadline > 0:
            found.append(Change(f"rollout.group_timeout_s={deadline:g} (aborts what is longer)",
                                scenario.changed(group_timeout_s=deadline)))  # fmt: skip
    if kind == "engines":
        found.append(Change("twice max_num_seqs, if the cache has room", scenario.changed(slots=2 * scenario.slots)))
    if scenario.verify_workers and kind in ("verifiers", "tail"):
        more = 2 * scenario.verify_workers
        found.append(Change(f"{more} verifiers at once (rollout.env_workers)", scenario.changed(verify_workers=more)))
    if kind == "driver":
        half = scenario.changed(driver_s=scenario.driver_s / 2)
        found.append(Change("half the driver's work per sample (answers in bundles, fewer turns)", half))
    if kind == "publication":
        half = scenario.changed(publish_s=scenario.publish_s / 2)
        found.append(Change("publication in half the time (LoRA, a faster link)", half))
    return found


def _sound(scenario: Scenario, scheduler: str) -> Scenario:
    return scenario.changed(scheduler=scheduler, depth="auto")


def mends(result: Result, changes: Sequence[Change]) -> list[tuple[str, Result]]:
    """The changes that make a step faster, the best first, each simulated."""
    tried = [(change.words, simulate(change.scenario.changed(trace=False))) for change in changes]
    better = [(words, other) for words, other in tried if other.step_s < (1 - _GAIN) * result.step_s]
    return sorted(better, key=lambda found: found[1].step_s)


def mend_lines(result: Result, found: Sequence[tuple[str, Result]]) -> list[str]:
    """What would mend it, as sentences."""
    if not found:
        return ["Nothing that was tried makes a step faster by more than 2 %."]
    return [
        f"{words}: {other.step_s:.3g} s a step ({other.step_s / result.step_s - 1:+.0%}), mean staleness "
        f"{other.staleness_mean:.2f}; then the limit is the {limit(other)}"
        for words, other in found
    ]


def scaling(rows: Sequence[Row]) -> list[str]:
    """What more GPUs bring, and from where on something else limits."""
    lines = []
    for smaller, larger in zip(rows, rows[1:]):
        faster = smaller.result.step_s / larger.result.step_s
        more = larger.gpus / smaller.gpus
        lines.append(
            f"{smaller.gpus} to {larger.gpus} GPUs: {more:.3g}x the GPUs, {faster:.3g}x the speed "
            f"({faster / more:.0%} of linear); the limit is the {limit(larger.result)}"
        )
    return lines
