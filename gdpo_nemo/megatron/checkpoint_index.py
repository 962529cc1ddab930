"""Reading what a checkpoint holds as pickles, without running any of it.

A checkpoint in torch's distributed format has an index, ``.metadata``, and objects that are no tensors; torch reads
both with unpicklers that call whatever they are told to. ``install`` puts readers in their place that do not. A file
can still name the wrong tensors, or cost time and memory; it cannot run code or name files outside its folder.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from pathlib import Path
from typing import Any, Iterator

import torch
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.errors import RunError

_LARGEST_INDEX = 1 << 30
"""Bytes: some ten million shards."""
_LARGEST_NUMBER = 1 << 48
_DIMENSIONS = 16

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_RECORDS = {
    *((_METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    # Where torch before 2.3 had the properties.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    # Of the plans of the ranks, which Megatron leaves in the index for its own writer.
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    ("pathlib", "PosixPath"),
}  # fmt: skip
"""(module, name) of all that an index may mention beside sizes and types of numbers."""


class _Record:
    """An object of the index as data. Nothing that a pickle does to it has an effect elsewhere."""

    state: Any = None

    def __new__(cls, *_: Any) -> _Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Makes records of everything that the index may mention, and refuses the rest.

    Their classes are new for every file: a pickle may set attributes of a class, which then die with it.
    """

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a class or function. Raises UnpicklingError: it does not belong into an index."""
        if (module, name) in _RECORDS:
            return self._classes.setdefault(name, type(name, (_Record,), {}))
        if (module, name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds")


def read_index(file: Path) -> Metadata:
    """The index of a checkpoint.

    Raises:
        RunError: it is none, names something that no index holds, or a file outside its folder.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read(_LARGEST_INDEX + 1)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST_INDEX:
        raise RunError(f"{file} is no index of a checkpoint (above {_LARGEST_INDEX >> 20} MiB)")
    # An object behind a registered number is found in this cache, and find_class not asked.
    copyreg.clear_extension_cache()
    try:
        return _metadata(_IndexUnpickler(content).load())
    except Exception as error:  # noqa: BLE001 - a hostile file may make any
        raise RunError(f"{file} is no index of a checkpoint that is read here ({first_line(error)})") from None


def _metadata(record: Any) -> Metadata:
    content = _state(record, "Metadata")
    tensors = {_text(key): _stored(value) for key, value in _mapping(content["state_dict_metadata"]).items()}
    places = {_place(key): _slice(value) for key, value in _mapping(content["storage_data"]).items()}
    version = content.get("version")
    return Metadata(tensors, None, places, StorageMeta(), None if version is None else _text(version))


def _stored(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    content = _state(record, "TensorStorageMetadata")
    properties = content["properties"]
    kept = properties.state if isinstance(properties, _Record) else None
    dtype = kept["dtype"] if isinstance(kept, dict) else kept[0] if isinstance(kept, tuple) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a type of numbers")
    chunks = content["chunks"]
    if not isinstance(chunks, list):
        raise ValueError("a tensor without a list of chunks")
    return TensorStorageMetadata(TensorProperties(dtype), _size(content["size"]), [_chunk(chunk) for chunk in chunks])


def _chunk(record: Any) -> ChunkStorageMetadata:
    content = _state(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(content["offsets"]), _size(content["sizes"]))


def _place(record: Any) -> MetadataIndex:
    content = _state(record, "MetadataIndex")
    offset = content.get("offset")
    index = content.get("index")
    return MetadataIndex(
        _text(content["fqn"]), None if offset is None else _size(offset), None if index is None else _number(index)
    )


def _slice(record: Any) -> _StorageInfo:
    content = _state(record, "_StorageInfo")
    path = _text(content["relative_path"])
    if path in (".", "..") or "/" in path or "\0" in path:
        raise ValueError(f"{path!r} is no file of the checkpoint")
    if content.get("transform_descriptors"):
        raise ValueError("a file that is not stored as it is")
    return _StorageInfo(path, _number(content["offset"]), _number(content["length"]))


def _state(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind or not isinstance(record.state, dict):
        raise ValueError(f"{type(record).__name__} in the place of {kind}")
    return record.state


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{type(value).__name__} in the place of a dictionary")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{type(value).__name__} in the place of a text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_NUMBER:
        raise ValueError("a number out of range")
    return value


def _size(value: Any) -> torch.Size:
    if type(value) is not tuple or len(value) > _DIMENSIONS:
        raise ValueError("a shape that is none")
    return torch.Size([_number(entry) for entry in value])


def load_plain(stream: io.BytesIO) -> Any:
    """An object that ``torch.save`` wrote: containers, numbers, texts, tensors and arrays, and what Megatron declares
    safe. Raises RunError: it holds something else."""
    copyreg.clear_extension_cache()
    try:
        return torch.load(stream, weights_only=True)
    except Exception as error:  # noqa: BLE001 - as in read_index
        raise RunError(f"an object in it is not read ({_said(error)})") from None


def check_extra_state(state: torch.Tensor | io.BytesIO | None) -> None:
    """Hold what a layer of TransformerEngine is about to unpickle, its scales for fp8, against what may be in it.
    Raises UnpicklingError."""
    from megatron.core.safe_globals import SafeUnpickler

    copyreg.clear_extension_cache()
    if isinstance(state, torch.Tensor) and state.numel():
        SafeUnpickler(io.BytesIO(state.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())).load()
    elif isinstance(state, io.BytesIO) and state.getbuffer().nbytes:
        load_plain(io.BytesIO(state.getvalue()))


def _said(error: Exception) -> str:
    """torch's reason, without its advice to read the file with an unpickler that runs it."""
    text = " ".join(str(error).split())
    return (text.partition("WeightsUnpickler error: ")[2] or text).partition(" Please ")[0][:200]


@contextlib.contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Say of which checkpoint what goes wrong in the block. Raises RunError for every error in it."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's derives from BaseException alone
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        cause = causes[0] if causes else error
        reason = str(cause) if isinstance(cause, RunError) else first_line(cause)
        raise RunError(f"checkpoint {folder} cannot be read: {reason}") from error


def install() -> None:
    """Have torch's distributed checkpoints read by the functions here, in this process."""

    def read_metadata(self: FileSystemReader, *_: Any, rank: int | None = None, **__: Any) -> Metadata:
        metadata = read_index(Path(self._get_metadata_path(rank)))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        found = load_plain(value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found

    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]  # the readers are made inside torch
    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
