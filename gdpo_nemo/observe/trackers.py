"""Experiment trackers: Weights & Biases (MIT); MLflow, Prometheus and TensorBoard (Apache-2.0)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gdpo_nemo.config.changes import flattened
from gdpo_nemo.config.effects import value_of
from gdpo_nemo.config.schema import Config, LoggerConfig
from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.observe.installation import installed
from gdpo_nemo.observe.metric_registry import description_of
from gdpo_nemo.observe.metrics import clean
from gdpo_nemo.observe.sample_images import with_labels
from gdpo_nemo.utils.errors import printable_lines

_ID_FILE = "{}_run_id"


class Tracker(Protocol):
    """Receiver of a run's metrics and completions.

    Methods may raise any exception of the tracker's library. If a call fails, the run continues without it.
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics at ``row["step"]``. The step may be less than the step of the previous row."""

    def completions(self, step: int, table: CompletionTable) -> None:
        """Log the samples of a step."""

    def close(self, status: str) -> None:
        """Wait until all data is sent or written. ``status`` is complete, stopped or failed."""


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in clean(row).items() if key != "step" and isinstance(value, (int, float))}


def _read_run_id(run_dir: Path, tracker: str, start_step: int) -> str | None:
    """Return the id that the tracker gave this run before it was resumed, or None for a new run."""
    file = run_dir / _ID_FILE.format(tracker)
    return file.read_text() if start_step and file.is_file() else None


def _write_run_id(run_dir: Path, tracker: str, name: str) -> None:
    (run_dir / _ID_FILE.format(tracker)).write_text(name)


class WandbLog:
    """Weights & Biases run, with the trainer's step as the x axis of all metrics.

    The built-in step of Weights & Biases cannot be the x axis, because it must not decrease. A validation is logged at
    a step that was already logged or, with asynchronous rollouts, at an earlier step. A resumed run logs some steps
    again.
    """

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        import wandb

        run_dir = Path(run_dir)
        section = config.logger.wandb
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=config.run.name,
            tags=list(section.tags),
            id=section.id or _read_run_id(run_dir, "wandb", start_step),
            resume="allow",
            mode=section.mode,
            dir=run_dir,
            config=settings,
            allow_val_change=True,  # The config may change when a run is resumed.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=not config.logger.system_metrics),
        )
        _write_run_id(run_dir, "wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the row, with ``step`` as an ordinary value."""
        self._run.log({"step": row["step"], **_numbers(row)})

    def completions(self, step: int, table: CompletionTable) -> None:
        """Log a table named ``completions``, with one version per step."""
        import wandb

        # Mixed types are allowed, because a reward may be an integer in one sample and a float in another.
        self._run.log({"step": step, "completions": wandb.Table(table.columns, table.rows, allow_mixed_types=True)})

    def close(self, status: str) -> None:
        """Wait until all data is sent or written."""
        self._run.finish(exit_code=int(status == "failed"))


class MlflowLog:
    """MLflow run, with the config as its parameters.

    Parameters cannot be changed in MLflow. Settings that change when the run is resumed are logged as tags.
    """

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        from mlflow import MlflowClient

        run_dir = Path(run_dir)
        section = config.logger.mlflow
        default_uri = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri
        # A server chooses the location of artifacts. Without a server, artifacts are stored in the run folder.
        self._artifacts = (run_dir / "mlflow_artifacts").absolute().as_uri() if uri == default_uri else None
        self._client = MlflowClient(uri)
        known = section.run_id or _read_run_id(run_dir, "mlflow", start_step)
        self._id = known or self._start(config.run.name, section.experiment)
        _write_run_id(run_dir, "mlflow", self._id)
        if known:
            self._client.update_run(self._id, status="RUNNING")
        self._describe(flattened(settings), {str(name): str(text) for name, text in section.tags.items()})
        self._monitor = self._watch_system(uri, bool(known)) if config.logger.system_metrics else None

    def _start(self, name: str, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment, self._artifacts)
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        return run_id

    def _describe(self, settings: Mapping[str, Any], tags: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        before = self._client.get_run(self._id).data.params
        values = {_valid_name(key): str(value)[:6000] for key, value in settings.items()}
        changed = {f"changed.{key}": value for key, value in values.items() if before.get(key, value) != value}
        for part in _batches([Param(key, value) for key, value in values.items() if key not in before]):
            self._client.log_batch(self._id, params=part)
        for part in _batches([RunTag(_valid_name(key), value) for key, value in (tags | changed).items()]):
            self._client.log_batch(self._id, tags=part)

    def _watch_system(self, uri: str, resumed: bool) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(self._id, resume_logging=resumed, tracking_uri=uri)
        monitor.start()
        return monitor

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the row at its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_valid_name(key), value, now, row["step"]) for key, value in _numbers(row).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def completions(self, step: int, table: CompletionTable) -> None:
        """Log a separate table for each step, because MLflow rewrites a whole table to append to it."""
        columns = dict(zip(table.columns, map(list, zip(*table.rows))))
        self._client.log_table(self._id, columns, f"completions/step_{step:06}.json")

    def close(self, status: str) -> None:
        """Set the final status of the run."""
        if self._monitor:
            self._monitor.finish()
        ends = {"complete": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, ends.get(status, "FAILED"))


