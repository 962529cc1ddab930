"""Tiny GGUF files, written by the ``gguf`` package with llama.cpp's own table of names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdpo_nemo.models.hf_folder import open_weights, weight_names

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "mixtral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
}  # fmt: skip
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight")
TOKENS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?", "Ġ", "th", "the", "Ġthe"]
MERGES = ["t h", "th e", "Ġ the"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<end>{% endfor %}"


def write_gguf(
    folder: Path, file: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **metadata: Any
) -> Path:
    """Write the Hugging Face ``folder`` as a GGUF ``file``, its matrices in the type ``kind``.

    ``metadata`` sets further keys (dots as two underscores), each to a text, or to None for none.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config)
    _write_tokenizer(writer, config.vocab_size)
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _tensors(folder, config):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        values = tensor.float().numpy()
        stored = kind if values.ndim > 1 and "ffn_gate_inp" not in found else gguf.GGMLQuantizationType.F32
        writer.add_tensor(found, quantize(values, stored), raw_dtype=stored)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return file


def _write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    normal = [*TOKENS, *(f"ż{n}" for n in range(size - len(TOKENS) - 2))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*normal, "<begin>", "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(normal) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)
    writer.add_chat_template(TEMPLATE)


def _tensors(folder: Path, config: Any):
    """The weights as llama.cpp keeps them: experts of a layer in one, heads of a Llama's q and k in turns."""
    read = open_weights(folder)
    stacks: dict[str, list[torch.Tensor]] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name in weight_names(folder):
        tensor = read(name)
        match = _EXPERT.fullmatch(name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", []).append(tensor)
            assert len(stacks[f"{match[1]}.{match[3]}.weight"]) == int(match[2]) + 1
            continue
        module = name.split(".")[-2]
        if config.model_type in ("llama", "mistral", "mixtral") and module in heads:
            rows = tensor.unflatten(0, (heads[module], 2, -1))
            tensor = rows.transpose(1, 2).flatten(0, 2)
        yield name, tensor
    for name, parts in stacks.items():
        yield name, torch.stack(parts)


def _divisors(config: Any) -> np.ndarray:
    """Of the rotary frequencies, by transformers' own rule."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head = config.hidden_size // config.num_attention_heads
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head, 2).float() / head)
    return (plain / scaled).numpy()
