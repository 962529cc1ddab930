"""Safe readers for the pickles in a checkpoint: loading a checkpoint does not execute code from it.

A checkpoint in torch's distributed format contains an index, ``.metadata``, and objects that are not tensors. torch
reads both with unpicklers that call any function named in the file. ``install`` replaces these unpicklers with
restricted unpicklers. A malicious file can still name the wrong tensors, or waste time and memory. The file cannot run
code or refer to files outside its folder.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from gdpo_nemo.models.torch_dist import INDEX_CLASSES
from gdpo_nemo.utils.errors import RunError, first_line
from gdpo_nemo.utils.files import check_pickle

_MAX_INDEX_BYTES = 1 << 30
"""Maximum size of an index in bytes. An index of this size describes about ten million shards."""
_MAX_NUMBER = 1 << 48
"""Upper bound (exclusive) of sizes, offsets and byte counts in an index."""
_MAX_DIMENSIONS = 16

_RECORDS = {
    *INDEX_CLASSES,
    # Location of TensorProperties in torch before 2.3.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}
"""(module, name) of all classes and functions that an index may name, in addition to torch.Size and torch's dtypes."""


class _Record:
    """Stand-in for an object of the index: stores the object's state and ignores all other pickle operations."""

    state: Any = None

    def __new__(cls, *_: Any) -> _Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that creates a ``_Record`` for every allowed object and rejects all others.

    Each unpickler creates new record classes: a pickle may set attributes of a class, which must not affect other
    files.
    """

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function. Raises UnpicklingError if an index must not name it."""
        if (module, name) in _RECORDS:
            return self._classes.setdefault(name, type(name, (_Record,), {}))
        if (module, name) == ("torch", "Size"):
            return tuple
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not expected in an index")


def read_index(file: Path) -> Metadata:
    """Return the index of a checkpoint.

    Raises:
        RunError: if the file is not an index, or if it names a forbidden object or a file outside its folder.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read(_MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_INDEX_BYTES:
        raise RunError(f"{file} is not a checkpoint index (larger than {_MAX_INDEX_BYTES >> 20} MiB)")
    # Clear this cache, because pickle takes objects with an extension code from it without calling find_class.
    copyreg.clear_extension_cache()
    try:
        return _metadata(_IndexUnpickler(check_pickle(content)).load())
    except Exception as error:  # noqa: BLE001 - a hostile file may raise any exception
        raise RunError(f"{file} is not a supported checkpoint index ({first_line(error)})") from None


def _metadata(record: Any) -> Metadata:
    content = _state(record, "Metadata")
    tensors = {_text(key): _item_metadata(value) for key, value in _mapping(content["state_dict_metadata"]).items()}
    storage = {_index(key): _storage_info(value) for key, value in _mapping(content["storage_data"]).items()}
    version = content.get("version")
    return Metadata(tensors, None, storage, StorageMeta(), None if version is None else _text(version))


def _item_metadata(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    content = _state(record, "TensorStorageMetadata")
    properties = content["properties"]
    state = properties.state if isinstance(properties, _Record) else None
    dtype = None
    if isinstance(state, dict):
        dtype = state["dtype"]
    elif isinstance(state, tuple):
        dtype = state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no data type")
    chunks = content["chunks"]
    if not isinstance(chunks, list):
        raise ValueError("a tensor has no list of chunks")
    return TensorStorageMetadata(TensorProperties(dtype), _size(content["size"]), [_chunk(chunk) for chunk in chunks])


def _chunk(record: Any) -> ChunkStorageMetadata:
    content = _state(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(content["offsets"]), _size(content["sizes"]))


def _index(record: Any) -> MetadataIndex:
    content = _state(record, "MetadataIndex")
    offset = content.get("offset")
    index = content.get("index")
    return MetadataIndex(
        _text(content["fqn"]), None if offset is None else _size(offset), None if index is None else _number(index)
    )


def _storage_info(record: Any) -> _StorageInfo:
    content = _state(record, "_StorageInfo")
    path = _text(content["relative_path"])
    if path in (".", "..") or "/" in path or "\0" in path:
        raise ValueError(f"{path!r} is not a file of the checkpoint")
    if content.get("transform_descriptors"):
        raise ValueError("transformed files are not supported")
    return _StorageInfo(path, _number(content["offset"]), _number(content["length"]))


def _state(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind or not isinstance(record.state, dict):
        raise ValueError(f"expected {kind}, got {type(record).__name__}")
    return record.state


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"expected a dictionary, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, got {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError("a number is out of range")
    return value


def _size(value: Any) -> torch.Size:
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise ValueError("an invalid shape")
    return torch.Size([_number(entry) for entry in value])


def load_plain(stream: io.BytesIO) -> Any:
    """Load an object that ``torch.save`` wrote.

    The object may consist of containers, numbers, strings, tensors, arrays, and the types that Megatron declares safe.

    Raises:
        RunError: if the object has other content.
    """
    copyreg.clear_extension_cache()
    try:
        return torch.load(stream, weights_only=True)
    except Exception as error:  # noqa: BLE001 - a hostile file may raise any exception
        raise RunError(f"a stored object cannot be read ({_unpickling_reason(error)})") from None


def check_extra_state(state: torch.Tensor | io.BytesIO | None) -> None:
    """Check the pickled fp8 scales of a TransformerEngine layer before the layer loads them.

    Raises:
        UnpicklingError or RunError: if they contain types other than plain data and tensors.
    """
    from megatron.core.safe_globals import SafeUnpickler

    copyreg.clear_extension_cache()
    if isinstance(state, torch.Tensor) and state.numel():
        content = state.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        SafeUnpickler(io.BytesIO(check_pickle(content))).load()
    elif isinstance(state, io.BytesIO) and state.getbuffer().nbytes:
        load_plain(io.BytesIO(state.getvalue()))


def _unpickling_reason(error: Exception) -> str:
    """Return the reason in torch's error message, without the advice to load the file with weights_only=False."""
    text = " ".join(str(error).split())
    return (text.partition("WeightsUnpickler error: ")[2] or text).partition(" Please ")[0][:200]


@contextlib.contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Convert every error in the block to a RunError that names the checkpoint's folder."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's exception derives directly from BaseException
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        cause = causes[0] if causes else error
        reason = str(cause) if isinstance(cause, RunError) else first_line(cause)
        raise RunError(f"checkpoint {folder} cannot be read: {reason}") from error


def install() -> None:
    """Make torch use this module's readers for all distributed checkpoints in this process."""

    def read_metadata(self: FileSystemReader, *_: Any, rank: int | None = None, **__: Any) -> Metadata:
        metadata = read_index(Path(self._get_metadata_path(rank)))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_plain(value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]  # torch creates the readers itself
    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
