"""Virtual environments with packages from PyPI, which are made once and kept in the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdpo_nemo"
INSTALL_S = 600


def venv_with(*packages: str) -> Path:
    """The Python of the environment; makes it first where that has not been done (15 s). Any number may call at
    once."""
    folder = CACHE / "-".join(text.replace("==", "_") for text in packages)
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
            command = [uv, "pip", "install", "--directory", folder, "--quiet", "--python", python, *packages]
            subprocess.run(command, check=True, timeout=INSTALL_S)
            complete.touch()
    return python
