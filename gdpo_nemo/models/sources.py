"""Model sources: detection of a model's format by its content, and location of its config.json. No torch."""

from __future__ import annotations

import re
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.models.architectures import text_fields
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.gguf import MAGIC, read_gguf_model
from gdpo_nemo.models.peft import CONFIG as PEFT_CONFIG, PeftAdapter, read_peft_adapter
from gdpo_nemo.models.torch_dist import check_gpt_format, model_tensors, read_dist_metadata
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import parse_json, parse_yaml, read_json_object, read_text, real_path

_LATEST_FILE = "latest_checkpointed_iteration.txt"
"""File in which Megatron-LM writes the name of the latest checkpoint folder (iter_0000001, ... or release)."""


class Format(Enum):
    """Formats that can be converted to a Hugging Face folder. The values are descriptions for messages."""

    GGUF = "a GGUF file"
    PEFT = "a PEFT adapter"
    CHECKPOINT = "a checkpoint of gdpo_nemo"
    MEGATRON = "a Megatron-core checkpoint"
    NEMO_2 = "a NeMo 2 checkpoint"
    MXFP4 = "a Hugging Face folder with MXFP4 weights"
    FP8 = "a Hugging Face folder with FP8 weights"
    IMAGE = "an image model with a text model inside"


DOWNLOADED = (Format.MXFP4, Format.FP8, Format.IMAGE)
"""Formats of folders with config.json and tokenizer, as on the hub."""


@dataclass(frozen=True)
class Source:
    """A model in a format other than Hugging Face's."""

    format: Format
    path: Path
    """The file, or the folder that contains the weight files."""
    root: Path
    """Path that the user specified. ``path`` is this path or a path inside it."""


@dataclass(frozen=True)
class ModelFacts:
    """Information about a model that is available without a download and without running the model's code."""

    source: Source | None = None
    """None for a Hugging Face folder, and for a model that has not been downloaded."""
    fields: dict[str, Any] | None = None
    """Fields of config.json (None if they are unknown)."""

    @cached_property
    def description(self) -> ModelDescription | None:
        """Description of the model (None if its fields are unknown). Raises ConfigError (see ``describe``)."""
        return None if self.fields is None else describe(self.fields)


def recognise(path: Path, key: str = "policy.model_name") -> Source | None:
    """Detect the format of the model at ``path``.

    Return None for a Hugging Face folder, a missing path, or a folder of unknown format.

    Args:
        key: config key or option that specifies the path, for error messages.

    Raises:
        ConfigError: if the format is not supported, or the model is incomplete.
    """
    if path.is_file():
        _check_is_gguf(path, key)
        return Source(Format.GGUF, path, path)
    if not path.is_dir():
        return None
    model = any(file.name != "adapter_model.safetensors" for file in path.glob("*.safetensors"))
    if (path / PEFT_CONFIG).is_file() and not model:
        return Source(Format.PEFT, path, path)
    if (path / "config.json").is_file():
        format = _folder_format(path / "config.json")
        return format and Source(format, path, path)
    if (path / "files.json").is_file() and (path / "state.json").is_file():
        return Source(Format.CHECKPOINT, path, path)
    return _megatron(path, key) or _gguf_file(path, key)


def _folder_format(file: Path) -> Format | None:
    """Return the format of a folder with config.json, or None for a Hugging Face folder of a text model."""
    try:
        content = parse_json(read_text(file))
    except (OSError, ValueError):
        return None  # the file's reader reports the error
    if not isinstance(content, dict):
        return None
    if text_fields(content) is not None:
        return Format.IMAGE
    return _quantised_format(content)


def _quantised_format(content: dict[str, Any]) -> Format | None:
    """Return the format of the quantised weights of a text model, if conversion can dequantise them."""
    family = FAMILIES.get(str(content.get("model_type")))
    quantization = content.get("quantization_config")
    if family is None or not isinstance(quantization, dict):
        return None
    experts = family.experts
    method = quantization.get("quant_method")
    if method == "mxfp4" and experts is not None and experts.interleaved:
        return Format.MXFP4
    block = quantization.get("weight_block_size")
    has_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    stacked = experts is not None and experts.only_stacked
    return Format.FP8 if method == "fp8" and (block is None or has_block) and not stacked else None


