"""Self-contained report of a run (``report.html``, ``rewards.png``).

A separate process redraws the report during the run.
"""

from __future__ import annotations

import base64
import html
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterable, Sequence

from gdpo_nemo.observe.console import facts, number, reward_table
from gdpo_nemo.observe.metric_registry import about_of, title_of
from gdpo_nemo.observe.metrics import History, read_metrics
from gdpo_nemo.observe.plot import diagnostics_png, effects_png, measured_diagnostics, rewards_png
from gdpo_nemo.observe.run_files import read_alerts, read_run_config, status_if_whole
from gdpo_nemo.observe.samples import read_columns, rollout_files
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import real_path, remove_partial_files, write_whole

FILE = "report.html"
_MOST_CHARACTERS = 4000
_SHOWN = ("prompt", "completion", "rewards", "advantage", "outcome")
"""Columns of the sample files that the report shows."""


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    Raises:
        RunError: if the folder has no metrics, a file in it is damaged, or the report cannot be written.
    """
    run_dir = Path(run_dir)
    history = History.of(read_metrics(run_dir))
    if not history.training and not history.validation:
        raise RunError(f"{run_dir} has no metrics to report")
    path = run_dir / FILE
    page = _page(run_dir, history)
    try:
        write_whole(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _page(run_dir: Path, history: History) -> str:
    name = html.escape(real_path(run_dir).name)
    curves = [image(rewards_png(history), "reward curves")] if history.components else []
    rewards = [*curves, table(*reward_table(history))] if history.components else []
    body = [
        f"<h1>{name}</h1><p class=dim>{html.escape(' · '.join(_head(run_dir, history)))}</p>",
        *section("Rewards", rewards),
        *section("Weights", _weights(history)),
        *section("Facts", [f"<pre>{html.escape(chr(10).join(facts(history)))}</pre>"] if facts(history) else []),
        *section("Gradients by component", _effects(history)),
        *section("Alerts and notes", _alerts(run_dir)),
        *section("Diagnostics", _diagnostics(history)),
        *section("Samples", _samples(run_dir)),
        *section("Configuration", _config(run_dir)),
    ]
    return document(real_path(run_dir).name, body)


def _head(run_dir: Path, history: History) -> list[str]:
    """Return status, steps, model, algorithm and rewards of a run. A folder of metrics without a config has only the
    first two."""
    steps = history.training[-1]["step"] if history.training else 0
    head = [str(status_if_whole(run_dir).get("outcome") or "not finished"), f"{steps} steps"]
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


def _effects(history: History) -> list[str]:
    """Return the plot of the first-order changes of the expected rewards, if they were measured."""
    png = effects_png(history)
    about = "Estimated change of each mean reward by the gradient of each reward component, summed over the steps."
    return [] if png is None else [image(png, "gradients by component"), f"<p class=dim>{about}</p>"]


def _diagnostics(history: History) -> list[str]:
    """Return the plots of the diagnostics and their descriptions."""
    png = diagnostics_png(history)
    if png is None:
        return []
    meanings = [
        f"<dt>{html.escape(title_of(key))}</dt><dd>{html.escape(about_of(key))}</dd>"
        for key in measured_diagnostics(history)
    ]
    return [image(png, "diagnostics"), f"<dl class=dim>{''.join(meanings)}</dl>"]


def _weights(history: History) -> list[str]:
    """Return a table of the weights that change during the run, with the reason for the weight of the last step."""
    rows = [
        (name, number(history.curve(f"reward/{name}/weight")[1][0]), number(weight), reason)
        for name, weight, reason in history.weights()
    ]
    return [table(("reward", "first weight", "last weight", "reason"), rows)] if rows else []


def _alerts(run_dir: Path) -> list[str]:
    return [
        f"<p class={'dim' if a.get('level') == 'note' else 'alert'}>step {int(a['step'])}: "
        f"{html.escape(str(a['text']))}</p>"
        for a in read_alerts(run_dir)
    ]


def _samples(run_dir: Path) -> list[str]:
    """Return the best and worst sample of one group each from the first, middle and last recorded step."""
    files = list(rollout_files(run_dir))
    chosen = sorted({files[i] for i in (0, len(files) // 2, len(files) - 1)}) if files else []
    return [part for step, path in chosen for part in _file_samples(step, path)]


def _file_samples(step: int, path: Path) -> list[str]:
    try:
        return _step_samples(step, _first_group(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: is not a rollout file ({type(error).__name__}: {error})") from None


def _first_group(path: Path) -> list[dict[str, Any]]:
    """Return the samples of the first prompt in the file, with the columns ``_SHOWN``."""
    from gdpo_nemo.observe.sample_columns import values_of

    ids = read_columns(path, ["prompt_id"]).column("prompt_id").to_pylist()
    count = next((index for index, name in enumerate(ids) if name != ids[0]), len(ids))
    table = read_columns(path, _SHOWN, count)
    return [dict(zip(_SHOWN, row)) for row in zip(*(values_of(table.column(name)) for name in _SHOWN))]


def _step_samples(step: int, group: list[dict[str, Any]]) -> list[str]:
    if not group:
        return []
    group.sort(key=lambda r: r.get("advantage") or 0.0, reverse=True)
    prompt = f"<pre>{_text(group[0]['prompt'])}</pre>"
    shown = [group[0], group[-1]] if len(group) > 1 else group
    return [f"<details><summary>Step {step}</summary>{prompt}{''.join(map(_sample, shown))}</details>"]


def _sample(record: dict[str, Any]) -> str:
    rewards = ", ".join(f"{name} {_value(value)}" for name, value in record["rewards"].items())
    advantage = record.get("advantage")
    line = rewards + ("" if advantage is None else f"; advantage {advantage:+.3f}") + f"; {record['outcome']}"
    return f"<div class=dim>{html.escape(line)}</div><pre>{_text(record['completion'])}</pre>"


def _value(reward: float | None) -> str:
    return "n/a" if reward is None or math.isnan(reward) else f"{reward:g}"


def _text(text: str) -> str:
    cut = f" [... {len(text) - _MOST_CHARACTERS} more characters]" if len(text) > _MOST_CHARACTERS else ""
    return html.escape(text[:_MOST_CHARACTERS] + cut)


def _config(run_dir: Path) -> list[str]:
    path = run_dir / "config.yaml"
    if not path.is_file():
        return []
    return [
        f"<details><summary>config.yaml</summary><pre>{
            html.escape(path.read_text(encoding='utf-8', errors='replace'))
        }</pre></details>"
    ]


STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --dim: #5f6873; --line: #e6e9ed; --box: #f6f7f9; --alert: #a8231c }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1, h2, .dim, .alert { overflow-wrap: anywhere } h1 { margin-bottom: 0 }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line) } img { max-width: 100%; height: auto }
.table { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .25rem .9rem; text-align: right; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left; padding-left: 0 } .alert { color: var(--alert) }
pre { background: var(--box); padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 }
dt { float: left; clear: left; min-width: 13rem } dd { margin-left: 13.5rem }
summary { cursor: pointer } .dim { color: var(--dim) } details { margin: .6rem 0 }
@media (max-width: 600px) {
  dt { float: none } dd { margin-left: 1rem } td, th { padding: .25rem .4rem; font-size: 13px }
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #d7dce2; --dim: #98a2ad; --line: #363c45; --box: #23272e; --alert: #ff8a80 }
  body { background: #191c21 }
  img { filter: invert(.9) hue-rotate(180deg) } /* plots are drawn on white */
}
"""


