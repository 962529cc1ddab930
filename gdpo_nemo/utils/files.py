"""Safe reading of user-supplied files (regular files, limited size and depth), and atomic, durable writing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import pickletools
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gdpo_nemo.utils.errors import ConfigError, RunError

LARGEST = 256 << 20
"""Default maximum size of a file in bytes. The largest files are journals and metrics of long runs."""
_DEEPEST = 64
_NODES = 1_000_000
"""Maximum number of values in a YAML text after expanding its aliases.

A few lines with aliases may expand to billions of values.
"""
_LONGEST_NUMBER = 4000
"""Maximum number of digits in a number. Python does not parse integers of more than 4300 digits."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_MAY_HOLD_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Pattern that matches every JSON text that may contain a lone surrogate. Only matching texts are checked in detail."""
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def real_path(path: str | Path) -> Path:
    """Return an absolute path with symbolic links resolved.

    Unlike ``Path.resolve``, this function accepts links that form a loop.
    """
    return Path(os.path.realpath(path))


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Pipes and devices are refused, because a read could block forever.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return os.fdopen(opened, "rb")
    folder = stat.S_ISDIR(os.fstat(opened).st_mode)
    os.close(opened)
    if folder:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or has more than ``largest`` bytes.
    """
    with open_file(path) as stream:
        content = stream.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest >> 20} MiB", str(path))
    return content


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Return the content of a UTF-8 file.

    Raises:
        OSError: under the conditions of ``read_bytes``.
        UnicodeDecodeError: if the content is not valid UTF-8.
    """
    return read_bytes(path, largest).decode("utf-8")


class RepeatedKey(ValueError):
    """A JSON object contains a key twice. Readers of JSON disagree about which value counts."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RepeatedKey(f"it contains the key {repeated[:40]!r} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(content: str | bytes, half_pairs: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        half_pairs: True to accept lone surrogates, which recorded samples may contain.

    Raises:
        ValueError: if the text is not valid JSON or UTF-8, is nested too deeply, contains a key twice in an object, or
            contains a lone surrogate.
    """
    try:
        # json.loads accepts lone surrogates in bytes.
        text = content.decode(json.detect_encoding(content)) if isinstance(content, bytes) else content
        value = _DECODER.decode(text)
        if not half_pairs and _MAY_HOLD_HALF.search(text):
            check_pairs(json.dumps(value, ensure_ascii=False))
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class HalfPair(ValueError):
    """A text contains a lone surrogate, which UTF-8 cannot encode."""


def check_pairs(text: str) -> None:
    r"""Refuse a text with a lone surrogate, for example ``\ud83d``, which is half of an emoji.

    UTF-8 cannot encode lone surrogates, but tokenizers, files and servers require UTF-8.

    Raises:
        HalfPair: if the text contains a lone surrogate.
    """
    half = None if text.isascii() else _HALF_PAIR.search(text)
    if half:
        raise HalfPair(f"it contains half of a surrogate pair (\\u{ord(half[0]):04x}), which UTF-8 cannot encode")


def check_pickle(content: bytes) -> bytes:
    """Return a pickle unchanged if its memo is not larger than its content.

    Python's unpickler allocates an array up to the largest index in the memo, so a few bytes could take all memory.

    Raises:
        UnpicklingError: if an index is too large.
        ValueError: if the content is not a pickle.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(f"an index in its memo is too large ({argument})")
    return content


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: if the text is not valid YAML, exceeds a limit, or contains an invalid value.
    """
    check_yaml(text)
    try:
        return yaml.safe_load(text)
    except ValueError as error:  # for example an invalid date, or a number of thousands of digits
        raise yaml.YAMLError(str(error)) from None


def check_yaml(text: str) -> None:
    """Refuse a YAML text that is too large after expanding aliases, nested too deeply, or has lone surrogates.

    This check accepts invalid YAML. The caller parses the text afterwards and reports the location of the
    error.

    Raises:
        yaml.YAMLError: if the text exceeds a limit.
    """
    try:
        _check_events(text, _FAST_LOADER)
    except Refused:
        raise
    except yaml.YAMLError:
        # Since PyYAML 6.0.4, libyaml reports a violation of its internal limits, for example on nesting, as invalid
        # YAML. The callers parse with PyYAML's Python parser, so the limits are checked again with this parser.
        _check_with_python_parser(text)


def _check_with_python_parser(text: str) -> None:
    try:
        _check_events(text, yaml.SafeLoader)
    except Refused:
        raise
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    except yaml.YAMLError:
        return  # the caller parses the text afterwards and reports the error


