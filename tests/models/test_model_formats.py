"""What a path is, is told from its content; what is not read is refused by name, in one sentence."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
import torch

from gdpo_nemo.commands import cli
from gdpo_nemo.models import sources
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.sources import Format, recognise
from gdpo_nemo.utils.errors import ConfigError


def pytorch(path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, path)


def old_pytorch(path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


def archive(path: Path, *names: str, mode: str = "w", size: int = 2) -> None:
    with tarfile.open(path, mode) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))


def nemo_1(path: Path) -> None:
    archive(path, "./model_config.yaml", "./model_weights.ckpt")


def nemo_1_compressed(path: Path) -> None:
    archive(path, "model_config.yaml", mode="w:gz")


def nemo_1_zarr(path: Path) -> None:
    archive(path, "./model_weights/metadata.json", "./model_weights/model.embedding.weight/.zarray")


def nemo_1_torch_dist(path: Path) -> None:
    archive(path, "./model_weights/.metadata", "./model_weights/__0_0.distcp", "./model_config.yaml")


def other_archive(path: Path) -> None:
    archive(path, "../model.safetensors", "/etc/passwd")


def onnx(path: Path) -> None:
    path.write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.6.0:\x04\n\x02\x08\x01")


def safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, path)


def words(path: Path) -> None:
    path.write_text("what is this?")


FILES = [
    (pytorch, "a PyTorch pickle, which may run code"),
    (old_pytorch, "a PyTorch pickle, which may run code"),
    (nemo_1, "with weights in a PyTorch pickle, which is not supported; convert it"),
    (nemo_1_compressed, "which is not supported; convert it to Hugging Face's format with nemo-toolkit"),
    (nemo_1_zarr, "with weights in format zarr, which is not supported"),
    (nemo_1_torch_dist, "with weights in format torch_dist; unpack it and specify its folder model_weights"),
    (other_archive, "an archive, which is not a supported model format"),
    (onnx, "an ONNX graph"),
    (safetensors, "a single safetensors file; specify the folder"),
    (words, "not a model in a supported format"),
]


@pytest.mark.parametrize("write, message", FILES, ids=[write.__name__ for write, _ in FILES])
def test_format_of_a_file_follows_from_its_content(write, message, tmp_path):
    file = tmp_path / "model.gguf"
    write(file)
    with pytest.raises(ConfigError, match=message):
        recognise(file)


def test_a_compressed_archive_is_listed_up_to_a_limit_and_its_members_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MOST_BYTES", 2**20)
    names = [f"model_weights/part{number}" for number in range(64)]
    archive(tmp_path / "large.nemo", *names, "model_config.yaml", "last.ckpt", mode="w:gz", size=2**18)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"a NeMo 1 checkpoint \(.nemo\), which is not supported"):
        recognise(tmp_path / "large.nemo")
    assert [path.name for path in tmp_path.iterdir()] == ["large.nemo"]
    (tmp_path / "large.nemo").write_bytes((tmp_path / "large.nemo").read_bytes()[:100])
    with pytest.raises(ConfigError, match="an archive, which is not a supported model format"):
        recognise(tmp_path / "large.nemo")


def folder(path: Path, **files: str) -> Path:
    """A folder with these files; two underscores stand for a slash, one dollar for a dot."""
    for name, content in files.items():
        file = path / name.replace("__", "/").replace("DOT", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return path


DIST = {"metadataDOTjson": '{"sharded_backend": "torch_dist"}', "DOTmetadata": ""}


def inside(place: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{place}__{name}": content for name, content in files.items()}


@pytest.mark.parametrize(
    "files, form, place",
    [
        (dict(adapter_configDOTjson="{}"), Format.PEFT, ""),
        (dict(filesDOTjson="{}", stateDOTjson="{}", **DIST), Format.CHECKPOINT, ""),
        (DIST, Format.MEGATRON, ""),
        (dict(latest_checkpointed_iterationDOTtxt="12\n", **inside("iter_0000012", DIST)),
         Format.MEGATRON, "iter_0000012"),
        (dict(latest_checkpointed_iterationDOTtxt="release", **inside("release", DIST)), Format.MEGATRON, "release"),
        (dict(context__modelDOTyaml="{}", **inside("weights", DIST)), Format.NEMO_2, "weights"),
        (dict(xDOTgguf="GGUF"), Format.GGUF, "x.gguf"),
    ],
)  # fmt: skip
def test_format_of_a_folder_follows_from_its_content(files, form, place, tmp_path):
    found = recognise(folder(tmp_path, **files))
    assert found is not None and (found.format, found.path) == (form, tmp_path / place)


@pytest.mark.parametrize(
    "files",
    [{}, dict(configDOTjson="{}"), dict(configDOTjson="{}", adapter_configDOTjson="{}", modelDOTsafetensors="")],
)
def test_hugging_face_folder_and_empty_folder_have_no_other_format(files, tmp_path):
    assert recognise(folder(tmp_path, **files)) is None


@pytest.mark.parametrize(
    "files, message",
    [
        (dict(mp_rank_00__model_optim_rngDOTpt=""), "in the old pickle format .mp_rank_00"),
        (dict(latest_checkpointed_iterationDOTtxt="3", iter_0000003__mp_rank_00_000__xDOTpt=""), "old pickle format"),
        (dict(latest_checkpointed_iterationDOTtxt="3"), "lacks iter_0000003"),
        (dict(metadataDOTjson='{"sharded_backend": "zarr"}'), "format zarr, which is not supported; supported: torch"),
        (dict(metadataDOTjson="[]"), "has no metadata.json of Megatron-core"),
        (dict(metadataDOTjson='{"sharded_backend": "torch_dist"}'), "has no .metadata"),
        (dict(aDOTgguf="GGUF", bDOTgguf="GGUF"), "has 2 GGUF files; specify one"),
        (dict(modelDOTonnx="\b\b\x12"), "model.onnx is an ONNX graph"),
    ],
)  # fmt: skip
def test_a_folder_in_a_format_that_is_not_read_is_named(files, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        recognise(folder(tmp_path, **files))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(quantization_config=dict(quant_method="bitsandbytes")), "these are by bitsandbytes"),
        (dict(quantization_config=dict(quant_method="gptq", bits=4)), "these are by gptq"),
        (dict(quantization=dict(group_size=64, bits=4)), "these are by MLX"),
        (dict(quantization_config=dict(quant_method="mxfp4")), "these are by mxfp4"),
        (dict(quantization=dict(bits=4), quantization_config=dict(bits=4)), "these are by MLX"),
    ],
)
def test_quantised_folder_is_refused_with_its_quantisation_method(fields, message):
    with pytest.raises(ConfigError, match=message):
        describe({"model_type": "llama", **fields})


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_named_as_a_model_is_not_run(tmp_path, capsys):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "ran"), protocol=4))
    assert cli.main(["convert", "--to", "hf", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "SOURCE" in (said := capsys.readouterr().err) and "PyTorch pickle" in said and said.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("write, message", FILES, ids=[write.__name__ for write, _ in FILES])
def test_a_dry_run_names_the_format_in_one_line(write, message, tmp_path, capsys):
    file = tmp_path / "model"
    write(file)
    assert cli.main(["train", "--dry-run", f"policy.model_name={file}", "policy.model_factory=null"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: policy.model_name: ") and message in said and said.count("\n") == 1


def test_adapter_config_that_is_not_json_is_refused(tmp_path):
    from gdpo_nemo.models.peft import read_peft_adapter

    with pytest.raises(ConfigError, match="not valid JSON"):
        read_peft_adapter(folder(tmp_path, adapter_configDOTjson="{"), "x")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_peft_adapter(folder(tmp_path, adapter_configDOTjson=json.dumps([])), "x")
