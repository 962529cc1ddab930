"""Rows of metrics sent elsewhere: Weights & Biases (MIT), MLflow (Apache-2.0), Prometheus' client (Apache-2.0).

metrics.jsonl stays the record: a resumed run goes on in the same run of a tracker, from the step that it resumes at.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metric_registry import description_of
from gdpo_nemo.observe.metrics import clean

_ID_FILE = "{}_run_id"


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in clean(row).items() if key != "step" and isinstance(value, (int, float))}


def _known(run_dir: Path, tracker: str, start_step: int) -> str | None:
    """The tracker's name for this run, where an earlier start of it left one."""
    file = run_dir / _ID_FILE.format(tracker)
    return file.read_text() if start_step and file.is_file() else None


def _remember(run_dir: Path, tracker: str, name: str) -> None:
    (run_dir / _ID_FILE.format(tracker)).write_text(name)


class WandbLog:
    """A run of Weights & Biases."""

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        import wandb

        run_dir = Path(run_dir)
        section = config.logger.wandb
        self._run = wandb.init(
            project=section.project,
            name=config.run.name,
            id=_known(run_dir, "wandb", start_step),
            resume="allow",
            mode=section.mode,
            dir=run_dir,
            config=settings,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        _remember(run_dir, "wandb", self._run.id)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row at its step. A validation comes with the step before it, so rows are not closed by their step."""
        self._run.log({"step": row["step"], **_numbers(row)})

    def close(self) -> None:
        """Wait until everything is sent or written."""
        self._run.finish()


class MlflowLog:
    """A run of MLflow."""

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        from mlflow import MlflowClient

        run_dir = Path(run_dir)
        section = config.logger.mlflow
        own = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        self._client = MlflowClient(section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own)
        self._id = _known(run_dir, "mlflow", start_step) or self._start(config, section.experiment)
        _remember(run_dir, "mlflow", self._id)
        for key, value in settings.items():
            self._client.set_tag(self._id, key, str(value)[:4000])

    def _start(self, config: Config, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(number, run_name=config.run.name).info.run_id
        return run_id

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row at its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, row["step"]) for key, value in _numbers(row).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Marks the run as ended."""
        self._client.set_terminated(self._id)


class PrometheusLog:
    """An endpoint with the newest value of every metric, ``gdpo_`` before its name and ``_`` for what names may not
    have."""

    def __init__(self, config: Config, run_dir: str | Path, start_step: int, settings: dict[str, Any]):
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._run = config.run.name
        self._server, self._thread = start_http_server(config.logger.prometheus.port, registry=self._registry)

    def write(self, row: Mapping[str, Any]) -> None:
        """Show the row from now on."""
        from prometheus_client import Gauge

        for key, value in {"step": float(row["step"]), **_numbers(row)}.items():
            name = "gdpo_" + re.sub(r"\W", "_", key)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description_of(key) or key, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def wanted(config: Config) -> dict[str, type]:
    """The trackers that the config switches on, by the name that an alert would give them."""
    logger = config.logger
    chosen = {
        "Weights & Biases": WandbLog if logger.wandb.enabled else None,
        "MLflow": MlflowLog if logger.mlflow.enabled else None,
        "the Prometheus endpoint": PrometheusLog if logger.prometheus.port else None,
    }
    return {name: kind for name, kind in chosen.items() if kind}
