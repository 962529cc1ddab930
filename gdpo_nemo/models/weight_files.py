"""Checks that the weight files of a model folder exist, are complete and contain finite numbers. Only the headers and a
sample of the numbers are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.models.description import with_defaults
from gdpo_nemo.models.families import FAMILIES, Family
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import open_file, parse_json, read_text

INDEX = "model.safetensors.index.json"
"""Name of the file that lists the file of each tensor."""
_HEADER_LIMIT = 100 << 20
"""Maximum size of a header in bytes, as specified by the safetensors format."""

_EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Integer type and bit mask of the exponent, by data type. All bits of the mask are set only in NaN and infinity."""
_SAMPLED_TENSORS = 64
_SAMPLED_BYTES = 1 << 16
"""Number of bytes to read from the beginning of each sampled tensor."""
NOT_FINITE = "contains NaN or infinite values; download or convert the model again"


def has_weight_files(folder: Path) -> bool:
    """Return whether a folder contains safetensors files."""
    return any(folder.glob("*.safetensors"))


def check_weight_files(folder: Path, remedy: str = "") -> None:
    """Check that a folder has complete safetensors files, including all files that its index lists.

    Args:
        remedy: advice to append to the message if the folder has no weights.

    Raises:
        ConfigError: if the folder has no safetensors files, or a file is missing, truncated or not valid.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = any(folder.glob("*.bin"))
        what = "has weights only as *.bin; save them as safetensors" if other else "has no weights (*.safetensors)"
        raise ConfigError(f"policy.model_name: {folder} {what}{remedy}")
    for name in _files_in_index(folder / INDEX):
        if not (folder / name).is_file():
            raise ConfigError(f"policy.model_name: {folder} lacks {name}, which is listed in {INDEX}")
    for file in files:
        try:
            problem = _problem(file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem:
            raise ConfigError(f"policy.model_name: {file} {problem}")


def check_tensors(folder: Path, family: Family) -> None:
    """Check that the weight files in a folder belong to a model of the family.

    Only the embedding is required, because every model of the family has it.

    Raises:
        ConfigError: if no tensor has the name of the embedding, or a sampled tensor contains NaN or infinite values.
    """
    required = f"{family.modules.embedding}.weight"
    found = tensor_shapes(folder, "policy.model_name")
    if required not in found:
        details = (
            f"it contains {len(found)} tensors, for example {min(found)}" if found else "the folder contains no tensors"
        )
        raise ConfigError(
            f"policy.model_name: {folder} has no tensor {required} of a {family.model_type} model; {details}"
        )
    _check_numbers(folder)


def _check_numbers(folder: Path) -> None:
    """Raise ConfigError if the beginning of a sampled tensor contains NaN or infinite values."""
    tensors = []
    for file in sorted(folder.glob("*.safetensors")):
        start, header = _header(file)
        tensors += [(file, start, name, entry) for name, entry in header.items()]
    for file, start, name, entry in tensors[:: max(1, len(tensors) // _SAMPLED_TENSORS)]:
        if entry["dtype"] not in _EXPONENTS:
            continue
        integer, mask = _EXPONENTS[entry["dtype"]]
        first, end = entry["data_offsets"]
        with open_file(file) as stream:
            stream.seek(start + first)
            values = np.frombuffer(stream.read(min(end - first, _SAMPLED_BYTES)), integer)
        if (values & mask == mask).any():
            raise ConfigError(f"policy.model_name: {file}: {name} {NOT_FINITE}")


def prediction_weights(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights of multi-token-prediction layers.

    These layers follow the last layer of the model, or their names begin with a prefix of ``Family.untrained``.

    Args:
        names: names of all weights of a model folder.
        config: fields of the folder's config.json.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    layers = with_defaults(family, config).get("num_hidden_layers") if family else None
    if family is None or not isinstance(layers, int):
        return []
    index = re.compile(re.escape(family.modules.layer).replace(r"\{\}", r"(\d+)"))

    def is_untrained(name: str) -> bool:
        match = index.match(name)
        return name.startswith(family.untrained) or (match is not None and int(match[1]) >= layers)

    return list(filter(is_untrained, names))


def tower_weights(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights of a vision tower. For the arguments, see ``prediction_weights``."""
    family = FAMILIES.get(config.get("model_type", ""))
    return [name for name in names if family and family.tower and name.startswith(family.tower.prefix)]


def _files_in_index(index: Path) -> list[str]:
    if not index.exists():
        return []
    try:
        names = parse_json(read_text(index))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"policy.model_name: {index} is not a valid index of weights ({type(error).__name__})"
        ) from None


def tensor_shapes(folder: Path, key: str, file: str | None = None) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors in a model folder, by name. Only the headers of the files are read.

    Args:
        key: config key or option that specifies the folder, for error messages.
        file: name of the only file to read (None for all safetensors files).

    Raises:
        ConfigError: if a file is missing or not in safetensors format.
    """
    names = [file] if file else _files_in_index(folder / INDEX) or [path.name for path in folder.glob("*.safetensors")]
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(names):
        try:
            _, header = _header(folder / name)
            found.update({tensor: tuple(map(int, entry["shape"])) for tensor, entry in header.items()})
        except OSError as error:
            raise ConfigError(f"{key}: {folder / name} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{key}: {folder / name} is not a valid safetensors file") from None
    return found


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the tensor data in a safetensors file, and the header entries by tensor name.

    See https://github.com/huggingface/safetensors#format

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a valid safetensors file.
    """
    size = file.stat().st_size
    with open_file(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ValueError("no header")
        header = parse_json(stream.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def _problem(file: Path) -> str:
    """Describe the problem of a safetensors file that is truncated, invalid or not supported (empty if the file is
    usable).

    Stacked experts of MLX are not supported. Dense models from MLX have Hugging Face's tensor names and are supported.
    """
    try:
        start, header = _header(file)
        end = start + max(map(_end, header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return "is not a valid safetensors file"
    if any(".switch_mlp." in name for name in header):
        return (
            "has experts stacked by MLX (switch_mlp), which is not supported; use the model from which it was converted"
        )
    size = file.stat().st_size
    return "" if size == end else f"is truncated: {size} of {end} bytes"


def _end(entry: dict[str, Any]) -> int:
    """Return the end of a tensor's data as an offset from the end of the header."""
    return int(entry["data_offsets"][1])
