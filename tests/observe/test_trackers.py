"""What goes to a tracker is what stands in metrics.jsonl, also after a resume; a tracker that fails ends no run."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest

from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.trackers import MlflowLog, PrometheusLog, WandbLog

ROWS = [{"step": step, "loss": step / 10, "reward/format/mean": 0.5 + step / 100} for step in (1, 2, 3)]


@pytest.fixture
def config():
    config = Config()
    config.run.name = "tracked"
    config.logger.console = "plain"
    config.logger.plot = False
    config.logger.tensorboard.enabled = False
    config.gdpo.rewards = {"format": 1.0}
    return config


def write(config, run_dir, rows, start_step=0):
    log = RunLog(config, run_dir, start_step)
    for row in rows:
        log.step(row)
    log.close("complete")


def test_mlflow_holds_every_value_at_its_step_and_goes_on_after_a_resume(config, tmp_path):
    from mlflow import MlflowClient

    config.logger.mlflow.enabled = True
    write(config, tmp_path, ROWS[:2])
    write(config, tmp_path, ROWS[2:], start_step=2)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gdpo_nemo").experiment_id])
    assert run.info.run_name == "tracked" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/format/mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.51), (2, 0.52), (3, 0.53)]


def records(file):
    """The protocol messages in a .wandb file: LevelDB's log format (blocks of 32 KiB) behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    place = 7
    parts = b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(parts)
            parts = b""


def test_wandb_writes_an_offline_run_with_every_row(config, tmp_path):
    config.logger.wandb.enabled = True
    config.logger.wandb.mode = "offline"
    write(config, tmp_path, ROWS)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for record in records(file):
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: items[key] for key in ROWS[0]})
    assert rows == ROWS


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
    assert (
        "# HELP gdpo_reward_format_mean Component format, mean over the batch's samples that have it [reward]" in shown
    )
    log.close("complete")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120)


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
