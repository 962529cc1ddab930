"""A model of a disk that loses power: only writes that were synced survive, and it checks every moment in between."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

WATCHED = ("fsync", "replace", "rename", "unlink", "rmdir")


class SyncedDisk:
    """Records what is synced below a folder.

    After a power loss a file has the content of its last ``fsync``, and is empty if there was none. A folder has the
    names of its last ``fsync``; later changes of names may have reached the disk (``eager``) or not.
    """

    def __init__(self, root: Path):
        self.root = root
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}
        self._open: dict[int, int] = {}
        self._lock = threading.RLock()
        """One call at a time, of all threads."""
        self._examined = False
        """Calls of the moment itself are not recorded."""

    def watch(self, monkeypatch, moment: Callable[[], None]) -> None:
        """Call ``moment`` before and after every call that syncs, renames or removes."""
        for name in WATCHED:
            monkeypatch.setattr(os, name, self._watched(getattr(os, name), moment))

    def _watched(self, original, moment):
        def call(first, *arguments, **options):
            with self._lock:
                if self._examined:
                    return original(first, *arguments, **options)
                self._pin()
                self.examine(moment)
                result = original(first, *arguments, **options)
                if original.__name__ == "fsync":
                    self._synced(first)
                self.examine(moment)
                return result

        return call

    def examine(self, moment: Callable[[], None]) -> None:
        """Call ``moment`` as the power could be lost now."""
        self._examined = True
        try:
            moment()
        finally:
            self._examined = False

    def _pin(self) -> None:
        """Keep every file open, or the number of a removed one would be given to another."""
        for path in (self.root, *self.root.rglob("*")):
            number = path.stat().st_ino
            if number not in self._open:
                self._open[number] = os.open(path, os.O_RDONLY)

    def _synced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._entries[found.st_ino] = _entries(descriptor)
        else:
            self._contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def survivor(self, out: Path, eager: bool) -> Path:
        """Write what is left after a power loss at this moment into a new folder ``out``."""
        shutil.rmtree(out, ignore_errors=True)
        self._restore(self.root.stat().st_ino, out, self.root if eager else None)
        return out

    def _restore(self, number: int, out: Path, live: Path | None) -> None:
        out.mkdir()
        entries = self._entries.get(number, {}) if live is None else _entries(live)
        for name, (inner, is_folder) in entries.items():
            if is_folder:
                self._restore(inner, out / name, live and live / name)
            else:
                (out / name).write_bytes(self._contents.get(inner, b""))

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)


def _entries(folder: int | Path) -> dict[str, tuple[int, bool]]:
    with os.scandir(folder) as found:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in found}
