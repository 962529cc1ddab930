"""The Hugging Face folder of a model in another format or on the hub: made once, kept, found again by content."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from gdpo_nemo.config.model_formats import Source
from gdpo_nemo.config.model_sources import described_by
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, RunError, present

_KEY = "policy.model_name"
_PIECE = 1 << 16
_PIECES = 256
"""Files up to 16 MiB are read whole, of larger ones as much, from places all over them."""


def converted_path(config: Config, source: Source, companion: str | None) -> Path:
    """Where the folder of ``source`` is or will be: ``models/`` beside the folder of the run, in the name a checksum of
    what it is made of."""
    value = hashlib.blake2b(digest_size=4)
    files = [source.path] if source.path.is_file() else _files(source.path)
    described = described_by(source, _KEY, companion)
    for file in [*files, *(_files(described) if described is not None else [])]:
        _add(value, file)
    name = re.sub(r"[^\w.-]+", "_", source.root.stem if source.root.is_file() else real_path(source.root).name)
    return Path(config.run.dir).parent / "models" / f"{name}-{value.hexdigest()}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _add(value: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    value.update(f"{file.name} {size} ".encode())
    with file.open("rb") as stream:
        if size <= _PIECE * _PIECES:
            value.update(stream.read())
            return
        for place in range(_PIECES):
            stream.seek((size - _PIECE) * place // (_PIECES - 1))
            value.update(stream.read(_PIECE))


def huggingface_folder(config: Config, source: Source, companion: str | None = None) -> Path:
    """The Hugging Face folder of ``source``, made now if it is not there.

    Args:
        companion: as ``described_by`` takes it.

    Raises:
        ConfigError: the source cannot be read. RunError: the folder cannot be written.
    """
    folder = converted_path(config, source, companion)
    if (folder / "config.json").is_file():
        return folder
    print(f"{source.root} is {source.format.value}: making {folder} of it", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gdpo_nemo", "convert", "--to", "hf", str(source.root), str(folder)]
    described = described_by(source, _KEY, companion)
    if described is not None:
        command += ["--model", str(described)]
    # In a process of its own: its memory is given back, and Megatron is not for the driver.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and not (folder / "config.json").is_file():  # another run may have made it meanwhile
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        reason = said[-1].removeprefix("error: ").removeprefix("SOURCE: ") if said else done.stderr.strip()[-400:]
        raise (ConfigError if done.returncode == 2 else RunError)(f"{_KEY}: {source.root}: {reason}")
    return folder


def teacher_folder(config: Config) -> Path:
    """Return the folder of distillation's teacher, fetched from the hub when it is absent. Raises ConfigError."""
    name = present(config.teacher.model_name, "teacher.model_name")
    return (Path(name) if Path(name).is_dir() else from_hub(name, "teacher.model_name")).absolute()


def from_hub(name: str, key: str = "policy.model_name") -> Path:
    """Fetch a model from the hub, and return its folder. Raises ConfigError: the hub does not have or give it."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - the hub client raises many kinds; all mean the model is not there
        raise ConfigError(
            f"{key}: {name} is neither a folder nor reachable on the hub ({type(error).__name__})"
        ) from None
