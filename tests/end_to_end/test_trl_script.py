"""A script that was written for TRL, translated and trained by the real program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import rows

from gdpo_nemo.observe.samples import read_rollouts, rollout_path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tests" / "interop" / "trl" / "stranger.py"
LIMIT_S = 1200


def gdpo_nemo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gdpo_nemo", *arguments]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> Path:
    """A random model over bytes with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_tiny_model as m; m.make_random_model(sys.argv[2], 0)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(REPOSITORY / "examples"), str(folder)], check=True)
    return folder


def test_a_trl_script_is_translated_and_trains_its_two_steps(tmp_path, byte_model):
    (tmp_path / "stranger.py").write_text(SCRIPT.read_text().replace('"MODEL"', f'"{byte_model}"'))
    translated = gdpo_nemo("config", "from-trl", "stranger.py", "--out", "ours.yaml", cwd=tmp_path)
    assert (translated.returncode, translated.stderr) == (0, "")
    assert translated.stdout.startswith("same: every key that affects the result behaves as in TRL")
    small = ["policy.max_total_sequence_length=256", "policy.micro_batch_tokens=2048", "logger.console=plain"]
    trained = gdpo_nemo("train", "--config", "ours.yaml", *small, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "results" / "stranger"
    made = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in made] == [1, 2]
    for step, row in enumerate(made):
        assert row["grad_norm"] > 0 and row["rollout/env_failed"] == 0 and row["parity/max_abs"] < 1e-3
        assert row["reward_function/progress"] == step / 2
        assert row["reward_function/share"] == pytest.approx(row["reward/some_of_it/mean"])
    # transformers' warm-up of one update: the first has a rate of 0, the second that of the top.
    assert [row["lr"] for row in made] == pytest.approx([0.0, 1e-3])
    samples = read_rollouts(rollout_path(run, 1))
    assert len(samples) == 8 and {s["extra"]["solution"] for s in samples} <= {"13", "24", "5", "6"}
    assert {len(s["rewards"]) for s in samples} == {2}
    adapters = list((run / "model").glob("adapter_model.safetensors")) or list((run / "model").glob("*.safetensors"))
    assert adapters