def _check_events(text: str, loader: Any) -> None:  # noqa: C901
    _check_scalar(text)
    sizes: dict[str, int | None] = {}
    open_: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) == _DEEPEST:
                raise Refused(f"it is nested more than {_DEEPEST} levels deep")
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
                raise Refused(f"it contains a number of {len(event.value)} digits")
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
            raise Refused(f"it contains more than {_NODES:,} values")


class Refused(yaml.YAMLError):
    """A YAML text was refused for the reason in the message."""


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
        raise Refused("an alias contains itself")
    return size


def read_json_object(file: Path, key: str) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Args:
        key: config key or option that names the file, for messages.

    Raises:
        ConfigError: if the file cannot be read, or does not contain an object.
    """
    try:
        content = parse_json(read_text(file))
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {file} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {file} is not a JSON object")
    return content


_PARTIAL = ".partial-{process}-"
"""Name prefix of incomplete files.

The prefix does not include the target's name, which may already have maximum length.
"""


def write_whole(path: str | Path, content: bytes | str, *, sync: bool = False) -> None:
    """Write a file atomically. See `whole_file`.

    Args:
        content: bytes, or text to encode as UTF-8.

    Raises:
        OSError: if the file cannot be written.
        UnicodeEncodeError: if the text contains lone surrogates.
    """
    encoded = content.encode("utf-8") if isinstance(content, str) else content
    with whole_file(path, sync=sync) as file:
        file.write(encoded)


@contextlib.contextmanager
def whole_file(path: str | Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that atomically replaces ``path`` at the end of the block.

    If the block fails, ``path`` does not change.

    The new file has the permissions of the old file. A symbolic link is followed, and its target is replaced. Devices
    and pipes are not replaced but written directly.

    Args:
        sync: True to flush the content and the folder entry to disk at the end of the block.

    Raises:
        OSError: if the file cannot be written, or ``path`` is a folder or a pipe without a reader.
    """
    target = Path(os.path.realpath(path))
    before = _status(path)
    if before is not None and not _is_replaceable(before, target):
        with _opened_in_place(path) as file:
            yield file
        return
    with _partial(target, before, sync) as file:
        yield file
    if sync:
        sync_folder(target.parent)


def remove_partial_files(folder: str | Path, process: int) -> None:
    """Remove the incomplete files that a killed process left in a folder.

    Raises:
        OSError: if a file cannot be removed.
    """
    for left in Path(folder).glob(_PARTIAL.format(process=process) + "*"):
        left.unlink(missing_ok=True)


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_replaceable(status: os.stat_result, target: Path) -> bool:
    """Return True if ``target`` is a regular file, and the same file that ``status`` describes.

    A link in /dev/fd or /proc may name a file that was removed or replaced. The status then describes another file.
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    found = _status(target)
    return found is not None and os.path.samestat(status, found)


def _opened_in_place(path: str | Path) -> BinaryIO:
    # Without O_NONBLOCK, opening a pipe blocks until it has a reader.
    opened = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(opened, True)
    return os.fdopen(opened, "wb")


@contextlib.contextmanager
def _partial(target: Path, before: os.stat_result | None, sync: bool) -> Iterator[BinaryIO]:
    """Open a new file, which is renamed to ``target`` at the end of the block.

    If the block fails, the file is removed.
    """
    partial = target.parent / (_PARTIAL.format(process=os.getpid()) + secrets.token_hex(4))
    try:
        with open(partial, "xb") as file:
            if before is not None:
                os.chmod(partial, stat.S_IMODE(before.st_mode))
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that cannot sync folders, such as some network and user-space file systems."""


def sync_file(path: str | Path) -> None:
    """Flush the content of a file to disk, even if another process wrote it.

    Raises:
        OSError: if the file cannot be synced.
    """
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: str | Path) -> None:
    """Flush the entries of a folder to disk, so that created, renamed and removed files persist.

    Raises:
        OSError: if the folder cannot be synced.
    """
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(opened)


def sync_tree(folder: str | Path) -> None:
    """Flush a folder with all its files and subfolders to disk. Symbolic links are not followed.

    Raises:
        OSError: if a file or folder cannot be synced.
    """
    for directory, _, names in os.walk(folder, topdown=False, onerror=_raise):
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                sync_file(path)
        sync_folder(directory)


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield the path of a new folder, which is renamed to ``out`` at the end of the block.

    The caller creates the folder. If the block fails, the folder is removed.

    Raises:
        RunError: if the folder cannot be written, or ``out`` exists and is not an empty folder.
    """
    temporary = out.absolute().parent / f".writing_{out.name}_{os.getpid()}"
    try:
        yield temporary
        if out.is_dir():
            out.rmdir()
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
