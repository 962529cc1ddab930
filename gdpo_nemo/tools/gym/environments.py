"""Virtual environments for NeMo Gym's servers, made with uv from each server's requirements and kept in a cache.

Servers with equal requirements share an environment. NeMo Gym itself is not installed: its dependencies are, and its
code is imported from the checkout.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gdpo_nemo.commands.arguments import say
from gdpo_nemo.tools.gym.processes import last_lines
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import read_text

_GYM = re.compile(r"(?:-e\s+)?(?:nemo[-_]gym\b|\.\./\.\.)")
"""Matches a server's requirement of NeMo Gym itself."""
_INSTALL_S = 1800.0
_COMPLETE = "complete"
_LAST_LINES = 3


@dataclass(frozen=True)
class Requirements:
    """Packages of an environment."""

    lines: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    """Requirements that replace those of other packages, from the server's ``overrides.txt``."""

    @property
    def outside(self) -> tuple[str, ...]:
        """Requirements from other places than the package index."""
        return tuple(line for line in self.lines if "git+" in line or "://" in line)


def default_cache() -> Path:
    """Return the folder of environments in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdpo_nemo" / "gym"


class Environments:
    """Virtual environments of the servers in a checkout.

    Args:
        checkout: checkout of NeMo Gym, or the site-packages folder that contains it.
        cache: folder of the environments.
        python: version or path of the environments' Python, or None for the minor version that NeMo Gym requires.
    """

    def __init__(self, checkout: Path, cache: Path, python: str | None = None):
        self._checkout = checkout
        self._cache = cache.absolute()
        self._project = _pyproject(checkout)
        self._python = python or _python_version(checkout, self._project)

    def requirements(self, kind: str = "", name: str = "") -> Requirements:
        """Return the requirements of a server, or of NeMo Gym without a server.

        Raises:
            ConfigError: if a file with requirements is invalid.
        """
        folder = self._checkout / kind / name
        listed: list[str] = []
        if name and (folder / "requirements.txt").is_file():
            listed = _lines(folder / "requirements.txt")
        elif name:
            listed = _dependencies(_pyproject(folder))
        overrides = _lines(folder / "overrides.txt") if name and (folder / "overrides.txt").is_file() else []
        own = [line for line in listed if not _GYM.match(line)]
        extras = set(chain.from_iterable(_extras(line) for line in listed if _GYM.match(line)))
        return Requirements((*self._gym(sorted(extras - {"dev", ""})), *own), tuple(overrides))

    def python_of(self, kind: str = "", name: str = "") -> Path:
        """Return the Python of a server's environment, which is made first if it is not in the cache.

        Raises:
            ConfigError: if uv is not found.
            RunError: if the requirements cannot be installed.
        """
        wanted = self.requirements(kind, name)
        folder = self._folder(wanted)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _COMPLETE).exists():
                say(f"installing the requirements of {name or 'NeMo Gym'} in {folder}")
                shutil.rmtree(folder, ignore_errors=True)
                self._run(name, ["venv", "--python", self._python, str(folder)])
                self._run(name, ["pip", "install", "--python", str(folder / "bin" / "python"), *_files(folder, wanted)])
                (folder / _COMPLETE).touch()
        return folder / "bin" / "python"

    def check(self, kind: str, name: str, python: Path | None = None) -> str:
        """Resolve a server's requirements without installing them.

        Args:
            python: environment that must contain the requirements, instead of an environment of the cache.

        Returns:
            ``installed`` or ``can be installed``.

        Raises:
            RunError: if the requirements cannot be resolved, or the environment ``python`` lacks some of them.
        """
        wanted = self.requirements(kind, name)
        folder = self._folder(wanted)
        if python is None and (folder / _COMPLETE).exists():
            return "installed"
        files = _files(folder.with_suffix(".check"), wanted)
        if python is None:
            files.remove("-r")
            self._run(name, ["pip", "compile", "--python", self._python, *files, "-o", os.devnull])
            return "can be installed"
        told = self._run(name, ["pip", "install", "--dry-run", "--python", str(python), *files])
        lacking = re.findall(r"^ \+ (\S+?)==", told, re.MULTILINE)
        if lacking:
            raise RunError(f"{name}: {python} lacks {', '.join(lacking)}")
        return "installed"

    def _folder(self, wanted: Requirements) -> Path:
        text = "\n".join([self._python, *sorted(wanted.lines), "--", *sorted(wanted.overrides)])
        return self._cache / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _gym(self, extras: list[str]) -> list[str]:
        if not self._project:
            [installed, *_] = [*self._checkout.glob("nemo_gym-*.dist-info"), None]
            if installed is None:
                raise ConfigError(
                    f"--checkout: {self._checkout} contains neither pyproject.toml nor nemo_gym-*.dist-info"
                )
            return [f"nemo-gym{f'[{chr(44).join(extras)}]' if extras else ''}=={installed.stem.rpartition('-')[2]}"]
        optional = self._project.get("project", {}).get("optional-dependencies", {})
        lines = _dependencies(self._project)
        for extra in extras:
            lines += optional.get(extra, [])
        return lines

    def _run(self, name: str, arguments: list[str]) -> str:
        uv = shutil.which("uv")
        if uv is None:
            raise ConfigError("uv was not found on PATH; install it (pip install uv), or specify --python")
        # The versions in pyproject.toml are this project's.
        command = [uv, *arguments, "--no-config", "--color", "never"]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=_INSTALL_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{name}: uv did not install the requirements within {_INSTALL_S:.0f} s") from None
        if ended.returncode:
            last = last_lines(ended.stderr, _LAST_LINES)
            hint = "; specify an installed Python with --venv-python" if arguments[0] == "venv" else ""
            raise RunError(f"{name or 'NeMo Gym'}: uv {arguments[0]} failed: {last}{hint}")
        return ended.stderr


def _files(folder: Path, wanted: Requirements) -> list[str]:
    """Write the requirements next to an environment and return uv's arguments."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".txt")
    file.write_text("\n".join(wanted.lines) + "\n")
    if not wanted.overrides:
        return ["-r", str(file)]
    overrides = folder.with_suffix(".overrides.txt")
    overrides.write_text("\n".join(wanted.overrides) + "\n")
    return ["-r", str(file), "--override", str(overrides)]


