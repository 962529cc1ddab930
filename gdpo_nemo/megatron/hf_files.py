"""Read and write Hugging Face model folders, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Iterable

import torch

from gdpo_nemo.weights.model_folder import INDEX, save_tensors

# What makes a folder loadable besides weights; copied from the model the run started from.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def copy_companions(source: str | Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation settings of the Hugging Face folder ``source``."""
    for pattern in _COMPANIONS:
        for file in Path(source).glob(pattern):
            if file.parent.absolute() != folder.absolute():
                shutil.copyfile(file, folder / file.name)  # not its mode, which says nothing about this folder


def write_model(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config,
    source: str | Path,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write a folder that transformers and vLLM load: safetensors (sharded), configuration, tokenizer of ``source``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    copy_companions(source, folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    names: list[str] = []

    def flush():
        names.append(f"model-{len(names) + 1:05d}.safetensors")
        save_tensors(shards[-1], folder / names[-1], metadata={"format": "pt"})
        maps.append(dict.fromkeys(shards[-1], names[-1]))
        shards[-1].clear()
        sizes[-1] = 0

    maps: list[dict[str, str]] = []
    total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and sizes[-1] + size > shard_bytes:
            flush()
        shards[-1][name] = tensor.detach().to("cpu", copy=True).contiguous()
        sizes[-1] += size
        total += size
    flush()
    if len(names) == 1:
        (folder / names[0]).rename(folder / "model.safetensors")
    else:
        weight_map = {key: file for part in maps for key, file in part.items()}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
