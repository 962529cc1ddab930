"""The policy runs on a bare machine: torch, Megatron and transformers, and nothing that serves the rest of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_BLOCKED = ("ray", "vllm", "datasets", "pydantic", "wandb")
_CODE = """
import sys
sys.path[:0] = [{tests!r}, {for_gpus!r}]

class Blocked:
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            self.asked.append(name)
            raise ModuleNotFoundError("blocked: " + name, name=name)

sys.meta_path.insert(0, Blocked())
from gdpo_nemo.megatron import runtime
import layouts, rank_cases, rank_pool, tiny_models
chosen = runtime.prepare()
layout = layouts.parse("TP1").config
runtime.initialize(chosen, 0, 1, "file://{meeting}")
runtime.lay_out(layout, 1)
place = rank_pool.Place(chosen, layout, 0, 1, {{}})
rank_cases.updates(place, {folder!r}, tiny_models.make_batch(), 1)
compiler = [name for name in ("torch._dynamo", "torch._inductor", "tensorboard") if name in sys.modules]
compiler += [name for name in Blocked.asked if name == "wandb"]

import pkgutil, importlib
import gdpo_nemo.algorithms, gdpo_nemo.data, gdpo_nemo.megatron, gdpo_nemo.weights, gdpo_nemo.weights.transports
import gdpo_nemo.training.checkpoints, gdpo_nemo.data.packing, gdpo_nemo.megatron.policy, gdpo_nemo.megatron.checkpoint
for package in (gdpo_nemo.algorithms, gdpo_nemo.weights, gdpo_nemo.weights.transports, gdpo_nemo.megatron):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name != "gdpo_nemo.weights.vllm_receiver":  # which vLLM's workers import
            importlib.import_module(module.name)
import json
print(json.dumps([compiler, [name for name in {blocked} if name in sys.modules], sys.modules["transformer_engine"]]))
"""
_FOR_GPUS = ("transformer_engine", "apex")


@pytest.fixture(scope="module")
def imported(model_folder, tmp_path_factory) -> list[list[str] | None]:
    """What an update of a rank has imported of torch's compiler and trackers, and, once everything is imported that the
    policy may need, what there is of the rest of a run."""
    meeting, folder = tmp_path_factory.mktemp("rank") / "meeting", str(model_folder("qwen2"))
    for_gpus = tmp_path_factory.mktemp("for_gpus")
    for name in _FOR_GPUS:
        (for_gpus / f"{name}.py").write_text("raise RuntimeError('Found no NVIDIA driver on your system.')")
    tests = str(Path(__file__).parent)
    code = _CODE.format(blocked=_BLOCKED, tests=tests, for_gpus=str(for_gpus), meeting=meeting, folder=folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_policy_imports_without_ray_vllm_datasets_pydantic_and_wandb(imported):
    assert imported[1] == []


def test_a_rank_updates_without_torchs_compiler_and_without_trackers(imported):
    """They are 3 of the 9 s of a core that a rank took to start."""
    assert imported[0] == []


def test_a_rank_on_a_cpu_updates_if_libraries_for_gpus_are_installed(imported):
    """Megatron prefers their optimizers, which need a GPU. An import of either ends the process."""
    assert imported[2] is None
