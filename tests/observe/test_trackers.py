"""What goes to a tracker is what stands in metrics.jsonl, also after a resume; a tracker that fails ends no run."""

from __future__ import annotations

import json
import shutil
import socket
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from demo_run import demo_groups
from image_samples import image_group

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe import installation, trackers
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metric_registry import ALIASES, alias_values, find_metric
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.trackers import MlflowLog, PrometheusLog, WandbLog

ROWS = [{"step": step, "loss": step / 10, "reward/format/mean": 0.5 + step / 100} for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def empty_mlflow(tmp_path_factory) -> Path:
    """A database of MLflow. Its tables are made by dozens of migrations, one second of CPU time."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def database(tmp_path, empty_mlflow) -> None:
    """The run's database is there."""
    shutil.copy(empty_mlflow, tmp_path)


@pytest.fixture
def config():
    config = Config()
    config.run.name = "tracked"
    config.logger.console = "plain"
    config.logger.plot = False
    config.logger.tensorboard.enabled = False
    config.gdpo.rewards = {"format": 1.0}
    return config


def write(config, run_dir, rows, start_step=0, validations=(), status="complete"):
    """A run of ``rows``; a validation is recorded after the row that it is listed with, under a step of its own."""
    log = RunLog(config, run_dir, start_step)
    for row in rows:
        log.step(row, demo_groups(row["step"]), SampleValues(np.arange(6.0) - 2.5))
        for after, step in validations:
            if after == row["step"]:
                log.validation({"step": step, "validation/format": step / 100})
    log.close(status)


def mlflow_run(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gdpo_nemo").experiment_id])
    return client, run


@pytest.mark.slow
def test_mlflow_has_every_value_at_its_step_and_continues_after_a_resume(config, tmp_path):
    config.logger.mlflow.enabled = True
    write(config, tmp_path, ROWS[:2], status="stopped")
    assert mlflow_run(tmp_path)[1].info.status == "KILLED"
    write(config, tmp_path, ROWS[2:], start_step=2)
    client, run = mlflow_run(tmp_path)
    assert run.info.run_name == "tracked" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/format/mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.51), (2, 0.52), (3, 0.53)]


def records(file):
    """Return the protocol messages in the .wandb file of a finished run.

    W&B's own process may write the last messages after ``finish`` has returned, so wait for the message of the exit.
    """
    deadline = time.monotonic() + 300
    while True:
        found = list(_records_so_far(file.read_bytes()))
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def _records_so_far(data):
    """Yield the complete messages: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB)."""
    from wandb.proto.wandb_internal_pb2 import Record

    place = 7
    parts = b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        if place + 7 + length > len(data):  # an incomplete message
            return
        kind = data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(parts)
            parts = b""


def wandb_history(file):
    """The rows of a .wandb file: values by key, tables as what names their file."""
    rows = [record.history.item for record in records(file) if record.HasField("history")]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def without_its_own(row):
    """What was logged of a row; the rest is W&B's: times, and its count of rows."""
    return {key: value for key, value in row.items() if not key.startswith("_")}


@pytest.fixture
def offline(config):
    config.logger.wandb.enabled = True
    config.logger.wandb.mode = "offline"
    return config


@pytest.mark.slow
def test_wandb_writes_an_offline_run_with_every_row(offline, tmp_path):
    write(offline, tmp_path, ROWS)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert [without_its_own(row) for row in wandb_history(file)] == ROWS


@pytest.mark.slow
def test_wandb_uses_the_trainers_step_as_axis_for_all_validation_periods(offline, tmp_path):
    curves = []
    axes = []
    for name, validations in (("often", [(1, 1), (2, 2), (3, 3)]), ("late", [(3, 1)]), ("never", [])):
        write(offline, tmp_path / name, ROWS, validations=validations)
        (file,) = (tmp_path / name).glob("wandb/offline-run-*/*.wandb")
        rows = wandb_history(file)
        curves.append([(row["step"], row["loss"]) for row in rows if "loss" in row])
        held_out = [(row["step"], row["validation/format"]) for row in rows if "validation/format" in row]
        assert held_out == [(step, step / 100) for _, step in validations]
        metrics = [record.metric for record in records(file) if record.HasField("metric")]
        axes.append({metric.step_metric for metric in metrics if metric.glob_name == "*" or metric.name == "loss"})
    assert curves[0] == curves[1] == curves[2] == [(row["step"], row["loss"]) for row in ROWS]
    assert axes == [{"step"}] * 3


@pytest.mark.slow
def test_mlflow_has_a_validation_at_its_own_step_when_it_ends_later(config, tmp_path, database):
    config.logger.mlflow.enabled = True
    write(config, tmp_path, ROWS, validations=[(3, 1)])
    client, run = mlflow_run(tmp_path)
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "validation/format")] == [(1, 0.01)]


