"""Index of Megatron-core checkpoints in the format ``torch_dist``: shapes and dtypes of the tensors. No torch."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_nemo.models.families import Family
from gdpo_nemo.models.weights import EMBEDDING
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import check_pickle, read_bytes

_LARGEST_INDEX = 1 << 30
"""Largest size of an index in bytes."""
_CHECKPOINT = "torch.distributed.checkpoint"
_TENSOR = "TensorStorageMetadata"
_METADATA = (
    "Metadata", _TENSOR, "TensorProperties", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
    "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Classes of the ranks' save plans, which Megatron-core stores in the index for its own writer."""
INDEX_CLASSES = {
    *((f"{_CHECKPOINT}.metadata", name) for name in _METADATA),
    *((f"{_CHECKPOINT}.planner", name) for name in _PLANNER),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}
"""Classes that an index may name, as (module, class), in addition to torch.Size and torch's dtypes."""
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED = {*INDEX_CLASSES, (_MEGATRON, "MCoreMetadata"), (_MEGATRON, "MCoreSavePlan")}
"""Classes in the index of another program. They are replaced by placeholders and not imported."""
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
           "float8_e4m3fn", "float8_e5m2")  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    """Global shape over all ranks."""
    dtype: str
    """Name of the torch dtype, such as bfloat16."""


class _Placeholder:
    """Placeholder for an unpickled object: stores the class name, the constructor arguments and the state."""

    name = ""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return type(name, (_Placeholder,), {"name": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a checkpoint does not need")


def read_dist_metadata(folder: Path, key: str) -> Mapping[str, Held]:
    """Read each tensor's shape and dtype from the index of a checkpoint, by Megatron-core's names.

    Args:
        folder: folder of the checkpoint.
        key: config key or option that specifies the checkpoint, for error messages.

    Raises:
        ConfigError: if the index is damaged or contains classes that are not allowed, or if a file that it lists is
            missing or outside the folder.
    """
    file = folder / ".metadata"
    try:
        found = _Reader(io.BytesIO(check_pickle(read_bytes(file, _LARGEST_INDEX)))).load()
        entries = found.state["state_dict_metadata"]
        tensors = {
            name: _tensor_metadata(entry) for name, entry in entries.items() if getattr(entry, "name", "") == _TENSOR
        }
        files = {str(storage.state["relative_path"]) for storage in found.state["storage_data"].values()}
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise almost any exception
        raise ConfigError(f"{key}: {file} is not a valid index of a Megatron-core checkpoint ({error})") from None
    outside = sorted(name for name in files if Path(name).name != name)
    if outside:
        raise ConfigError(f"{key}: {file} lists {outside[0]}, which is outside the checkpoint")
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ConfigError(f"{key}: {folder} lacks {missing[0]}, which is listed in its index")
    return tensors


def _tensor_metadata(entry: Any) -> Held:
    properties = entry.state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    return Held(tuple(entry.state["size"]), str(dtype))


_PREFIXES = ("", "module.", "model.", "module.module.")
"""Possible prefixes of tensor names. Megatron-LM and Megatron-Bridge do not use a prefix. NeMo 2 uses ``module.``."""
_SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


def check_gpt_format(family: Family, key: str) -> None:
    """Check that the family has only the modules of GPTModel's standard layers. Raises ConfigError."""
    modules = family.modules
    added = modules.post_attention_norm or modules.post_mlp_norm or family.sinks or family.biases
    layers = family.latent or family.mamba or family.delta or (family.experts and family.experts.sigmoid)
    if added or layers or family.tower:
        raise ConfigError(
            f"{key}: Megatron-core checkpoints of {family.model_type} models are not supported; use Hugging Face "
            "folders"
        )


def model_tensors(
    checkpoint_tensors: Mapping[str, Held], fields: Mapping[str, Any], folder: Path, key: str
) -> dict[str, Held]:
    """Select the model's tensors from a checkpoint, without optimizer states. Remove the prefix of their names.

    Args:
        held: tensors of the checkpoint by name.
        fields: config.json fields of the model.
        folder: folder of the checkpoint, for error messages.
        key: config key or option that specifies the checkpoint, for error messages.

    Raises:
        ConfigError: if the checkpoint has no GPT model, its sizes differ from ``fields``, or a dtype is not supported.
    """
    prefix = next((prefix for prefix in _PREFIXES if prefix + EMBEDDING in checkpoint_tensors), None)
    if prefix is None:
        raise ConfigError(f"{key}: {folder} does not contain a GPT model of Megatron-core (no {EMBEDDING})")
    parts = tuple(prefix + part for part in ("embedding.", "decoder.", "output_layer."))
    found = {name.removeprefix(prefix): tensor for name, tensor in checkpoint_tensors.items() if name.startswith(parts)}
    for name, tensor in found.items():
        if tensor.dtype not in _SUPPORTED_DTYPES:
            raise ConfigError(
                f"{key}: {name} of {folder} has dtype {tensor.dtype}, which is not supported; "
                f"supported: {', '.join(_SUPPORTED_DTYPES)}"
            )
    rows, width = found[EMBEDDING].shape
    for field, size, expected in (
        ("hidden_size", width, fields["hidden_size"]),
        ("num_hidden_layers", layers_of(found), fields["num_hidden_layers"]),
    ):
        if size != expected:
            raise ConfigError(f"{key}: {folder} has {field} {size}, but its config.json has {expected}")
    if rows < fields["vocab_size"]:
        raise ConfigError(
            f"{key}: {folder} has a vocabulary of {rows} tokens, but its config.json has {fields['vocab_size']}"
        )
    if fields.get("tie_word_embeddings") and "output_layer.weight" in found:
        raise ConfigError(
            f"{key}: {folder} has a separate output layer, but its config.json ties the embeddings; "
            "set tie_word_embeddings to false there"
        )
    return found


def layers_of(tensors: Mapping[str, Held]) -> int:
    """Return the number of layers. A tensor contains either one layer or all layers, which are then its first
    dimension."""
    layered = [name.split(".") for name in tensors if name.startswith("decoder.layers.")]
    numbers = [int(parts[2]) for parts in layered if parts[2].isdigit()]
    if numbers:
        return max(numbers) + 1
    return next((tensors[".".join(parts)].shape[0] for parts in layered), 0)
