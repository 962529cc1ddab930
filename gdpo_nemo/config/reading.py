"""Files that a command is given: read only where they are files, only so much of them, and as plain data of bounded
size. Every file that somebody else may have written comes through here."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

LARGEST = 256 << 20
"""Bytes of a file that is read whole; journals and metrics of long runs are the largest."""
_DEEPEST = 64
_NODES = 1_000_000
"""Of a YAML file once its aliases are written out, which a text of a few lines may make billions."""
_LONGEST_NUMBER = 4000
"""Digits; Python refuses to read numbers of more than 4300."""
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading, never a pipe or a device, which would wait or never end. Raises OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return os.fdopen(opened, "rb")
    folder = stat.S_ISDIR(os.fstat(opened).st_mode)
    os.close(opened)
    if folder:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, and no file", str(path))


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """The content of a file. Raises OSError: it cannot be read, is no file, or has more than ``largest`` bytes."""
    with open_file(path) as stream:
        content = stream.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest >> 20} MiB", str(path))
    return content


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """The content of a file in UTF-8. Raises OSError as ``read_bytes``, UnicodeDecodeError."""
    return read_bytes(path, largest).decode("utf-8")


def parse_json(content: str | bytes) -> Any:
    """What a JSON text holds. Raises ValueError: it is none, or too deep."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """What a YAML text holds. Raises yaml.YAMLError: it is none, too deep, too large, or has a value that is none."""
    check_yaml(text)
    try:
        return yaml.safe_load(text)
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise yaml.YAMLError(str(error)) from None


def check_yaml(text: str) -> None:
    """Raise yaml.YAMLError for a text that is nested too deeply, or too large once its aliases are written out.

    A text that is not valid YAML passes: its reader's own error says where it is broken.
    """
    try:
        _check_events(text, _FAST_LOADER)
    except _Refused:
        raise
    except yaml.YAMLError:
        # libyaml reports its own limits, on nesting for one, as if the text were broken (since PyYAML 6.0.4), and the
        # readers that follow are not libyaml: the bounds must hold for what they will read.
        _check_events_of_reader(text)


def _check_events_of_reader(text: str) -> None:
    try:
        _check_events(text, yaml.SafeLoader)
    except _Refused:
        raise
    except RecursionError:
        raise _Refused("it is nested too deeply") from None
    except yaml.YAMLError:
        return  # invalid for the reader as well, which says where


def _check_events(text: str, loader: Any) -> None:
    sizes: dict[str, int | None] = {}
    open_: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) == _DEEPEST:
                raise _Refused(f"it is nested more than {_DEEPEST} deep")
            open_.append((event.anchor, 1))
            if event.anchor:
                sizes[event.anchor] = None
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            (anchor, size) = open_.pop()
        elif isinstance(event, yaml.ScalarEvent):
            (anchor, size) = (event.anchor, 1)
            if len(event.value) > _LONGEST_NUMBER and event.implicit[0] and _is_number(event.value):
                raise _Refused(f"it holds a number of {len(event.value)} digits")
        elif isinstance(event, yaml.AliasEvent):
            (anchor, size) = (None, _size_of_alias(sizes, event.anchor or ""))
        else:
            continue
        if anchor:
            sizes[anchor] = size
        if open_:
            (outer, before) = open_[-1]
            open_[-1] = (outer, before + size)
        if size > _NODES or (open_ and open_[-1][1] > _NODES):
            raise _Refused(f"it holds more than {_NODES:,} values")


class _Refused(yaml.YAMLError):
    pass


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace("_", "").isdecimal()


def _size_of_alias(sizes: dict[str, int | None], anchor: str) -> int:
    size = sizes.get(anchor, 0)
    if size is None:
        raise _Refused("an alias holds itself")
    return size
