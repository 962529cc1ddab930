"""PEFT adapters merged into their base: the logits of ``peft``'s own model; what is more than LoRA is refused."""

from __future__ import annotations

import json
import sys

import peft
import pytest
import torch
from tiny_models import VOCABULARY, write_model
from tiny_vision import KINDS, write_tiny_vision
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from gdpo_nemo.commands.cli import main
from gdpo_nemo.models.peft import read_peft_adapter, read_shapes
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.weights import adapters as weights
from gdpo_nemo.weights.adapters import Adapters, read_pairs

TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("peft") / "base")


def write_adapter(base, folder, **options):
    """An adapter of ``peft`` with random matrices in ``folder``, and the model with it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = dict(r=4, lora_alpha=6, target_modules=TARGETS, **options)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return adapted.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(60).reshape(2, 30) * 7 % VOCABULARY).logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(use_rslora=True),
        dict(rank_pattern={"q_proj": 2}),
        dict(layers_to_transform=[1]),
        dict(init_lora_weights="gaussian", lora_dropout=0.1),
    ],
    ids=["plain", "rslora", "ranks", "layers", "dropout"],
)
def test_a_merged_adapter_gives_the_logits_of_peft(options, base, tmp_path, capsys):
    wanted = logits(write_adapter(base, tmp_path / "adapter", **options))
    assert (wanted - logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))).abs().max() > 0.1
    status = main(["convert", "--to", "hf", str(tmp_path / "adapter"), str(tmp_path / "hf")])
    assert (status, capsys.readouterr().out.strip().splitlines()[-1]) == (0, str(tmp_path / "hf"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_an_image_model_have_the_names_of_peft(kind, tmp_path, monkeypatch, recwarn):
    """Also on the tower, whose modules have the names of the text model's in Qwen2.5-VL."""
    monkeypatch.setattr(sys.modules[__name__], "AutoModelForCausalLM", AutoModelForImageTextToText)
    base = write_tiny_vision(tmp_path / "base", kind)
    wanted = logits(write_adapter(base, tmp_path / "adapter"))
    adapter = read_peft_adapter(tmp_path / "adapter", "key")
    pairs = read_pairs(adapter, base, "key")
    assert any("visual" in module for module in pairs) == (kind == "qwen2_5_vl")
    assert main(["convert", "--to", "hf", str(tmp_path / "adapter"), str(tmp_path / "hf")]) == 0
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-4, rtol=0)

    text = {module: pair for module, pair in pairs.items() if "visual" not in module}
    settings = Adapters(4, 6.0, 0.0, str(base))
    weights.write_adapter(tmp_path / "ours", dict(weights.named(text)), settings, base)
    recwarn.clear()
    model = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), tmp_path / "ours")
    torch.testing.assert_close(logits(model.eval()), wanted, atol=1e-5, rtol=0)
    assert not any("missing" in str(warning.message) for warning in recwarn)
    assert sorted(read_shapes(read_peft_adapter(tmp_path / "ours", "key"), "key", base)) == sorted(text)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(use_dora=True), "a PEFT adapter with use_dora, which is not supported"),
        (dict(modules_to_save=["lm_head"]), "with modules_to_save"),
        (dict(bias="lora_only"), "with bias lora_only"),
        (dict(lora_bias=True), "with lora_bias"),
        (dict(alpha_pattern={"q_proj": 3}), "with alpha_pattern"),
        (dict(layer_replication=[[0, 2]]), "with layer_replication"),
        (dict(target_parameters=["experts"]), "with target_parameters"),
        (dict(trainable_token_indices=[1]), "with trainable_token_indices"),
        (dict(fan_in_fan_out=True), "with fan_in_fan_out"),
        (dict(a_later_invention=1), "with a_later_invention"),
        (dict(init_lora_weights="pissa"), "init_lora_weights pissa, which changes the base model"),
        (dict(peft_type="IA3"), "of type IA3, which is not supported; supported: LORA"),
        (dict(r=0), "has r 0, which must be a positive number"),
        (dict(lora_alpha=float("nan")), "has lora_alpha nan, which must be a positive number"),
        (dict(lora_alpha=10**400), "has lora_alpha 1000"),
        (dict(target_modules=5), "has target_modules 5, which must be texts"),
        (dict(target_modules=[["q_proj"]]), "which must be texts"),
        (dict(lora_dropout="x"), "has lora_dropout 'x', which must be from 0 to below 1"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused_by_name(changes, message, base, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").touch()
    content = dict(peft_type="LORA", r=4, lora_alpha=6, base_model_name_or_path=str(base))
    (folder / "adapter_config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ConfigError, match=message):
        read_peft_adapter(folder, "SOURCE")


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(base_model_name_or_path="nowhere"), "nowhere, was not found"),
        (dict(base_model_name_or_path="some/model"), "pass the folder of the base model with --model"),
        (dict(base_model_name_or_path=None), "the base model of the adapter"),
    ],
)
def test_an_adapter_whose_base_is_not_here_asks_for_it(config, message, base, tmp_path, capsys):
    write_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    arguments = ["convert", "--to", "hf", str(tmp_path / "adapter"), str(tmp_path / "hf")]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("error") == 1 and not (tmp_path / "hf").exists()
    assert main([*arguments, "--model", str(base)]) == 0


def test_an_adapter_of_another_model_is_refused(base, tmp_path, capsys):
    write_adapter(base, tmp_path / "adapter")
    other = write_model("llama", tmp_path / "other", hidden_size=64)
    assert main(["convert", "--to", "hf", str(tmp_path / "adapter"), str(tmp_path / "hf"), "--model", str(other)]) == 2
    assert "mlp.down_proj is for shape (32, 48), " in (said := capsys.readouterr().err) and "has (64, 48)" in said
    assert not list(tmp_path.glob(".writing*"))


def test_a_pickled_adapter_is_not_read(base, tmp_path):
    write_adapter(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ConfigError, match="adapter_model.bin is a pickle, which is not supported"):
        read_peft_adapter(tmp_path / "adapter", "SOURCE")
