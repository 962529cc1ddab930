"""What a GGUF file says of itself: its metadata and the place of every tensor, without reading a weight.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read here and not by the ``gguf`` package, which takes
seconds for a vocabulary and reads all of the file into memory maps before it can say what is wrong with it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Mapping

from gdpo_nemo.config.reading import open_file
from gdpo_nemo.errors import ConfigError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_LONGEST = 1 << 32
"""Bytes or items that a text or an array may have; more is taken for damage."""
_DEEPEST = 8
"""Arrays in arrays; the metadata of real models has none."""

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""The types of tensors that are read, by GGML's number: name, values in a block, bytes of a block."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of the file."""

    shape: tuple[int, ...]
    """Rows first, as in torch; the file has it the other way round."""
    kind: str
    """Name of its type in ``BLOCKS``."""
    start: int
    """Of its first byte in the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, and the tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """The name that llama.cpp gives the model's architecture."""
        return str(self.metadata.get("general.architecture"))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """The value of ``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf_header(file: Path, key: str) -> GgufHeader:
    """Read the header of a GGUF file and check that all its tensors are in it.

    Args:
        key: what the user named the file by, for messages.

    Raises:
        ConfigError: the file is damaged, cut off, one part of several, or has tensors of a type that is not read.
    """
    try:
        with open_file(file) as stream:
            header = _read(stream, key, file)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{key}: {file} is no whole GGUF file ({error})") from None
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(f"{key}: {file} is one of {parts} parts; join them with llama.cpp's `gguf-split --merge`")
    size = file.stat().st_size
    end = max((place.start + place.size for place in header.tensors.values()), default=0)
    if end > size:
        raise ConfigError(f"{key}: {file} is cut off: {size} bytes of {end}")
    return header


def _read(stream: BinaryIO, key: str, file: Path) -> GgufHeader:
    if stream.read(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    (version,) = _unpack(stream, "I")
    if version not in _VERSIONS:
        raise ConfigError(f"{key}: {file} is GGUF of version {version}; read are {', '.join(map(str, _VERSIONS))}")
    tensors, pairs = _unpack(stream, "QQ")
    metadata: dict[str, Any] = {}
    for _ in range(_checked(pairs)):
        name = _text(stream)
        metadata[name] = _value(stream, _unpack(stream, "I")[0])
    found = [(_text(stream), _dimensions(stream), _unpack(stream, "Q")[0]) for _ in range(_checked(tensors))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("general.alignment is no size")
    begin = -(-stream.tell() // alignment) * alignment
    places = {name: _place(key, file, name, *form, begin + offset) for name, form, offset in found}
    return GgufHeader(metadata, places)


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack("<" + form, stream.read(struct.calcsize("<" + form)))


def _checked(count: int) -> int:
    if count > _LONGEST:
        raise ValueError(f"a count of {count}")
    return count


def _text(stream: BinaryIO) -> str:
    length = _checked(_unpack(stream, "Q")[0])
    found = stream.read(length)
    if len(found) < length:
        raise ValueError("it ends within a text")
    return found.decode("utf-8", errors="replace")


def _value(stream: BinaryIO, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return _unpack(stream, _SCALARS[kind])[0]
    if kind == _STRING:
        return _text(stream)
    if kind != _ARRAY:
        raise ValueError(f"a value of unknown type {kind}")
    if depth == _DEEPEST:
        raise ValueError(f"arrays are nested more than {_DEEPEST} deep")
    inner, count = _unpack(stream, "IQ")
    if inner in _SCALARS:
        return list(_unpack(stream, f"{_checked(count)}{_SCALARS[inner]}"))
    return [_value(stream, inner, depth + 1) for _ in range(_checked(count))]


def _dimensions(stream: BinaryIO) -> tuple[tuple[int, ...], int]:
    (count,) = _unpack(stream, "I")
    if count > 4:
        raise ValueError(f"a tensor of {count} dimensions")
    *dimensions, kind = _unpack(stream, f"{count}QI")
    return tuple(reversed(dimensions)), kind


def _place(key: str, file: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorPlace:
    if kind not in BLOCKS:
        known = ", ".join(known for known, _, _ in BLOCKS.values())
        raise ConfigError(f"{key}: {name} of {file} is quantised as GGML type {kind}, which is not read; read: {known}")
    label, values, size = BLOCKS[kind]
    if shape and shape[-1] % values:
        raise ValueError(f"{name} has rows of {shape[-1]} values in blocks of {values}")
    return TensorPlace(shape, label, start, math.prod(shape) // values * size)
