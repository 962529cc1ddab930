"""Real NeMo Gym, from PyPI, in an environment of its own that is made once and kept in the user's cache."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdpo_nemo"
COMPILED = ("reasoning_gym",) if find_spec("reasoning_gym") else ()
"""Servers whose library needs a compiler: those of the project's extras that are installed."""
PACKAGES = ("nemo-gym==0.4.0", "tiktoken==0.12.0", *(["reasoning-gym==0.1.25"] if COMPILED else []))
INSTALL_S = 600
START_S = 600
PLUGIN = REPOSITORY / "examples" / "nemo_gym_plugin"
"""A folder with resources servers of ours, beside NeMo Gym's."""


def installed() -> Path:
    """The Python of the environment; makes it first where that has not been done (15 s). Any number may call at
    once."""
    folder = CACHE / "-".join(text.replace("==", "_") for text in PACKAGES)
    python = folder / "bin" / "python"
    complete = folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            uv = shutil.which("uv")
            assert uv, "uv is not on PATH (pip install uv)"
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True, timeout=INSTALL_S)
            # The versions that this project's configuration lists are not NeMo Gym's.
            command = [uv, "pip", "install", "--directory", folder, "--quiet", "--python", python, *PACKAGES]
            subprocess.run(command, check=True, timeout=INSTALL_S)
            complete.touch()
    return python


class RealGym:
    """Resources servers of real NeMo Gym and their head server; ends with ``close``."""

    def __init__(self, *servers: str, log: Path):
        python = installed()
        [packages] = python.parent.parent.glob("lib/python3.*/site-packages")
        self.data = packages / "resources_servers"
        command = [str(python), str(REPOSITORY / "examples" / "serve_nemo_gym.py"), *(f"{name}=0" for name in servers)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(PLUGIN)}
        with open(log, "w") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        line = self._process.stdout.readline()
        assert line, log.read_text()
        report = json.loads(line)
        self.head: str = report["head"]
        self.urls: dict[str, str] = report["servers"]

    def rows(self, server: str, name: str = "example") -> list[dict]:
        """The rows of a data file that NeMo Gym ships for a server."""
        return [json.loads(line) for line in (self.data / server / "data" / f"{name}.jsonl").read_text().splitlines()]

    def close(self) -> None:
        """End the servers."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
