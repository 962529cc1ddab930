"""Folders with FP8 weights become unquantised ones, with the values that transformers computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gdpo_nemo.commands import cli
from gdpo_nemo.models.fp8 import dequantised
from gdpo_nemo.models.hf_folder import open_weights
from gdpo_nemo.models.sources import Format, recognise, source_fields
from gdpo_nemo.utils.errors import ConfigError

sys.path.append(str(Path(__file__).resolve().parents[1] / "megatron"))
import tiny_models  # noqa: E402
from test_image_models import write_image_model  # noqa: E402

BLOCK = (16, 32)
"""The experts have 24 rows, so their last blocks are smaller."""
SMALL = dict(num_hidden_layers=1, num_local_experts=2)


def quantise(folder: Path, block: tuple[int, int] | None) -> Path:
    """Replace all matrices but the embeddings and routers by random FP8 values and factors."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight") or ".experts." in name]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        blocks = (-(-rows // block[0]), -(-columns // block[1])) if block else ()
        tensors[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) + 0.1
        if block is None:
            tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": list(block) if block else None}
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("block", [BLOCK, None])
def test_weights_become_those_that_transformers_dequantises(tmp_path, block):
    from transformers import AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = tiny_models.write_model("minimax-m2", tmp_path / "source", **SMALL)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.1.eh_proj.weight": torch.zeros(32, 64)}, folder / "model.safetensors")
    quantise(folder, block)
    source = recognise(folder)
    assert source.format is Format.FP8 and "quantization_config" not in source_fields(source, "SOURCE")
    assert cli.main(["convert", "--to", "hf", str(folder), str(tmp_path / "out")]) == 0
    stored, converted = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    weights = {name for name in stored if f"{name}_scale_inv" in stored}
    assert len(weights) == 4 + 3 * 2 + 1 and converted.keys() == {name for name in stored if "scale" not in name}
    for name, found in converted.items():
        if name not in weights:
            assert torch.equal(found, stored[name])
            continue
        matrix, scales = stored[name], stored[f"{name}_scale_inv"]
        if block and len(matrix) % block[0]:  # transformers refuses these
            matrix = torch.nn.functional.pad(matrix.float(), (0, 0, 0, -len(matrix) % block[0]))
        expected = Fp8Dequantize(None)._dequantize_one(matrix, scales.reshape(scales.shape or (1, 1)), torch.bfloat16)
        assert torch.equal(found, expected[: len(found)])
    _, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert loaded.pop("unexpected_keys") == {"model.layers.1.eh_proj.weight"}  # for multi-token prediction
    assert not any(loaded.values())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_text_model_of_an_image_model_is_dequantised_and_not_written_back(tmp_path, capsys):
    """Mistral Medium 3.5 is published in this form."""
    image, text = tmp_path / "image", tmp_path / "text"
    write_image_model("mistral3", image)
    quantise(image, None)
    assert cli.main(["convert", "--to", "hf", str(image), str(text)]) == 0
    stored, converted = (load_file(path / "model.safetensors") for path in (image, text))
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    expected = stored[name].float() * stored[f"{name}_scale_inv"]
    assert torch.equal(converted["model.layers.0.mlp.up_proj.weight"], expected.bfloat16())
    assert not any("scale" in name for name in converted)
    capsys.readouterr()
    assert cli.main(["convert", "--to", "image", "--model", str(image), str(text), str(tmp_path / "out")]) == 2
    assert "has quantised weights, in which a trained text model cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [("missing", "lacks"), ("shorter", "is not a valid FP8 weight")])
def test_factors_that_do_not_fit_are_named(tmp_path, capsys, change, message):
    folder = quantise(tiny_models.write_model("minimax-m2", tmp_path / "source", **SMALL), BLOCK)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    scales = tensors.pop(f"{name}_scale_inv")
    if change == "shorter":
        tensors[f"{name}_scale_inv"] = scales[:-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    capsys.readouterr()
    assert cli.main(["convert", "--to", "hf", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and name in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_exponents_are_not_read_as_factors():
    """Other formats store the exponents of powers of two, as bytes."""
    with pytest.raises(ValueError, match="shapes"):
        dequantised(torch.zeros(16, 32).to(torch.float8_e4m3fn), torch.full((1, 1), 127, dtype=torch.uint8), BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_that_are_not_finite_are_refused_by_file_and_name(tmp_path, dtype):
    """Anywhere in a tensor, for conversions. Engines and comparisons read all values."""
    good = torch.full((3, 70_000), -448.0).to(dtype)
    bad = good.clone()
    bad[2, 69_999] = float("nan")
    tensors = {"good": good, "bad": bad, "none": torch.zeros(0), "whole": torch.tensor([1])}
    save_file(tensors, tmp_path / "model.safetensors")
    read = open_weights(tmp_path, finite=True)
    assert all(torch.equal(read(name), tensors[name]) for name in ("good", "none", "whole"))
    with pytest.raises(ConfigError, match=r"model.safetensors: bad contains NaN or infinite values"):
        read("bad")
    assert open_weights(tmp_path)("bad")[2, 69_999].isnan()
    save_file({"bad": torch.tensor([1.0, -torch.inf])}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="bad contains"):
        open_weights(tmp_path, finite=True)("bad")
