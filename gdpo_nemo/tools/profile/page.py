"""Output of ``gdpo-nemo profile``: tables for the terminal and the page ``profile.html``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.observe.html_report import render
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdpo_nemo.tools.profile.measure import Measured
    from gdpo_nemo.tools.profile.reward_profile import Estimate, RewardProfile

_HEADS = (
    "component", "weight", "mean", "pass rate", "live groups", "saturation", "effective", "noise", "length", "ms",
)  # fmt: skip
_EXPLAINED = (
    "pass rate: share of samples with the best reward, which is the smallest for a negative weight; live groups: "
    "groups whose samples have different rewards; saturation: position of the mean between the worst and the best "
    "reward; effective: share of the variance of the advantages; noise: share of the variance that changes when the "
    "same samples are verified again; length: correlation with the number of tokens; ms: time to verify a sample"
)
_LEGENDS = {
    "effective": "share of the variance of the advantages that each component has under each estimator. config: the "
    "estimator of the config, with its preset and options",
    "correlation": "correlation of the z-scores of two components within groups: 1 if they agree, -1 if they oppose "
    "each other, 0 if they are unrelated",
    "conflicts": "share of the samples with a z-score other than 0 in both components in which the two signs differ. "
    "Unrelated components have about 50%",
    "rates": "number of rows by the share of their samples that get the best reward in all weighted components",
}
_CRITERIA_HEADS = ("family", "criteria", "met", "dead", "missing", "noise", "agreement")
_WORST_HEADS = ("row", "criterion", "problem")
_CRITERIA_EXPLAINED = (
    "criteria: number with a verdict, over all rows; met: verdicts that are 1, or 0 for a negative weight; dead: "
    "criteria with equal verdicts on all samples of the row; noise: as above, of each criterion; agreement: verdicts "
    "that are equal when the same samples are verified again"
)
_BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def summary(measured: Measured, out: Path) -> RenderableType:
    """Return the profile as a renderable for the terminal."""
    from rich import box
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD)
    for head in _HEADS:
        grid.add_column(head, justify="left" if head == "component" else "right")
    for row in component_rows(measured):
        grid.add_row(*map(Text, row))
    lines = [*heading(measured), "", *findings(measured), "", *proposals(measured), ""]
    if any(one.weight and one.noise_std for one in measured.profile.components.values()):
        lines += [f"to train with the measured noise: gdpo.noise='{{from: {out / 'profile.json'}}}'", ""]
    lines.append(f"{out / 'profile.html'}")
    first, *rest = map(Text, lines)
    return Lines(first, grid, Text(_EXPLAINED), *_criteria_grids(measured), *rest)


def _criteria_grids(measured: Measured) -> list[RenderableType]:
    """Return the table of the families and the table of their worst criteria. Empty without families."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grids: list[RenderableType] = []
    for heads, rows in (criteria_cells(measured), worst_cells(measured)):
        if rows:
            grid = Table(box=box.SIMPLE_HEAD)
            for head in heads:
                grid.add_column(head, overflow="fold")
            for row in rows:
                grid.add_row(*map(Text, row))
            grids.append(grid)
    return [*grids, Text(_CRITERIA_EXPLAINED)] if grids else []


def heading(measured: Measured) -> list[str]:
    """Return sentences about the samples, the live groups and the cost."""
    profile, config = measured.profile, measured.config
    samples = config.gdpo.val_generations_per_prompt
    lines = [f"{config.policy.model_name}: {len(measured.rows)} rows x {samples} samples; {config.gdpo.estimator}"]
    lines.append(f"{_percent(profile.live)} of the groups have a training signal")
    lines.append(f"{measured.tokens:.1f} tokens per sample; all samples took {measured.sampling_s:.1f} s")
    if measured.failed:
        lines.append(f"{measured.failed} further verifications failed; they are left out of the noise")
    lines += [f"{name}: {value:.1f} per sample" for name, value in measured.verifier_tokens.items()]
    return lines


def findings(measured: Measured) -> list[str]:
    """Return the findings in words."""
    return [finding.text for finding in measured.profile.findings] or ["no defects found in the weighted components"]


