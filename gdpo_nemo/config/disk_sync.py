"""Files and folders that outlive a loss of power: their content and their names are on the disk when a call returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that do not sync folders (some on a network, some of user space)."""


def sync_file(path: str | Path) -> None:
    """Flush the content of a file to the disk, whichever process wrote it. Raises OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: str | Path) -> None:
    """Flush the names in a folder to the disk: files that were made, renamed or removed. Raises OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(opened)


def sync_tree(folder: str | Path) -> None:
    """Flush a folder and all files and folders in it to the disk. Links are not followed. Raises OSError."""
    for place, _, names in os.walk(folder, topdown=False, onerror=_raise):
        for name in names:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                sync_file(path)
        sync_folder(place)


def _raise(error: OSError) -> None:
    raise error
