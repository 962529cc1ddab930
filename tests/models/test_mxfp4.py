"""A folder of gpt-oss with MXFP4 weights becomes an unquantised one, with the values that transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from gdpo_nemo.commands import cli
from gdpo_nemo.models.sources import Format, recognise, source_fields

EXPERTS = "model.layers.{}.mlp.experts.{}"
PROJECTIONS = [EXPERTS.format(layer, name) for layer in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture
def quantised(tmp_path) -> Path:
    """A tiny model whose experts are random codes and exponents."""
    folder = tiny_models.write_model("gpt-oss", tmp_path / "source", num_hidden_layers=2, intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in PROJECTIONS:
        experts, width, rows = tensors.pop(name).shape
        shape = experts, rows, width // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "mxfp4"}}))
    return folder


def test_experts_become_those_that_transformers_dequantises(quantised, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = recognise(quantised)
    assert source.format is Format.MXFP4 and "quantization_config" not in source_fields(source, "SOURCE")
    assert cli.main(["convert", "--to", "hf", str(quantised), str(tmp_path / "out")]) == 0
    stored, converted = (load_file(folder / "model.safetensors") for folder in (quantised, tmp_path / "out"))
    for name in PROJECTIONS:
        expected = convert_moe_packed_tensors(stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales"))
        assert torch.equal(converted.pop(name), expected) and len(expected.unique()) > 30
    assert stored.keys() == converted.keys() and all(torch.equal(stored[name], converted[name]) for name in stored)
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("change, message", [("missing", "lacks"), ("shorter", "is not a valid MXFP4 weight")])
def test_scales_that_do_not_fit_are_named(quantised, tmp_path, capsys, change, message):
    tensors = load_file(quantised / "model.safetensors")
    scales = tensors.pop(f"{PROJECTIONS[0]}_scales")
    if change == "shorter":
        tensors[f"{PROJECTIONS[0]}_scales"] = scales[:, :-1].contiguous()
    save_file(tensors, quantised / "model.safetensors")
    assert cli.main(["convert", "--to", "hf", str(quantised), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and PROJECTIONS[0] in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
