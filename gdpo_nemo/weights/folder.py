"""Weights through a folder that all nodes see: safetensors files, written whole, read back by every engine.

Adapters alone are a folder that PEFT loads.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

import numpy as np
import torch

from gdpo_nemo.errors import RunError
from gdpo_nemo.weights.adapters import Adapters, peft_modules
from gdpo_nemo.weights.buckets import neighbours
from gdpo_nemo.weights.manifest import Manifest, unpack
from gdpo_nemo.weights.model_folder import save_tensors


def write(folder: str | Path, manifest: Manifest, buffer: np.ndarray, bucket_bytes: int) -> None:
    """Write an update as ``00000.safetensors``, ``00001.safetensors`` ...; a file takes tensors up to ``bucket_bytes``;
    adapters make one file whatever their size.

    The folder appears under its name when it is complete.

    Raises:
        RunError: it could not be written.
    """
    final = Path(folder)
    temporary = Path(f"{folder}.writing")
    tensors = dict(unpack(manifest, buffer))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        temporary.mkdir(parents=True)
        if manifest.adapters is not None:
            write_adapter(temporary, tensors, manifest.adapters)
        else:
            for number, bucket in enumerate(neighbours(manifest.entries, bucket_bytes)):
                save_tensors({e.name: tensors[e.name] for e in bucket}, temporary / f"{number:05d}.safetensors")
        temporary.rename(final)
    except OSError as error:
        raise RunError(f"weight update {manifest.version} could not be written to {folder}: {error}") from error


def write_adapter(folder: str | Path, matrices: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
    """Write A and B, by PEFT's names, as a folder that PEFT and vLLM load. Raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = adapters.description(peft_modules(matrices))
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=1))


@dataclass(frozen=True)
class Folder:
    """What a receiver is told: where the files are."""

    path: str

    def fetch(self, manifest: Manifest) -> np.ndarray:
        """Read uint8 [bytes] of an update, laid out as the manifest says.

        Raises:
            RunError: files or tensors are missing, as where the folder is not shared.
        """
        from safetensors import SafetensorError, safe_open

        buffer = np.zeros(manifest.nbytes, np.uint8)
        wanted = {entry.name: entry for entry in manifest.entries}
        try:
            for file in sorted(Path(self.path).glob("*.safetensors")):
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():
                        entry = wanted.pop(name)
                        data = shard.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy()
                        buffer[entry.offset : entry.offset + entry.nbytes] = data
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise RunError(f"weight update {manifest.version}: {self.path} cannot be read ({error})") from error
        if wanted:
            some = ", ".join(sorted(wanted)[:3])
            raise RunError(
                f"weight update {manifest.version}: {len(wanted)} tensors are not in {self.path}, for instance {some}"
            )
        return buffer
