"""A PEFT adapter merged into the weights of its base, one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import torch
from safetensors.torch import load_file

from gdpo_nemo.config.peft_config import MATRICES, PeftAdapter
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.weights.adapters import Pairs, merge, peft_name
from gdpo_nemo.weights.model_folder import open_weights, weight_names

_A = ".lora_A.weight"
_PREFIX = "base_model.model."


def read_pairs(adapter: PeftAdapter, key: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of an adapter by Hugging Face module: A [rank, in], B [out, rank].

    Args:
        key: what the user named the adapter by, for messages.

    Raises:
        ConfigError: a tensor that is no matrix A or B, one without its partner, or an unreadable file.
    """
    file = adapter.folder / MATRICES
    try:
        matrices = load_file(file)
    except Exception as error:  # noqa: BLE001 - safetensors raises a type of its own and OSError
        raise ConfigError(f"{key}: {file} cannot be read ({error})") from None
    pairs = {}
    for name in [name for name in matrices if name.startswith(_PREFIX) and name.endswith(_A)]:
        module = name.removeprefix(_PREFIX).removesuffix(_A)
        a, b = matrices.pop(name), matrices.pop(peft_name(module, "B"), None)
        if b is None or a.dim() != 2 or b.dim() != 2 or len(a) != b.size(1):
            raise ConfigError(f"{key}: {file} has no pair of matrices for {module}")
        pairs[module] = a, b
    if matrices or not pairs:
        what = f"{min(matrices)}, which is no matrix of a linear layer" if matrices else "no matrix"
        raise ConfigError(f"{key}: {file} has {what}")
    return pairs


def check_fit(pairs: Pairs, base: Path, key: str) -> None:
    """Every pair has a weight of its shape in the folder ``base``. Raises ConfigError."""
    names = set(weight_names(base))
    read = open_weights(base)
    for module, (a, b) in pairs.items():
        if f"{module}.weight" not in names:
            raise ConfigError(f"{key}: the base model {base} has no weight {module}.weight for the adapter")
        shape = tuple(read(f"{module}.weight").shape)
        if shape != (len(b), a.size(1)):
            raise ConfigError(f"{key}: the adapter of {module} is for {(len(b), a.size(1))}, {base} has {shape}")


def merged_weights(adapter: PeftAdapter, base: Path, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of ``base`` with the adapter merged, each in the base's type. Raises ConfigError."""
    pairs = read_pairs(adapter, key)
    check_fit(pairs, base, key)
    read = open_weights(base)
    for name in weight_names(base):
        pair = pairs.get(name.removesuffix(".weight"))
        yield name, read(name) if pair is None else merge(read(name), pair, adapter.scale(len(pair[0])))
