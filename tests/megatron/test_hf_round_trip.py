"""Hugging Face -> Megatron -> Hugging Face gives every tensor back, bit by bit, under its own name."""

from __future__ import annotations

import re
import shutil

import checkpoint_cases
import numpy as np
import pytest
import rank_cases
import tiny_models
import tiny_vision
import torch
from layouts import fitting
from safetensors.numpy import load_file, save_file

from gdpo_nemo.models.hf_folder import differences, open_weights, tower_names, weight_names, write_model
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.adapters import modules_of, peft_name
from gdpo_nemo.weights.manifest import weight_metadata

pytestmark = pytest.mark.slow


DENSE = ["TP1", "TP2", "PP2", "PP2+SHORTHEAD", "TP2xPP2+SP", "TP2xDP2", "CP2xDP2", "PP2xVPP2"]
MIXTURE = ["TP1", "TP2+SP", "TP2xEP2xETP1+SP", "DP2xEP2", "PP2", "DP2", "TP2xDP2xEP2+SP", "DP4xEP2"]


@pytest.mark.parametrize("layout", DENSE)
def test_round_trip_is_bit_exact(on_ranks, model_folder, layout):
    check({name: model_folder(name) for name in (*tiny_models.DENSE, *tiny_vision.KINDS)}, on_ranks, layout)


@pytest.mark.parametrize("layout", MIXTURE)
def test_round_trip_of_experts_is_bit_exact(on_ranks, model_folder, layout):
    """The experts in several batches of several tensors, the last of which is not full."""
    names = [name for name in tiny_models.MIXTURES if fitting(layout, name) == layout]
    check({name: model_folder(name) for name in names}, on_ranks, layout, 31_000)


@pytest.mark.parametrize(
    "model, layer",
    [("deepseek-v3", "model.layers.4."), ("nemotron-3-super", "mtp.layers.0.")],
)
def test_layers_for_multi_token_prediction_are_exported_and_never_sent_to_engines(model_folder, tmp_path, model, layer):
    from transformers import AutoConfig

    source = tmp_path / "source"
    shutil.copytree(model_folder(model), source)
    tensors = load_file(source / "model.safetensors")
    last = re.compile(r"\w+\.layers\.3\.")
    predictions = {last.sub(layer, name): tensors[name] + 1 for name in tensors if last.match(name)}
    predictions[f"{layer}eh_proj.weight"] = np.ones((32, 64), np.float16)
    predictions[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors | predictions, source / "model.safetensors")
    names = weight_names(source)
    assert set(names) == set(tensors)
    read = open_weights(source)
    config = AutoConfig.from_pretrained(source)
    write_model(tmp_path / "exported", ((name, read(name)) for name in names), config, source)
    assert differences(source, tmp_path / "exported") == []


def test_experts_are_also_read_from_fused_tensors(on_ranks, model_folder, tmp_path):
    """Folders may hold a layer's experts as transformers keeps them in memory; what is exported is per expert."""
    from transformers import AutoModelForCausalLM

    for name in ("mixtral", "qwen3-moe"):
        model = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype="float32")
        fused = {key: tensor.detach().numpy() for key, tensor in model.state_dict().items()}
        assert any(key.endswith("experts.gate_up_proj") for key in fused)
        (tmp_path / name).mkdir()
        save_file(fused, tmp_path / name / "model.safetensors")
        model.config.save_pretrained(tmp_path / name)
        tensors = dict(on_ranks("DP2xEP2", rank_cases.round_trips, {name: tmp_path / name})[0][name])
        stored = load_file(model_folder(name) / "model.safetensors")
        assert tensors.keys() == stored.keys()
        assert all(np.array_equal(tensors[key], stored[key]) for key in stored)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_an_update_has_a_tower_only_if_it_is_trained_and_adapters_only_outside(on_ranks, model_folder, kind):
    folder = model_folder(kind)
    names, tower = weight_names(folder), set(tower_names(folder))
    text = [name for name in names if name not in tower]
    frozen, trained = (on_ranks("PP2", rank_cases.update_names, folder, (), train)[0] for train in (False, True))
    assert sorted(frozen) == sorted(text) and sorted(trained) == sorted(names) != sorted(text)
    targets = ["q_proj", "gate_proj"]
    adapters = on_ranks("PP2", rank_cases.update_names, folder, targets)[0]
    assert sorted(adapters) == sorted(peft_name(name, letter) for name in modules_of(text, targets) for letter in "AB")
    manifest = weight_metadata(((name, torch.empty(0)) for name in [*frozen, min(tower)]), 1)
    with pytest.raises(RunError, match=f"{len(tower) - 1} tensors missing"):
        manifest.check_names(names, frozen=tower)


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_an_export_never_holds_the_whole_model(on_ranks, model_folder, layout):
    """With a tensor a batch, two at a time: the one that is handed out while the next is made, and its neighbour of a
    fused matrix."""
    assert max(on_ranks(layout, rank_cases.exported_at_once, model_folder("qwen2"))) <= 4


