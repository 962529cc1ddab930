"""Files written whole: another process sees the old content or the new, and never a part of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Iterator

from gdpo_nemo.config.disk_sync import sync_folder

_PARTIAL = ".partial-{process}-"
"""Start of the name of an unfinished file. It does not contain the target's name, which may be as long as names get."""


def write_whole(path: str | Path, content: bytes | str, *, sync: bool = False) -> None:
    """Write a whole file. See `whole_file`.

    Args:
        content: bytes, or a text to be written in UTF-8.

    Raises:
        OSError: if the file cannot be written.
        UnicodeEncodeError: if a text has no UTF-8 form (lone surrogates).
    """
    encoded = content.encode("utf-8") if isinstance(content, str) else content
    with whole_file(path, sync=sync) as file:
        file.write(encoded)


@contextlib.contextmanager
def whole_file(path: str | Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` at the end of the block. If the block fails, ``path`` stays as it was.

    A symbolic link is followed: its target is replaced, and keeps its permissions. A device or a pipe is opened
    and written directly, since replacing it would destroy it.

    Args:
        sync: flush the content and the folder entry to the disk before the function returns.

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
    """Remove the files that a killed process left unfinished in a folder. Raises OSError."""
    for left in Path(folder).glob(_PARTIAL.format(process=process) + "*"):
        left.unlink(missing_ok=True)


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_replaceable(status: os.stat_result, target: Path) -> bool:
    """Return whether ``target`` is a regular file and the one that the status describes.

    A descriptor in /dev/fd or /proc is a link to a name that may no longer exist, or may belong to another file.
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    found = _status(target)
    return found is not None and os.path.samestat(status, found)


def _opened_in_place(path: str | Path) -> BinaryIO:
    # Without O_NONBLOCK, opening a pipe waits for a reader, without limit.
    opened = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(opened, True)
    return os.fdopen(opened, "wb")


@contextlib.contextmanager
def _partial(target: Path, before: os.stat_result | None, sync: bool) -> Iterator[BinaryIO]:
    """Open a new file that gets the name ``target`` when the block ends, or is removed when it fails."""
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
