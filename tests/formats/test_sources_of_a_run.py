"""A run whose ``policy.model_name`` is a model in another format: checked before it, converted once, found again."""

from __future__ import annotations

import json

import pytest
import tiny_gguf
from tiny_models import write_model

from gdpo_nemo import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.formats.converted import converted_path
from gdpo_nemo.inputs import model_folder
from gdpo_nemo.weights.model_folder import differences


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model("qwen2", tmp_path_factory.mktemp("sources") / "model")


def config_of(source, tmp_path, *overrides):
    names = (f"policy.model_name={source}", "policy.model_factory=null", f"run.dir={tmp_path}/results/run")
    return load_config(None, [*names, *overrides])


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(model, tmp_path, capfd):
    file = tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf")
    folder = model_folder(config_of(file, tmp_path))
    assert folder.parent == tmp_path / "results" / "models" and folder.name.startswith("tiny-")
    assert f"{file} is a GGUF file: making {folder} of it\n" in capfd.readouterr().out
    assert differences(folder, model) == []
    assert model_folder(config_of(file, tmp_path)) == folder and capfd.readouterr().out == ""
    assert not list(folder.parent.glob(".*"))
    other = write_model("qwen2", tmp_path / "other", seed=8)
    tiny_gguf.write_gguf(other, file)
    assert model_folder(config_of(file, tmp_path)) != folder


def test_an_adapter_goes_with_the_content_of_its_base(model, tmp_path):
    from gdpo_nemo.config.model_formats import Format, Source

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    config = config_of(adapter, tmp_path)
    found = set()
    for base in (model, write_model("qwen2", tmp_path / "other", seed=8)):
        content = dict(peft_type="LORA", base_model_name_or_path=str(base))
        (adapter / "adapter_config.json").write_text(json.dumps(content))
        (adapter / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": "x/y"}))
        found.add(converted_path(config, Source(Format.PEFT, adapter, adapter), str(base)))
    assert len(found) == 2


def test_adapters_on_an_adapter_are_refused_before_the_run(model, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    content = dict(peft_type="LORA", base_model_name_or_path=str(model))
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    names = [f"policy.model_name={adapter}", "policy.model_factory=null", "policy.lora.rank=8"]
    assert cli.main(["train", "--dry-run", *names, "policy.max_total_sequence_length=64"]) == 2
    assert "policy.lora.rank: training does not go on with the matrices" in capsys.readouterr().err


def test_a_nemo_2_checkpoint_is_refused_with_the_name_it_has(tmp_path):
    from gdpo_nemo.config.model_formats import recognise
    from gdpo_nemo.config.model_sources import described_by

    for name, text in {
        "context/model.yaml": "_target_: nemo.llm.LlamaModel\nconfig:\n  _target_: nemo.llm.Llama32Config1B\n",
        "weights/metadata.json": '{"sharded_backend": "torch_dist"}',
        "weights/.metadata": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"NeMo 2 checkpoint \(Llama32Config1B\), which is not read"):
        described_by(recognise(tmp_path), "policy.model_name")
    (tmp_path / "context" / "model.yaml").write_text("!!python/object/apply:os.system ['touch ran']")
    with pytest.raises(ConfigError, match="is a NeMo 2 checkpoint, which is not read"):
        described_by(recognise(tmp_path), "policy.model_name")
