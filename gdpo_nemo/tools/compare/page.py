"""Output of ``gdpo-nemo compare``: tables for a terminal, a PNG with curves, and an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdpo_nemo.algorithms.diagnostics import student_factor
from gdpo_nemo.observe.html_report import render
from gdpo_nemo.observe.metric_registry import title_of
from gdpo_nemo.observe.plot import COLOURS, INK, panels, png_of
from gdpo_nemo.tools.compare.comparison import (
    AXES,
    Variant,
    band,
    common_effort,
    gaps,
    shown,
    sign_flip_p,
    standard_error,
    steps_to,
    values_at,
)
from gdpo_nemo.utils.errors import RunError, printable
from gdpo_nemo.utils.files import write_whole

PNG = "compare.png"
HTML = "compare.html"
Goals = Sequence[tuple[str, float]]
"""Pairs of a metric and the goal for its trailing mean."""
_MOST_PANELS = 12
_MOST_COLUMNS = 3


@dataclass(frozen=True)
class Table:
    """Table whose cells are text."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def short_title(metric: str) -> str:
    """Return the component name of a reward metric, or the title of another metric from the registry."""
    parts = metric.split("/")
    return "/".join(parts[1:-1]) if parts[0] == "reward" and parts[-1] == "mean" else title_of(metric)


def tables(variants: Sequence[Variant], metrics: Sequence[str], goals: Goals = ()) -> list[Table]:
    """Return tables of the settings, of values after equal effort, of steps to the goals, and of differences.

    Effort is measured in steps, samples and time. Differences are measured from the first variant.
    """
    found = [_settings_table(variants)]
    for axis in AXES:
        if axis != "samples" or _samples_differ(variants):
            found.append(_values_table(variants, metrics, axis))
    if goals:
        found.append(_goals_table(variants, goals))
    if len(variants) > 1:
        found.append(_gaps_table(variants, metrics))
    return [table for table in found if table.rows]


def _samples_differ(variants: Sequence[Variant]) -> bool:
    """Return whether the runs use different numbers of samples per step."""
    return len({float(run.effort("samples", [1])[0]) for variant in variants for run in variant.runs}) > 1


def _settings_table(variants: Sequence[Variant]) -> Table:
    """Return a table with one row per setting, or one row per variant if there are many variants."""
    keys = list(variants[0].settings)
    columns = [(variant.label, *map(shown, variant.settings.values())) for variant in variants]
    if len(variants) > _MOST_COLUMNS:
        return Table("Settings that differ", ("", *keys), columns if keys else [])
    heads, *rows = zip(("", *keys), *columns)
    return Table("Settings that differ", heads, rows)


def _values_table(variants: Sequence[Variant], metrics: Sequence[str], axis: str) -> Table:
    effort = common_effort(variants, axis)
    rows = []
    for variant in variants:
        cells = [_cell(values_at(variant, metric, axis, effort)) for metric in metrics]
        rows.append((variant.label, str(len(variant.runs)), *cells))
    title = f"After {effort:,.0f} {AXES[axis]}, reached by all runs"
    return Table(title, ("", "runs", *map(short_title, metrics)), rows, _error_note(variants))


def _goals_table(variants: Sequence[Variant], goals: Goals) -> Table:
    end = common_effort(variants, "steps")
    rows = []
    for variant in variants:
        cells = [_cell(steps_to(variant, metric, goal, end), digits=1) for metric, goal in goals]
        rows.append((variant.label, str(len(variant.runs)), *cells))
    heads = [f"{short_title(metric)} ≥ {goal:g}" for metric, goal in goals]
    note = f"{_error_note(variants)} {end + 1:,.0f} means not reached by step {end:,.0f}."
    return Table("Steps until the mean of five steps reaches", ("", "runs", *heads), rows, note)


def _gaps_table(variants: Sequence[Variant], metrics: Sequence[str]) -> Table:
    rows: list[tuple[str, ...]] = []
    found = gaps(variants, metrics)
    for gap in found:
        cells = [cell for gap_of in (gap.at_end, gap.over_run) for cell in (_cell(gap_of, signed=True), _p(gap_of))]
        rows.append((gap.variant, short_title(gap.metric), str(len(gap.seeds)), *cells))
    least = min((2 / 2 ** len(gap.seeds) for gap in found), default=1.0)
    note = "Runs are compared per seed and after equal steps."
    if least < 1:
        note += (
            " p: probability of a mean difference this large by chance (exact paired randomization test, two-sided, "
            f"not corrected for the number of rows). With so few seeds, p is at least {least:.2g}."
        )
    title = f"Differences from {variants[0].label}"
    return Table(title, ("", "reward", "seeds", "at the end", "p", "over the run", "p"), rows, note)


def _error_note(variants: Sequence[Variant]) -> str:
    """Explain the errors of a table, and how wide the confidence intervals of so few runs are."""
    counts = sorted({len(variant.runs) for variant in variants} - {1})
    factors = " or ".join(f"{student_factor(count):.1f} (of {count} runs)" for count in counts)
    return "Mean ± standard error over the runs." + (factors and f" A 95% interval is ± {factors} standard errors.")


def _p(gap: np.ndarray) -> str:
    p_value = sign_flip_p(gap)
    return "-" if np.isnan(p_value) else f"{p_value:.2g}"


def _cell(values: np.ndarray, signed: bool = False, digits: int = 3) -> str:
    """Format the mean ± standard error over the runs that have a value."""
    known = values[~np.isnan(values)]
    if not len(known):
        return "-"
    sign = "+" if signed else ""
    error = standard_error(known)
    return f"{known.mean():{sign}.{digits}f}" + ("" if np.isnan(error) else f" ± {float(error):.{digits}f}")


def curves_png(variants: Sequence[Variant], metrics: Sequence[str], axis: str) -> bytes:
    """Return a PNG with one panel per metric and one line per variant. Bands show the standard error over the runs."""
    plotted = list(metrics)[:_MOST_PANELS]
    figure, axes_list = panels(len(plotted), "", AXES[axis])
    for axes, metric in zip(axes_list, plotted):
        axes.set_title(short_title(metric), loc="left", fontsize=11, fontweight="bold", color=INK)
        for index, variant in enumerate(variants):
            colour = COLOURS[index % len(COLOURS)]
            style = ("-", "--", ":")[index // len(COLOURS) % 3]
            effort, mean, error = band(variant, metric, axis)
            label = printable(variant.label)
            axes.plot(effort, mean, color=colour, linestyle=style, linewidth=1.8, label=label)
            axes.fill_between(effort, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
    handles, labels = axes_list[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(3, len(labels)), frameon=False, fontsize=9, labelcolor=INK
    )
    return png_of(figure)


def write(
    variants: Sequence[Variant], metrics: Sequence[str], axis: str, out: Path, goals: Goals = ()
) -> tuple[Path, Path]:
    """Write ``compare.png`` and ``compare.html`` to the folder ``out`` and return their paths. Raises RunError."""
    picture = curves_png(variants, metrics, axis)
    runs = []
    for variant in variants:
        folders = ", ".join(str(run.folder) for run in variant.runs)
        runs.append((f"{variant.label}: {folders}",))
    page = render(
        "tools/compare/page.html.j2",
        title="Runs compared",
        curves=picture,
        tables=tables(variants, metrics, goals),
        runs=runs,
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / PNG, picture)
        write_whole(out / HTML, page)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from None
    return out / PNG, out / HTML