def _lines(file: Path) -> list[str]:
    """Return the requirements in a file, without comments."""
    text = re.sub(r"(^|\s)#.*", "", read_text(file), flags=re.MULTILINE)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _extras(line: str) -> list[str]:
    found = re.search(r"\[(.*?)\]", line)
    return list(map(str.strip, found[1].split(","))) if found else []


def _pyproject(folder: Path) -> dict[str, Any]:
    """Return a folder's ``pyproject.toml`` (empty without the file). Raises ConfigError if it is not valid."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        return tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def _dependencies(project: dict[str, Any]) -> list[str]:
    """Return the dependencies in a ``pyproject.toml``, with the repositories that uv's section specifies."""
    sources = project.get("tool", {}).get("uv", {}).get("sources", {})
    lines = []
    for line in project.get("project", {}).get("dependencies", []):
        source = sources.get(line, {})
        revision = source.get("rev") or source.get("tag") or source.get("branch")
        place = f" @ git+{source['git']}{f'@{revision}' if revision else ''}" if "git" in source else ""
        lines.append(f"{line}{place}")
    return lines


def _python_version(checkout: Path, project: dict[str, Any]) -> str:
    """Return the minor version that NeMo Gym requires or is installed for, else that of this process."""
    text = str(project.get("project", {}).get("requires-python", "")) or checkout.parent.name
    found = re.search(r"(?:>=\s*|python)(3\.\d+)", text)
    return found[1] if found else f"{sys.version_info.major}.{sys.version_info.minor}"
