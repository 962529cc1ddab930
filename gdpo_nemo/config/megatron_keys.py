"""Which tensors of a Megatron-core GPT checkpoint make which Hugging Face weights, as far as its index says. No
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.config.dist_metadata import Held
from gdpo_nemo.errors import ConfigError

EMBEDDING = "embedding.word_embeddings.weight"
_PREFIXES = ("", "module.", "model.", "module.module.")
"""Megatron-LM and Megatron-Bridge write none, NeMo 2 writes ``module.``."""
_READ = ("float32", "bfloat16", "float16")


def model_tensors(held: Mapping[str, Held], fields: Mapping[str, Any], folder: Path, key: str) -> dict[str, Held]:
    """The model's tensors, their names without a prefix; those of the optimizer are left out.

    Args:
        fields: of the config.json that describes the model.
        key: what the user named the checkpoint by, for messages.

    Raises:
        ConfigError: there is no model, or one of other sizes than ``fields`` say, or of a type that is not read.
    """
    prefix = next((prefix for prefix in _PREFIXES if prefix + EMBEDDING in held), None)
    if prefix is None:
        raise ConfigError(f"{key}: {folder} holds no GPT model of Megatron-core (no {EMBEDDING})")
    parts = tuple(prefix + part for part in ("embedding.", "decoder.", "output_layer."))
    found = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(parts)}
    for name, tensor in found.items():
        if tensor.dtype not in _READ:
            raise ConfigError(
                f"{key}: {name} of {folder} is in {tensor.dtype}, which is not read; read: {', '.join(_READ)}"
            )
    rows, width = found[EMBEDDING].shape
    for what, size, wanted in (
        ("hidden_size", width, fields["hidden_size"]),
        ("num_hidden_layers", layers_of(found), fields["num_hidden_layers"]),
    ):
        if size != wanted:
            raise ConfigError(
                f"{key}: {folder} is of a model with {what} {size}; the config.json that describes it says {wanted}"
            )
    if rows < fields["vocab_size"]:
        raise ConfigError(
            f"{key}: {folder} has {rows} tokens, the config.json that describes it has {fields['vocab_size']}"
        )
    if fields.get("tie_word_embeddings") and "output_layer.weight" in found:
        raise ConfigError(f"{key}: {folder} has an output layer of its own; the config.json that describes it ties it")
    return found


def layers_of(tensors: Mapping[str, Held]) -> int:
    """Layers of the model: the first dimension where all lie in one tensor, else the highest number."""
    layered = [name.split(".") for name in tensors if name.startswith("decoder.layers.")]
    numbers = [int(parts[2]) for parts in layered if parts[2].isdigit()]
    if numbers:
        return max(numbers) + 1
    return next((tensors[".".join(parts)].shape[0] for parts in layered), 0)
