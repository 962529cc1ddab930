"""Page of ``gdpo-nemo reproduce``: the paper's results beside those of the runs, with errors and verdicts in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from gdpo_nemo.algorithms.diagnostics import student_factor
from gdpo_nemo.config.changes import find_changes
from gdpo_nemo.config.load import load_config
from gdpo_nemo.observe.html_report import render
from gdpo_nemo.observe.run_files import read_run_config
from gdpo_nemo.tools.compare.comparison import RunRecord, components, sign_flip_p, standard_error, variants_of
from gdpo_nemo.tools.compare.page import curves_png
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import write_whole

PAGE = "reproduce.html"
Arms = Mapping[str, Sequence[Path]]
"""Run folders of each estimator, grpo and gdpo, in the order of the seeds."""


@dataclass(frozen=True)
class Published:
    """A published result, and the metric that corresponds to it in a run."""

    name: str
    metric: str
    """Name without ``validation/``."""
    scale: float
    """Factor from the metric to the published unit."""
    start: float | None
    """Published value before training."""
    grpo: float | None
    gdpo: float | None
    less_is_better: bool = False


PUBLISHED = {
    "tool_calling": (
        Published("matching calls (published: BFCL-v3 average), %", "ast", 100, 17.88, 30.18, 32.81),
        Published("correct format, %", "format", 100, 4.74, 76.33, 80.66),
        Published("correctness reward, -3 to 3 (published: curve of one run)", "correctness", 1, None, 1.72, 1.92),
    ),
    "gsm8k": (
        Published("correctness reward, % (published: curve of one run)", "correctness", 100, None, 68.0, 71.0),
        Published("integer reward, % (published: curve of one run)", "integer", 100, None, 94.5, 97.5),
        Published("format reward, % (published: curve of one run)", "format", 100, None, 95.0, 96.5),
        Published("equal answer by math-verify, %", "math_verify", 100, None, None, None),
    ),
    "math_length": (
        Published("accuracy (published: MATH), %", "correctness", 100, 84.3, 83.6, 86.2),
        Published("longer than the limit (published: MATH), %", "exceed", 100, 35.0, 1.5, 0.8, less_is_better=True),
    ),
}
"""Tables 1 and 3 of the paper, and the curves in NVlabs/GDPO, which were read by eye. The curves are of training
batches, while the runs are measured on held-out rows."""
WEAKNESSES = {
    "tool_calling": (
        "BFCL is not run. Matching calls are measured on RLLA's held-out rows, with the ground truth's types.",
        "As in the authors' scripts, only the GRPO runs have a KL penalty, so there are two differences.",
    ),
    "gsm8k": (
        "The paper has no GSM8K experiment. The published values are ends of training curves, read from a figure.",
    ),
    "math_length": (
        "The paper reports the mean of 16 samples of up to 32,000 tokens. Here the limit is that of training.",
        "The code of this experiment is not published; docs/paper.md lists the settings that are assumptions.",
    ),
}
_SMALL = (
    "The model has 135 M parameters and was warmed up on rows of the same data; the published models have 1.5 B. "
    "The run has a small part of the recipe's samples (see the settings), so its result neither confirms nor "
    "contradicts the paper."
)


@dataclass(frozen=True)
class Result:
    """Held-out results for one published result."""

    published: Published
    start: np.ndarray
    """float64 [seeds], before training, in the published unit."""
    grpo: np.ndarray
    """float64 [seeds], after training."""
    gdpo: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """GDPO minus GRPO for each seed: float64 [seeds]."""
        return np.asarray(self.gdpo - self.grpo)


def results_of(task: str, arms: Arms) -> list[Result]:
    """Return the first and last validation of all runs. Raises RunError if a run has no validation."""
    grpo, gdpo = (list(map(RunRecord.read, arms[arm])) for arm in ("grpo", "gdpo"))
    found = []
    for published in PUBLISHED[task]:
        _, after_grpo = _ends(grpo, published)
        before, after_gdpo = _ends(gdpo, published)
        found.append(Result(published, before, after_grpo, after_gdpo))
    return found


def _ends(runs: Sequence[RunRecord], published: Published) -> np.ndarray:
    """Return first and last validation in the published unit: float64 [2, seeds]."""
    ends = [_first_and_last(run, published.metric) for run in runs]
    return np.array(ends).T * published.scale


def _first_and_last(run: RunRecord, metric: str) -> tuple[float, float]:
    steps, values = run.history.curve(f"validation/{metric}")
    if not steps:
        raise RunError(f"{run.folder}: has no metric validation/{metric}; set gdpo.val_period")
    return values[0] if steps[0] == 0 else float("nan"), values[-1]


def verdicts(results: Sequence[Result]) -> list[str]:
    """Return a sentence per published result that says whether the runs agree with it.

    A verdict names an estimator if 0 is outside the 95 % confidence interval of the paired difference. Without a
    difference, each sentence therefore names one in 5 % of the experiments.
    """
    return [f"{result.published.name}: {_verdict(result)}" for result in results]


def _verdict(result: Result) -> str:
    published, gap = result.published, result.gap
    theirs = None if published.gdpo is None or published.grpo is None else published.gdpo - published.grpo
    paper = "" if theirs is None else f" (published: {theirs:+.2f})"
    error = float(standard_error(gap))
    difference = f"GDPO minus GRPO is {gap.mean():+.2f}"
    if np.isnan(error):
        return f"{difference}{paper}. One seed has no error, so nothing follows from it."
    difference += f" ± {error:.2f}{paper}"
    factor = student_factor(len(gap))
    if abs(gap.mean()) <= factor * error or error == 0:
        return f"{difference}. Undecided: {len(gap)} seeds do not distinguish the estimators."
    ahead = (gap.mean() > 0) != published.less_is_better
    agrees = "" if theirs is None else " As published." if gap.mean() * theirs > 0 else " Unlike the published result."
    return f"{difference}. {'GDPO' if ahead else 'GRPO'} is better by more than {factor:.1f} standard errors.{agrees}"


def write(task: str, scale: str, out: Path, arms: Arms, recipe: str) -> Path:
    """Write ``reproduce.html`` to the folder ``out`` and return its path.

    Args:
        recipe: config file of the experiment at full size, whose differences from the runs are listed.

    Raises:
        RunError: if a run has no validation, or the page cannot be written.
    """
    results = results_of(task, arms)
    seeds = len(arms["gdpo"])
    weaknesses = [*WEAKNESSES[task], *([_SMALL] if scale == "cpu" else [])]
    if seeds < 3:
        weaknesses.append(f"Number of seeds: {seeds}. Three or more are needed for an error that means something.")
    folders = list(chain.from_iterable(arms.values()))
    variants = variants_of([RunRecord.read(folder) for folder in folders])
    changes = find_changes(read_run_config(arms["gdpo"][0]), load_config(recipe))
    page = render(
        "tools/reproduce/page.html.j2",
        title=f"{task}: reproduction",
        task=task,
        scale=scale,
        verdicts=verdicts(results),
        results=_table(results),
        note=_NOTE,
        weaknesses=weaknesses,
        curves=curves_png(variants, components(variants), "steps"),
        settings=[(one.key, one.now, one.before) for one in changes if not one.key.startswith(_NOT_COMPARED)],
        folders=[(folder,) for folder in folders],
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / PAGE, page)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from None
    return out / PAGE


_NOT_COMPARED = ("run.", "logger.", "checkpointing.")
_NOTE = (
    "Mean ± standard error over the seeds, on held-out rows after the last step. The difference is paired: both "
    "estimators start from the same weights and see the same prompts. A verdict names an estimator if the difference "
    "is significant at 5 % in Student's paired t-test, without a correction for the number of results. p is that of "
    "the exact paired randomization test, which does not assume normal differences. The paper gives no errors."
)


def _table(results: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and rows of the table of results."""
    heads = ("result", "paper: start", "GRPO", "GDPO", "here: start", "GRPO", "GDPO", "difference", "p", "seeds")
    rows = []
    for result in results:
        published = result.published
        p = sign_flip_p(result.gap)
        row = (
            published.name,
            *map(_number, (published.start, published.grpo, published.gdpo)),
            *map(_mean, (result.start, result.grpo, result.gdpo)),
            _mean(result.gap, "+"),
            "-" if np.isnan(p) else f"{p:.2g}",
            str(len(result.gap)),
        )
        rows.append(row)
    return heads, rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _mean(values: np.ndarray, sign: str = "") -> str:
    if np.isnan(values).any():
        return "-"
    error = standard_error(values)
    return f"{values.mean():{sign}.2f}" + ("" if np.isnan(error) else f" ± {float(error):.2f}")
