"""A simulation as a PNG: seconds per step over the staleness bound, and one stretch of a run in time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gdpo_nemo.config.writing import write_whole
from gdpo_nemo.planning.simulation_records import Result, Trace
from gdpo_nemo.planning.simulation_report import Row

_COLOURS = ("#2a6fbb", "#c8553d", "#3a8f5c", "#8a5aa8", "#b88a1e", "#3b8d99", "#a8456e", "#5c6370")
_GREY = "#9aa3ad"
_INK = "#22272e"
_BINS = 400
_LANES = 64
"""Engines that have a lane of their own in the picture; of more, neighbours share one."""
_STEPS = 3
_WIDE = 8
"""Ratio of the slowest to the fastest step from which on the axis is logarithmic."""
_PHASES = (("waits for its batch", "#dfe3e8"), ("trains", "#2a6fbb"), ("waits to send", "#e8b9ae"),
           ("sends the weights", "#c8553d"))  # fmt: skip


def draw(rows: Sequence[Row], shown: Result, title: str, path: str | Path) -> Path:
    """Write the figure.

    Args:
        rows: the runs of the left panel; those of one scheduler and number of GPUs make a line.
        shown: the run of the right panels, simulated with its trace.

    Raises:
        OSError: if the file cannot be written.
    """
    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.9), height_ratios=(4, 1))
    _steps_over_staleness(figure.add_subplot(grid[:, 0]), rows)
    lanes = figure.add_subplot(grid[0, 1])
    _timeline(figure, lanes, figure.add_subplot(grid[1, 1], sharex=lanes), shown)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    write_whole(path, image.getvalue())
    return Path(path)


def _bare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, labelsize=8.5, color=_GREY)


def _steps_over_staleness(axes: Axes, rows: Sequence[Row]) -> None:
    _bare(axes, "seconds a step")
    lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for row in rows:
        scenario = row.result.scenario
        lines.setdefault((row.gpus, scenario.scheduler), []).append((scenario.max_staleness, row.result.step_s))
    colours = {gpus: _COLOURS[n % len(_COLOURS)] for n, gpus in enumerate(sorted({gpus for gpus, _ in lines}))}
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


def _timeline(figure: Figure, lanes: Axes, bar: Axes, shown: Result) -> None:
    first = max(0, min(shown.scenario.skipped, len(shown.steps) - _STEPS))
    steps = shown.steps[first : first + _STEPS]
    start, end = steps[0].started, steps[-1].ended
    assert shown.trace is not None
    table = occupancy(shown.trace, shown.scenario.engines, start, end) / shown.scenario.slots
    scenario = shown.scenario
    gathered = -(-scenario.engines // _LANES)
    _bare(lanes, f"slots in use, {_each(gathered)}; max_staleness {scenario.max_staleness}")
    image = lanes.imshow(table, aspect="auto", origin="lower", extent=(0, end - start, 0, scenario.engines),
                         cmap="Blues", vmin=0, vmax=1, interpolation="nearest")  # fmt: skip
    colours = figure.colorbar(image, ax=lanes, pad=0.01, format=lambda value, _: f"{value:.0%}")
    colours.outline.set_visible(False)
    colours.ax.tick_params(labelsize=8, colors=_INK)
    lanes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    lanes.set_ylabel("engines", fontsize=9, color=_INK)
    lanes.tick_params(labelbottom=False)
    _bare(bar, "the trainer")
    for step in steps:
        bar.axvline(step.ended - start, color=_INK, linewidth=0.6)
        left = step.started - start
        lengths = (step.waited, scenario.train_s, step.held_up, scenario.publish_s)
        for seconds, (_, colour) in zip(lengths, _PHASES):
            bar.barh(0, seconds, left=left, color=colour, height=0.8)
            left += seconds
    bar.set_yticks([])
    bar.set_xlim(0, end - start)
    bar.set_xlabel(f"seconds; steps {first + 1} to {first + len(steps)}, each ends at a line", fontsize=9, color=_INK)
    used = _PHASES if scenario.scheduler == "barrier" else (_PHASES[0], _PHASES[1], _PHASES[3])
    handles = [Patch(color=colour, label=name) for name, colour in used]
    bar.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8.5,
               labelcolor=_INK, borderaxespad=0.1)  # fmt: skip


def _each(gathered: int) -> str:
    return "engine by engine" if gathered == 1 else f"{gathered} engines a lane"


def occupancy(trace: Trace, engines: int, start: float, end: float) -> np.ndarray:
    """Mean sequences per engine, [lanes, bins] over the seconds from ``start`` to ``end``."""
    gathered = -(-engines // _LANES)
    lanes = -(-engines // gathered)
    width = (end - start) / _BINS
    area = np.zeros((lanes, _BINS))
    since = [(0.0, 0)] * engines
    for now, engine, sequences in [*trace.changes, *((end, engine, 0) for engine in range(engines))]:
        before, count = since[engine]
        since[engine] = now, sequences
        if count and now > start and before < end:
            _fill(area[engine // gathered], (before - start) / width, (now - start) / width, count)
    sizes = np.array([min(gathered, engines - lane * gathered) for lane in range(lanes)])
    return np.asarray(area / sizes[:, None])


def _fill(row: np.ndarray, left: float, right: float, count: int) -> None:
    """Add ``count`` to the bins between two places, to those at the ends their share."""
    left, right = max(0.0, left), min(float(len(row)), right)
    first, last = int(left), min(int(right), len(row) - 1)
    if first >= last:
        row[last] += count * max(0.0, right - left)
        return
    row[first] += count * (first + 1 - left)
    row[first + 1 : last] += count
    row[last] += count * (right - last)
