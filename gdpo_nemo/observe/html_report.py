"""Self-contained report of a run (``report.html``, ``rewards.png``), and the templates of all HTML pages.

A separate process redraws the report during the run.
"""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gdpo_nemo.algorithms.rubrics import restored, with_scores
from gdpo_nemo.observe.console import facts, number, reward_table
from gdpo_nemo.observe.metric_registry import about_of, title_of
from gdpo_nemo.observe.metrics import History, read_metrics
from gdpo_nemo.observe.plot import diagnostics_png, effects_png, measured_diagnostics, plot_rewards, rewards_png
from gdpo_nemo.observe.run_files import read_alerts, read_run_config, status_if_whole
from gdpo_nemo.observe.sample_images import RecordedImages, with_labels
from gdpo_nemo.observe.samples import read_columns, rollout_files
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import real_path, remove_partial_files, write_whole

FILE = "report.html"
_MOST_CHARACTERS = 4000
_SHOWN = ("prompt", "completion", "rewards", "criteria", "advantage", "outcome", "images")
"""Columns of the sample files that the report shows."""


@cache
def _templates() -> Environment:
    # Names, texts and settings on the pages come from models and config files, so all values are escaped.
    templates = Environment(
        loader=PackageLoader("gdpo_nemo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["base64"] = lambda png: base64.b64encode(png).decode()
    return templates


def render(template: str, **values: Any) -> bytes:
    """Return an HTML page. All values are escaped.

    Args:
        template: path of the page's template in the package, for example ``observe/pages/report.html.j2``.
    """
    return _templates().get_template(template).render(values).encode("utf-8", "replace")


def write_report(run_dir: str | Path, history: History | None = None) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    Args:
        history: metrics of the run. None reads them from the run folder.

    Raises:
        RunError: if the folder has no metrics, a file in it is damaged, or the report cannot be written.
    """
    run_dir = Path(run_dir)
    history = history or History.of(read_metrics(run_dir))
    if not history.training and not history.validation:
        raise RunError(f"{run_dir} has no metrics to report")
    config = run_dir / "config.yaml"
    page = render(
        "observe/pages/report.html.j2",
        title=real_path(run_dir).name,
        head=_head(run_dir, history),
        curves=rewards_png(history) if history.components else None,
        rewards=reward_table(history),
        weights=_weights(history),
        facts=facts(history),
        effects=effects_png(history),
        alerts=read_alerts(run_dir),
        diagnostics=diagnostics_png(history),
        meanings=[(title_of(key), about_of(key)) for key in measured_diagnostics(history)],
        samples=_samples(run_dir),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else None,
    )
    path = run_dir / FILE
    try:
        write_whole(path, page)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _head(run_dir: Path, history: History) -> list[str]:
    """Return status, steps, model, algorithm and rewards of a run. A folder of metrics without a config has only the
    first two."""
    steps = history.training[-1]["step"] if history.training else 0
    head = [str(status_if_whole(run_dir).get("outcome") or "not finished"), f"{steps} step{'s' * (steps != 1)}"]
    if not (run_dir / "config.yaml").is_file():
        return head
    config = read_run_config(run_dir)
    gdpo = config.get("gdpo", {})
    head.append(str(config.get("policy", {}).get("model_name", "")))
    kind = str(config.get("algorithm", {}).get("type") or "")
    head.append(str(gdpo.get("estimator", "")) if kind in ("", "gdpo") else kind)
    rewards = gdpo.get("rewards")
    if isinstance(rewards, dict):
        head.append(" + ".join(f"{weight} {name}" for name, weight in rewards.items()))
    return [part for part in head if part]


def _weights(history: History) -> list[tuple[str, ...]]:
    """Return first value, last value and reason of the last value of each weight that changes during the run."""
    rows: list[tuple[str, ...]] = []
    for name, weight, reason in history.weights():
        first = history.curve(f"reward/{name}/weight")[1][0]
        rows.append((name, number(first), number(weight), reason))
    return rows


Shown = tuple[int, str, list[tuple[str, str]]]
"""A step, the prompt of its first group, and result and completion of the samples that the report shows."""


def _samples(run_dir: Path) -> list[Shown]:
    """Return the best and worst sample of one group each from the first, middle and last recorded step."""
    files = list(rollout_files(run_dir))
    found = []
    for index in sorted({0, len(files) // 2, len(files) - 1}) if files else ():
        step, path = files[index]
        try:
            if group := _first_group(path):
                found.append(_shown(step, group))
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: is not a rollout file ({type(error).__name__}: {error})") from None
    return found


def _first_group(path: Path) -> list[dict[str, Any]]:
    """Return the samples of the first prompt in the file, with the columns ``_SHOWN``."""
    from gdpo_nemo.observe.sample_columns import values_of

    ids = read_columns(path, ["prompt_id"]).column("prompt_id").to_pylist()
    count = next((index for index, name in enumerate(ids) if name != ids[0]), len(ids))
    columns = read_columns(path, _SHOWN, count)
    rows = zip(*(values_of(columns.column(name)) for name in _SHOWN))
    return [dict(zip(_SHOWN, row)) for row in rows]


def _shown(step: int, group: list[dict[str, Any]]) -> Shown:
    group.sort(key=lambda r: r.get("advantage") or 0.0, reverse=True)
    ends = [group[0], group[-1]] if len(group) > 1 else group
    prompt = with_labels(group[0]["prompt"], RecordedImages().placed(group[0]["images"]))
    return step, _cut(prompt), [(_result(record), _cut(record["completion"])) for record in ends]


def _result(record: dict[str, Any]) -> str:
    scores = with_scores(record["rewards"], restored(json.loads(record["criteria"] or "{}")))
    rewards = ", ".join(f"{name} {_value(value)}" for name, value in scores.items())
    advantage = record.get("advantage")
    return rewards + ("" if advantage is None else f"; advantage {advantage:+.3f}") + f"; {record['outcome']}"


def _value(reward: float | None) -> str:
    return "n/a" if reward is None or math.isnan(reward) else f"{reward:g}"


def _cut(text: str) -> str:
    cut = f" [... {len(text) - _MOST_CHARACTERS} more characters]" if len(text) > _MOST_CHARACTERS else ""
    return text[:_MOST_CHARACTERS] + cut


_COMMAND = (sys.executable, "-W", "ignore", "-m", __name__)
"""Command that runs this module. Its arguments are the run folder and whether to plot."""


def draw(run_dir: str | Path, plot: bool) -> None:
    """Write ``report.html``, and also ``rewards.png`` if ``plot`` is set and the run has rewards.

    Raises:
        RunError: if a file of the run cannot be read, or an output file cannot be written.
    """
    history = History.of(read_metrics(run_dir))
    if plot and history.components:
        plot_rewards(run_dir, history)
    write_report(run_dir, history)


class Redraw:
    """Every ``period`` steps, start a process that redraws the report of a run. A period of 0 disables redrawing.

    A redraw is skipped if the previous redraw is still running.
    """

    def __init__(self, run_dir: str | Path, period: int, plot: bool):
        self._command = [*_COMMAND, str(Path(run_dir).absolute()), str(plot)]
        self._period = period
        self._run_dir = Path(run_dir)
        self._process: subprocess.Popen[bytes] | None = None

    def step(self, step: int) -> None:
        """Start a redraw if ``step`` is a multiple of the period.

        The run's files must already contain all steps up to ``step``.

        Raises:
            OSError: if the process cannot be started.
            RuntimeError: if the previous redraw failed.
        """
        if not self._period or step % self._period:
            return
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._process = None
            if status:
                raise RuntimeError(
                    f"the drawing process exited with status {status}; run gdpo-nemo report to see the error"
                )
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, stderr=quiet)

    def close(self) -> None:
        """Stop a redraw in progress and remove its unfinished files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            remove_partial_files(self._run_dir, self._process.pid)
            self._process = None


if __name__ == "__main__":
    os.nice(10)  # at 19, a drawing took over 5 minutes beside eight busy processes on two cores; at 10, 2 minutes
    draw(sys.argv[1], sys.argv[2] == "True")
