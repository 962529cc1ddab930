"""Reports on simulated runs: tables, bottlenecks, suggested changes and plots."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.rollouts.depth import WAITING
from gdpo_nemo.tools.simulation.records import Result, Scenario, Trace
from gdpo_nemo.tools.simulation.simulation import simulate
from gdpo_nemo.utils.files import write_whole

if TYPE_CHECKING:  # importing matplotlib takes half of a command's startup time
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FULL = 0.8
"""Utilization above which the driver, the verifiers or the engines count as the bottleneck."""
_QUEUE = 0.05
"""Ratio of waiting samples to all slots above which the engines are the bottleneck. Queues from bursts are shorter."""
_PUBLICATION = 0.25
"""Ratio of weight update time to step time above which the weight update is the bottleneck."""
_GAIN = 0.02
"""Minimum fraction of a step's time that a suggested change must save."""


@dataclass(frozen=True)
class Row:
    """Simulated run, one row of the table."""

    gpus: int
    """Number of GPUs, or 0 for a run on CPUs."""
    engine_tensor: int
    result: Result

    def record(self) -> dict[str, Any]:
        """Return the row's content for ``--json``."""
        scenario = self.result.scenario
        chosen = {
            name: getattr(scenario, name)
            for name in ("scheduler", "engines", "max_staleness", "window", "kv", "slots", "train_s", "publish_s")
        }
        return {
            "gpus": self.gpus,
            "engine_tensor": self.engine_tensor,
            **chosen,
            **self.result.figures(),
            "limit": limit(self.result),
        }


@dataclass(frozen=True)
class Change:
    """Change of a setting, with its description and the resulting scenario."""

    words: str
    scenario: Scenario