def converted_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json fields of the folder to which a downloaded folder is converted.

    They lack the fields of quantised weights, if conversion can dequantise the weights. For an image model, they are
    the fields of the text model. For other folders, they are ``content``.
    """
    inner = text_fields(content)
    fields = content if inner is None else inner
    if _quantised_format(fields) is None:
        return fields
    return {key: value for key, value in fields.items() if key != "quantization_config"}


def _megatron(path: Path, key: str) -> Source | None:
    """Return the Megatron-core checkpoint in a folder, or None.

    The checkpoint may be nested in the folders that NeMo 2 and Megatron-LM create.
    """
    if (path / "context").is_dir() and (path / "weights").is_dir():
        return Source(Format.NEMO_2, _distributed(path / "weights", key), path)
    if (path / _LATEST_FILE).is_file():
        latest = (path / _LATEST_FILE).read_text(errors="replace").strip()
        folder = path / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
        if not latest or not folder.is_dir():
            raise ConfigError(f"{key}: {path} lacks {folder.name}, which is listed in {_LATEST_FILE}")
        return Source(Format.MEGATRON, _distributed(folder, key), path)
    if (path / "metadata.json").is_file() or any(path.glob("mp_rank_*")) or any(path.glob("*.distcp")):
        return Source(Format.MEGATRON, _distributed(path, key), path)
    return None


def _distributed(folder: Path, key: str) -> Path:
    if any(folder.glob("mp_rank_*")):
        raise ConfigError(
            f"{key}: {folder} is a Megatron-LM checkpoint in the old pickle format (mp_rank_00...), which is not "
            "supported; save it with --ckpt-format torch_dist"
        )
    try:
        backend = parse_json(read_text(folder / "metadata.json"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{key}: {folder} has no metadata.json of Megatron-core, so the checkpoint is incomplete"
        ) from None
    if backend != "torch_dist":
        raise ConfigError(
            f"{key}: {folder} is a Megatron-core checkpoint in format {backend}, which is not supported; supported: "
            "torch_dist"
        )
    if not (folder / ".metadata").is_file():
        raise ConfigError(f"{key}: {folder} has no .metadata, so the checkpoint is incomplete")
    return folder


def _gguf_file(folder: Path, key: str) -> Source | None:
    """Return the only GGUF file in a folder, or None. Raises ConfigError for several files or unsupported formats."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(
            f"{key}: {folder} has {len(files)} GGUF files; specify one of these files, for example {files[0]}"
        )
    if files:
        return recognise(files[0], key)
    for pattern in ("*.nemo", "*.onnx", "*.bin", "*.pt", "*.pth"):
        for file in sorted(folder.glob(pattern)):
            _check_is_gguf(file, key)
    return None


def _check_is_gguf(file: Path, key: str) -> None:
    """Raise ConfigError if a file is not GGUF. The message describes the file's format."""
    try:
        with file.open("rb") as stream:
            start = stream.read(512)
        description = "" if start[:4] == MAGIC else _describe_format(file, start)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    if description:
        raise ConfigError(f"{key}: {file} is {description}")


def _describe_format(file: Path, start: bytes) -> str:
    size = int.from_bytes(start[:8], "little")
    if 2 <= size < file.stat().st_size and start[8:9] == b"{":
        return "a single safetensors file; specify the folder that contains this file and config.json"
    pickled = "a PyTorch pickle, which may run code and is not supported; save the model as safetensors"
    if start[:4] == b"PK\x03\x04":
        return pickled if _has_member(file, "data.pkl") else "a zip archive, which is not a supported model format"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return pickled
    if start[257:262] == b"ustar" or start[:2] == b"\x1f\x8b":
        if description := _describe_nemo_1(file, compressed=start[:2] == b"\x1f\x8b"):
            return description
        return "an archive, which is not a supported model format; unpack it"
    # An ONNX file begins with its ir_version, followed by the producer's name.
    if start[:1] == b"\x08" and 0 < int.from_bytes(start[1:2], "big") < 32 and start[2:3] in (b"\x12", b"\x1a", b":"):
        return "an ONNX graph, which cannot be trained; use the model from which it was exported"
    return "not a model in a supported format (a Hugging Face folder, GGUF, a PEFT adapter, a Megatron-core checkpoint)"


def _has_member(file: Path, name: str) -> bool:
    """Return whether a zip archive contains a file with this name."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, EOFError, zipfile.BadZipFile):
        return False
    return any(member.rpartition("/")[2] == name for member in names)


_MOST_MEMBERS, _MOST_BYTES = 10_000, 2**28
"""Limits on an archive's listing: members, and decompressed bytes. A compressed archive is read to be listed."""
_NEMO_1 = "a NeMo 1 checkpoint (.nemo)"
_OTHERWISE = "which is not supported; convert it to Hugging Face's format with nemo-toolkit"


