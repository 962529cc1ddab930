"""The tokenizer that a GGUF file describes, as one that transformers saves and loads."""

from __future__ import annotations

import json
from typing import Any, Mapping

from gdpo_nemo.config.gguf_model import GgufModel

_PARTS = {
    "tokenizer_type": "model", "pre_tokenizer_type": "pre", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "add_prefix_space": "add_space_prefix",
}  # fmt: skip
"""Names of transformers' builder -> keys behind ``tokenizer.ggml.``."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BEGINS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Byte-level BPE of models that were trained with a first token; older files do not say so."""


def gguf_tokenizer(model: GgufModel) -> Any:
    """Build the tokenizer, a ``PreTrainedTokenizerFast``, with the file's chat template and special tokens."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer

    metadata = model.header.metadata
    found = {f"tokenizer.ggml.{key}": name for name, key in _PARTS.items()}
    parts = {name: metadata[key] for key, name in found.items() if key in metadata}
    backend, _ = convert_gguf_tokenizer(model.header.architecture, parts)
    backend = _without_more(backend, len(parts["tokens"]))
    if parts.get("pre_tokenizer_type") == "smollm":
        backend.pre_tokenizer = _digits_apart()
    special = _special_tokens(metadata)
    begin = special.get("bos_token")
    if begin is not None and _begins(metadata):
        number = metadata["tokenizer.ggml.bos_token_id"]
        backend.post_processor = TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, number)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=model.fields["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **special,
    )


def _without_more(backend: Any, size: int) -> Any:
    """Without tokens that the file has not: transformers' builder adds the <|endoftext|> of GPT-2 behind the others,
    where the model has no embedding."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
    return type(backend).from_str(json.dumps(content))


def _digits_apart() -> Any:
    """SmolLM's way to cut text, which transformers' builder does not know: each digit alone, then as GPT-2."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    numbers = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    return {name: tokens[number] for name, number in numbers.items() if number is not None and number < len(tokens)}


def _begins(metadata: Mapping[str, Any]) -> bool:
    """Whether text begins with the first token, as llama.cpp decides it."""
    usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGINS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))
