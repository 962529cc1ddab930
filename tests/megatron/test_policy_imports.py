"""The policy runs on a bare machine: torch, Megatron and transformers, and nothing that serves the rest of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_BLOCKED = ("ray", "vllm", "datasets", "pydantic", "wandb")
_CODE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError("blocked: " + name, name=name)

sys.meta_path.insert(0, Blocked())
from gdpo_nemo.megatron import runtime
runtime.prepare()
import pkgutil, importlib
import gdpo_nemo.algorithms, gdpo_nemo.data, gdpo_nemo.megatron, gdpo_nemo.weights, gdpo_nemo.weights.transports
import gdpo_nemo.training.checkpoints, gdpo_nemo.data.packing, gdpo_nemo.megatron.policy, gdpo_nemo.megatron.checkpoint
for package in (gdpo_nemo.algorithms, gdpo_nemo.weights, gdpo_nemo.weights.transports, gdpo_nemo.megatron):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name != "gdpo_nemo.weights.vllm_receiver":  # which vLLM's workers import
            importlib.import_module(module.name)
left = sorted(name for name in {blocked} if name in sys.modules)
sys.exit("imported " + ", ".join(left) if left else 0)
"""


def test_policy_imports_without_ray_vllm_datasets_pydantic_and_wandb():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE.format(blocked=_BLOCKED)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


_UPDATE = """
import sys
sys.path.insert(0, {tests!r})
from gdpo_nemo.megatron import runtime
import layouts, rank_cases, rank_pool, tiny_models
chosen = runtime.prepare()
layout = layouts.parse("TP1").config
runtime.initialize(chosen, 0, 1, "file://{meeting}")
runtime.lay_out(layout, 1)
place = rank_pool.Place(chosen, layout, 0, 1, {{}})
rank_cases.updates(place, {folder!r}, tiny_models.make_batch(), 1)
left = sorted(name for name in ("torch._dynamo", "torch._inductor", "wandb", "tensorboard") if name in sys.modules)
sys.exit("imported " + ", ".join(left) if left else 0)
"""


def test_a_rank_updates_without_torchs_compiler_and_without_trackers(model_folder, tmp_path):
    """They are 3 of the 9 s of a core that a rank took to start."""
    code = _UPDATE.format(
        tests=str(Path(__file__).parent), meeting=tmp_path / "meeting", folder=str(model_folder("qwen2"))
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
