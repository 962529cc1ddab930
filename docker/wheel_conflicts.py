"""Find paths that two wheels of the group gpu install with different contents. The wheels are not downloaded.

    python docker/wheel_conflicts.py [FOLDER]     FOLDER contains pyproject.toml and uv.lock (default: this checkout)

The wheel that is unpacked last overwrites such a path, and an import of the other package may fail.
Each wheel lists its files in RECORD, which is near the end of the archive. This script reads only that part with HTTP
range requests. Packages without a wheel are reported and not checked.
"""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from packaging.markers import Marker, default_environment
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
_EXPORT = "uv export --quiet --frozen --no-emit-project --no-default-groups --format pylock.toml".split()
_HARMLESS = {"build_backend.py": "build scripts of flashinfer-python and torch-c-dlpack-ext, which no code imports"}
"""Paths that may be overwritten, and the reason."""
_TAIL_BYTES = 1 << 18
"""Size of the first request of a wheel, which usually contains the archive's directory and RECORD."""
_TIMEOUT_S = 60.0
_CONNECTIONS = 8
_RETRIES = 5
"""Further attempts of a request, for example after a failed name resolution."""


@dataclass(frozen=True)
class Wheel:
    """One file of the package index."""

    name: str
    url: str
    size: int
    """Bytes, or 0 if the lock file does not contain the size."""


class RangeFile(io.RawIOBase):
    """A read-only file over HTTP. Each read outside the end of the file is one range request."""

    def __init__(self, client: httpx.Client, wheel: Wheel) -> None:
        """Request the end of the file."""
        self._client = client
        self._url = wheel.url
        self._size = wheel.size or int(self._request("HEAD").headers["Content-Length"])
        self._position = 0
        self._start = max(0, self._size - _TAIL_BYTES)
        self._tail = self._fetch(self._start, self._size)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position. See `io.IOBase.seek`."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes; all bytes to the end if it is negative."""
        start = self._position
        stop = self._size if size < 0 else min(start + size, self._size)
        self._position = max(start, stop)
        if start >= stop:
            return b""
        if start >= self._start:
            return self._tail[start - self._start : stop - self._start]
        return self._fetch(start, stop)

    def _fetch(self, start: int, stop: int) -> bytes:
        answer = self._request("GET", {"Range": f"bytes={start}-{stop - 1}"})
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            raise SystemExit(f"{self._url}: the package index does not serve ranges")
        return answer.content

    def _request(self, method: str, headers: dict[str, str] | None = None) -> httpx.Response:
        """Send a request. Repeat it if the connection or the server fails."""
        for left in range(_RETRIES, -1, -1):
            try:
                return self._client.request(method, self._url, headers=headers).raise_for_status()
            except httpx.HTTPError:
                if not left:
                    raise
        raise AssertionError("unreachable")


def resolved(folder: Path, group: str = "gpu") -> tuple[list[Wheel], list[str]]:
    """Return the wheels that a lock file installs on this machine, and the packages without a suitable wheel.

    Args:
        folder: folder with pyproject.toml and uv.lock.
        group: dependency group.
    """
    done = subprocess.run([*_EXPORT, "--group", group], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    environment = {**default_environment(), "extra": ""}
    rank = {tag: place for place, tag in enumerate(sys_tags())}
    wheels, without = [], []
    for package in tomllib.loads(done.stdout)["packages"]:
        if "marker" in package and not Marker(package["marker"]).evaluate(environment, context="lock_file"):
            continue
        suitable = []
        for entry in package.get("wheels", ()):
            if not entry.get("url", "").startswith("http"):  # a wheel in a local folder
                continue
            file = entry["url"].rpartition("/")[2].replace("%2B", "+")
            places = [rank[tag] for tag in parse_wheel_filename(file)[3] if tag in rank]
            suitable += [(min(places), Wheel(file, entry["url"], entry.get("size", 0)))] if places else []
        if suitable:
            wheels.append(min(suitable, key=lambda pair: pair[0])[1])
        else:
            without.append(package["name"])
    return wheels, without


def records(wheels: Iterable[Wheel]) -> dict[str, str]:
    """Read the RECORD of wheels from the package index; return them by file name."""
    transport = httpx.HTTPTransport(retries=_RETRIES)
    with httpx.Client(transport=transport, timeout=_TIMEOUT_S) as client, ThreadPoolExecutor(_CONNECTIONS) as pool:
        return dict(pool.map(lambda wheel: (wheel.name, _record(RangeFile(client, wheel))), wheels))


def _record(file: RangeFile) -> str:
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
        return archive.read(name).decode()


def conflicts(by_wheel: dict[str, str]) -> dict[tuple[str, ...], list[str]]:
    """Return the paths that wheels install with different contents, by the names of these wheels.

    Args:
        by_wheel: RECORD of each wheel by file name.
    """
    owners: dict[str, dict[str, str]] = {}
    for wheel, text in by_wheel.items():
        for path, digest, _ in filter(None, csv.reader(text.splitlines())):
            owners.setdefault(_installed(path), {})[wheel] = digest
    found: dict[tuple[str, ...], list[str]] = {}
    for path, digests in sorted(owners.items()):
        if len(set(digests.values())) > 1 and path not in _HARMLESS:
            found.setdefault(tuple(sorted(digests)), []).append(path)
    return found


def _installed(path: str) -> str:
    """Return the path relative to site-packages, or to the environment for a script, of an entry of RECORD."""
    path = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", path)
    return re.sub(r"^[^/]+\.data/scripts/", "bin/", path)


def main(folder: Path = ROOT) -> int:
    """Print the conflicts of a lock file's group gpu; return 1 if there are any."""
    wheels, without = resolved(folder)
    found = conflicts(records(wheels))
    for names, paths in found.items():
        print(f"{' and '.join(names)}: different contents of {len(paths)} paths, for example {paths[0]}")
    print(f"{len(wheels)} wheels: {sum(map(len, found.values())) or 'no'} paths with different contents")
    print(f"no wheel, not compared: {', '.join(without)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