def document(title: str, body: Iterable[str]) -> str:
    """Return a complete HTML page. The title is escaped, but ``body`` must be HTML."""
    screen = '<meta name=viewport content="width=device-width, initial-scale=1">'
    head = f"<meta charset=utf-8>{screen}<title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"


def section(title: str, parts: Sequence[str]) -> list[str]:
    """Return a heading followed by ``parts``. Return an empty list if ``parts`` is empty."""
    return [f"<h2>{title}</h2>", *parts] if parts else []


def image(png: bytes, what: str) -> str:
    """Return an HTML image with the PNG embedded. ``what`` is the image's alternative text."""
    return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table. All cells are escaped."""
    body = "".join(_row("td", row) for row in rows)
    return f"<div class=table><table>{_row('th', heads)}{body}</table></div>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


_COMMAND = (sys.executable, "-W", "ignore", "-m", __name__)
"""Command that runs this module. Its arguments are the run folder and whether to plot."""


def draw(run_dir: str | Path, plot: bool) -> None:
    """Write ``report.html``, and also ``rewards.png`` if ``plot`` is set and the run has rewards.

    Raises:
        RunError: if a file of the run cannot be read, or an output file cannot be written.
    """
    from gdpo_nemo.observe.metrics import History, read_metrics
    from gdpo_nemo.observe.plot import plot_rewards

    if plot and History.of(read_metrics(run_dir)).components:
        plot_rewards(run_dir)
    write_report(run_dir)


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
