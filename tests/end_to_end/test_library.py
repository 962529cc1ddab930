"""Runs from Python, as scripts of users have them: real Ray, ranks and engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from launch import START_S, rows, timeless

SCRIPT = """
import json, os, random, signal, sys, threading

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


def steps(number):
    small = {"gdpo.num_prompts_per_step": 4, "gdpo.num_generations_per_prompt": 4, "checkpointing.save_period": 1,
             "policy.generation.engines": 2}
    named = {"run.name": "five", "policy.model_name": sys.argv[1], "logger.console": "plain", "logger.plot": False,
             "policy.precision": "bfloat16"}
    return {**small, **named, "gdpo.max_num_steps": number}


def left():
    children = psutil.Process().children(recursive=True)
    return [" ".join(c.cmdline()) for c in children if "resource_tracker" not in " ".join(c.cmdline())]


handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
first = train(rewards={"correct": correct, "short": (lambda completions, **_: short(completions), 0.5)}, data=data,
              overrides=steps(2))
found = {"left": left(), "temporary": os.environ["TMPDIR"], "step": first.metrics["step"], "model": str(first.model)}
found["handlers"] = handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def in_a_thread():
    result = train(first.run_dir / "config.yaml", rewards={"correct": correct, "short": (short, 0.5)}, data=data,
                   overrides=steps(3))
    found.update(again=result.metrics["step"], rows=len(result.history()))


thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
print(json.dumps({**found, "left_after_all": left()}))
"""


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """The command in ``folder``, with a folder of its own for temporary files; Ray's sockets need a short path."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    beside = {"TMPDIR": str(scratch), "RAY_TMPDIR": tempfile.gettempdir()}
    beside["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_tests"
    environment = {**os.environ, **beside}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert list(scratch.iterdir()) == []
    return done


def test_a_script_and_a_thread_train_with_two_engines_what_the_cli_repeats_bit_for_bit(tmp_path, digit_model):
    """Functions of the script and lambdas verify in other processes, which do not run the script again. Two steps are
    trained at the top level, a third one in a thread. From the config and the files that this leaves, the command line
    trains three steps at once in another folder, with engines that answer in their own order."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = _run(tmp_path, sys.executable, "script.py", str(digit_model))
    assert done.stdout.count("the script runs in") == 1
    found = json.loads(done.stdout.splitlines()[-1])
    run_dir = tmp_path / "results" / "five"
    assert (found["step"], found["again"], found["rows"]) == (2, 3, 3)
    assert found["left"] == found["left_after_all"] == [] and found["handlers"]
    assert found["temporary"] == str(tmp_path / "scratch") and found["model"] == str(run_dir / "model")
    (tmp_path / "script.py").unlink()
    command = (sys.executable, "-m", "gdpo_nemo", "train", "--config", "results/five/config.yaml")
    _run(tmp_path, *command, "run.dir=results/repeated")
    repeated = tmp_path / "results" / "repeated"
    trained = rows(run_dir)
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert all({"reward/correct/mean", "reward/short/mean"} <= row.keys() for row in trained)
    # Engine and trainer round to bfloat16 at different places, by far less than what ends a run.
    assert all(0 < row["parity/mean_abs"] < 0.1 and row["parity/max_prob"] < 0.5 for row in trained)
    assert [timeless(row) for row in trained] == [timeless(row) for row in rows(repeated)]
    weights = [folder / "model" / "model.safetensors" for folder in (run_dir, repeated)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert all(row["grad_norm"] > 0 for row in trained)
