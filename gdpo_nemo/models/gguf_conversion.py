"""Conversion of a GGUF file's weights and tokenizer to Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gdpo_nemo.models.gguf import GgufModel, TensorInfo

_PLAIN = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


def gguf_weights(model: GgufModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as (Hugging Face name, tensor). Quantised tensors are converted to float32. Other tensors keep
    their dtype."""
    data = np.memmap(model.file, mode="r")
    for name, location in model.weights.items():
        info = model.header.tensors[location.tensor]
        tensor = _tensor(data, info, location.expert)
        yield name, tensor if location.heads is None else _deinterleave(tensor, location.heads)


def _tensor(data: np.memmap, info: TensorInfo, expert: int | None) -> torch.Tensor:
    raw = data[info.start : info.start + info.size]
    shape = info.shape
    if expert is not None:
        raw = raw.reshape(shape[0], -1)[expert]
        shape = shape[1:]
    if info.kind in _PLAIN:
        number, dtype = _PLAIN[info.kind]
        return torch.from_numpy(raw.view(number).copy()).view(dtype).reshape(shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = raw.reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[info.kind])).reshape(shape)


def _deinterleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Deinterleave the rows of each head, so that the second half follows the first half. Also works for a bias.

    llama.cpp rotates pairs of adjacent rows, so its files interleave the two halves.
    """
    return torch.unflatten(tensor, 0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


_PARTS = {
    "tokenizer_type": "model", "pre_tokenizer_type": "pre", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "add_prefix_space": "add_space_prefix",
}  # fmt: skip
"""Metadata keys after ``tokenizer.ggml.``, by the names that transformers' ``convert_gguf_tokenizer`` expects."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BOS_PRE_TOKENIZERS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Pre-tokenizers of models that expect a BOS token. Older GGUF files do not specify ``add_bos_token``."""


def gguf_tokenizer(model: GgufModel) -> Any:
    """Return a ``PreTrainedTokenizerFast`` with the file's vocabulary, chat template and special tokens."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer

    metadata = model.header.metadata
    names = {f"tokenizer.ggml.{key}": name for name, key in _PARTS.items()}
    parts = {name: metadata[key] for key, name in names.items() if key in metadata}
    backend, _ = convert_gguf_tokenizer(model.header.architecture, parts)
    backend = _remove_extra_tokens(backend, len(parts["tokens"]))
    if parts.get("pre_tokenizer_type") == "smollm":
        backend.pre_tokenizer = _smollm_pre_tokenizer()
    special = _special_tokens(metadata)
    bos = special.get("bos_token")
    if bos is not None and _adds_bos(metadata):
        number = metadata["tokenizer.ggml.bos_token_id"]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=model.fields["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **special,
    )


def _remove_extra_tokens(backend: Any, size: int) -> Any:
    """Remove added tokens whose id is not less than ``size``, the number of tokens in the file.

    transformers' ``convert_gguf_tokenizer`` adds GPT-2's <|endoftext|> at the end of the vocabulary. The model has no
    embedding for this token.
    """
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
    return type(backend).from_str(json.dumps(content))


def _smollm_pre_tokenizer() -> Any:
    """Return SmolLM's pre-tokenizer, which transformers does not support: split digits, then apply GPT-2's rule."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    numbers = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    return {name: tokens[number] for name, number in numbers.items() if number is not None and number < len(tokens)}


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer adds a BOS token, by llama.cpp's rule."""
    default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _BOS_PRE_TOKENIZERS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))