def proposals(measured: Measured) -> list[str]:
    """Return the proposed weights with their reasons."""
    found = measured.profile.proposals
    changed = any(one.weight != measured.profile.components[name].weight for name, one in found.items())
    lines = ["proposed weights:"] if changed else ["proposed weights: no change"]
    lines += [
        f"  {name}: {one.weight:g} ({one.reason})" for name, one in found.items() if changed or one.reason != "keep"
    ]
    return lines


def component_rows(measured: Measured) -> list[list[str]]:
    """Return the cells of one row per component, in the order of the heads."""
    effective = measured.profile.effective["config"]
    rows = []
    for name, one in measured.profile.components.items():
        row = [
            name,
            f"{one.weight:g}",
            _number(one.mean, ".3g"),
            _number(one.pass_rate, ".1%"),
            _percent(one.live),
            _number(one.saturation, ".1%"),
            _percent(effective[name]) if one.weight else "-",
            _number(one.noise, ".1%"),
            _number(one.length, "+.2f"),
            _number(measured.seconds.get(name, math.nan) * 1000, ".2g"),
        ]
        rows.append(row)
    return rows


def write_page(path: Path, measured: Measured) -> None:
    """Write ``profile.html``. Raises RunError if the file cannot be written."""
    profile = measured.profile
    page = render(
        "tools/profile/page.html.j2",
        title=f"Reward profile of {measured.config.run.name}",
        heading=heading(measured),
        components=(_HEADS, component_rows(measured)),
        explained=_EXPLAINED,
        criteria=criteria_cells(measured),
        worst=worst_cells(measured),
        criteria_explained=_CRITERIA_EXPLAINED,
        legends=_LEGENDS,
        findings=findings(measured),
        has_defects=bool(profile.findings),
        proposals=proposals(measured),
        effective=_effective_table(profile),
        undefined=[f"{name}: {reason}" for name, reason in profile.undefined.items()],
        correlation=_pair_table(profile.correlation, list(profile.components), "+.2f"),
        conflicts=_pair_table(profile.conflicts, list(profile.components), ".0%"),
        rates=_histogram([row["pass_rate"] for row in measured.rows if row["pass_rate"] is not None]),
    )
    try:
        write_whole(path, page)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


Cells = tuple[list[str], list[list[str]]]
"""Heads and rows of a table."""


def criteria_cells(measured: Measured) -> Cells:
    """Return a table with a row for each family."""
    rows = []
    for name, one in measured.criteria.items():
        shares = (one.met, one.dead, one.missing, one.noise, one.agreement)
        rows.append([name, str(one.criteria), *(_number(share, ".1%") for share in shares)])
    return list(_CRITERIA_HEADS), rows


def worst_cells(measured: Measured) -> Cells:
    """Return a table of the worst criteria of each family."""
    rows = []
    for one in measured.criteria.values():
        rows += [[worst.row, worst.criterion, worst.problem] for worst in one.worst]
    return list(_WORST_HEADS), rows


def _effective_table(profile: RewardProfile) -> Cells:
    weighted = [name for name, one in profile.components.items() if one.weight]
    rows = []
    for rule, shares in profile.effective.items():
        rows.append([rule, *(_percent(shares[name]) for name in weighted)])
    return ["estimator", *weighted], rows


def _pair_table(matrix: Mapping[str, Mapping[str, float]], names: list[str], form: str) -> Cells:
    """Return a table with one row and one column per component."""
    rows = []
    for name in names:
        rows.append([name, *("" if other == name else _number(matrix[name][other], form) for other in names)])
    return ["", *names], rows


def _histogram(rates: list[float]) -> list[list[str]]:
    """Return the number of rows that no sample, all samples, or a share of the samples pass."""
    rows = [["0%", str(sum(rate == 0 for rate in rates))]]
    for low, high in zip(_BINS, _BINS[1:]):
        count = sum(low < rate <= high and rate < 1 for rate in rates)
        rows.append([f"up to {high:.0%}" if high < 1 else "below 100%", str(count)])
    return [*rows, ["100%", str(sum(rate == 1 for rate in rates))]]


def _percent(estimate: Estimate) -> str:
    """Return a share with its standard error."""
    if math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.1%}" + ("" if math.isnan(estimate.error) else f" ± {estimate.error:.1%}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
