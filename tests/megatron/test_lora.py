"""LoRA on Megatron's fused, sharded layers is LoRA on the Hugging Face modules, at every layout."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import adapter_cases
import hf_reference
import layouts
import numpy as np
import pytest
import rank_cases
import tiny_models
import torch
from hf_reference import relative_error
from safetensors.torch import load_file

from gdpo_nemo.config.schema import LoraConfig

pytestmark = pytest.mark.slow

SETTINGS = LoraConfig(rank=4, alpha=8.0)
SOME = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "up_proj"])
SHARED = LoraConfig(rank=4, alpha=8.0, share_a=True)
HEAD = LoraConfig(rank=4, alpha=8.0, target_modules=["v_proj", "down_proj", "lm_head"])
HEAD_SHARED = LoraConfig(rank=4, alpha=8.0, target_modules=["k_proj", "v_proj", "lm_head"], share_a=True)
# Phi-3 has these two in one matrix each, so PEFT's pair of each is trained as an A and two or three Bs.
IN_ONE_MATRIX = LoraConfig(rank=4, alpha=8.0, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
# Of a dense layer, of shared experts and of each expert.
EXPERTS = LoraConfig(rank=4, alpha=8.0, target_modules=["kv_b_proj", "gate_proj", "up_proj", "down_proj"])
# Of shared experts and of each expert, which has no gate and processes latent vectors.
LATENT_EXPERTS = LoraConfig(rank=4, alpha=8.0, target_modules=["up_proj", "down_proj"])
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Modules of an expert in each stacked tensor of transformers. A family has the first or the second one."""
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate-up", "up_proj": "gate-up"}


class MergedExperts(torch.nn.Module):
    """The stacked matrices of a layer's experts, with a pair beside each matrix of each expert."""

    def __init__(self, experts: list[list[tuple | None]], scale: float):
        super().__init__()
        self.experts = experts
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        merged = []
        for matrix, pairs in zip(weight, self.experts):
            parts = zip(matrix.chunk(len(pairs)), pairs)
            sums = [part if pair is None else part + self.scale * pair[1] @ pair[0] for part, pair in parts]
            merged.append(torch.cat(sums))
        return torch.stack(merged)


