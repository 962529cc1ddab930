"""Reward plot (``rewards.png``): one panel per component with training values, trailing mean and validations."""

from __future__ import annotations

import io
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gdpo_nemo.observe.metric_registry import title_of
from gdpo_nemo.observe.metrics import WINDOW, History, read_metrics
from gdpo_nemo.utils.errors import printable
from gdpo_nemo.utils.files import real_path, write_whole

FILE = "rewards.png"
COLOURS = ("#2a6fbb", "#c8553d", "#3a8f5c", "#8a5aa8", "#b88a1e", "#3b8d99", "#a8456e", "#5c6370")
_GREY = "#9aa3ad"
INK = "#22272e"
_DIAGNOSTICS = (
    "grad_norm",
    "policy/entropy",
    "parity/max_abs",
    "rollout/mean_length",
    "advantage/distinct",
    "throughput/tokens_per_second",
)


def plot_rewards(run_dir: str | Path, history: History | None = None) -> Path:
    """Draw the reward curves of a run to ``rewards.png`` in the run folder, and return its path.

    Args:
        history: metrics of the run. None reads them from the run folder.

    Raises:
        ValueError: if the run has no rewards yet.
        OSError: if the file cannot be written.
    """
    run_dir = Path(run_dir)
    image = rewards_png(history or History.of(read_metrics(run_dir)), title=real_path(run_dir).name)
    path = run_dir / FILE
    write_whole(path, image)
    return path


def rewards_png(history: History, title: str = "") -> bytes:
    """Draw one panel per reward component. Return the PNG as bytes.

    Raises:
        ValueError: if the run has no rewards yet.
    """
    names = history.components
    if not names:
        raise ValueError("no rewards to plot yet")
    figure, axes_of = panels(len(names), title)
    for index, (axes, name) in enumerate(zip(axes_of, names)):
        _draw_component(axes, history, name, COLOURS[index % len(COLOURS)])
    _legend(figure, axes_of[0], bool(history.validation))
    return png_of(figure)


def measured_diagnostics(history: History) -> list[str]:
    """Return the keys of the measured metrics that ``diagnostics_png`` draws."""
    return [key for key in _DIAGNOSTICS if len(history.curve(key)[0]) > 0]


def diagnostics_png(history: History) -> bytes | None:
    """Draw the measured diagnostics, such as gradient norm, entropy and parity.

    Return None if no diagnostic was measured.
    """
    keys = measured_diagnostics(history)
    if not keys:
        return None
    figure, axes_of = panels(len(keys), "")
    for axes, key in zip(axes_of, keys):
        axes.plot(*history.curve(key), color=INK, linewidth=1.2)
        axes.set_title(title_of(key), loc="left", fontsize=10, color=INK)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        if key != "rollout/mean_length":
            axes.set_ylim(bottom=0.0)
    return png_of(figure)


def effects_png(history: History) -> bytes | None:
    """Draw how each component's gradient changed each component's expected reward: the sums of the first-order changes
    up to each step. Return None if they were not measured."""
    effects = history.effects()
    if not effects:
        return None
    figure, axes_of = panels(len(effects), "")
    parts = list(dict.fromkeys(chain.from_iterable(effects.values())))
    for axes, (name, causes) in zip(axes_of, effects.items()):
        for part, (steps, values) in causes.items():
            axes.plot(steps, np.cumsum(values), color=COLOURS[parts.index(part) % len(COLOURS)], label=part)
        axes.axhline(0.0, color=_GREY, linewidth=0.8)
        axes.set_title(f"change of {name} by", loc="left", fontsize=10, color=INK)
    lows, highs = zip(*(axes.get_ylim() for axes in axes_of))
    for axes in axes_of:
        axes.set_ylim(min(lows), max(highs))
    handles, labels = axes_of[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9)
    return png_of(figure)


def _draw_component(axes: Axes, history: History, name: str, colour: str) -> None:
    key = f"reward/{name}/mean"
    steps, values = history.curve(key)
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1.0)
    axes.plot(*history.trailing(key), color=colour, linewidth=2.2)
    held_out = history.curve(f"validation/{name}")
    point: dict[str, Any] = {
        "marker": "o",
        "markersize": 5.5,
        "markerfacecolor": "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.6,
    }
    axes.plot(*held_out, linestyle="none", **point)
    if steps and len(steps) < WINDOW:
        axes.plot(steps, values, linestyle="none", marker=".", color=colour)
    last = history.last(key, history.end_window)
    axes.set_title(name, loc="left", fontsize=11, fontweight="bold", color=colour)
    if last is not None:
        axes.set_title(
            f"{history.first(key, history.end_window):.2f} → {last:.2f}", loc="right", fontsize=10, color=INK
        )
    everything = [*values, *held_out[1]]
    if everything and min(everything) >= 0 and max(everything) <= 1:
        axes.set_ylim(-0.03, 1.05)  # Rewards between 0 and 1 have the same y range in every panel.


def panels(count: int, title: str, effort: str = "step") -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` empty panels, at most four per row.

    Args:
        effort: label of the x axis.
    """
    columns = min(count, 4) if count != 5 and count != 6 else 3
    rows = -(-count // columns)
    figure = Figure(figsize=(max(3.3 * columns, 4.5), 2.7 * rows + 0.75), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(printable(title), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    bare = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in bare[count:]:
        spare.remove()
    for index, axes in enumerate(bare[:count]):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(colors=INK, labelsize=8.5, color=_GREY)
        axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if index >= count - columns:
            axes.set_xlabel(effort, fontsize=9, color=INK)
    return figure, bare[:count]


def _legend(figure: Figure, axes: Axes, validation: bool) -> None:
    entries: list[tuple[Artist, str]] = [(axes.lines[0], "training batch"), (axes.lines[1], f"mean of {WINDOW} steps")]
    if validation:
        entries.append((axes.lines[2], "held-out validation"))
    handles, labels = zip(*entries)
    figure.legend(
        handles, labels, loc="outside upper right", ncols=len(entries), frameon=False, fontsize=9, labelcolor=INK
    )


def png_of(figure: Figure) -> bytes:
    """Render the figure to PNG and return the bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
