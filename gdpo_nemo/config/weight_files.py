"""Whether a model folder's weight files are there and whole, by their headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.config.families import Family
from gdpo_nemo.config.reading import open_file, parse_json, read_text
from gdpo_nemo.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20
"""Bytes that a safetensors header may have, by the format's own rule."""


def check_weight_files(folder: Path, remedy: str = "") -> None:
    """The folder has weights in safetensors files, each as long as its header says, and all that its index names.

    Args:
        remedy: what to do about a folder without weights, put behind the message.

    Raises:
        ConfigError: no such files, or one is missing, cut off or something else.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = any(folder.glob("*.bin"))
        what = "has weights as *.bin only; save them as safetensors" if other else "has no weights (*.safetensors)"
        raise ConfigError(f"policy.model_name: {folder} {what}{remedy}")
    for name in _indexed(folder / _INDEX):
        if not (folder / name).is_file():
            raise ConfigError(f"policy.model_name: {folder} lacks {name}, which {_INDEX} names")
    for file in files:
        try:
            problem = _problem(file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem:
            raise ConfigError(f"policy.model_name: {file} {problem}")


def check_tensors(folder: Path, family: Family) -> None:
    """Refuse a folder whose files, though whole, hold another model's tensors or none.

    Only the names in the headers are read, and only the embedding is asked for, which every model of a family has.

    Raises:
        ConfigError: if no tensor has the embedding's name.
    """
    wanted = f"{family.modules.embedding}.weight"
    found = tensor_shapes(folder, "policy.model_name")
    if wanted not in found:
        there = f"it holds {len(found)} tensors, {min(found)} first" if found else "it holds no tensor"
        raise ConfigError(f"policy.model_name: {folder} has no tensor {wanted} of a {family.model_type} model; {there}")


def _indexed(index: Path) -> list[str]:
    if not index.exists():
        return []
    try:
        names = parse_json(read_text(index))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"policy.model_name: {index} is no index of weights ({type(error).__name__})") from None


def tensor_shapes(folder: Path, key: str, file: str | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model folder, or of one ``file`` in it, by the headers alone.

    Args:
        key: what the user named the folder by, for messages.

    Raises:
        ConfigError: a file is missing or no safetensors file.
    """
    names = [file] if file else _indexed(folder / _INDEX) or [path.name for path in folder.glob("*.safetensors")]
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(names):
        try:
            _, header = _header(folder / name)
            found.update({tensor: tuple(map(int, entry["shape"])) for tensor, entry in header.items()})
        except OSError as error:
            raise ConfigError(f"{key}: {folder / name} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{key}: {folder / name} is no safetensors file") from None
    return found


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what is said of each of them.
    https://github.com/huggingface/safetensors#format

    Raises OSError, or ValueError: it is no such file.
    """
    size = file.stat().st_size
    with open_file(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ValueError("no header")
        header = parse_json(opened.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def _problem(file: Path) -> str:
    """What is wrong with a safetensors file, or nothing. MLX leaves a dense model as Hugging Face has it."""
    try:
        start, header = _header(file)
        end = start + max(map(_end, header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return "is no safetensors file"
    if any(".switch_mlp." in name for name in header):
        return "has experts as MLX stacks them (switch_mlp), which is not read; give the model that it was made of"
    size = file.stat().st_size
    return "" if size == end else f"is cut off: {size} bytes of {end}"


def _end(entry: dict[str, Any]) -> int:
    """Where the tensor ends behind the header."""
    return int(entry["data_offsets"][1])
