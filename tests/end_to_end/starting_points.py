"""An adapter that a run starts from, and the advantages that its samples should have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from gdpo_nemo.models.weight_files import tensor_shapes

TARGETS = ("q_proj", "down_proj")
LR = 1e-3
_EPSILON = 1e-6


def write_adapter(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """A PEFT adapter of rank 4 with random matrices, far from where a new one starts; its matrices by name."""
    torch.manual_seed(1)
    matrices = {}
    for name, shape in tensor_shapes(base, "base").items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            matrices[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, shape[1]) / shape[1] ** 0.5
            matrices[f"base_model.model.{module}.lora_B.weight"] = torch.randn(shape[0], 4) * 0.02
    folder.mkdir()
    save_file(matrices, folder / "adapter_model.safetensors")
    content = dict(peft_type="LORA", base_model_name_or_path=str(base), r=4, lora_alpha=8, target_modules=TARGETS)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return matrices


def gdpo(samples: list[dict], weights: dict[str, float], batch_norm: bool) -> np.ndarray:
    """Equations 4 to 6 of arXiv 2601.05242, group by group and reward by reward, on recorded samples; [samples]."""
    total = np.zeros(len(samples))
    live = np.zeros(len(samples), bool)
    prompts = [sample["prompt_id"] for sample in samples]
    for prompt in dict.fromkeys(prompts):
        members = [index for index, name in enumerate(prompts) if name == prompt]
        for name, weight in weights.items():
            reward = np.array([samples[index]["rewards"][name] for index in members], np.float64)
            if np.ptp(reward):
                live[members] = True
                total[members] += weight * (reward - reward.mean()) / (reward.std(ddof=1) + _EPSILON)
    if not batch_norm:
        return total
    return np.where(live, (total - total[live].mean()) / (total[live].std(ddof=1) + _EPSILON), 0.0)
