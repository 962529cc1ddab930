"""Output of ``gdpo-nemo profile``: tables for the terminal and the page ``profile.html``."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Iterable

from gdpo_nemo.observe.html_report import document, section, table
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdpo_nemo.tools.profile.measure import Measured
    from gdpo_nemo.tools.profile.reward_profile import Estimate

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
    lines = [*heading(measured), "", *findings(measured), "", *proposals(measured), "", f"{out / 'profile.html'}"]
    first, *rest = map(Text, lines)
    return Lines(first, grid, Text(_EXPLAINED), *rest)


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
    return [
        [
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
        for name, one in measured.profile.components.items()
    ]


def write_page(path: Path, measured: Measured) -> None:
    """Write ``profile.html``. Raises RunError if the file cannot be written."""
    profile = measured.profile
    names = list(profile.components)
    weighted = [name for name in names if profile.components[name].weight]
    rules = [[rule, *(_percent(shares[name]) for name in weighted)] for rule, shares in profile.effective.items()]
    matrices = [
        [name, *("" if other == name else _number(matrix[name][other], form) for other in names)]
        for matrix, form in ((profile.correlation, "+.2f"), (profile.conflicts, ".0%"))
        for name in names
    ]
    effective = [table(["estimator", *weighted], rules), *_undefined(measured)]
    rates = [record["pass_rate"] for record in measured.rows if record["pass_rate"] is not None]
    title = f"Reward profile of {measured.config.run.name}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        *_lines(heading(measured), "dim"),
        *section("Components", [table(_HEADS, component_rows(measured)), *_lines([_EXPLAINED], "dim")]),
        *section("Findings", _lines(findings(measured), "alert" if profile.findings else "")),
        *section("Proposed weights", _lines(proposals(measured))),
        *section(
            "Effective weights by estimator",
            _explained("effective", *effective),
        ),
        *section("Correlation", _explained("correlation", table(["", *names], matrices[: len(names)]))),
        *section("Conflicts", _explained("conflicts", table(["", *names], matrices[len(names) :]))),
        *section("Rows by pass rate", _explained("rates", table(["pass rate", "rows"], _histogram(rates)))),
    ]
    try:
        write_whole(path, document(title, body).encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def _explained(legend: str, *parts: str) -> list[str]:
    return [*parts, *_lines([_LEGENDS[legend]], "dim")]


def _undefined(measured: Measured) -> list[str]:
    return _lines((f"{name}: {reason}" for name, reason in measured.profile.undefined.items()), "dim")


def _lines(lines: Iterable[str], style: str = "") -> list[str]:
    return [f"<p class={style or 'text'}>{html.escape(line)}</p>" for line in lines]


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