@pytest.mark.slow
def test_wandb_gets_config_tags_and_entity_and_continues_under_the_id(offline, tmp_path, monkeypatch):
    monkeypatch.setenv("GDPO_SECRET", "hunter2-hunter2")
    config = load_config(None, ["env.judge.key=${oc.env:GDPO_SECRET}", "gdpo.rewards={format: 2.0}"])
    config.logger = offline.logger
    config.logger.wandb.tags = ["ablation", "seed 3"]
    config.logger.wandb.entity = "a-team"
    write(config, tmp_path, ROWS[:2])
    write(config, tmp_path, ROWS[2:], start_step=2)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    runs = [[r.run for r in records(file) if r.HasField("run")][0] for file in files]
    assert len(runs) == 2 and runs[0].run_id == runs[1].run_id == (tmp_path / "wandb_run_id").read_text()
    assert list(runs[0].tags) == ["ablation", "seed 3"] and runs[0].entity == "a-team"
    settings = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert settings["gdpo"]["rewards"] == {"format": 2.0}
    assert settings["env"]["judge"]["key"] == "${oc.env:GDPO_SECRET}"
    assert not any(b"hunter2" in file.read_bytes() for file in files)


@pytest.mark.slow
def test_mlflow_is_given_the_config_as_parameters_and_tags(config, tmp_path, monkeypatch, database):
    monkeypatch.setenv("GDPO_SECRET", "hunter2-hunter2")
    logger = config.logger
    config = load_config(
        None, ["env.judge.key=${oc.env:GDPO_SECRET}", "gdpo.rewards={'a\"b': 2.0}", "run.name=tracked"]
    )
    config.logger = logger
    config.logger.mlflow.enabled = True
    config.logger.mlflow.tags = {"purpose": "ablation"}
    write(config, tmp_path, ROWS[:2])
    config.gdpo.epsilon = 1e-4
    write(config, tmp_path, ROWS[2:], start_step=2)
    _, run = mlflow_run(tmp_path)
    assert run.data.params["gdpo.rewards.a_b"] == "2.0" and run.data.params["gdpo.epsilon"] == "1e-06"
    assert run.data.params["env.judge.key"] == "${oc.env:GDPO_SECRET}"
    assert run.data.tags["purpose"] == "ablation" and run.data.tags["changed.gdpo.epsilon"] == "0.0001"
    assert b"hunter2" not in (tmp_path / "mlflow.db").read_bytes()


@pytest.mark.slow
def test_tracker_continues_the_run_that_the_config_names(config, tmp_path):
    config.logger.mlflow.enabled = True
    config.logger.mlflow.tracking_uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    write(config, tmp_path / "first", ROWS[:2])
    config.logger.mlflow.run_id = mlflow_run(tmp_path)[1].info.run_id
    write(config, tmp_path / "second", ROWS[2:])
    client, run = mlflow_run(tmp_path)
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [1, 2, 3]


