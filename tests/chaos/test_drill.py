"""Faults of a run on purpose, with real processes; ``soak.py`` does a thousand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile_verifier import DEEDS
from soak import RECORD, VARIANTS, read, soak, table

from gdpo_nemo.commands.drill.exercise import by_fault
from gdpo_nemo.commands.drill.faults import FAULTS
from gdpo_nemo.commands.drill.run import Outcome, trained
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.observe.samples import read_rollouts, rollout_path

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = (
    "rank-kill",
    "engine-kill",
    "worker-kill",
    "raylet-kill",
    "gcs-kill",
    "engine-pause",
    "torn-checkpoint",  # kills the driver, as driver-kill does, and more
    "no-space",
)
"""The default kinds without those that other tests have: SIGTERM is in `end_to_end/test_supervised_runs.py`, and a
signal that stops a sampling run in `end_to_end/test_run.py`."""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    drill = [sys.executable, "-m", "gdpo_nemo", "drill", *arguments]
    return subprocess.run(drill, capture_output=True, text=True, cwd=REPOSITORY, timeout=2400)


@pytest.fixture(scope="module")
def drilled(tmp_path_factory, digit_model) -> tuple[Path, str]:
    """A drill of PPO, whose checkpoints hold most (a value head, its optimizer, running means): its folder, and what
    was printed."""
    out = tmp_path_factory.mktemp("drill") / "drill"
    config = ("--config", "configs/ppo_tiny_cpu.yaml", f"policy.model_name={digit_model}")
    small = ("gdpo.num_prompts_per_step=16", "gdpo.num_iterations=2", "rollout.env_workers=2")
    done = command(*config, *small, "--out", str(out), "--steps", "1", "--patience", "900", "--faults", ",".join(KINDS))
    assert done.returncode == 0, done.stdout + done.stderr  # a string, which pytest prints whole
    assert "bitwise equal" in done.stdout and "Traceback" not in done.stdout + done.stderr
    return out, done.stdout


def test_a_run_through_eight_kinds_of_faults_is_the_undisturbed_run_bit_for_bit(drilled):
    out, _ = drilled
    found = json.loads((out / "drill.json").read_text())
    assert [outcome["fault"] for outcome in found["outcomes"]] == list(KINDS)
    assert all(outcome["victim"] and outcome["seconds"] > 0 for outcome in found["outcomes"])
    assert found["exact"] and found["passed"] and found["wrong"] == []
    said = {outcome["fault"]: " ".join(outcome["said"]) for outcome in found["outcomes"]}
    assert "engine 0" in said["engine-kill"] and "worker" in said["worker-kill"]
    log = (out / "disturbed.log").read_text()
    assert "is damaged" in log, "the checkpoint that was cut short is skipped"
    assert "(raylet)" not in log and "state-dump" not in log, "what Ray says of lost processes stays in its own logs"
    check_account_of_restarts(out / "disturbed", log)


def test_every_step_of_ppo_measures_the_values(drilled):
    run_dir = drilled[0] / "undisturbed"
    done = trained(run_dir)
    assert list(done) == list(range(1, len(done) + 1))
    early = [done[step] for step in range(1, 7)]  # later all returns of a step may be equal: no variance to explain
    names = {f"value/{name}" for name in ("loss", "mean", "return", "clip_fraction", "explained_variance")}
    assert all(names <= row.keys() for row in early)
    # The head starts at 0. The ratio of a step's second update refers to the weights before the first.
    first, last = done[1], done[len(done)]
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert last["value/mean"] > first["value/mean"]
    assert all(abs(row["policy/ratio_mean"] - 1) < 0.2 and row["policy/ratio_max"] != 1 for row in early)
    samples = read_rollouts(rollout_path(run_dir, 1))
    assert len(samples) == 16 and np.isfinite([sample["advantage"] for sample in samples]).all()


def test_the_exported_model_of_ppo_is_the_policy_alone(drilled):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folder = drilled[0] / "disturbed" / "model"
    _, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with safe_open(folder / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "value" in name or "score" in name]


def check_account_of_restarts(run_dir: Path, log: str) -> None:
    """Alerts, metrics and terminal agree on how often the run was started again, in whole and in part."""
    alerts = [alert["text"] for alert in read_alerts(run_dir)]
    restarts = [text for text in alerts if "run.max_restarts" in text]
    rebuilds = [text for text in alerts if "the policy is restarted" in text]
    assert [line for line in log.splitlines() if line.startswith("supervisor:")] == [
        f"supervisor: {t}" for t in restarts
    ]
    assert any("was killed by SIGKILL; the run is restarted" in text for text in restarts), restarts
    assert len(rebuilds) == 1 and "a worker process died" in rebuilds[0], rebuilds
    assert log.count("complete after step") == 1 and "restarting after" not in log, "a single summary, at the end"


def test_a_run_ahead_of_its_weights_accounts_for_every_prompt_after_kills_and_bad_verdicts(
    tmp_path, digit_model, monkeypatch
):
    """A soak of one run, with kills of every role and a verifier that hangs, dies, fails and says nothing."""
    hostile = VARIANTS["a hostile verifier"]
    ahead = replace(hostile, changes=("rollout.max_staleness=2", *hostile.changes))
    monkeypatch.setitem(VARIANTS, "two steps ahead, a hostile verifier", ahead)
    kills = ("engine-kill", "supervisor-kill")  # the others are in the drill above
    monkeypatch.setattr("soak.FAULTS", {name: FAULTS[name] for name in kills})
    monkeypatch.setattr("soak.SLOW", ("supervisor-kill",))
    model = f"policy.model_name={digit_model}"
    rows = soak(tmp_path, 2, 2, 10, [model], 900.0, ["two steps ahead, a hostile verifier"])
    assert [row for row in rows if row["wrong"]] == []
    assert {row["fault"] for row in rows[:2]} == set(kills)
    assert {row["fault"] for row in rows[2:]} == set(DEEDS)
    assert read(tmp_path / RECORD) == rows
    assert f"{len(rows)} of {len(rows)} faults as they should be" in table(rows)
    assert not (tmp_path / "run_0").exists(), "what went well is not kept"
    assert not list(tmp_path.glob("undisturbed*")), "there is nothing to compare it with"


def test_the_table_has_median_and_longest_of_every_fault_that_met_something():
    outcomes = [Outcome("a", "pid", 3, seconds) for seconds in (1.0, 5.0, 2.0)] + [Outcome("b", ""), Outcome("c", "x")]
    assert by_fault(outcomes) == [("a", 3, 2.0, 5.0), ("c", 0, None, None)]
