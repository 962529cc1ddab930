"""What a Megatron-core checkpoint (``torch_dist``) says that it holds, read without torch and without running anything.

Its index, ``.metadata``, is a pickle, which torch and Megatron-core load as it is: whatever it names would be called.
Here only the few classes that torch's index consists of may be named, and none of them is imported. A file that passes
is safe to hand to torch.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.errors import ConfigError

_CHECKPOINT = "torch.distributed.checkpoint"
_TENSOR = "TensorStorageMetadata"
_METADATA = (
    "Metadata", _TENSOR, "TensorProperties", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
    "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Megatron-core keeps the plans of the ranks in the index."""
_INERT = {
    *((f"{_CHECKPOINT}.metadata", name) for name in _METADATA),
    *((f"{_CHECKPOINT}.planner", name) for name in _PLANNER),
    *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}
"""(module, class) of what may be in the index; none of them is imported."""
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
           "float8_e4m3fn", "float8_e5m2")  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A tensor of the checkpoint, over all ranks that wrote it."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""


class _Thing:
    """In place of an object of torch's: its class's name and what it was made of."""

    name = ""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INERT:
            return type(name, (_Thing,), {"name": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_dist_metadata(folder: Path, key: str) -> Mapping[str, Held]:
    """The tensors of the checkpoint in ``folder``, by Megatron's names.

    Args:
        key: what the user named the checkpoint by, for messages.

    Raises:
        ConfigError: the index is damaged, or names something that could be run, or a file that it needs is missing or
        elsewhere.
    """
    file = folder / ".metadata"
    try:
        with file.open("rb") as stream:
            found = _Reader(stream).load()
        entries = found.state["state_dict_metadata"]
        tensors = {name: _held(entry) for name, entry in entries.items() if getattr(entry, "name", "") == _TENSOR}
        files = {str(place.state["relative_path"]) for place in found.state["storage_data"].values()}
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises nearly anything
        raise ConfigError(
            f"{key}: {file} is no index of a Megatron-core checkpoint that can be trusted ({error})"
        ) from None
    outside = sorted(name for name in files if Path(name).name != name)
    if outside:
        raise ConfigError(f"{key}: {file} names {outside[0]}, which is no file of a checkpoint")
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ConfigError(f"{key}: {folder} lacks {missing[0]}, which its index names")
    return tensors


def _held(entry: Any) -> Held:
    properties = entry.state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    return Held(tuple(entry.state["size"]), str(dtype))
