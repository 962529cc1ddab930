"""A run that its supervisor starts again, as a user sees it."""

from __future__ import annotations

import json
import time

import psutil
from launch import START_S, Launch, rows, timeless

from gdpo_nemo.observe.alerts import read_alerts

QUICK = (
    "logger.plot=false",
    "logger.tensorboard.enabled=false",
    "gdpo.val_at_start=true",
    "checkpointing.save_period=1",
)


def _status(launch: Launch) -> dict:
    return json.loads((launch.run_dir / "status.json").read_text())


def _kill(launch: Launch, name: str, after_restarts: int, step: int) -> None:
    """Kill the driver, or the process of that name, in the attempt after so many restarts, once ``step`` is done."""
    deadline = time.monotonic() + START_S
    while _status(launch).get("restarts") != after_restarts or _status(launch)["step"] < step:
        assert launch.process.poll() is None, launch.process.communicate()
        assert time.monotonic() < deadline, _status(launch)
        time.sleep(0.05)
    if name == "driver":
        psutil.Process(_status(launch)["driver"]).kill()
        return
    children = psutil.Process(launch.process.pid).children(recursive=True)
    next(child for child in children if name in " ".join(child.cmdline()) and child.status() != "zombie").kill()


def test_a_supervised_run_that_loses_driver_gcs_and_rank_equals_the_undisturbed_one(undisturbed, tmp_path, digit_model):
    launch = Launch(tmp_path / "run", digit_model, *QUICK)
    launch.wait_for_step(2)
    # A run without a checkpoint begins again, and what was recorded before, the first alert too, goes to its archive.
    deadline = time.monotonic() + START_S
    while not (launch.run_dir / "checkpoints" / "step_2").exists():
        assert time.monotonic() < deadline and launch.process.poll() is None
        time.sleep(0.05)
    _kill(launch, "driver", 0, 2)
    _kill(launch, "gcs_server", 1, 3)
    _kill(launch, "ray::PolicyRank", 2, 4)
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    assert launch.left_behind() == []
    straight = undisturbed[0].run_dir
    assert [timeless(row) for row in rows(launch.run_dir)] == [timeless(row) for row in rows(straight)]
    weights = [folder / "model" / "model.safetensors" for folder in (straight, launch.run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    told = [alert["text"] for alert in read_alerts(launch.run_dir) if "run.max_restarts" in alert["text"]]
    assert len(told) == 3 and "was killed by SIGKILL" in told[0] and "Ray's gcs_server" in told[1], told
    assert [line for line in err.splitlines() if line.startswith("supervisor:")] == [f"supervisor: {t}" for t in told]
    assert "Traceback" not in err
    last = rows(launch.run_dir)[-2]
    assert last["driver/restarts"] == 3.0
