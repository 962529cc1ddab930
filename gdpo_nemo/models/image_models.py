"""Text models inside image models: Qwen3.5, Gemma 3, Gemma 4 and Mistral 3 as published.

The config.json of an image model contains the fields of its text model as ``text_config``. ``text_weights`` reads
the text model, and ``with_text`` writes a trained text model back. Other weights do not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from gdpo_nemo.models.families import FAMILIES, Experts
from gdpo_nemo.models.fp8 import block_of, unquantised
from gdpo_nemo.models.hf_folder import open_weights, stored_names
from gdpo_nemo.utils.errors import ConfigError

_PREFIX = re.compile(r"model\.language_model\.|language_model\.model\.|language_model\.(?=lm_head\.)")
"""Prefixes of the text model's tensors. The text model itself has ``model.`` in their place, or none for ``lm_head``.
"""


def _text_name(name: str) -> str:
    """Return the text model's name of an image model's tensor. Other names do not change."""
    match = _PREFIX.match(name)
    if match is None:
        return name
    return ("" if match[0] == "language_model." else "model.") + name[match.end() :]


def text_weights(folder: Path, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each weight of the text model, and of its multi-token-prediction layers.

    Args:
        folder: Hugging Face folder of the image model.
        key: config key or option that specifies the folder, for messages.

    Raises:
        ConfigError: if the folder contains no text model.
    """
    names = stored_names(folder)
    found = [name for name in names if _PREFIX.match(name) or name.startswith(("lm_head.", "mtp."))]
    if not any(_PREFIX.match(name) for name in found):
        raise ConfigError(f"{key}: {folder} has no weights of a text model; it contains, for example, {min(names)}")
    block = block_of(json.loads((folder / "config.json").read_text()))
    for name, tensor in unquantised(open_weights(folder, finite=True), found, block, key):
        yield _text_name(name), tensor


def with_text(image_model: Path, text_model: Path, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each weight of an image model, whose text model has the weights of another folder.

    Args:
        image_model: Hugging Face folder of the image model.
        text_model: Hugging Face folder of the text model.
        key: option that specifies the text model, for messages.

    Raises:
        ConfigError: if the text model does not have the same tensors as the text model of ``image_model``.
    """
    kind = json.loads((text_model / "config.json").read_text())["model_type"]
    experts = FAMILIES[kind].experts
    stored = set(stored_names(text_model))
    read, read_text = open_weights(image_model), open_weights(text_model, finite=True)
    for name in stored_names(image_model):
        tensor = read(name)
        inner = _text_name(name)
        if inner in stored:
            found = read_text(inner)
        elif _PREFIX.match(name) and experts is not None:
            names = _expert_names(inner, experts, len(tensor))
            for part in chain.from_iterable(names):
                if part not in stored:
                    raise ConfigError(f"{key}: {text_model} has no tensor {part}")
            found = torch.stack([torch.cat(list(map(read_text, parts))) for parts in names])
        elif _PREFIX.match(name):
            raise ConfigError(f"{key}: {text_model} has no tensor {inner}")
        else:
            found = tensor
        if found.shape != tensor.shape:
            raise ConfigError(
                f"{key}: {inner} has shape {list(found.shape)}, but {name} of the image model {list(tensor.shape)}"
            )
        yield name, found.to(tensor.dtype)


def _expert_names(name: str, experts: Experts, count: int) -> list[list[str]]:
    """Return the names of each expert's tensors in a folder that stores the experts separately.

    Args:
        name: name of the tensor of all experts. Other names are returned as the tensor of a single expert.
        count: number of experts.
    """
    modules: dict[str, tuple[str | None, ...]] = {
        experts.stacked_gate_up: (experts.gate, experts.up),
        experts.stacked_down: (experts.down,),
    }
    for stacked, parts in modules.items():
        if name.endswith(stacked):
            layer = name.removesuffix(stacked)
            patterns = [f"{layer}{part}.weight" for part in parts]
            names = []
            for expert in range(count):
                names.append([pattern.format(expert) for pattern in patterns])
            return names
    return [[name]]
