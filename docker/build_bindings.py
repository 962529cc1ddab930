"""Compile TransformerEngine's torch bindings into a wheel, with progress.

    uv sync --no-default-groups --group gpu --no-install-package transformer-engine-torch
    uv run --no-sync python docker/build_bindings.py [FOLDER]     (default: docker/wheels)

An existing wheel in FOLDER is reused. The wheel can be copied to machines with the same architecture and the same
versions of Python and torch. MAX_JOBS is the number of files that are compiled at the same time. Each needs up to 2 GB
of memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = "transformer-engine-torch"
_JOB_BYTES = 2 << 30
_TAIL_LINES = 20
"""Lines of the build's output that are printed if the build fails."""


def max_jobs() -> int:
    """Return MAX_JOBS, or what the cores and the memory of this machine allow."""
    if given := os.environ.get("MAX_JOBS"):
        return int(given)
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _JOB_BYTES))


def progress(line: str, seconds: float) -> str | None:
    """Return a progress message for a line of ninja, ``[DONE/ALL] command``; None for other lines.

    Args:
        line: line of the build's output.
        seconds: time since the start of the compilation.
    """
    found = re.search(r"\[(\d+)/(\d+)\] ", line)
    if not found:
        return None
    done, files = map(int, found.groups())
    left = seconds / done * (files - done)
    return f"{done} of {files} files compiled in {seconds / 60:.0f} min, about {left / 60:.0f} min left"


def build(folder: Path) -> int:
    """Build the wheel into ``folder``; return pip's exit status."""
    variables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["extra-build-variables"][_PACKAGE]
    environment = {**os.environ, **variables, "MAX_JOBS": str(max_jobs()), "PYTHONUNBUFFERED": "1"}
    constraints = ROOT / "docker" / "constraints-gpu.txt"
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", folder, "--constraint", constraints, _PACKAGE]
    print(f"{_PACKAGE}: {environment['MAX_JOBS']} files at the same time (MAX_JOBS)", flush=True)
    lines = []
    start = time.monotonic()
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line)
            if message := progress(line, time.monotonic() - start):
                print(message, flush=True)
    if pip.returncode:
        print("".join(lines[-_TAIL_LINES:]), file=sys.stderr)
    return pip.returncode


def main(folder: Path = ROOT / "docker" / "wheels") -> int:
    """Build the wheel unless the folder contains a wheel of the listed version; return the exit status."""
    constraints = (ROOT / "docker" / "constraints-gpu.txt").read_text()
    (version,) = re.findall(rf"(?m)^{_PACKAGE}==(\S+)$", constraints)
    tags = f"cp{sys.version_info[0]}{sys.version_info[1]}-*_{os.uname().machine}"
    name = f"{_PACKAGE.replace('-', '_')}-{version}[-+]*{tags}.whl"
    if not list(folder.glob(name)) and (status := build(folder)):
        return status
    print(*folder.glob(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
