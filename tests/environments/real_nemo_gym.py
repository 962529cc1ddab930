"""Real NeMo Gym, from PyPI, in an environment of its own that is made once and kept in the user's cache."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from package_venv import venv_with

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILED = ("reasoning_gym",) if find_spec("reasoning_gym") else ()
"""Servers whose library needs a compiler: those of the project's extras that are installed."""
PACKAGES = ("nemo-gym==0.4.0", "tiktoken==0.12.0", *(["reasoning-gym==0.1.25"] if COMPILED else []))
START_S = 600
PLUGIN = REPOSITORY / "examples" / "nemo_gym_plugin"
"""A folder with resources servers of ours, beside NeMo Gym's."""


def installed() -> Path:
    """The Python of the environment with NeMo Gym."""
    return venv_with(*PACKAGES)


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
