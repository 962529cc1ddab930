"""A PEFT adapter merged into the weights of its base, one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import torch
from safetensors.torch import load_file

from gdpo_nemo.config.peft_config import MATRICES, PeftAdapter
from gdpo_nemo.config.peft_matrices import check_fit, read_shapes
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.weights.adapters import merge, peft_name
from gdpo_nemo.weights.model_folder import open_weights, weight_names


def read_pairs(adapter: PeftAdapter, base: Path, key: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of an adapter by Hugging Face module: A [rank, in], B [out, rank].

    Args:
        base: Hugging Face folder of the model that it belongs to.
        key: what the user named the adapter by, for messages.

    Raises:
        ConfigError: they are no pairs, do not fit the base, or cannot be read.
    """
    shapes = read_shapes(adapter, key)
    check_fit(shapes, base, key)
    file = adapter.folder / MATRICES
    try:
        matrices = load_file(file)
    except Exception as error:  # noqa: BLE001 - safetensors raises a type of its own and OSError
        raise ConfigError(f"{key}: {file} cannot be read ({error})") from None
    return {module: (matrices[peft_name(module, "A")], matrices[peft_name(module, "B")]) for module in shapes}


def merged_weights(adapter: PeftAdapter, base: Path, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of ``base`` with the adapter merged, each in the base's type. Raises ConfigError."""
    pairs = read_pairs(adapter, base, key)
    read = open_weights(base)
    for name in weight_names(base):
        pair = pairs.get(name.removesuffix(".weight"))
        yield name, read(name) if pair is None else merge(read(name), pair, adapter.scale(len(pair[0])))
