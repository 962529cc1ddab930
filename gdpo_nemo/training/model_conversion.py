"""Conversion of a model in another format to a Hugging Face folder. The folder is created atomically."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gdpo_nemo.models.fp8 import block_of, unquantised
from gdpo_nemo.models.gguf import read_gguf_model
from gdpo_nemo.models.hf_folder import open_weights, weight_names, write_model, write_weights
from gdpo_nemo.models.peft import read_peft_adapter
from gdpo_nemo.models.sources import Format, Source, described_by, source_fields
from gdpo_nemo.models.weight_files import INDEX
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import read_json_object, whole_folder
from gdpo_nemo.utils.progress import import_transformers

Tensors = Iterable[tuple[str, torch.Tensor]]


def write_folder(source: Source, out: Path, key: str, companion: str | None = None) -> None:
    """Convert ``source`` to the Hugging Face folder ``out``, which must not exist.

    Args:
        key: name of the source for messages, such as a config key.
        companion: folder that describes the model, for formats that need one (``described_by``).

    Raises:
        ConfigError: if the source cannot be read.
        RunError: if the folder cannot be written.
    """
    if source.format is Format.CHECKPOINT:
        raise ValueError("a checkpoint of this program can only be read by policy ranks")
    with whole_folder(out) as folder:
        _write(source, folder, key, companion)


def _write(source: Source, folder: Path, key: str, companion: str | None) -> None:
    import_transformers()
    from transformers import AutoConfig

    if source.format is Format.GGUF:
        from gdpo_nemo.models.gguf_conversion import gguf_tokenizer, gguf_weights

        model = read_gguf_model(source.path, key)
        tokenizer = gguf_tokenizer(model)
        config = AutoConfig.for_model(**model.fields)
        _write_model(folder, gguf_weights(model), config, folder)
        tokenizer.save_pretrained(folder)
        return
    base = described_by(source, key, companion)
    if base is None:
        raise ConfigError(
            f"{key}: {source.root} refers to its base model by name; pass the folder of the base model with --model"
        )
    if source.format is Format.IMAGE:
        from gdpo_nemo.models.image_models import text_weights

        fields = source_fields(source, key) or {}
        _write_model(folder, text_weights(source.path, key), AutoConfig.for_model(**fields), base)
        return
    config = AutoConfig.from_pretrained(base)
    if source.format is Format.PEFT:
        from gdpo_nemo.weights.adapters import merged_weights

        _write_model(folder, merged_weights(read_peft_adapter(source.path, key), base, key), config, base)
        return
    if source.format is Format.MXFP4:
        from gdpo_nemo.models.mxfp4 import mxfp4_weights

        del config.quantization_config
        _write_model(folder, mxfp4_weights(source.path, key), config, base)
        return
    if source.format is Format.FP8:
        block = block_of(read_json_object(base / "config.json", key))
        del config.quantization_config
        weights = unquantised(open_weights(source.path, finite=True), weight_names(source.path), block, key)
        _write_model(folder, weights, config, base)
        return
    from gdpo_nemo.megatron.gpt_checkpoint import megatron_weights

    _write_model(folder, megatron_weights(source, config, key), config, base)


def write_image_model(text_model: Path, image_model: Path, out: Path, key: str) -> None:
    """Write an image model with the weights of a text model to ``out``, which must not exist.

    All other files and weights are those of ``image_model``. For the arguments and errors, see ``write_folder`` and
    ``image_models.with_text``.
    """
    from gdpo_nemo.models.image_models import with_text

    with whole_folder(out) as folder:
        folder.mkdir()
        for file in sorted(image_model.iterdir()):
            if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copyfile(file, folder / file.name)
        write_weights(folder, with_text(image_model, text_model, key))


def _write_model(folder: Path, tensors: Tensors, config: Any, companions: Path) -> None:
    """Write tensors and config. The dtype in config.json is that of most parameters."""
    counts: dict[torch.dtype, int] = {}

    def counted() -> Tensors:
        for name, tensor in tensors:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
            yield name, tensor

    write_model(folder, counted(), config, companions)
    config.dtype = max(counts, key=lambda dtype: counts[dtype])
    config.save_pretrained(folder)
