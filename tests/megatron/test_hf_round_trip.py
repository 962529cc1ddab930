"""Hugging Face -> Megatron -> Hugging Face gives every tensor back, bit by bit, under its own name."""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
from safetensors.numpy import load_file

MODELS = ["llama", "mistral", "qwen2", "qwen2-tied", "qwen3"]


@pytest.mark.parametrize("layout", ["TP1", "TP2", "PP2"])
def test_round_trip_is_bit_exact(on_ranks, model_folder, layout):
    folders = {name: model_folder(name) for name in MODELS}
    for name, tensors in on_ranks(layout, rank_cases.round_trips, folders)[0].items():
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
    assert culprit in on_ranks("TP1", rank_cases.load_failure, model_folder("qwen3"), fault)[0]
