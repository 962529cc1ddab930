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


def _trained(launch: Launch) -> int:
    """The last step that is recorded and saved."""
    recorded = max((row["step"] for row in rows(launch.run_dir) if "loss" in row), default=0)
    return recorded if (launch.run_dir / "checkpoints" / f"step_{recorded}").exists() else 0


def _kill(launch: Launch, name: str, after_restarts: int, beyond: int) -> int:
    """Kill the driver, or the process of that name, in the attempt after so many restarts, as soon as a step after
    ``beyond`` is trained: two attempts in a row that gain none would be the last. Returns the step."""
    deadline = time.monotonic() + START_S
    while (status := _status(launch)).get("restarts") != after_restarts or (step := _trained(launch)) <= beyond:
        assert launch.process.poll() is None, launch.process.communicate()
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    if name == "driver":
        psutil.Process(status["driver"]).kill()
        return step
    children = psutil.Process(launch.process.pid).children(recursive=True)
    next(child for child in children if name in " ".join(child.cmdline()) and child.status() != "zombie").kill()
    return step


def _last_roles(launch: Launch) -> dict:
    """The last status of the run that knows its processes."""
    found = {}
    while launch.process.poll() is None:
        status = _status(launch)
        if {"engine 0", "policy rank 0"} <= status.get("roles", {}).keys():
            found = status
        time.sleep(0.05)
    return found


def test_a_supervised_run_that_loses_driver_gcs_and_rank_equals_the_undisturbed_one(undisturbed, tmp_path, digit_model):
    launch = Launch(tmp_path / "run", digit_model, *QUICK)
    launch.wait_for_step(1)
    # A run without a checkpoint would begin again, and its alert would go to the archive with the rest.
    step = _kill(launch, "driver", 0, 0)
    step = _kill(launch, "gcs_server", 1, step)
    _kill(launch, "ray::PolicyRank", 2, step)
    before = _status(launch)
    after = _last_roles(launch)
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    assert (after["driver"], after["roles"]["engine 0"]) == (before["driver"], before["roles"]["engine 0"])
    assert after["roles"]["policy rank 0"] != before["roles"]["policy rank 0"]
    assert launch.left_behind() == []
    straight = undisturbed[0].run_dir
    assert [timeless(row) for row in rows(launch.run_dir)] == [timeless(row) for row in rows(straight)]
    weights = [folder / "model" / "model.safetensors" for folder in (straight, launch.run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    told = [alert["text"] for alert in read_alerts(launch.run_dir) if "run.max_restarts" in alert["text"]]
    assert len(told) == 2 and "was killed by SIGKILL" in told[0] and "Ray's gcs_server" in told[1], told
    assert [line for line in err.splitlines() if line.startswith("supervisor:")] == [f"supervisor: {t}" for t in told]
    assert "Traceback" not in err and "(raylet)" not in out + err, "Ray's own lines are in its logs"
    rebuilt = [alert["text"] for alert in read_alerts(launch.run_dir) if "the policy is started again" in alert["text"]]
    assert len(rebuilt) == 1 and "a worker process died" in rebuilt[0], rebuilt
    assert out.count("complete after step") == 1 and "restarting after" not in out, "a summary at the end, and no other"
    last = rows(launch.run_dir)[-2]
    assert (last["driver/restarts"], last["driver/rebuilds"]) == (2.0, 1.0)
