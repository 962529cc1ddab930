"""Distributed checkpoints that Megatron-core's GPTModel writes go in, are trained, and come back to it."""

from __future__ import annotations

import dist_cases
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

MODELS = ["qwen2-tied", "qwen3", "qwen3-moe"]


def hf_logits(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(dist_cases.tokens()).logits


@pytest.fixture(scope="module")
def made(on_ranks, model_folder, tmp_path_factory):
    """``made(model)``: a checkpoint by Megatron-core, its logits, and the Hugging Face folder that it gives."""
    done = {}

    def make(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("gpt")
            (logits,) = on_ranks("TP1", dist_cases.save_gpt, model_folder(name), folder / "mcore")
            on_ranks("TP1", dist_cases.to_huggingface, folder / "mcore", folder / "hf", model_folder(name))
            done[name] = folder, logits
        return done[name]

    return make


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_megatron_core_gives_its_logits_in_transformers(name, made):
    folder, logits = made(name)
    torch.testing.assert_close(hf_logits(folder / "hf"), logits[..., : tiny_models.VOCABULARY], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_the_layout_that_wrote_a_checkpoint_does_not_matter(layout, on_ranks, model_folder, tmp_path):
    model = model_folder("qwen3")
    on_ranks(layout, dist_cases.save_gpt, model, tmp_path / "mcore")
    on_ranks("TP1", dist_cases.to_huggingface, tmp_path / "mcore", tmp_path / "hf", model)
    (again,) = on_ranks("TP1", dist_cases.load_gpt, model, tmp_path / "mcore" / "iter_0000007")
    torch.testing.assert_close(hf_logits(tmp_path / "hf"), again[..., : tiny_models.VOCABULARY], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name, layout", [*((name, "TP1") for name in MODELS), ("qwen3", "TP2"), ("qwen3", "PP2")])
def test_a_checkpoint_of_megatron_core_is_trained_and_comes_back(name, layout, made, on_ranks, tmp_path):
    source = made(name)[0] / "hf"
    arguments = (source, tiny_models.make_batch(), tmp_path / "hf", tmp_path / "mcore")
    steps = on_ranks(layout, dist_cases.train_and_export, *arguments)[0]
    assert len(steps) == 2
    trained = hf_logits(tmp_path / "hf")
    assert (trained - hf_logits(source)).abs().max() > 1e-4
    (again,) = on_ranks("TP1", dist_cases.load_gpt, source, tmp_path / "mcore" / "release")
    torch.testing.assert_close(again[..., : tiny_models.VOCABULARY], trained, atol=1e-5, rtol=0)
