"""What a path to a model is, told from its content and not from its name; formats that are not read are refused by
name.

A Hugging Face folder is what a run works with. The formats of ``Format`` are made into one first.
"""

from __future__ import annotations

import tarfile
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gdpo_nemo.config.gguf_header import MAGIC
from gdpo_nemo.config.peft_config import CONFIG as PEFT_CONFIG
from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.errors import ConfigError

_NEWEST = "latest_checkpointed_iteration.txt"
"""What Megatron-LM writes beside its folders iter_0000001, ... or release."""


class Format(Enum):
    """What is made into a Hugging Face folder, in words."""

    GGUF = "a GGUF file"
    PEFT = "a PEFT adapter"
    CHECKPOINT = "a checkpoint of this program"
    MEGATRON = "a Megatron-core checkpoint"
    NEMO_2 = "a NeMo 2 checkpoint"


@dataclass(frozen=True)
class Source:
    """A model in another format than Hugging Face's."""

    format: Format
    path: Path
    """The file, or the folder that has the weights' files."""
    root: Path
    """What the user named, which may have more beside it."""


def recognise(path: Path, key: str = "policy.model_name") -> Source | None:
    """What is at ``path``; None for a Hugging Face folder, nothing, or a folder of no known kind.

    Args:
        key: what the user named it by, for messages.

    Raises:
        ConfigError: it is something else, which the message names.
    """
    if path.is_file():
        _refuse_file(path, key)
        return Source(Format.GGUF, path, path)
    if not path.is_dir():
        return None
    model = any(file.name != "adapter_model.safetensors" for file in path.glob("*.safetensors"))
    if (path / PEFT_CONFIG).is_file() and not model:
        return Source(Format.PEFT, path, path)
    if (path / "config.json").is_file():
        return None
    if (path / "files.json").is_file() and (path / "state.json").is_file():
        return Source(Format.CHECKPOINT, path, path)
    return _megatron(path, key) or _only_file(path, key)


def _megatron(path: Path, key: str) -> Source | None:
    """A checkpoint of Megatron-core, alone or in the folders that NeMo 2 and Megatron-LM put around it."""
    if (path / "context").is_dir() and (path / "weights").is_dir():
        return Source(Format.NEMO_2, _distributed(path / "weights", key), path)
    if (path / _NEWEST).is_file():
        newest = (path / _NEWEST).read_text(errors="replace").strip()
        folder = path / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)
        if not newest or not folder.is_dir():
            raise ConfigError(f"{key}: {path} lacks {folder.name}, which {_NEWEST} names")
        return Source(Format.MEGATRON, _distributed(folder, key), path)
    if (path / "metadata.json").is_file() or any(path.glob("mp_rank_*")) or any(path.glob("*.distcp")):
        return Source(Format.MEGATRON, _distributed(path, key), path)
    return None


def _distributed(folder: Path, key: str) -> Path:
    if any(folder.glob("mp_rank_*")):
        raise ConfigError(
            f"{key}: {folder} is a Megatron-LM checkpoint of the old kind (mp_rank_00...), pickles that are not read; "
            "save it with --ckpt-format torch_dist"
        )
    try:
        backend = parse_json(read_text(folder / "metadata.json"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{key}: {folder} has no metadata.json of Megatron-core, its checkpoint is not whole"
        ) from None
    if backend != "torch_dist":
        raise ConfigError(f"{key}: {folder} is a Megatron-core checkpoint in {backend}; read is torch_dist")
    if not (folder / ".metadata").is_file():
        raise ConfigError(f"{key}: {folder} lacks .metadata, its checkpoint is not whole")
    return folder


def _only_file(folder: Path, key: str) -> Source | None:
    """The one GGUF file of a folder; another kind of weights is refused."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(f"{key}: {folder} has {len(files)} GGUF files; name one of them, {files[0]} for instance")
    if files:
        return recognise(files[0], key)
    for pattern in ("*.nemo", "*.onnx", "*.bin", "*.pt", "*.pth"):
        for file in sorted(folder.glob(pattern)):
            _refuse_file(file, key)
    return None


def _refuse_file(file: Path, key: str) -> None:
    """Raise ConfigError with what the file is, unless it is GGUF."""
    try:
        with file.open("rb") as stream:
            start = stream.read(512)
        what = "" if start[:4] == MAGIC else _described(file, start)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    if what:
        raise ConfigError(f"{key}: {file} is {what}")


def _described(file: Path, start: bytes) -> str:
    size = int.from_bytes(start[:8], "little")
    if 2 <= size < file.stat().st_size and start[8:9] == b"{":
        return "one safetensors file; name the folder that has it and config.json"
    pickled = "a pickle of PyTorch, which may run code and is not read; save the model as safetensors"
    if start[:4] == b"PK\x03\x04":
        return pickled if _has_member(file, "data.pkl") else "a zip archive, which is no model that is read"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return pickled
    if start[257:262] == b"ustar" or start[:2] == b"\x1f\x8b":
        if _has_member(file, "model_config.yaml"):
            return "a checkpoint of NeMo 1 (.nemo), which is not read; export it to Hugging Face's format with NeMo 1"
        return "an archive, which is no model that is read; unpack it"
    # An ONNX file begins with its ir_version, then the producer's name.
    if start[:1] == b"\x08" and 0 < int.from_bytes(start[1:2], "big") < 32 and start[2:3] in (b"\x12", b"\x1a", b":"):
        return "an ONNX graph, which cannot be trained; give the model that it was exported from"
    return "no model in a format that is read (a Hugging Face folder, GGUF, a PEFT adapter, a Megatron-core checkpoint)"


def _has_member(file: Path, name: str) -> bool:
    """Whether an archive has a member of this name."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
        else:
            with tarfile.open(file) as tar:
                names = tar.getnames()
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError):
        return False
    return any(member.rpartition("/")[2] == name for member in names)
