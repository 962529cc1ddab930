"""``report.html``: a run on one page that needs nothing else, to be mailed or archived.

Everything a model wrote is escaped; the page holds no script.
"""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.writing import write_whole
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.alerts import read_alerts
from gdpo_nemo.observe.history import WINDOW, History
from gdpo_nemo.observe.html_parts import document, image, section, table
from gdpo_nemo.observe.metric_registry import about_of, title_of
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.plot import diagnostics_png, measured_diagnostics, rewards_png
from gdpo_nemo.observe.rollouts import read_columns, rollout_files
from gdpo_nemo.observe.summary import facts, reward_rows

FILE = "report.html"
_MOST_CHARACTERS = 4000
_SHOWN = ("prompt", "completion", "rewards", "advantage", "outcome")
"""Columns of the samples that the page needs."""


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    Raises:
        RunError: the folder holds no metrics, or a file in it is damaged or cannot be written.
    """
    run_dir = Path(run_dir)
    history = History.of(read_metrics(run_dir))
    if not history.training and not history.validation:
        raise RunError(f"{run_dir} holds no metrics to report on")
    path = run_dir / FILE
    page = _page(run_dir, history)
    try:
        write_whole(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _page(run_dir: Path, history: History) -> str:
    name = html.escape(real_path(run_dir).name)
    steps = history.training[-1]["step"] if history.training else 0
    rewards = [image(rewards_png(history), "reward curves"), _reward_table(history)] if history.components else []
    body = [
        f"<h1>{name}</h1><p class=dim>{steps} steps</p>",
        *section("Rewards", rewards),
        *section("Facts", [f"<pre>{html.escape(chr(10).join(facts(history)))}</pre>"] if facts(history) else []),
        *section("Alerts and notes", _alerts(run_dir)),
        *section("Diagnostics", _diagnostics(history)),
        *section("Samples", _samples(run_dir)),
        *section("Configuration", _config(run_dir)),
    ]
    return document(real_path(run_dir).name, body)


def _diagnostics(history: History) -> list[str]:
    """The panels, and what each of them measures."""
    png = diagnostics_png(history)
    if png is None:
        return []
    meanings = [
        f"<dt>{html.escape(title_of(key))}</dt><dd>{html.escape(about_of(key))}</dd>"
        for key in measured_diagnostics(history)
    ]
    return [image(png, "diagnostics"), f"<dl class=dim>{''.join(meanings)}</dl>"]


def _reward_table(history: History) -> str:
    heads = ("reward", f"first {WINDOW} steps", f"last {WINDOW} steps", "change", "validation start", "validation end")
    return table(heads, reward_rows(history))


def _alerts(run_dir: Path) -> list[str]:
    return [
        f"<p class={'dim' if a.get('level') == 'note' else 'alert'}>step {int(a['step'])}: "
        f"{html.escape(str(a['text']))}</p>"
        for a in read_alerts(run_dir)
    ]


def _samples(run_dir: Path) -> list[str]:
    """One group each of the first, the middle and the last step that was recorded: its best and its worst sample."""
    files = list(rollout_files(run_dir))
    chosen = sorted({files[i] for i in (0, len(files) // 2, len(files) - 1)}) if files else []
    return [part for step, path in chosen for part in _file_samples(step, path)]


def _file_samples(step: int, path: Path) -> list[str]:
    try:
        return _step_samples(step, _first_group(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: is not a file of rollouts ({type(error).__name__}: {error})") from None


def _first_group(path: Path) -> list[dict[str, Any]]:
    """The samples of the file's first prompt, without their tokens."""
    from gdpo_nemo.observe.sample_columns import values_of

    ids = read_columns(path, ["prompt_id"]).column("prompt_id").to_pylist()
    count = next((place for place, name in enumerate(ids) if name != ids[0]), len(ids))
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
