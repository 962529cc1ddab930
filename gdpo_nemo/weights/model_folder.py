"""The weights in a Hugging Face model folder: which there are, and each of them when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gdpo_nemo.errors import ConfigError

INDEX = "model.safetensors.index.json"


def save_tensors(
    tensors: Mapping[str, torch.Tensor], file: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode of any new file; safetensors itself makes it private, whatever the umask
    says.

    Raises OSError, or what safetensors raises.
    """
    file = Path(file)
    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(dict(tensors), file, metadata=dict(metadata) if metadata else None)
    file.chmod(mode)


def weight_names(folder: str | Path) -> list[str]:
    """Names of the weights a checkpoint of this model has, in the files' order; a tied head is not one of them."""
    folder = Path(folder)
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    return [name for name in _places(folder) if not (tied and name == "lm_head.weight")]


def open_weights(folder: str | Path) -> Callable[[str], torch.Tensor]:
    """A reader of the folder's safetensors: name -> tensor on the CPU, memory-mapped.

    Raises:
        ConfigError: the folder has no safetensors. The reader raises KeyError for an unknown name.
    """
    folder, where = Path(folder), _places(folder)
    handles: dict[str, Any] = {}

    def read(name: str) -> torch.Tensor:
        file = where[name]
        if file not in handles:
            handles[file] = safe_open(folder / file, framework="pt")
        return handles[file].get_tensor(name)

    return read


def _places(folder: str | Path) -> dict[str, str]:
    """File of every tensor."""
    folder = Path(folder)
    if (folder / INDEX).exists():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    where: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            where.update(dict.fromkeys(shard.keys(), file.name))
    if not where:
        raise ConfigError(f"policy.model_name: no weights (*.safetensors) in {folder}")
    return where
