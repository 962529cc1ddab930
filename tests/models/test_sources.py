"""A run whose ``policy.model_name`` is a model in another format: checked before it, converted once, found again."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import load_file, save_file
from tiny_models import write_model

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import model_source
from gdpo_nemo.models.hf_folder import differences
from gdpo_nemo.models.torch_dist import EMBEDDING, Held, model_tensors, read_dist_metadata
from gdpo_nemo.training.inputs import converted_path, model_folder, starting_adapter
from gdpo_nemo.utils.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model("qwen2", tmp_path_factory.mktemp("sources") / "model")


def config_of(source, tmp_path, *overrides):
    names = (f"policy.model_name={source}", "policy.model_factory=null", f"run.dir={tmp_path}/results/run")
    return load_config(None, [*names, *overrides])


@pytest.mark.slow
def test_a_gguf_file_is_converted_once_and_again_when_it_changes(model, tmp_path, capfd):
    file = tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf")
    folder = model_folder(config_of(file, tmp_path), model_source(config_of(file, tmp_path).policy))
    assert folder.parent == tmp_path / "results" / "models" and folder.name.startswith("tiny-")
    assert f"{file} is a GGUF file; converting it to {folder}\n" in capfd.readouterr().out
    assert differences(folder, model) == []
    assert (
        model_folder(config_of(file, tmp_path), model_source(config_of(file, tmp_path).policy)) == folder
        and capfd.readouterr().out == ""
    )
    assert not list(folder.parent.glob(".*"))

    def converted() -> Path:
        config = config_of(file, tmp_path)
        return converted_path(config.run, model_source(config.policy), None)

    assert converted() == folder
    tiny_gguf.write_gguf(write_model("qwen2", tmp_path / "other", seed=8), file)
    assert not converted().exists(), "a changed file is converted to another folder"


def test_an_adapter_goes_with_the_content_of_its_base(model, tmp_path):
    from gdpo_nemo.models.sources import Format, Source

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    config = config_of(adapter, tmp_path)
    found = set()
    for base in (model, write_model("qwen2", tmp_path / "other", seed=8)):
        content = dict(peft_type="LORA", base_model_name_or_path=str(base))
        (adapter / "adapter_config.json").write_text(json.dumps(content))
        (adapter / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": "x/y"}))
        found.add(converted_path(config.run, Source(Format.PEFT, adapter, adapter), str(base)))
    assert len(found) == 2


TARGETS = ("q_proj", "v_proj")


def write_adapter(folder: Path, base: Path, layers=range(4), rank: int = 4, **changes) -> Path:
    """An adapter of zeros on q and v of the layers, as ``peft`` writes it."""
    folder.mkdir()
    shapes = {"q_proj": (32, 32), "v_proj": (16, 32)}
    matrices = {}
    for layer in layers:
        for module in TARGETS:
            rows, columns = shapes[module]
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            matrices[f"{name}.lora_A.weight"] = np.zeros((rank, columns), np.float32)
            matrices[f"{name}.lora_B.weight"] = np.zeros((rows, rank), np.float32)
    save_file(matrices, folder / "adapter_model.safetensors")
    content = dict(peft_type="LORA", base_model_name_or_path=str(base), r=rank, lora_alpha=8, target_modules=TARGETS)
    (folder / "adapter_config.json").write_text(json.dumps(content | changes))
    return folder


def lora(**changes) -> list[str]:
    values = dict(rank=4, alpha=8, target_modules="[q_proj,v_proj]") | changes
    return [f"policy.lora.{name}={value}" for name, value in values.items()]


@pytest.mark.slow
def test_a_lora_run_on_an_adapter_takes_its_base_as_the_model_and_its_matrices(model, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", model)
    config = config_of(adapter, tmp_path, *lora())
    assert (
        model_folder(config, model_source(config.policy)) == model
        and starting_adapter(config.policy, model_source(config.policy)) == adapter
    )
    merged = config_of(adapter, tmp_path)
    assert (
        model_folder(merged, model_source(merged.policy)).parent.name == "models"
        and starting_adapter(merged.policy, model_source(merged.policy)) is None
    )


def test_an_adapter_needs_no_matrices_for_layers_that_only_predict_further_tokens(model, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(model, base)
    tensors = load_file(base / "model.safetensors")
    names = [name for name in tensors if name.startswith("model.layers.3.")]
    further = {name.replace("layers.3", "layers.4"): tensors[name] for name in names}
    save_file(tensors | further, base / "model.safetensors")
    for layers, fits in ((range(4), True), (range(3), False)):
        config = config_of(write_adapter(tmp_path / f"adapter{fits}", base, layers), tmp_path, *lora())
        with nullcontext() if fits else pytest.raises(ConfigError, match="no matrices for model.layers.3.self_attn"):
            assert model_folder(config, model_source(config.policy)) == base


@pytest.mark.parametrize(
    "adapter, run, message",
    [
        ({}, dict(rank=8, alpha=16), "policy.lora.rank: must match the adapter .* .4., got 8"),
        ({}, dict(alpha=16), "policy.lora.alpha: must match the adapter .* .8., got 16"),
        (
            dict(use_rslora=True),
            {},
            "policy.lora.alpha: must match the adapter .* .16 .rsLoRA: 8 x the square root of 4.., got 8",
        ),
        (
            {},
            dict(target_modules="[q_proj]"),
            "policy.lora.target_modules: must match the adapter .* .q_proj, v_proj., got q_proj",
        ),
        (dict(layers=[0, 2]), {}, "policy.lora.target_modules: .* has no matrices for model.layers.1.self_attn.q_proj"),
        (
            {},
            dict(share_a="true"),
            "policy.lora.share_a: must match the adapter .* .a separate matrix A for each module., got true",
        ),
    ],
)
def test_a_lora_run_on_an_adapter_of_another_kind_is_refused_by_name(adapter, run, message, model, tmp_path, capsys):
    source = write_adapter(tmp_path / "adapter", model, **adapter)
    names = [f"policy.model_name={source}", "policy.model_factory=null", "policy.max_total_sequence_length=64"]
    assert cli.main(["train", "--dry-run", *names, *lora(**run)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1
    with pytest.raises(ConfigError, match=message):
        model_folder(
            config_of(source, tmp_path, *lora(**run)), model_source(config_of(source, tmp_path, *lora(**run)).policy)
        )


def test_dry_run_reports_that_an_adapter_does_not_fit_its_base(model, tmp_path, capsys):
    other = write_model("qwen2", tmp_path / "other", hidden_size=64)
    source = write_adapter(tmp_path / "adapter", other)
    names = [f"policy.model_name={source}", "policy.model_factory=null", "policy.max_total_sequence_length=64"]
    assert cli.main(["train", "--dry-run", *names]) == 2
    assert "q_proj is for shape (32, 32), " in capsys.readouterr().err and not (tmp_path / "results").exists()


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("what", ["a pickle that runs", "damage", "nothing", "a huge memo"])
def test_an_index_of_a_checkpoint_that_would_run_code_is_refused(what, model, tmp_path, capsys):
    checkpoint = tmp_path / "mcore"
    checkpoint.mkdir()
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    content = {
        "a pickle that runs": pickle.dumps(Runs(tmp_path / "ran")),
        "damage": b"\x80\x04x",
        "nothing": b"",
        "a huge memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    }[what]
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match="not a valid index of a Megatron-core checkpoint"):
        read_dist_metadata(checkpoint, "SOURCE")
    arguments = ["convert", "--to", "hf", str(checkpoint), str(tmp_path / "out"), "--model", str(model)]
    assert cli.main(arguments) == 2 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_a_separate_output_layer_is_refused_if_config_json_ties_the_embeddings(tmp_path):
    """NeMo's Qwen2 models have one, even those whose Hugging Face model ties the embeddings."""
    weights = {f"module.{EMBEDDING}": (8, 4), "module.output_layer.weight": (8, 4), "module.decoder.layers.0.a": (4,)}
    stored = {name: Held(shape, "bfloat16") for name, shape in weights.items()}
    fields = {"hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 7, "tie_word_embeddings": False}
    found = model_tensors(stored, fields, tmp_path, "SOURCE")
    assert found.keys() == {EMBEDDING, "output_layer.weight", "decoder.layers.0.a"}
    with pytest.raises(ConfigError, match="ties the embeddings; set tie_word_embeddings to false there"):
        model_tensors(stored, {**fields, "tie_word_embeddings": True}, tmp_path, "SOURCE")


def test_a_nemo_2_checkpoint_asks_for_its_architecture_by_the_name_it_has(tmp_path):
    from gdpo_nemo.models.sources import described_by, recognise

    for name, text in {
        "context/model.yaml": "_target_: nemo.llm.LlamaModel\nconfig:\n  _target_: nemo.llm.Llama32Config1B\n",
        "weights/metadata.json": '{"sharded_backend": "torch_dist"}',
        "weights/.metadata": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"NeMo 2 checkpoint \(Llama32Config1B\), .* \(policy.tokenizer_name\)"):
        described_by(recognise(tmp_path), "policy.model_name")
    (tmp_path / "context" / "model.yaml").write_text("!!python/object/apply:os.system ['touch ran']")
    with pytest.raises(ConfigError, match="is a NeMo 2 checkpoint, which has no config.json"):
        described_by(recognise(tmp_path), "policy.model_name")