def with_adapters(folder, settings: LoraConfig, start: dict):
    """The model of transformers with the pairs of ``start`` beside its linear layers; and those pairs by module."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    pairs = {}
    first = {}
    for name, module in list(model.named_modules()):
        if model.config.model_type == "nemotron_h":  # its files use another name than transformers' module
            name = re.sub("^model", "backbone", name)
        parent, _, last = name.rpartition(".")
        if name.endswith(".experts"):
            for tensor, parts in STACKED.items():
                if not hasattr(module, tensor):
                    continue
                beside = []
                for index in range(model.config.n_routed_experts):
                    names = [f"{name}.{index}.{part}" for part in parts]
                    pairs |= {n: tuple(torch.nn.Parameter(m.clone()) for m in start[n]) for n in names if n in start}
                    beside.append([pairs.get(n) for n in names])
                merged = MergedExperts(beside, settings.alpha / settings.rank)
                torch.nn.utils.parametrize.register_parametrization(module, tensor, merged, unsafe=True)
        if last in settings.target_modules:
            a, b = (torch.nn.Parameter(matrix.clone()) for matrix in start[name])
            assert a.abs().max() > 0 and not b.any()
            if settings.share_a:
                kept = first.setdefault((parent, FUSED.get(last, last)), a)
                assert torch.equal(a, kept)
                a = kept
            pairs[name] = (a, b)
            module.register_forward_hook(
                lambda module, args, out, a=a, b=b: out + (args[0] @ a.T @ b.T) * settings.alpha / settings.rank
            )
    return model, pairs


@pytest.fixture(scope="module")
def expected(on_ranks, model_folder):
    """Two updates of the adapters alone, by transformers and torch."""

    def run(settings: LoraConfig, name: str = "qwen2-tied"):
        options = layouts.optimizer()
        batch = tiny_models.make_batch()
        folder = model_folder(name)
        start = on_ranks("TP1", adapter_cases.lora_start, folder, settings)[0]
        model, pairs = with_adapters(folder, settings, start)
        assert start.keys() == pairs.keys()
        parameters = list({id(p): p for pair in pairs.values() for p in pair}.values())
        adam = torch.optim.AdamW(
            parameters, lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps,
            weight_decay=options.weight_decay,
        )  # fmt: skip
        rows = []
        for _ in range(2):
            adam.zero_grad()
            loss, entropy, _ = hf_reference._loss(model, batch, 1.0)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, options.clip_grad)
            adam.step()
            rows.append((loss.item(), norm.item(), entropy))
        return settings, folder, np.array(rows), {name: (a.detach(), b.detach()) for name, (a, b) in pairs.items()}

    return {
        "every": run(SETTINGS),
        "some": run(SOME),
        "shared": run(SHARED),
        "head": run(HEAD, "qwen2"),
        "head, shared": run(HEAD_SHARED, "qwen2"),
        "in one matrix": run(IN_ONE_MATRIX, "phi3"),
        "experts": run(EXPERTS, "deepseek-v3"),
        "latent": run(LATENT_EXPERTS, "nemotron-3-super"),
    }


@pytest.mark.parametrize(
    "layout, which",
    [("TP1", "every"), ("TP1", "some"), ("TP2", "every"), ("TP2+SP", "some"), ("TP2xPP2+SP+FULL", "every"),
     ("PP2", "some"), ("DP2+DIST", "every"), ("CP2", "every"), ("TP1", "shared"), ("TP2+SP", "shared"), ("DP2+DIST",
     "shared"),
     ("TP1", "head"), ("TP2", "head"), ("TP2xPP2+SP+FULL", "head"), ("DP2+DIST", "head, shared"), ("TP2+SP",
     "head, shared"), ("TP1", "in one matrix"), ("TP2+SP", "in one matrix"), ("PP2", "in one matrix"),
     ("TP1", "experts"), ("TP2+SP", "experts"), ("TP2xEP2xETP1+SP", "experts"), ("DP2xEP2+DIST", "experts"),
     ("PP2", "experts"), ("TP1", "latent"), ("TP2xEP2xETP1+SP", "latent")],
)  # fmt: skip
def test_adapters_learn_as_in_transformers(on_ranks, model_folder, expected, layout, which, tmp_path):
    settings, folder, steps, pairs = expected[which]
    results = on_ranks(layout, adapter_cases.lora_updates, folder, tiny_models.make_batch(), settings, str(tmp_path))
    assert max(relative_error(ours, steps) for ours, _ in results) < 1e-5
    # The export merges exactly these pairs into the frozen weights, and PEFT's file holds them under PEFT's names.
    base = load_file(folder / "model.safetensors")
    after = results[0][1]
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for name, value in base.items():
        module = name.removesuffix(".weight")
        if module in pairs:
            a, b = pairs[module]
            np.testing.assert_allclose(after[name], (value + 2.0 * b @ a).numpy(), atol=2e-6)
            for letter, matrix in zip("AB", (a, b)):
                np.testing.assert_allclose(saved[f"base_model.model.{module}.lora_{letter}.weight"], matrix, atol=2e-6)
        else:
            np.testing.assert_array_equal(after[name], value.numpy())
    assert len(saved) == 2 * len(pairs)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 8.0)
    assert set(described["target_modules"]) == set(settings.target_modules)


def test_model_without_adapters_is_the_reference_and_has_no_copy(on_ranks, model_folder):
    batch = tiny_models.make_batch()
    results = on_ranks("TP2", adapter_cases.lora_reference, model_folder("qwen2-tied"), batch, SETTINGS)
    start, moved, reference = (rank_cases.by_sequence([r[i] for r in results], batch) for i in range(3))
    for s, m, r in zip(start, moved, reference):
        np.testing.assert_array_equal(s, r)
        assert np.abs(m - r).max() > 1e-4
    assert all(result[3] for result in results)


@pytest.mark.parametrize(
    "saved, loaded, name, settings",
    [
        ("TP2xPP2", "TP1", "qwen2-tied", SETTINGS),
        ("DP2+DIST", "TP2", "qwen2-tied", SHARED),
        ("TP2xPP2", "DP2+DIST", "qwen2", HEAD_SHARED),
        ("TP1", "TP2", "qwen2", HEAD),
        ("TP2", "DP2+DIST", "phi3", IN_ONE_MATRIX),
        ("DP2xEP2+DIST", "TP2+SP", "deepseek-v3", EXPERTS),
    ],
)
def test_checkpoint_of_adapters_resumes_at_another_layout_and_contains_only_adapters(
    on_ranks, model_folder, tmp_path, saved, loaded, name, settings
):
    folder = model_folder(name)
    batch = tiny_models.make_batch()
    checkpoint = str(tmp_path / "checkpoint")
    straight = on_ranks(saved, adapter_cases.lora_checkpoint, folder, batch, settings, checkpoint, True)
    resumed = on_ranks(loaded, adapter_cases.lora_checkpoint, folder, batch, settings, checkpoint, False)
    assert relative_error(resumed[0], straight[0]) < 1e-5
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = [key for key, kind in stored.items() if hasattr(kind, "size") and len(kind.size)]
    assert tensors and all("lora_" in key for key in tensors)
    assert sum(file.stat().st_size for file in Path(checkpoint).iterdir()) > 0


def test_dropout_acts_on_updates_and_not_on_log_probs(on_ranks, model_folder):
    folder = model_folder("qwen2-tied")
    batch = tiny_models.make_batch()
    dropped = LoraConfig(rank=4, alpha=8.0, dropout=0.5)
    results = {
        name: on_ranks("TP2+SP", adapter_cases.lora_updates, folder, batch, settings)[0]
        for name, settings in (("with", dropped), ("without", SETTINGS))
    }
    # At the first update B is 0, so dropout shows in the gradient of B alone; the loss is that of the frozen model.
    assert results["with"][0][0, 0] == pytest.approx(results["without"][0][0, 0], rel=1e-6)
    assert relative_error(results["with"][0][:, 1], results["without"][0][:, 1]) > 1e-2


def test_an_output_layer_that_is_the_embedding_cannot_be_adapted(on_ranks, model_folder):
    assert (
        "lm_head is tied to the embedding"
        in on_ranks("TP1", adapter_cases.lora_targets_refused, model_folder("qwen2-tied"), HEAD)[0]
    )


@pytest.mark.parametrize("layout", ["TP1", "TP2"])
def test_logits_that_are_computed_twice_have_the_same_dropout_both_times(on_ranks, model_folder, layout):
    """In several chunks the logits are computed again in the backward pass; another mask would give another loss's
    gradient."""
    settings = dataclasses.replace(HEAD, dropout=0.5)
    for again, once in on_ranks(layout, adapter_cases.lora_head_gradients, model_folder("qwen2"), settings):
        np.testing.assert_array_equal(again, once)
        assert np.abs(once).max() > 0


def test_a_starts_from_the_distribution_that_is_asked_for(on_ranks):
    """Uniform within 1 / sqrt(width), or normal with variance 2 / (rank + width)."""
    uniform, xavier = (on_ranks("TP1", adapter_cases.starting_a, init)[0] for init in ("uniform", "xavier"))
    assert np.abs(uniform).max() <= 192**-0.5 and np.isclose(uniform.std(), (3 * 192) ** -0.5, rtol=0.05)
    assert np.isclose(xavier.std(), (2 / 256) ** 0.5, rtol=0.05) and np.abs(xavier).max() > 3 * xavier.std()
