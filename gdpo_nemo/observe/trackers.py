"""Rows of metrics sent elsewhere: Weights & Biases (MIT), MLflow (Apache-2.0), Prometheus' client (Apache-2.0).

metrics.jsonl stays the record: a resumed run goes on in the same run of a tracker, from the step that it resumes at.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, Iterator, Mapping, Protocol, Sequence

from gdpo_nemo.config.changes import flattened
from gdpo_nemo.config.effects import value_of
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.completion_table import CompletionTable
from gdpo_nemo.observe.gpu_libraries import version
from gdpo_nemo.observe.metric_registry import description_of
from gdpo_nemo.observe.metrics import clean

_ID_FILE = "{}_run_id"


class Tracker(Protocol):
    """What takes the rows of a run. Each may raise whatever its library does: the run goes on without it."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row at ``row["step"]``, which may be an earlier one than that of the row before."""

    def completions(self, step: int, table: CompletionTable) -> None:
        """Add the samples of a step."""

    def close(self, status: str) -> None:
        """Wait until everything is sent or written; ``status``: complete, stopped or failed."""


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in clean(row).items() if key != "step" and isinstance(value, (int, float))}


def _known(run_dir: Path, tracker: str, start_step: int) -> str | None:
    """The tracker's name for this run, where an earlier start of it left one."""
    file = run_dir / _ID_FILE.format(tracker)
    return file.read_text() if start_step and file.is_file() else None


def _remember(run_dir: Path, tracker: str, name: str) -> None:
    (run_dir / _ID_FILE.format(tracker)).write_text(name)


class WandbLog:
    """A run of Weights & Biases, with the trainer's step as the axis of every metric.

    Its own count of rows cannot be that axis: it never goes back, but a validation comes with a step that has a row
    already, or under asynchronous rollouts with an earlier one, and a resumed run writes some steps again.
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
            id=section.id or _known(run_dir, "wandb", start_step),
            resume="allow",
            mode=section.mode,
            dir=run_dir,
            config=settings,
            allow_val_change=True,  # a run may be changed and resumed
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=not config.logger.system_metrics),
        )
        _remember(run_dir, "wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row; its ``step`` is a value like others."""
        self._run.log({"step": row["step"], **_numbers(row)})

    def completions(self, step: int, table: CompletionTable) -> None:
        """Add a table ``completions``, one version of it per step."""
        import wandb

        # Mixed: a reward that is whole in one sample need not be in the next.
        self._run.log({"step": step, "completions": wandb.Table(table.columns, table.rows, allow_mixed_types=True)})

    def close(self, status: str) -> None:
        """Wait until everything is sent or written."""
        self._run.finish(exit_code=int(status == "failed"))


class MlflowLog:
    """A run of MLflow, with the config as its parameters. MLflow keeps a parameter as it is: those that a resumed run
    has changed become tags."""

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        from mlflow import MlflowClient

        run_dir = Path(run_dir)
        section = config.logger.mlflow
        own = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        # Files of a server go where it says, those of our own beside it: MLflow's default is the working directory.
        self._artifacts = (run_dir / "mlflow_artifacts").absolute().as_uri() if uri == own else None
        self._client = MlflowClient(uri)
        known = section.run_id or _known(run_dir, "mlflow", start_step)
        self._id = known or self._start(config.run.name, section.experiment)
        _remember(run_dir, "mlflow", self._id)
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
        values = {_entity(key): str(value)[:6000] for key, value in settings.items()}
        changed = {f"changed.{key}": value for key, value in values.items() if before.get(key, value) != value}
        for part in _batches([Param(key, value) for key, value in values.items() if key not in before]):
            self._client.log_batch(self._id, params=part)
        for part in _batches([RunTag(_entity(key), value) for key, value in (tags | changed).items()]):
            self._client.log_batch(self._id, tags=part)

    def _watch_system(self, uri: str, resumed: bool) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(self._id, resume_logging=resumed, tracking_uri=uri)
        monitor.start()
        return monitor

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row at its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_entity(key), value, now, row["step"]) for key, value in _numbers(row).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def completions(self, step: int, table: CompletionTable) -> None:
        """Add a table of its own: MLflow appends to one by reading and writing all of it."""
        columns = dict(zip(table.columns, map(list, zip(*table.rows))))
        self._client.log_table(self._id, columns, f"completions/step_{step:06}.json")

    def close(self, status: str) -> None:
        """Mark the run as ended."""
        if self._monitor:
            self._monitor.finish()
        ends = {"complete": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, ends.get(status, "FAILED"))


def _entity(key: str) -> str:
    """``key`` without what MLflow takes in no name."""
    return re.sub(r"[^\w. :/-]", "_", key)[:250]


def _batches(entries: Sequence[Any], most: int = 100) -> Iterator[Sequence[Any]]:
    """As many parameters or tags at a time as MLflow takes."""
    for start in range(0, len(entries), most):
        yield entries[start : start + most]


class PrometheusLog:
    """An endpoint with the newest value of every metric, ``gdpo_`` before its name and ``_`` for what names may not
    have."""

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._run = config.run.name
        section = config.logger.prometheus
        self._server, self._thread = start_http_server(section.port, addr=section.host, registry=self._registry)

    def write(self, row: Mapping[str, Any]) -> None:
        """Show the row from now on."""
        from prometheus_client import Gauge

        for key, value in {"step": float(row["step"]), **_numbers(row)}.items():
            name = "gdpo_" + re.sub(r"\W", "_", key)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description_of(key) or key, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def completions(self, step: int, table: CompletionTable) -> None:
        """Prometheus takes numbers only."""

    def close(self, status: str) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_PACKAGES = {
    "logger.wandb.enabled": ("wandb",),
    "logger.mlflow.enabled": ("mlflow-skinny", "mlflow"),
    "logger.prometheus.port": ("prometheus-client",),
}
"""Packages that a tracker needs, any one of them, by the key that switches the tracker on."""


def missing_trackers(config: Config) -> list[str]:
    """Return a sentence for each tracker that the config switches on and that is not installed."""
    return [
        f"{key}: {packages[0]} is not installed, so nothing is recorded there; install it (uv sync --group trackers, "
        f"or pip install {packages[0]})"
        for key, packages in _PACKAGES.items()
        if value_of(config, key) and not any(version(package) for package in packages)
    ]


def wanted(config: Config) -> dict[str, Any]:
    """The trackers that the config switches on, by the name that an alert would give them."""
    logger = config.logger
    chosen = {
        "Weights & Biases": WandbLog if logger.wandb.enabled else None,
        "MLflow": MlflowLog if logger.mlflow.enabled else None,
        "the Prometheus endpoint": PrometheusLog if logger.prometheus.port else None,
    }
    return {name: kind for name, kind in chosen.items() if kind}
