"""Distributed checkpoints that Megatron-core's GPTModel writes go in, are trained, and come back to it."""

from __future__ import annotations

import subprocess
import sys

import dist_cases
import peft
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from gdpo_nemo.weights.model_folder import differences

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


def convert(*arguments: object) -> tuple[int, str]:
    """Exit status and stderr of ``gdpo-nemo convert`` in a process of its own: Megatron is never imported here."""
    command = [sys.executable, "-m", "gdpo_nemo", "convert", "--to", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stderr


def test_the_command_writes_a_checkpoint_of_megatron_core_and_reads_it_again(model_folder, tmp_path):
    model = model_folder("qwen3")
    status, said = convert("megatron", model, tmp_path / "mcore", "--layout", "tensor=2")
    assert status == 0, said
    assert convert("hf", tmp_path / "mcore", tmp_path / "back") == (0, "")
    assert differences(tmp_path / "back", model) == []
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_a_lora_run_becomes_an_adapter_of_peft(on_ranks, model_folder, tmp_path):
    model = model_folder("qwen3")
    on_ranks("TP1", dist_cases.lora_run, model, tiny_models.make_batch(), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    status, said = convert("peft", checkpoint, tmp_path / "adapter")
    assert status == 0, said
    status, said = convert("hf", tmp_path / "adapter", tmp_path / "merged")
    assert status == 0, said
    status, said = convert("hf", checkpoint, tmp_path / "exported")
    assert status == 0, said
    assert differences(tmp_path / "merged", tmp_path / "exported") == []
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(dist_cases.tokens()).logits
    torch.testing.assert_close(adapted, hf_logits(tmp_path / "merged"), atol=1e-5, rtol=0)
    status, said = convert("megatron", checkpoint, tmp_path / "mcore")
    assert status == 2 and "holds adapters; make it --to hf first" in said
