"""Runs from Python, as scripts of users have them: real Ray, ranks and engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from launch import START_S, rows, timeless
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from gdpo_nemo.cluster.worker_launcher import FOLDER
from gdpo_nemo.commands.cli import main
from gdpo_nemo.observe.samples import read_rollouts, rollout_path

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, random, shutil, signal, sys, threading

import psutil

from gdpo_nemo import train

print("the script runs in", __name__, flush=True)
draw = random.Random(0)
numbers = ["".join(draw.choices("0123456789", k=5)) for _ in range(64)]
data = [{"prompt": f"{number}=", "answer": "".join(sorted(number))} for number in numbers]
longest = 40


def correct(completions, answer, **columns):
    return [float(wanted in text) for text, wanted in zip(completions, answer)]


def short(completions):
    return [1.0 - len(text) / longest for text in completions]


overrides = {
    "run.name": "five", "policy.model_name": sys.argv[1], "policy.precision": "bfloat16", "algorithm.type": "ppo",
    "policy.generation.engines": 2, "gdpo.num_prompts_per_step": 16, "gdpo.num_generations_per_prompt": 1,
    "gdpo.num_iterations": 2, "gdpo.max_num_steps": 3, "ppo.vf_coef": 0.1, "checkpointing.save_period": 1,
    "logger.console": "plain", "logger.plot": False,
}


def left():
    children = psutil.Process().children(recursive=True)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]
    for thread in threads:
        thread.join(60)  # idle threads of a closed executor end at once
    remaining = [thread.name for thread in threads if thread.is_alive()]
    return remaining + [" ".join(c.cmdline()) for c in children if "resource_tracker" not in " ".join(c.cmdline())]


handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
first = train(rewards={"correct": correct, "short": (lambda completions, **_: short(completions), 0.5)}, data=data,
              overrides=overrides)
found = {"left": left(), "temporary": os.environ["TMPDIR"], "step": first.metrics["step"], "model": str(first.model)}
found["handlers"] = handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

os.unlink(__file__)
again = first.run_dir.with_name("again")
shutil.copytree(first.run_dir, again)
shutil.rmtree(again / "checkpoints" / "step_3")


def in_a_thread():
    result = train(first.run_dir / "config.yaml", overrides={"run.dir": str(again), "policy.generation.engines": 1})
    found.update(again=result.metrics["step"], rows=len(result.history()))


thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
print(json.dumps({**found, "left_after_all": left()}))
"""


SCRATCH = "scratch_" * 12
"""A folder for temporary files."""


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run the command in ``folder`` with a TMPDIR that is too long for sockets, as job folders of a cluster are."""
    scratch = folder / SCRATCH
    scratch.mkdir(exist_ok=True)
    beside = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_tests"}
    environment = {**os.environ, **beside}
    environment.pop("RAY_TMPDIR", None)
    del environment[FOLDER]  # ranks and engines are then descendants of the script
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert list(scratch.iterdir()) == []
    links = [path for path in Path("/tmp").glob("gdpo-*") if path.is_symlink()]
    assert [path for path in links if str(scratch) in os.readlink(path)] == []
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory, digit_model) -> Path:
    """The folder of the script, which has trained PPO in ``results/five``, and its third step once more in
    ``results/again``."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    done = _run(folder, sys.executable, "script.py", str(digit_model))
    assert done.stdout.count("the script runs in") == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["step"], found["again"], found["rows"]) == (3, 3, 3)
    assert found["left"] == found["left_after_all"] == [] and found["handlers"]
    run_dir = folder / "results" / "five"
    assert found["temporary"] == str(folder / SCRATCH) and found["model"] == str(run_dir / "model")
    return folder


def test_thread_resumes_the_run_of_a_script_with_two_engines_bit_for_bit(folder, monkeypatch):
    """Functions of the script and lambdas verify in other processes, which do not run the script again. The thread has
    the config and the files that are left, the value head and its optimizer from the checkpoint, and one engine."""
    run_dir, again = (folder / "results" / name for name in ("five", "again"))
    trained = rows(run_dir)
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert all({"reward/correct/mean", "reward/short/mean"} <= row.keys() for row in trained)
    # Engine and trainer round to bfloat16 at different places, by far less than what ends a run.
    assert all(0 < row["parity/mean_abs"] < 0.1 and row["parity/max_prob"] < 0.5 for row in trained)
    assert trained[-1]["time/step"] != rows(again)[-1]["time/step"], "the third step is trained again"
    assert [timeless(row) for row in trained] == [timeless(row) for row in rows(again)]
    weights = [folder / "model" / "model.safetensors" for folder in (run_dir, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert all(row["grad_norm"] > 0 for row in trained)
    monkeypatch.chdir(folder)
    assert main(["train", "--config", "results/five/config.yaml", "run.dir=results/repeated", "--dry-run"]) == 0


def test_every_step_of_ppo_measures_the_values(folder):
    run_dir = folder / "results" / "five"
    first, *_, last = trained = rows(run_dir)
    names = {f"value/{name}" for name in ("loss", "mean", "return", "clip_fraction", "explained_variance")}
    assert all(names <= row.keys() for row in trained)
    # The head starts at 0. The ratio of a step's second update refers to the weights before the first.
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert last["value/mean"] > first["value/mean"]
    assert all(abs(row["policy/ratio_mean"] - 1) < 0.2 and row["policy/ratio_max"] != 1 for row in trained)
    samples = read_rollouts(rollout_path(run_dir, 1))
    assert len(samples) == 16 and np.isfinite([sample["advantage"] for sample in samples]).all()


def test_exported_model_of_ppo_contains_only_the_policy(folder):
    model = folder / "results" / "again" / "model"
    _, found = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with safe_open(model / "model.safetensors", "np") as file:
        assert not [name for name in file.keys() if "value" in name or "score" in name]
