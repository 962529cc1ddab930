"""A LoRA run whose model is a PEFT adapter: engine and trainer begin with its matrices."""

from __future__ import annotations

import json

import torch
from launch import Launch, rows
from safetensors.torch import load_file, save_file

from gdpo_nemo.config.weight_files import tensor_shapes

TARGETS = ("q_proj", "down_proj")


def write_adapter(folder, base) -> dict[str, torch.Tensor]:
    """An adapter of random matrices that changes the model much; its matrices."""
    torch.manual_seed(1)
    matrices = {}
    for name, shape in tensor_shapes(base, "base").items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            matrices[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, shape[1]) / shape[1] ** 0.5
            matrices[f"base_model.model.{module}.lora_B.weight"] = torch.randn(shape[0], 4) * 0.05
    folder.mkdir()
    save_file(matrices, folder / "adapter_model.safetensors")
    content = dict(peft_type="LORA", base_model_name_or_path=str(base), r=4, lora_alpha=8, target_modules=TARGETS)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return matrices


def test_the_first_step_samples_and_trains_from_the_adapter(digit_model, tmp_path):
    start = write_adapter(tmp_path / "adapter", digit_model)
    launched = Launch(
        tmp_path / "run",
        tmp_path / "adapter",
        "gdpo.max_num_steps=1",
        "gdpo.val_period=0",
        "checkpointing.metric_name=null",
        "policy.lora.rank=4",
        "policy.lora.alpha=8",
        f"policy.lora.target_modules=[{','.join(TARGETS)}]",
        "policy.megatron_cfg.optimizer.lr=1.0e-6",
    )
    status, _, err = launched.finish()
    assert status == 0, err
    (row,) = [row for row in rows(tmp_path / "run") if "loss" in row]
    assert row["parity/max_abs"] < 1e-3
    after = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert after.keys() == start.keys()
    assert max(float((after[name] - start[name]).abs().max()) for name in start) < 1e-5