def _valid_name(key: str) -> str:
    """Return ``key`` without the characters that MLflow does not allow in names."""
    return re.sub(r"[^\w. :/-]", "_", key)[:250]


def _batches(entries: Sequence[Any], most: int = 100) -> Iterator[Sequence[Any]]:
    """Split parameters or tags into batches of at most ``most``, the limit of MLflow."""
    for start in range(0, len(entries), most):
        yield entries[start : start + most]


class PrometheusLog:
    """HTTP endpoint for Prometheus with the latest value of every metric.

    Names begin with ``gdpo_``. Characters that are not allowed in names are replaced by ``_``.
    """

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._run = config.run.name
        section = config.logger.prometheus
        self._server, self._thread = start_http_server(section.port, addr=section.host, registry=self._registry)

    def write(self, row: Mapping[str, Any]) -> None:
        """Set the exposed values to the values of the row."""
        from prometheus_client import Gauge

        for key, value in {"step": float(row["step"]), **_numbers(row)}.items():
            name = "gdpo_" + re.sub(r"\W", "_", key)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description_of(key) or key, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def completions(self, step: int, table: CompletionTable) -> None:
        """Do nothing, because Prometheus accepts only numbers."""

    def close(self, status: str) -> None:
        """Stop the HTTP server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_PACKAGES = {
    "logger.wandb.enabled": ("wandb",),
    "logger.mlflow.enabled": ("mlflow-skinny", "mlflow"),
    "logger.prometheus.port": ("prometheus-client",),
}
"""Packages of each tracker, by the config key that enables the tracker. One of its packages is sufficient."""


def missing_trackers(config: Config) -> list[str]:
    """Return one warning for each enabled tracker that is not installed."""
    warnings = []
    for key, packages in _PACKAGES.items():
        if value_of(config, key) and not installed(packages):
            warnings.append(
                f"{key}: {packages[0]} is not installed, so metrics are not sent to it; install it (uv sync --group "
                f"trackers, or pip install {packages[0]})"
            )
    return warnings


def enabled_trackers(logger: LoggerConfig) -> dict[str, Any]:
    """Return the classes of the enabled trackers, by the name that alerts use."""
    kinds: dict[str, Any] = {}
    if logger.wandb.enabled:
        kinds["Weights & Biases"] = WandbLog
    if logger.mlflow.enabled:
        kinds["MLflow"] = MlflowLog
    if logger.prometheus.port:
        kinds["the Prometheus endpoint"] = PrometheusLog
    return kinds


LONGEST = 4000
"""Maximum number of characters of a text in a table. Full texts are in the sample files."""


@dataclass(frozen=True)
class CompletionTable:
    """Table with named columns. Each row has one value per column. Missing values are None."""

    columns: list[str]
    rows: list[list[Any]]


def completion_table(groups: Sequence[Group], advantages: np.ndarray | None, count: int) -> CompletionTable:
    """Return a table of the first ``count`` trajectories. Samples of a prompt are adjacent.

    Args:
        advantages: advantage of each trajectory, in the order of the groups. None if unknown. Shape: [trajectories].
    """
    samples = [trajectory for group in groups for trajectory in group.trajectories][:count]
    names = list(dict.fromkeys(name for trajectory in samples for name in trajectory.component_rewards))
    rows = []
    for index, trajectory in enumerate(samples):
        advantage = None if advantages is None else float(advantages[index])
        rewards = [_number(trajectory.component_rewards.get(name)) for name in names]
        rows.append([*_texts(trajectory), trajectory.num_policy_tokens, _number(advantage), *rewards])
    fixed = ["prompt_id", "environment", "prompt", "completion", "outcome", "tokens", "advantage"]
    return CompletionTable([*fixed, *(f"reward/{name}" for name in names)], rows)


def markdown(table: CompletionTable) -> str:
    """Convert a table to Markdown, with all texts escaped."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _texts(trajectory: Trajectory) -> list[str]:
    prompt = trajectory.prompt
    text = with_labels(prompt.text, prompt.images)
    texts = (prompt.id, prompt.environment, text, trajectory.text, str(trajectory.outcome))
    return list(map(_short, texts))


def _short(text: str) -> str:
    text = printable_lines(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"


def _number(value: float | None) -> float | None:
    """Replace non-finite values by None, because trackers store tables as JSON."""
    return None if value is None or not np.isfinite(value) else float(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
