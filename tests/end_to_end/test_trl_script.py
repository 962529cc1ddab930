"""A script that was written for TRL, translated and trained by the real program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, rows

from gdpo_nemo.commands.cli import main
from gdpo_nemo.observe.samples import read_rollouts, rollout_path

pytestmark = pytest.mark.slow

REWARDS = """
import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import helper


class Kept:
    def __init__(self):
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context(helper.METHOD))
        self.lock = asyncio.Lock()

    async def __call__(self, completions, **kwargs):
        return await asyncio.gather(*(self.one(completion[0]["content"]) for completion in completions))

    async def one(self, text):
        async with self.lock:
            return await asyncio.get_running_loop().run_in_executor(self.pool, helper.value, text)
"""
"""Reward that keeps a lock, which belongs to one event loop, and a process pool. Its helper is in the same folder."""
SCRIPT = REPOSITORY / "tests" / "tools" / "trl" / "stranger.py"


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> Path:
    """A random model over bytes with a chat template."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "bytes"
    make_tiny_model.make_random_model(str(folder), 0)
    return folder


def test_a_trl_script_is_translated_and_trains_its_two_steps(tmp_path, byte_model, monkeypatch, capfd):
    """In the folder of the script, to which all names are relative. Two rewards of other folders are added, whose
    helpers have the same name."""
    monkeypatch.chdir(tmp_path)
    for folder, method, factor in (("halves", "spawn", 0.5), ("thirds", "fork", 1 / 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(REWARDS)
        helper = f"METHOD = {method!r}\ndef value(text): return {factor!r} * len(text)"
        (tmp_path / folder / "helper.py").write_text(helper)
    (tmp_path / "stranger.py").write_text(SCRIPT.read_text().replace('"MODEL"', f'"{byte_model}"'))
    assert main(["config", "from-trl", "stranger.py", "--out", "ours.yaml"]) == 0
    translated = capfd.readouterr()
    assert translated.err == ""
    assert translated.out.startswith("same: every key that affects the result behaves as in TRL")
    kept = {folder: f"{folder}/rewards.py:Kept" for folder in ("halves", "thirds")}
    added = [f"env.functions.functions.{name}={place}" for name, place in kept.items()]
    added += [f"gdpo.rewards.{name}=0.1" for name in kept]
    small = ["policy.max_total_sequence_length=256", "policy.micro_batch_tokens=2048", "logger.console=plain"]
    assert main(["train", "--config", "ours.yaml", *small, *added]) == 0
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
    assert {len(s["rewards"]) for s in samples} == {4}
    for step in (1, 2):
        for sample in read_rollouts(rollout_path(run, step)):
            length = len(sample["completion"])
            assert [sample["rewards"][name] for name in kept] == pytest.approx([length / 2, length / 3])
    adapters = list((run / "model").glob("adapter_model.safetensors")) or list((run / "model").glob("*.safetensors"))
    assert adapters