@pytest.mark.slow
def test_trackers_get_completions_with_rewards_and_advantages(offline, tmp_path, database):
    config = offline
    config.logger.mlflow.enabled = True
    config.logger.tensorboard.enabled = True
    config.logger.num_completions = 4
    config.logger.completions_period = 3
    write(config, tmp_path, ROWS)
    assert not (tmp_path / "alerts.jsonl").exists()
    client, run = mlflow_run(tmp_path)
    names = [entry.path for entry in client.list_artifacts(run.info.run_id, "completions")]
    assert names == ["completions/step_000001.json", "completions/step_000003.json"]
    kept = json.loads((next(tmp_path.glob("mlflow_artifacts/**/step_000003.json"))).read_text())
    sent = [json.loads(file.read_text()) for file in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert len(sent) == 2 and kept in [{"columns": table["columns"], "data": table["data"]} for table in sent]
    first, second = (dict(zip(kept["columns"], row)) for row in kept["data"][:2])
    assert len(kept["data"]) == 4 and second["completion"] == "<t></t><a>12379</a>"
    assert second["prompt"] == "39172=<b>" and second["advantage"] == -1.5 and second["reward/correctness"] == 1.0
    assert first["reward/length"] is None and "\ud800" not in first["completion"]
    (shown,) = [text for step, text in tensorboard_texts(tmp_path, "completions") if step == 3]
    assert "| p3-0 | digit_sort | 39172=<b> |" in shown and len(shown.splitlines()) == 6


def test_table_of_completions_has_labels_in_place_of_images():
    ((_, _, prompt, *_), _) = trackers.completion_table([image_group()], None, 2).rows
    assert prompt.startswith("A [image 64×48 ") and "image_pad" not in prompt


@pytest.mark.slow
def test_no_text_goes_to_a_tracker_unasked(offline, tmp_path, database):
    offline.logger.mlflow.enabled = True
    offline.logger.tensorboard.enabled = True
    write(offline, tmp_path, ROWS)
    held = [file for file in tmp_path.rglob("*") if file.is_file() and "rollouts" not in file.parts]
    assert not [file for file in held if file.name != "report.html" and b"<a>12379" in file.read_bytes()]


def tensorboard_texts(run_dir, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]


def test_tensorboard_has_the_config_as_text_and_changed_keys_as_hparams(config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import (
        parse_session_end_info_plugin_data,
        parse_session_start_info_plugin_data,
    )

    config.logger.tensorboard.enabled = True
    config.gdpo.num_prompts_per_step = 3
    write(config, tmp_path, ROWS)
    ((step, text),) = tensorboard_texts(tmp_path, "config")
    assert step == 0 and "num_prompts_per_step: 3" in text
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    content = events.PluginTagToContent("hparams")
    started = parse_session_start_info_plugin_data(content["_hparams_/session_start_info"]).hparams
    assert started["gdpo.num_prompts_per_step"].number_value == 3 and started["run.name"].string_value == "tracked"
    assert "gdpo.epsilon" not in started
    ended = parse_session_end_info_plugin_data(content["_hparams_/session_end_info"])
    assert ended.status == Status.STATUS_SUCCESS


@pytest.mark.slow
def test_aliases_are_written_beside_our_names_with_the_same_values(config, tmp_path, database):
    config.logger.mlflow.enabled = True
    config.logger.aliases = ["nemo_rl", "trl"]
    write(config, tmp_path, ROWS, validations=[(3, 3)])
    _, run = mlflow_run(tmp_path)
    values = run.data.metrics
    assert values["train/rewards/format/mean"] == values["reward/format/mean"] == 0.53
    assert values["train/loss"] == values["loss"] == 0.3
    assert values["eval/rewards/format/mean"] == 0.03
    assert "train/loss" not in (tmp_path / "metrics.jsonl").read_text()


def test_alias_names_exactly_one_existing_metric():
    for program, table in ALIASES.items():
        assert len(set(table.values())) == len(table), program
        assert all(find_metric(key) for key in table)
        assert alias_values({"validation/env_failed": 1.0, "time/step": 2.0}, [program])
        assert "eval/rewards/env_failed/mean" not in alias_values({"validation/env_failed": 1.0}, [program])
    assert alias_values({"reward/total/mean": 0.5}, ["trl"]) == {"train/reward": 0.5}


@pytest.mark.slow
def test_system_metrics_are_recorded_where_the_config_asks_for_them(config, tmp_path, monkeypatch, database):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    config.logger.mlflow.enabled = True
    config.logger.system_metrics = True
    log = RunLog(config, tmp_path)
    deadline = time.monotonic() + 300
    while "system/cpu_utilization_percentage" not in mlflow_run(tmp_path)[1].data.metrics:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    log.close("complete")
    assert not (tmp_path / "alerts.jsonl").exists()


def test_prometheus_shows_the_newest_row_until_the_run_ends(config, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.logger.prometheus.port = port
    log = RunLog(config, tmp_path)
    for row in ROWS:
        log.step(row)
    shown = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120).read().decode()
    assert 'gdpo_step{run="tracked"} 3.0' in shown and 'gdpo_reward_format_mean{run="tracked"} 0.53' in shown
    log.step({"step": 4, "reward_function/mine": 1.0})
    shown = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120).read().decode()
    assert "# HELP gdpo_reward_function_mine reward_function/mine\n" in shown
    assert "# HELP gdpo_reward_format_mean Mean of component format over the samples of the batch that have" in shown
    log.close("complete")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120)


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=120).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("host", [None, "127.0.0.2"])
def test_prometheus_listens_on_loopback_by_default(config, tmp_path, host):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.logger.prometheus.port = port
    if host:
        config.logger.prometheus.host = host
    log = RunLog(config, tmp_path)
    assert [address for address in ("127.0.0.1", "127.0.0.2") if listens(address, port)] == [host or "127.0.0.1"]
    log.close("complete")


@pytest.mark.parametrize("installed", [True, False])
def test_the_dry_run_names_trackers_that_are_not_installed(installed, capsys, monkeypatch):
    if not installed:
        monkeypatch.setattr(installation, "version", lambda package: None)
    chosen = ["logger.wandb.enabled=true", "logger.mlflow.enabled=true", "logger.prometheus.port=9100"]
    assert cli.main(["train", "--dry-run", "--config", "configs/gdpo_tiny_cpu.yaml", *chosen]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "not installed" in line]
    named = [note.split()[2] for note in notes]
    expected = ["logger.wandb.enabled:", "logger.mlflow.enabled:", "logger.prometheus.port:"]
    assert named == ([] if installed else expected)
    assert all("uv sync --group trackers" in note for note in notes)


def test_a_tracker_that_is_switched_off_need_not_be_installed(config, monkeypatch):
    monkeypatch.setattr(installation, "version", lambda package: None)
    assert trackers.missing_trackers(config) == []


@pytest.mark.slow
@pytest.mark.parametrize("tracker", [WandbLog, MlflowLog, PrometheusLog])
def test_a_tracker_that_cannot_start_is_an_alert_and_no_end(config, tmp_path, tracker, capsys):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if tracker is PrometheusLog:
            config.logger.prometheus.port = port
        elif tracker is MlflowLog:
            config.logger.mlflow.enabled = True
            config.logger.mlflow.tracking_uri = "nonsense://nowhere"
        else:
            config.logger.wandb.enabled = True
            config.logger.wandb.mode = "offline"
            (tmp_path / "wandb").write_text("in the way")
        write(config, tmp_path, ROWS)
    (alert,) = [json.loads(line)["text"] for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert "failed and is incomplete" in alert
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
