"""Reading and writing of Hugging Face model folders, one tensor at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gdpo_nemo.models.description import with_text_fields
from gdpo_nemo.models.fp8 import block_of, unquantised
from gdpo_nemo.models.weight_files import INDEX, NOT_FINITE, prediction_weights, tower_weights
from gdpo_nemo.utils.errors import ConfigError


@contextlib.contextmanager
def whole_or_nothing(folder: str | Path) -> Iterator[Path]:
    """Create a model folder atomically. Yield a temporary folder, which is renamed to ``folder`` after the block.

    A killed process therefore leaves no incomplete model. If two processes create the same model concurrently, the
    folder of the first to finish is used, and the other is discarded.

    Raises:
        ConfigError: if ``folder`` exists and is not an empty folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists; remove it to create the model again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as private:
        model_folder = Path(private) / "model"  # a subfolder, because a temporary folder is readable only by its owner
        model_folder.mkdir()
        yield model_folder
        try:
            model_folder.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            print(f"{folder}: created by another process in the meantime; using that model", flush=True)


def save_tensors(
    tensors: Mapping[str, torch.Tensor], file: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the default permissions of the umask.

    safetensors itself would make the file readable only by its owner. Raises OSError if writing fails.
    """
    file = Path(file)
    file.touch()
    mode = file.stat().st_mode & 0o777
    try:
        save_file(dict(tensors), file, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:  # safetensors raises this, for example, if the disk is full
        raise OSError(f"{file}: {error}") from error
    file.chmod(mode)


def weight_names(folder: str | Path) -> list[str]:
    """Return the names of the weights that training and engines use, in the order of the files.

    A tied output layer and multi-token-prediction layers are omitted.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    names = stored_names(folder)
    omitted = set(prediction_weights(names, config))
    if with_text_fields(config).get("tie_word_embeddings"):
        omitted.add("lm_head.weight")
    return [name for name in names if name not in omitted]


def tower_names(folder: str | Path) -> list[str]:
    """Return the names of the weights of the vision tower in a folder, or an empty list for a text model."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return tower_weights(weight_names(folder), config) if "vision_config" in config else []


def stored_names(folder: str | Path) -> list[str]:
    """Return the names of all tensors in a folder, in the order of the files."""
    return list(_weight_map(folder))


def _unchanged(source: Path, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the multi-token-prediction layers in ``source``, if it is another folder with weights."""
    has_weights = (source / "config.json").is_file() and any(source.glob("*.safetensors"))
    if source.absolute() == folder.absolute() or not has_weights:
        return
    read = open_weights(source)
    config = json.loads((source / "config.json").read_text())
    yield from unquantised(read, prediction_weights(_weight_map(source), config), block_of(config), str(source))


def open_weights(folder: str | Path, finite: bool = False) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a weight by its name, as a memory-mapped CPU tensor.

    The function raises KeyError for an unknown name.

    Args:
        finite: True to raise ConfigError for a weight that contains NaN or infinite values.

    Raises:
        ConfigError: if the folder has no safetensors files.
    """
    folder, file_of = Path(folder), _weight_map(folder)
    handles: dict[str, Any] = {}

    def read(name: str) -> torch.Tensor:
        file = file_of[name]
        if file not in handles:
            handles[file] = safe_open(folder / file, framework="pt")
        tensor: torch.Tensor = handles[file].get_tensor(name)
        if finite and not _is_finite(tensor):
            raise ConfigError(f"{folder / file}: {name} {NOT_FINITE}")
        return tensor

    return read


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # FP8 (E4M3) has no infinite values, and NaN has all bits set except for the sign
        return bool((tensor.view(torch.uint8) & 0x7F).max() < 0x7F)
    return all(map(math.isfinite, map(float, tensor.aminmax())))  # NaN propagates to both; one pass without a copy


def differences(folder: str | Path, other: str | Path) -> list[str]:
    """Compare the tensors of two folders bitwise. Return a sentence for each difference, sorted by decreasing size."""
    read_first, read_second = open_weights(folder), open_weights(other)
    names, others = set(_weight_map(folder)), set(_weight_map(other))
    found = [(math.inf, f"{name} is in only one of the two folders") for name in names ^ others]
    for name in sorted(names & others):
        a, b = read_first(name), read_second(name)
        if a.dtype != b.dtype or a.shape != b.shape:
            forms = f"{a.dtype} {list(a.shape)} in one folder and {b.dtype} {list(b.shape)} in the other"
            found.append((math.inf, f"{name} is {forms}"))
        elif not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):  # also detects differences in NaN and -0
            same = (a == b) | (a.isnan() & b.isnan())
            difference = torch.where(same, 0.0, (a.double() - b.double()).abs())
            largest = float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())
            found.append((largest, f"{name} differs by up to {largest:.3g}"))
    return [sentence for _, sentence in sorted(found, key=lambda pair: (-pair[0], pair[1]))]


def _weight_map(folder: str | Path) -> dict[str, str]:
    """Return the file name of every tensor, by tensor name."""
    folder = Path(folder)
    file_of: dict[str, str] = {}
    if (folder / INDEX).exists():
        file_of = json.loads((folder / INDEX).read_text())["weight_map"]
    else:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as shard:
                file_of.update(dict.fromkeys(shard.keys(), file.name))
        if not file_of:
            raise ConfigError(f"policy.model_name: {folder} has no weights (*.safetensors)")
    return file_of


# Files besides weights and config.json that make a folder loadable. They are copied from the initial model.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)


def copy_companions(source: str | Path, folder: Path) -> None:
    """Copy tokenizer, chat template, processors and generation settings from the folder ``source`` to ``folder``."""
    for pattern in _COMPANIONS:
        for file in Path(source).glob(pattern):
            if file.parent.absolute() != folder.absolute():
                shutil.copyfile(file, folder / file.name)  # do not copy the file permissions


def write_model(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Any,
    source: str | Path,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write a Hugging Face model folder for transformers and vLLM.

    Args:
        folder: folder to write.
        tensors: weights as (name, tensor).
        config: transformers configuration of the model.
        source: Hugging Face folder with the tokenizer files to copy. Its multi-token-prediction layers are also copied.
        shard_bytes: maximum size of a safetensors file in bytes. A larger tensor still gets a single file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    copy_companions(source, folder)
    write_weights(folder, chain(tensors, _unchanged(Path(source), folder)), shard_bytes)


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = 4 << 30) -> None:
    """Write the weights of a Hugging Face folder, with an index if there are several files.

    For the arguments, see ``write_model``.
    """
    shard: dict[str, torch.Tensor] = {}
    shard_size = total = 0
    files: list[str] = []
    weight_map: dict[str, str] = {}

    def flush() -> None:
        files.append(f"model-{len(files) + 1:05d}.safetensors")
        save_tensors(shard, folder / files[-1], metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, files[-1]))
        shard.clear()

    for name, tensor in tensors:
        if shard and shard_size + tensor.nbytes > shard_bytes:
            flush()
            shard_size = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        shard_size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
    else:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