SCALED = {
    # Half a billion parameters with a tied embedding, and 7 and 30 billion parameters, at an eighth of their widths.
    "qwen2.5-0.5b": dict(
        model_type="qwen2", hidden_size=112, intermediate_size=608, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=18992, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": dict(
        model_type="qwen2", hidden_size=448, intermediate_size=2368, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=19008, tie_word_embeddings=False,
    ),
    # Fewer experts and layers, in the same ratio to the vocabulary.
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", hidden_size=256, moe_intermediate_size=96, num_hidden_layers=12, num_experts=32,
        num_attention_heads=32, num_key_value_heads=4, head_dim=16, vocab_size=1192, tie_word_embeddings=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout, model",
    [("DP4", "qwen2.5-0.5b"), ("TP2xPP2", "qwen2.5-0.5b"), ("DP4", "qwen2.5-7b"), ("TP2xPP2", "qwen2.5-7b"),
     ("DP4xEP4", "qwen3-30b-a3b"), ("DP4xEP2", "qwen3-30b-a3b")],
)  # fmt: skip
def test_every_rank_sends_about_its_share_and_copies_one_piece_at_a_time(on_ranks, layout, model):
    from transformers import AutoConfig

    found = on_ranks(layout, rank_cases.bytes_sent, AutoConfig.for_model(**SCALED[model]), (16 << 20) // 64)
    sent, largest, copied = zip(*found)
    share = sum(sent) / len(sent)
    print(f"| {model} | {layout} | {sum(sent):,} | {sent[0] / share:.3f} | {max(sent) / share:.3f} |")
    assert max(sent) <= 1.2 * share
    assert all(most <= 2 * piece for most, piece in zip(copied, largest))


def check(folders, on_ranks, layout, batch_bytes=256 << 20):
    for name, tensors in on_ranks(layout, rank_cases.round_trips, folders, batch_bytes)[0].items():
        stored = load_file(folders[name] / "model.safetensors")
        assert sorted(key for key, _ in tensors) == sorted(stored), name
        for key, tensor in tensors:
            np.testing.assert_array_equal(tensor, stored[key], err_msg=f"{name}: {key}")


def missing(name, tensor):
    if name == "model.layers.2.mlp.up_proj.weight":
        raise KeyError(name)
    return tensor


def cut(name, tensor):
    return tensor[:-1] if name == "model.layers.1.self_attn.o_proj.weight" else tensor


@pytest.mark.parametrize("fault, culprit", [(missing, "layers.2.mlp.up_proj"), (cut, "layers.1.self_attn.o_proj")])
def test_a_missing_or_misshapen_tensor_is_named(on_ranks, model_folder, fault, culprit):
    assert culprit in on_ranks("TP1", checkpoint_cases.load_failure, model_folder("qwen3"), fault)[0]
