"""The text model inside an image model is read as transformers computes it, and written back alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from gdpo_nemo.commands import cli
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.model_checks import check_files, check_model
from gdpo_nemo.config.schema import Config, PolicyConfig
from gdpo_nemo.models.hf_folder import open_weights, save_tensors, stored_names, tower_names
from gdpo_nemo.models.sources import Format, recognise
from gdpo_nemo.models.torch_dist import check_gpt_format
from gdpo_nemo.utils.errors import ConfigError

sys.path.append(str(Path(__file__).resolve().parents[1] / "megatron"))
import tiny_models  # noqa: E402
from tiny_vision import KINDS, VOCABULARY, write_tiny_vision  # noqa: E402

EYE = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, num_position_embeddings=16)
VISION = {
    "qwen3_5": EYE,
    "qwen3_5_moe": EYE,
    "gemma4": dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        position_embedding_size=16,
    ),
    "gemma3": dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=28),
}
VISION["mistral3"] = dict(VISION["gemma3"], model_type="pixtral", head_dim=8, patch_size=14)
TEXT = {
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5-moe",
    "gemma3": "gemma3",
    "gemma4": "gemma4-moe",
    "mistral3": "ministral3",
}


def write_image_model(kind: str, folder: Path) -> torch.nn.Module:
    """Save a tiny image model with its text model as in published folders, and return it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(3)
    text = tiny_models.hf_config(TEXT[kind], tie_word_embeddings=False, pad_token_id=0).to_dict()
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION[kind], tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if kind == "qwen3_5_moe":  # published folders stack the experts and contain multi-token prediction layers
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensors["mtp.norm.weight"] = torch.ones(32)
        save_tensors(tensors, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("kind", VISION)
def test_text_model_of_an_image_model_is_read_and_written_back(kind, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    image, text, out = tmp_path / "image", tmp_path / "text", tmp_path / "out"
    model = write_image_model(kind, image)
    assert recognise(image).format is Format.IMAGE
    policy = PolicyConfig(model_name=str(image), max_total_sequence_length=64)
    fields = check_model(policy, resolve_layout(Config(policy=policy))).fields
    assert fields["model_type"] == ("ministral3" if kind == "mistral3" else f"{kind}_text")
    assert cli.main(["convert", "--to", "hf", str(image), str(text)]) == 0
    assert recognise(text) is None
    ids = torch.arange(12)[None]
    alone = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    assert ("mtp.norm.weight" in stored_names(text)) == (kind == "qwen3_5_moe")

    read = open_weights(text)
    save_tensors({name: read(name) + 1 for name in stored_names(text)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(text / "model.safetensors")
    assert cli.main(["convert", "--to", "image", "--model", str(image), str(text), str(out)]) == 0
    before, after = open_weights(image), open_weights(out)
    assert stored_names(out) == stored_names(image)
    for name in stored_names(image):
        is_text = "language_model" in name or name.startswith(("lm_head", "mtp."))
        assert torch.equal(after(name), before(name) + is_text), name
    assert json.loads((out / "config.json").read_text()) == json.loads((image / "config.json").read_text())
    capsys.readouterr()


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_images_are_trained_are_not_converted(kind, tmp_path):
    """Qwen2.5-VL and Qwen3-VL are policies themselves, and formats of text models are refused by name."""
    folder = write_tiny_vision(tmp_path, kind)
    assert recognise(folder) is None
    policy = PolicyConfig(model_name=str(folder), max_total_sequence_length=64)
    config = Config(policy=policy)
    facts = check_model(policy, resolve_layout(config))
    assert facts.fields["vocab_size"] == VOCABULARY and facts.description.tower is not None
    assert set(tower_names(folder)) == {name for name in stored_names(folder) if "visual" in name}
    with pytest.raises(ConfigError, match=f"Megatron-core checkpoints of {kind} models are not supported"):
        check_gpt_format(facts.description.family, "--to megatron")
    config.algorithm.type = "reward_model"
    with pytest.raises(ConfigError, match="reward models with images are not supported"):
        check_files(config, resolve_layout(config))


def test_text_model_is_written_only_into_the_image_model_that_contained_it(tmp_path, capsys):
    write_image_model("qwen3_5", tmp_path / "image")
    other = tiny_models.write_model("qwen2", tmp_path / "other")
    for model, complaint in (
        (tmp_path / "image", "has no tensor model.layers.0"),
        (other, "must be the folder of the"),
    ):
        arguments = ["convert", "--to", "image", "--model", str(model), str(other), str(tmp_path / "out")]
        assert cli.main(arguments) == 2
        assert complaint in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
