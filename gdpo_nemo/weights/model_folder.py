"""The weights in a Hugging Face model folder: which there are, and each of them when it is asked for."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gdpo_nemo.errors import ConfigError

INDEX = "model.safetensors.index.json"


@contextlib.contextmanager
def whole_or_nothing(folder: str | Path) -> Iterator[Path]:
    """Make a folder that takes its final name at the end of the block, so that a killed process leaves no half model.

    Two runs that start together make the same model from the same seed. The first to end gives it its name; the other
    one's copy is discarded.

    Raises:
        ConfigError: if ``folder`` exists and is not an empty folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; remove it to have the model made again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as private:
        whole = Path(private) / "model"  # the private folder is closed to other users, the model need not be
        whole.mkdir()
        yield whole
        try:
            whole.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            print(f"{folder}: another process has made it in the meantime; its model is used", flush=True)


def save_tensors(
    tensors: Mapping[str, torch.Tensor], file: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode of any new file; safetensors itself makes it private, whatever the umask
    says.

    Raises OSError.
    """
    file = Path(file)
    file.touch()
    mode = file.stat().st_mode & 0o777
    try:
        save_file(dict(tensors), file, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{file}: {error}") from error
    file.chmod(mode)


def weight_names(folder: str | Path) -> list[str]:
    """Names of the weights a checkpoint of this model has, in the files' order; a tied head is not one of them."""
    folder = Path(folder)
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    return [name for name in _places(folder) if not (tied and name == "lm_head.weight")]


def open_weights(folder: str | Path) -> Callable[[str], torch.Tensor]:
    """A reader of the folder's safetensors: name -> tensor on the CPU, memory-mapped.

    Raises:
        ConfigError: the folder has no safetensors. The reader raises KeyError for an unknown name.
    """
    folder, where = Path(folder), _places(folder)
    handles: dict[str, Any] = {}

    def read(name: str) -> torch.Tensor:
        file = where[name]
        if file not in handles:
            handles[file] = safe_open(folder / file, framework="pt")
        return handles[file].get_tensor(name)

    return read


def differences(folder: str | Path, other: str | Path) -> list[str]:
    """A sentence for each tensor of two folders that is not the same, bit for bit, the largest difference first."""
    before, now = open_weights(folder), open_weights(other)
    (names, others) = (set(_places(folder)), set(_places(other)))
    found: list[tuple[float, str]] = [(math.inf, f"{name} is in one of the two only") for name in names ^ others]
    for name in sorted(names & others):
        (a, b) = (before(name), now(name))
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append((math.inf, f"{name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"))
        elif not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):  # of NaN, too, and of -0
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a.double() - b.double()).abs())
            largest = float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())
            found.append((largest, f"{name} differs by up to {largest:.3g}"))
    return [sentence for _, sentence in sorted(found, key=lambda pair: (-pair[0], pair[1]))]


def _places(folder: str | Path) -> dict[str, str]:
    """File of every tensor."""
    folder = Path(folder)
    if (folder / INDEX).exists():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    where: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            where.update(dict.fromkeys(shard.keys(), file.name))
    if not where:
        raise ConfigError(f"policy.model_name: no weights (*.safetensors) in {folder}")
    return where
