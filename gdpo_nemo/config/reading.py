"""Files that a command is given: read only where they are files, only so much of them, and as plain data of bounded
size. Every file that somebody else may have written comes through here."""

from __future__ import annotations

import errno
import json
import os
import re
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
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_MAY_HOLD_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""In the JSON text of a value with half a surrogate pair, and of few others."""
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def real_path(path: str | Path) -> Path:
    """Return an absolute path without links. ``Path.resolve`` raises RuntimeError for links that form a loop."""
    return Path(os.path.realpath(path))


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


def parse_json(content: str | bytes, half_pairs: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        half_pairs: accept texts with half a surrogate pair, which recorded samples may hold.

    Raises:
        ValueError: if it is not valid JSON or not UTF-8, is nested too deeply, or holds half a surrogate pair.
    """
    try:
        # json.loads decodes bytes leniently, so that half a pair would pass.
        text = content.decode(json.detect_encoding(content)) if isinstance(content, bytes) else content
        value = json.loads(text)
        if not half_pairs and _MAY_HOLD_HALF.search(text):
            check_pairs(json.dumps(value, ensure_ascii=False))
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class HalfPair(ValueError):
    """A text that UTF-8 cannot encode."""


def check_pairs(text: str) -> None:
    r"""Refuse a text that UTF-8 cannot encode: one with a lone surrogate such as ``\ud83d``, half of an emoji.

    Tokenizers, files and servers all need UTF-8. The text is therefore refused where it comes in.

    Raises:
        HalfPair: if there is one.
    """
    half = None if text.isascii() else _HALF_PAIR.search(text)
    if half:
        raise HalfPair(f"it holds half of a surrogate pair (\\u{ord(half[0]):04x}), which UTF-8 cannot encode")


def parse_yaml(text: str) -> Any:
    """What a YAML text holds. Raises yaml.YAMLError: it is none, too deep, too large, or has a value that is none."""
    check_yaml(text)
    try:
        return yaml.safe_load(text)
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise yaml.YAMLError(str(error)) from None


def check_yaml(text: str) -> None:
    """Raise yaml.YAMLError for a text that is nested too deeply, or too large once its aliases are written out.

    Half a surrogate pair is refused as in JSON (``check_pairs``).
    A text that is not valid YAML passes: its reader's own error says where it is broken.
    """
    try:
        _check_events(text, _FAST_LOADER)
    except Refused:
        raise
    except yaml.YAMLError:
        # libyaml reports its own limits, on nesting for one, as if the text were broken (since PyYAML 6.0.4), and the
        # readers that follow are not libyaml: the bounds must hold for what they will read.
        _check_events_of_reader(text)


def _check_events_of_reader(text: str) -> None:
    try:
        _check_events(text, yaml.SafeLoader)
    except Refused:
        raise
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    except yaml.YAMLError:
        return  # invalid for the reader as well, which says where


def _check_events(text: str, loader: Any) -> None:
    _check_scalar(text)
    sizes: dict[str, int | None] = {}
    open_: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) == _DEEPEST:
                raise Refused(f"it is nested more than {_DEEPEST} deep")
            open_.append((event.anchor, 1))
            if event.anchor:
                sizes[event.anchor] = None
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            (anchor, size) = open_.pop()
        elif isinstance(event, yaml.ScalarEvent):
            (anchor, size) = (event.anchor, 1)
            _check_scalar(event.value)
            if len(event.value) > _LONGEST_NUMBER and event.implicit[0] and _is_number(event.value):
                raise Refused(f"it holds a number of {len(event.value)} digits")
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
            raise Refused(f"it holds more than {_NODES:,} values")


class Refused(yaml.YAMLError):
    """A YAML text beyond a bound; its text says which."""


def _check_scalar(text: str) -> None:
    try:
        check_pairs(text)
    except HalfPair as error:
        raise Refused(str(error)) from None


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace("_", "").isdecimal()


def _size_of_alias(sizes: dict[str, int | None], anchor: str) -> int:
    size = sizes.get(anchor, 0)
    if size is None:
        raise Refused("an alias holds itself")
    return size
