"""Chromium from a package registry: fetched once, checked, unpacked, and driven by Playwright."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import subprocess
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, Iterator

VERSION = "147.0.0"
_SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
_PACKAGE = f"@sparticuz/chromium/-/chromium-{VERSION}.tgz"
"""Below an npm registry: 68 MB; MIT, Chromium's own licences within."""


def fetched(folder: Path) -> Path:
    """The program, in ``folder``; with the libraries it needs (NSS) beside it in ``lib``."""
    program = folder / VERSION / "chromium"
    if program.exists():
        return program
    import brotli

    address = f"{_registry()}/{_PACKAGE}"
    content = urllib.request.urlopen(address, timeout=600).read()
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != _SHA512:
        raise SystemExit(f"{address}: another file than it was")
    with tarfile.open(fileobj=io.BytesIO(content)) as package:

        def part(name: str) -> bytes:
            file = package.extractfile(f"package/bin/{name}.br")
            assert file
            return brotli.decompress(file.read())

        program.parent.mkdir(parents=True, exist_ok=True)
        for name in ("al2023", "swiftshader"):
            with tarfile.open(fileobj=io.BytesIO(part(f"{name}.tar"))) as inside:
                inside.extractall(program.parent, filter="data")
        partial = program.with_suffix(".partial")
        partial.write_bytes(part("chromium"))
    partial.chmod(0o755)
    partial.rename(program)
    return program


def _registry() -> str:
    """The address of the npm registry that this machine uses."""
    if (given := os.environ.get("NPM_CONFIG_REGISTRY")) is None:
        try:
            given = subprocess.run(
                ["npm", "config", "get", "registry"], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"npm does not say its registry ({error}): set NPM_CONFIG_REGISTRY") from None
    return given.strip().rstrip("/")


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