def _describe_nemo_1(file: Path, compressed: bool) -> str:
    """Describe a NeMo 1 archive by its members (empty if the archive is of another kind). Nothing is unpacked."""
    names: list[str] = []
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                names.append(member.name.removeprefix("./"))
                read = member.offset_data + member.size if compressed else 0
                if len(names) == _MOST_MEMBERS or read > _MOST_BYTES:
                    break
    except (OSError, EOFError, tarfile.TarError, zlib.error):
        return ""
    files = {name.rpartition("/")[2] for name in names}
    if "model_config.yaml" not in files and not any(name.startswith("model_weights") for name in names):
        return ""
    if any(name.endswith(".ckpt") for name in files):
        return f"{_NEMO_1} with weights in a PyTorch pickle, {_OTHERWISE}"
    if ".zarray" in files:
        return f"{_NEMO_1} with weights in format zarr, {_OTHERWISE}"
    if ".metadata" in files:
        folder = next(name for name in names if name.endswith(".metadata")).rpartition("/")[0]
        return f"{_NEMO_1} with weights in format torch_dist; unpack it and specify its folder {folder}"
    return f"{_NEMO_1}, {_OTHERWISE}"


HUB_NAME = re.compile(r"(?!.*(?:--|\.\.|\.git$))(?=.{,96}$)[A-Za-z0-9]([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
"""Model name on the hub, organisation/name. The pattern also rejects names that only the hub's server would reject."""
COMPANION = "hf"
"""Folder with config.json and tokenizer that this project writes next to a Megatron-core checkpoint."""


def source_fields(source: Source, key: str, companion: str | None = None) -> dict[str, Any] | None:
    """Return the config.json fields of the model in ``source`` (None if config.json is on the hub).

    Args:
        key: config key or option that specifies the source, for error messages.
        companion: Hugging Face folder with the config.json of a Megatron-core checkpoint, or with an adapter's base
            model.

    Raises:
        ConfigError: if the source is damaged, or its config.json is missing or does not match.
    """
    if source.format is Format.GGUF:
        return read_gguf_model(source.path, key).fields
    if source.format in DOWNLOADED:
        content = converted_fields(read_json_object(source.path / "config.json", key))
        describe(content)
        return content
    folder = described_by(source, key, companion)
    if folder is None:
        return None
    fields = read_json_object(folder / "config.json", key)
    family = describe(fields).family
    if source.format in (Format.MEGATRON, Format.NEMO_2):
        check_gpt_format(family, key)
        model_tensors(read_dist_metadata(source.path, key), fields, source.path, key)
    return fields


def described_by(source: Source, key: str, companion: str | None = None) -> Path | None:
    """Return the Hugging Face folder with the config.json and tokenizer of ``source``.

    Return None if the model is on the hub, or if the source does not need such a folder (GGUF). Arguments and
    exceptions are those of ``source_fields``.
    """
    if source.format is Format.GGUF:
        return None
    if source.format is Format.PEFT:
        adapter = read_peft_adapter(source.path, key)
        if companion and (Path(companion) / "config.json").is_file():
            return Path(companion)
        folder = adapter.base_folder()
        if folder is None:
            _check_hub_name(adapter, key)
        return folder
    if source.format is Format.CHECKPOINT:
        return _folder(companion or _model_of_run(source.path), key, "the initial model of the run")
    if source.format in DOWNLOADED:
        return source.path
    folders = [*([Path(companion)] if companion else []), source.path / COMPANION, source.root / COMPANION]
    found = next((candidate for candidate in folders if (candidate / "config.json").is_file()), None)
    if found is None:
        raise ConfigError(
            f"{key}: {source.root} is {source.format.value}{_trained_as(source)}, which has no config.json; "
            f"specify a Hugging Face folder of the same model ({_option(key)})"
        )
    return found


def _option(key: str) -> str:
    return "policy.tokenizer_name" if key.startswith("policy") else "--model"


def _folder(name: str, key: str, description: str) -> Path:
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(f"{key}: {description}; {name} is not a folder with config.json ({_option(key)})")
    return Path(name)


def _check_hub_name(adapter: PeftAdapter, key: str) -> None:
    """Raise ConfigError if the name of the base model is not a valid name on the hub."""
    if not HUB_NAME.fullmatch(adapter.base):
        raise ConfigError(
            f"{key}: the base model of the adapter {adapter.folder}, {adapter.base or 'which is not specified'}, was "
            "not found"
        )


def _model_of_run(checkpoint: Path) -> str:
    """Return ``policy.model_name`` of the run that wrote a checkpoint (empty if it is unknown)."""
    file = real_path(checkpoint).parent.parent / "config.yaml"
    try:
        return str(parse_yaml(read_text(file))["policy"]["model_name"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return ""


def _trained_as(source: Source) -> str:
    """Return NeMo 2's class name of the model in brackets, for a message (empty if it is unknown)."""
    try:
        content = parse_yaml(read_text(source.root / "context" / "model.yaml"))
        section = content.get("config", content)
        names = [str(part["_target_"]).rpartition(".")[2] for part in (content, section) if "_target_" in part]
    except (OSError, ValueError, AttributeError, TypeError, KeyError, yaml.YAMLError):
        return ""
    return f" ({names[-1]})" if names else ""
