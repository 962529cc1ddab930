"""Write a model in another format as a Hugging Face folder, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable

import torch

from gdpo_nemo.config.gguf_model import read_gguf_model
from gdpo_nemo.config.model_formats import Format, Source
from gdpo_nemo.config.model_sources import described_by
from gdpo_nemo.config.peft_config import read_peft_adapter
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.formats.whole_folder import whole_folder
from gdpo_nemo.megatron.hf_files import write_model

Tensors = Iterable[tuple[str, torch.Tensor]]


def write_folder(source: Source, out: Path, key: str, companion: str | None = None) -> None:
    """Write ``source`` as the Hugging Face folder ``out``, which must not be there.

    Args:
        key: what the user named the source by, for messages.
        companion: as ``described_by`` takes it.

    Raises:
        ConfigError: the source cannot be read. RunError: the folder cannot be written.
    """
    if source.format is Format.CHECKPOINT:
        raise ValueError("a checkpoint of this program is read by ranks")
    with whole_folder(out) as folder:
        _write(source, folder, key, companion)


def _write(source: Source, folder: Path, key: str, companion: str | None) -> None:
    from transformers import AutoConfig

    if source.format is Format.GGUF:
        from gdpo_nemo.formats.gguf_tokenizer import gguf_tokenizer
        from gdpo_nemo.formats.gguf_weights import gguf_weights

        model = read_gguf_model(source.path, key)
        tokenizer = gguf_tokenizer(model)
        config = AutoConfig.for_model(**model.fields)
        _write_model(folder, gguf_weights(model), config, folder)
        tokenizer.save_pretrained(folder)
        return
    base = described_by(source, key, companion)
    if base is None:
        raise ConfigError(f"{key}: {source.root} names its base model by a name; give its folder with --model")
    config = AutoConfig.from_pretrained(base)
    if source.format is Format.PEFT:
        from gdpo_nemo.formats.peft_merge import merged_weights

        _write_model(folder, merged_weights(read_peft_adapter(source.path, key), base, key), config, base)
        return
    from gdpo_nemo.formats.megatron_reader import megatron_weights

    _write_model(folder, megatron_weights(source, config, key), config, base)


def _write_model(folder: Path, tensors: Tensors, config: Any, companions: Path) -> None:
    """Write the folder; its config.json says the type that most values are in."""
    counts: dict[torch.dtype, int] = {}

    def counted() -> Tensors:
        for name, tensor in tensors:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
            yield name, tensor

    write_model(folder, counted(), config, companions)
    config.dtype = max(counts, key=lambda dtype: counts[dtype])
    config.save_pretrained(folder)
