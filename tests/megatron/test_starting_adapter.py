"""A LoRA run that goes on with the matrices of a PEFT adapter starts as what ``peft`` makes of it, at every layout."""

from __future__ import annotations

import adapter_cases
import hf_reference
import peft
import pytest
import rank_cases
import tiny_models
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gdpo_nemo.config.schema import LoraConfig

pytestmark = pytest.mark.slow

CASES = {
    "qwen2": ["q_proj", "v_proj", "down_proj", "lm_head"],
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "qwen3.5": ["q_proj", "in_proj_qkv", "in_proj_b", "out_proj"],
    "qwen3-next": ["q_proj", "in_proj_qkvz", "in_proj_ba", "o_proj"],
}


def write_adapter(base, folder, targets, **options):
    """An adapter of ``peft`` with random matrices, and the model with it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": targets} | options)
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.eval()


@pytest.fixture(scope="module")
def adapted(model_folder, tmp_path_factory):
    """``adapted(name, **options)``: the base, the adapter's folder, and log-probs by ``peft`` with and without it."""

    def make(name, **options):
        base, folder = model_folder(name), tmp_path_factory.mktemp("adapter")
        model = write_adapter(base, folder, CASES[name], **options)
        batch = tiny_models.make_batch()
        with torch.no_grad(), model.disable_adapter():
            _, _, without = hf_reference._loss(model, batch, 1.0)
        with torch.no_grad():
            _, _, beside = hf_reference._loss(model, batch, 1.0)
        return base, folder, beside, without

    return make


@pytest.mark.parametrize(
    "layout, name",
    [
        ("TP1", "qwen2"),
        ("TP2", "qwen2"),
        ("PP2", "qwen2"),
        ("DP2+DIST", "qwen2"),
        ("TP2+SP", "phi3"),
        ("TP2+SP", "qwen3.5"),
        ("TP2+SP", "qwen3-next"),
    ],
)
def test_a_policy_starts_with_the_log_probs_of_peft_and_trains_from_there(layout, name, adapted, on_ranks):
    base, folder, beside, without = adapted(name)
    batch = tiny_models.make_batch()
    settings = LoraConfig(rank=4, alpha=6.0, target_modules=CASES[name])
    results = on_ranks(layout, adapter_cases.continued_adapters, base, folder, batch, settings)
    for place, wanted in enumerate((beside, without)):
        found = rank_cases.by_sequence([result[0][place] for result in results], batch)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), atol=1e-5, rtol=0)
    assert max(abs(a - b).max() for a, b in zip(beside, without)) > 0.1
    saved = load_file(folder / "adapter_model.safetensors")
    start, later = results[0][1]
    assert 2 * len(start) == len(saved)
    for module, pair in start.items():
        for letter, matrix, after in zip("AB", pair, later[module]):
            assert torch.equal(matrix, saved[f"base_model.model.{module}.lora_{letter}.weight"])
            assert 0 < (after - matrix).abs().max() < 1e-5, "an update of learning rate 1e-6, from the same place"


def test_a_scale_by_the_root_of_the_rank_is_that_of_the_run_with_its_alpha(adapted, on_ranks):
    base, folder, beside, _ = adapted("qwen2", use_rslora=True)
    batch = tiny_models.make_batch()
    settings = LoraConfig(rank=4, alpha=12.0, target_modules=CASES["qwen2"])
    results = on_ranks("TP1", adapter_cases.continued_adapters, base, folder, batch, settings)
    found = rank_cases.by_sequence([result[0][0] for result in results], batch)
    for ours, theirs in zip(found, beside, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), atol=1e-5, rtol=0)
