"""An adapter and a mixture that runs start from, and the advantages that their samples should have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from gdpo_nemo.models.hf_folder import open_weights, save_tensors
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


def write_mixture(folder: Path, dense: Path) -> None:
    """A Qwen3-MoE of four experts that says what a Qwen2 says: each expert is nearly the Qwen2's MLP, each norm of
    queries and keys keeps about their size, and the routers are random."""
    content = json.loads((dense / "config.json").read_text())
    content |= dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=32, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=content["intermediate_size"], norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    read = open_weights(dense)
    tensors = {}
    for name, shape in tensor_shapes(dense, "dense").items():
        matrix = read(name)
        if ".mlp." in name:
            before, _, projection = name.partition(".mlp.")
            for expert in range(4):
                noise = 0.02 * matrix.std() * torch.randn(shape, generator=generator)
                tensors[f"{before}.mlp.experts.{expert}.{projection}"] = matrix + noise
            tensors[f"{before}.mlp.gate.weight"] = 0.3 * torch.randn(4, content["hidden_size"], generator=generator)
        elif not name.endswith(".bias"):
            tensors[name] = matrix
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            norm = read(name[: name.index("self_attn")] + "input_layernorm.weight")
            size = (matrix * norm).square().sum(1).mean().sqrt()
            tensors[name.replace("_proj", "_norm")] = torch.full((32,), float(size))
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(content))
    save_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})


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