def limit(result: Result) -> str:
    """Return the bottleneck according to idle times and queues.

    The bottleneck is one of publication, trainer, driver, verifiers, engines and tail. ``publication`` is the weight
    update, and ``tail`` the longest samples.
    """
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
    """Return a table with one line per run."""
    lines = [
        f"{'GPUs':>5} {'engines':>9} {'schedule':>10} {'S':>2} {'s/step':>9} {'tokens/s':>9} {'trainer':>8} "
        f"{'engines':>8} {'slots':>6} {'staleness':>10} {'depth':>6} {'KV':>5}  bottleneck",
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


def describe_bottleneck(row: Row) -> list[str]:
    """Describe a run's waiting times and its bottleneck in sentences."""
    result, scenario = row.result, row.result.scenario
    sentences = [
        f"At max_staleness {scenario.max_staleness} a step takes {result.step_s:.3g} s. The trainer waits "
        f"{result.trainer_idle:.0%} of this time. Engines are idle {result.engine_idle:.0%} of this time and fill "
        f"{result.slots_used:.0%} of their slots. {_reason(result)}"
    ]
    if result.kv_use > 1:
        sentences.append(
            f"The fullest cache would need {result.kv_use:.0%} of its capacity. Engines would preempt sequences and "
            "recompute them, which is not simulated. A smaller max_num_seqs or a larger cache avoids preemption."
        )
    if result.late:
        shares = result.late / (len(result.steps) * scenario.groups * scenario.samples)
        sentences.append(f"{result.late} samples ({shares:.1%}) are aborted at their group's deadline.")
    return sentences


def _reason(result: Result) -> str:
    scenario = result.scenario
    longest = scenario.lengths.longest
    longest_alone = f"the longest sample takes {result.longest_s:.3g} s by itself ({longest:,.0f} tokens x "
    longest_alone += f"{scenario.rates.step(1) * 1e3:.3g} ms)"
    return {
        "trainer": f"The trainer is the bottleneck: {scenario.train_s:.3g} s of training and "
        f"{scenario.publish_s:.3g} s of "
        "weight update per step.",
        "driver": f"The driver is the bottleneck: it is busy {result.driver:.0%} of the time, "
        f"{scenario.driver_sample_s * 1e3:.3g} ms per sample.",
        "verifiers": f"The verifiers are the bottleneck: {scenario.verify_workers} verifiers are busy "
        f"{result.verifiers:.0%} "
        "of the time.",
        "engines": f"The engines' throughput is the bottleneck: on average, {result.queued:,.0f} samples wait for a "
        "slot.",
        "publication": f"The weight update is the bottleneck: {scenario.publish_s:.3g} s per step.",
        "tail": f"The longest samples are the bottleneck: {longest_alone}, and at most "
        f"{result.depth / scenario.groups:.3g} batches may be outstanding.",
    }[limit(result)]


def candidates(result: Result) -> list[Change]:  # noqa: C901
    """Return changes that keep the layout and might relieve the bottleneck."""
    scenario = result.scenario
    found = []
    if scenario.scheduler == "barrier":
        continuous = scenario.changed(scheduler="continuous", depth="auto")
        found.append(Change("individual groups instead of whole batches (continuous)", continuous))
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
        # With a deadline, the driver handles a reply per sample.
        driver_s = scenario.groups * scenario.samples * (scenario.driver_s + scenario.reply_s)
        if deadline > 0 and driver_s < result.step_s:
            found.append(Change(f"rollout.group_timeout_s={deadline:g} (aborts longer samples)",
                                scenario.changed(group_timeout_s=deadline)))  # fmt: skip
    if kind == "engines":
        found.append(
            Change("twice max_num_seqs, if the cache is large enough", scenario.changed(slots=2 * scenario.slots))
        )
    if scenario.verify_workers and kind in ("verifiers", "tail"):
        more = 2 * scenario.verify_workers
        found.append(Change(f"{more} parallel verifiers (rollout.env_workers)", scenario.changed(verify_workers=more)))
    if kind == "driver":
        half = scenario.changed(driver_s=scenario.driver_s / 2, reply_s=scenario.reply_s / 2)
        found.append(Change("half the driver's work per sample (batched results, fewer turns)", half))
    if kind == "publication":
        half = scenario.changed(publish_s=scenario.publish_s / 2)
        found.append(Change("weight update in half the time (LoRA, a faster link)", half))
    return found


def helpful_changes(result: Result, changes: Sequence[Change]) -> list[tuple[str, Result]]:
    """Simulate the changes. Return (description, result) of each change that makes a step faster, fastest first."""
    tried = [(change.words, simulate(change.scenario.changed(trace=False))) for change in changes]
    better = [(words, other) for words, other in tried if other.step_s < (1 - _GAIN) * result.step_s]
    return sorted(better, key=lambda found: found[1].step_s)


def describe_changes(result: Result, found: Sequence[tuple[str, Result]]) -> list[str]:
    """Describe the results of ``helpful_changes`` in sentences."""
    if not found:
        return ["None of the simulated changes makes a step faster by more than 2 %."]
    lines = []
    for words, other in found:
        lines.append(
            f"{words}: {other.step_s:.3g} s per step ({other.step_s / result.step_s - 1:+.0%}), mean staleness "
            f"{other.staleness_mean:.2f}; the bottleneck is then: {limit(other)}"
        )
    return lines


def scaling(rows: Sequence[Row]) -> list[str]:
    """Describe the speedup from each number of GPUs to the next number, with the bottleneck of the larger run."""
    lines = []
    for smaller, larger in zip(rows, rows[1:]):
        faster = smaller.result.step_s / larger.result.step_s
        more = larger.gpus / smaller.gpus
        lines.append(
            f"{smaller.gpus} to {larger.gpus} GPUs: {more:.3g}x the GPUs, {faster:.3g}x the speed "
            f"({faster / more:.0%} of linear); bottleneck: {limit(larger.result)}"
        )
    return lines


_COLOURS = ("#2a6fbb", "#c8553d", "#3a8f5c", "#8a5aa8", "#b88a1e", "#3b8d99", "#a8456e", "#5c6370")
_GREY = "#9aa3ad"
_INK = "#22272e"
_BINS = 400
_TRACKS = 64
"""Maximum number of tracks in the timeline. If there are more engines, neighboring engines share a track."""
_STEPS = 3
"""Number of steps in the timeline."""
_WIDE = 8
"""Ratio of the slowest to the fastest step above which the axis is logarithmic."""
_PHASES = (("waits for its batch", "#dfe3e8"), ("trains", "#2a6fbb"), ("waits for engines", "#e8b9ae"),
           ("updates weights", "#c8553d"))  # fmt: skip


def draw(rows: Sequence[Row], detailed: Result, title: str, path: str | Path) -> Path:
    """Plot seconds per step over staleness, and a timeline of one run. Return the path of the image.

    Args:
        rows: runs in the left panel. Runs with the same scheduler and number of GPUs are connected by a line.
        detailed: run in the right panels, simulated with ``trace``.

    Raises:
        OSError: if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.9), height_ratios=(4, 1))
    _steps_over_staleness(figure.add_subplot(grid[:, 0]), rows)
    tracks = figure.add_subplot(grid[0, 1])
    _timeline(figure, tracks, figure.add_subplot(grid[1, 1], sharex=tracks), detailed)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    write_whole(path, image.getvalue())
    return Path(path)


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, labelsize=8.5, color=_GREY)


def _steps_over_staleness(axes: Axes, rows: Sequence[Row]) -> None:
    _style_axes(axes, "seconds per step")
    lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for row in rows:
        scenario = row.result.scenario
        lines.setdefault((row.gpus, scenario.scheduler), []).append((scenario.max_staleness, row.result.step_s))
    colours = dict(zip(sorted({row.gpus for row in rows}), itertools.cycle(_COLOURS)))
    for (gpus, scheduler), points in lines.items():
        x, y = zip(*sorted(points))
        style = "o--" if scheduler == "barrier" else "o-"
        name = f"{gpus} GPUs, {scheduler}" if gpus else scheduler
        axes.plot(x, y, style, color=colours[gpus], linewidth=2, markersize=5, label=name)
    seconds = [row.result.step_s for row in rows]
    if max(seconds) > _WIDE * min(seconds):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row.result.scenario.max_staleness for row in rows}))
    axes.set_xlabel("rollout.max_staleness", fontsize=9, color=_INK)
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, labelcolor=_INK)


def _timeline(figure: Figure, tracks: Axes, bar: Axes, detailed: Result) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    first = max(0, min(detailed.scenario.skipped, len(detailed.steps) - _STEPS))
    steps = detailed.steps[first : first + _STEPS]
    start, end = steps[0].started, steps[-1].ended
    assert detailed.trace is not None
    table = occupancy(detailed.trace, detailed.scenario.engines, start, end) / detailed.scenario.slots
    scenario = detailed.scenario
    engines_per_track = -(-scenario.engines // _TRACKS)
    _style_axes(tracks, f"slots in use, {_row_unit(engines_per_track)}; max_staleness {scenario.max_staleness}")
    image = tracks.imshow(table, aspect="auto", origin="lower", extent=(0, end - start, 0, scenario.engines),
                         cmap="Blues", vmin=0, vmax=1, interpolation="nearest")  # fmt: skip
    colours = figure.colorbar(image, ax=tracks, pad=0.01, format=lambda value, _: f"{value:.0%}")
    colours.outline.set_visible(False)
    colours.ax.tick_params(labelsize=8, colors=_INK)
    tracks.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    tracks.set_ylabel("engines", fontsize=9, color=_INK)
    tracks.tick_params(labelbottom=False)
    _style_axes(bar, "the trainer")
    for step in steps:
        bar.axvline(step.ended - start, color=_INK, linewidth=0.6)
        left = step.started - start
        lengths = (step.waited, scenario.train_s, step.held_up, scenario.publish_s)
        for seconds, (_, colour) in zip(lengths, _PHASES):
            bar.barh(0, seconds, left=left, color=colour, height=0.8)
            left += seconds
    bar.set_yticks([])
    bar.set_xlim(0, end - start)
    bar.set_xlabel(f"seconds; steps {first + 1} to {first + len(steps)}, separated by lines", fontsize=9, color=_INK)
    used = _PHASES if scenario.scheduler == "barrier" else (_PHASES[0], _PHASES[1], _PHASES[3])
    handles = [Patch(color=colour, label=name) for name, colour in used]
    bar.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8.5,
               labelcolor=_INK, borderaxespad=0.1)  # fmt: skip


def _row_unit(engines_per_track: int) -> str:
    return "per engine" if engines_per_track == 1 else f"{engines_per_track} engines per row"


def occupancy(trace: Trace, engines: int, start: float, end: float) -> np.ndarray:
    """Return the mean number of active sequences per engine between ``start`` and ``end``. Shape: [tracks, bins]."""
    engines_per_track = -(-engines // _TRACKS)
    tracks = -(-engines // engines_per_track)
    width = (end - start) / _BINS
    area = np.zeros((tracks, _BINS))
    since = [(0.0, 0)] * engines
    for now, engine, sequences in [*trace.changes, *((end, engine, 0) for engine in range(engines))]:
        before, count = since[engine]
        since[engine] = now, sequences
        if count and now > start and before < end:
            _fill(area[engine // engines_per_track], (before - start) / width, (now - start) / width, count)
    sizes = np.array([min(engines_per_track, engines - track * engines_per_track) for track in range(tracks)])
    return np.asarray(area / sizes[:, None])


def _fill(row: np.ndarray, left: float, right: float, count: int) -> None:
    """Add ``count`` to the bins between two points. The bins at both ends get the covered fraction of ``count``."""
    left, right = max(0.0, left), min(float(len(row)), right)
    first, last = int(left), min(int(right), len(row) - 1)
    if first >= last:
        row[last] += count * max(0.0, right - left)
        return
    row[first] += count * (first + 1 - left)
    row[first + 1 : last] += count
    row[last] += count * (right - last)
