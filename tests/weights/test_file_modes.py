"""Weights on disk are readable by whom the umask allows, like every other file of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from gdpo_nemo.models.hf_folder import whole_or_nothing, write_model
from gdpo_nemo.weights.adapters import Adapters, write_adapter

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_models_and_adapters_are_written_with_the_modes_of_new_files(tmp_path, umask, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_tiny_model

    made, whole, shards, adapter = (tmp_path / name for name in ("made", "whole", "shards", "adapter"))
    make_tiny_model.make_random_model(str(made), 0)
    for file in made.glob("tokenizer*"):
        file.chmod(0o600)  # the source is private, what is made of it need not be
    config = AutoConfig.from_pretrained(made)
    tensors = [("a", torch.ones(8)), ("b", torch.ones(8))]
    write_model(whole, iter(tensors), config, made)
    write_model(shards, iter(tensors), config, made, shard_bytes=8)
    matrices = {
        "base_model.model.q_proj.lora_A.weight": torch.ones(1, 2),
        "base_model.model.q_proj.lora_B.weight": torch.ones(2, 1),
    }
    write_adapter(adapter, matrices, Adapters(1, 1.0, 0.0, "base"))
    assert len(list(shards.glob("*.safetensors"))) == 2 and list(whole.glob("tokenizer*"))
    assert [modes(folder) for folder in (whole, shards, adapter)] == [{0o666 & ~umask}] * 3
    assert (made / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_first_of_two_processes_that_make_one_model_names_it_and_the_other_uses_it(tmp_path, capsys):
    folder = tmp_path / "model"
    with whole_or_nothing(folder) as second:
        (second / "config.json").write_text("second")
        with whole_or_nothing(folder) as first:
            (first / "config.json").write_text("first")
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "the other copy is gone"
    assert (folder / "config.json").read_text() == "first"
    assert "created by another process in the meantime" in capsys.readouterr().out
