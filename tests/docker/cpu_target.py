"""Runs the steps of the Dockerfile's CPU target in a folder that takes the place of the image's root.

    python tests/docker/cpu_target.py FOLDER

Steps that need an image of their own are named and left out: system packages, the user, ownership. Copies between
stages become copies between folders, and the image's python3.12 is the one that runs this script. At the end the health
check and a dry run of the default config are run as the image would, with the environment that the Dockerfile sets.
Needs some 7 GB and the package index, and minutes, most of them for bytecode; UV_LINK_MODE=hardlink where uv's cache is
on the same disk saves the copies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from dockerfile import ROOT, copied, lineage, read

_NEEDS_AN_IMAGE = ("apt-get", "useradd")


def main() -> int:
    """Runs everything; the first step that fails ends it."""
    image = Path(sys.argv[1]).resolve()
    if image.exists() and any(image.iterdir()):
        print(f"{image} is not empty", file=sys.stderr)
        return 2
    image.mkdir(parents=True, exist_ok=True)
    arguments, stages = read()
    for name in ("cpu-build", "cpu"):
        environment = _fresh(image)
        folder = image
        for stage in lineage(stages, name):
            for word, rest in stage.steps:
                rest = _filled(rest, arguments)
                folder = _step(word, rest, image, environment, folder)
    (health,) = stages["cpu"].all("HEALTHCHECK")
    command = re.search(r'CMD \["(.+)"\]', health)[1]
    _run(_inside(command, image), environment, image / "workspace")
    _run("gdpo-nemo train --dry-run", environment, image / "workspace")
    print("the CPU target's steps ran")
    return 0


def _fresh(image: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "UV_PROJECT"))
    }
    return {
        **kept,
        "HOME": str(image / "root"),
        "PATH": f"{sys.base_prefix}/bin:{kept['PATH']}",
        "UV_CACHE_DIR": kept.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
    }


def _step(word: str, rest: str, image: Path, environment: dict[str, str], folder: Path) -> Path:
    """Does one instruction; returns the working folder after it."""
    if word == "WORKDIR":
        folder = Path(_inside(rest, image))
        folder.mkdir(parents=True, exist_ok=True)
    elif word == "ENV":
        for pair in rest.split():
            key, _, value = pair.partition("=")
            if key == "UV_LINK_MODE" and key in os.environ:
                continue  # hard links save a copy of everything
            environment[key] = _inside(value, image).replace("$PATH", environment["PATH"])
    elif word == "COPY":
        _copy(rest, image, folder)
    elif word == "RUN":
        command = re.sub(r"--mount=\S+\s+", "", rest)
        if command.startswith(_NEEDS_AN_IMAGE):
            print(f"left out   {command[:100]}")
        else:
            _run(_inside(command, image), environment, folder)
    return folder


def _copy(rest: str, image: Path, folder: Path) -> None:
    source, names, destination = copied(rest)
    if source:  # both stages are this folder
        return
    target = Path(_inside(destination, image)) if destination.startswith("/") else folder / destination
    for name in names:
        into = target / name if destination.endswith("/") else target
        into.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, into)


def _run(command: str, environment: dict[str, str], folder: Path) -> None:
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["sh", "-c", command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    print(f"{time.monotonic() - start:7.1f} s  {command[:110]}", flush=True)


def _inside(text: str, image: Path) -> str:
    """Absolute paths of the image as paths below ``image``."""
    return re.sub(r"(?<![\w./])/(opt|workspace|root)\b", lambda match: f"{image}/{match[1]}", text)


def _filled(text: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], match[0]), text)


if __name__ == "__main__":
    sys.exit(main())
