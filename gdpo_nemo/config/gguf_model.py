"""A GGUF file as a Hugging Face model: the fields of its config.json, and which tensor becomes which weight. No torch.

Names and keys are llama.cpp's (https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py); the Hugging Face side
comes from the family's declaration.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

from gdpo_nemo.config.architectures import check_model_content
from gdpo_nemo.config.families import FAMILIES, Family
from gdpo_nemo.config.gguf_header import GgufHeader, read_gguf_header
from gdpo_nemo.errors import ConfigError

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "phi3": "phi3",
    "seed_oss": "seed_oss",
}  # fmt: skip
"""llama.cpp's architecture -> ``model_type``; a llama with experts is a Mixtral, and Mistral is a llama there."""

PRE_TOKENIZERS = ("gpt-2", "llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "qwen2", "deepseek-r1-qwen",
                  "tekken", "smollm")  # fmt: skip
"""The ways to cut text before byte-level BPE that are known here, by ``tokenizer.ggml.pre``. With a wrong one the same
text becomes other tokens than the model was trained on."""

_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = "llama"
"""The architecture whose queries and keys llama.cpp keeps with the two halves of each head in turns."""


@dataclass(frozen=True)
class Origin:
    """Where a Hugging Face weight comes from."""

    tensor: str
    expert: int | None = None
    """Its place in the tensor's first dimension."""
    heads: int | None = None
    """Heads whose rows are in turns of the two halves, to be put back one half after the other."""


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file whose model can be read."""

    file: Path
    header: GgufHeader
    fields: dict[str, Any]
    """Of config.json."""
    weights: dict[str, Origin]
    """By Hugging Face name, in the order of the layers."""


def read_gguf_model(file: Path, key: str) -> GgufModel:
    """Read the header of ``file`` and match it with a family.

    Args:
        key: what the user named the file by, for messages.

    Raises:
        ConfigError: the architecture, a trait of it, its tokenizer or a tensor is not supported, or is missing.
    """
    header = read_gguf_header(file, key)
    family = _family(header, file, key)
    fields = _fields(header, family, file, key)
    check_model_content(fields)
    weights = dict(_weights(header, family, fields))
    _check_tensors(header, weights, file, key)
    _check_tokenizer(header, file, key)
    return GgufModel(file, header, fields, weights)


def _family(header: GgufHeader, file: Path, key: str) -> Family:
    name = header.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{key}: {file} is GGUF of architecture {name!r}, which is not supported; supported: {known}")
    kind = ARCHITECTURES[name]
    return FAMILIES["mixtral" if kind == "llama" and header.of_architecture("expert_count") else kind]


def _fields(header: GgufHeader, family: Family, file: Path, key: str) -> dict[str, Any]:
    read = header.of_architecture

    def size(name: str, default: int | None = None) -> int:
        value = read(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}: {file} has {header.architecture}.{name} {value!r}, which must be one number")
        return value

    heads = size("attention.head_count")
    width = size("embedding_length")
    head = size("attention.key_length", read("rope.dimension_count") or width // heads)
    if read("attention.value_length", head) != head:
        raise ConfigError(f"{key}: {file} has keys and values of different sizes, which is not supported")
    fields: dict[str, Any] = dict(
        model_type=family.model_type,
        architectures=[family.architecture],
        hidden_size=width,
        num_hidden_layers=size("block_count"),
        intermediate_size=size("feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=size("attention.head_count_kv", heads),
        head_dim=head,
        hidden_act=family.activation,
        vocab_size=_vocabulary(header, file, key),
        max_position_embeddings=size("context_length"),
        rms_norm_eps=_short(read("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_parameters=_rope(header, head, file, key),
        tie_word_embeddings="output.weight" not in header.tensors,
        sliding_window=read("attention.sliding_window") or None,
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=header.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = bool(fields["sliding_window"])
    if read("rope.dimension_count", head) != head:
        fields["partial_rotary_factor"] = read("rope.dimension_count") / head
    fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors and family.qkv_bias is not True
    experts = family.experts
    if experts:
        # Mixtral names the experts' width as a dense MLP's; llama.cpp has it in feed_forward_length.
        fields[experts.width] = size("expert_feed_forward_length", fields["intermediate_size"])
        fields[experts.count] = size("expert_count")
        fields["num_experts_per_tok"] = size("expert_used_count")
        if experts.normalized:
            fields[experts.normalized] = True  # as llama.cpp computes it
    return fields


def _short(number: float) -> float:
    """A float32 as the decimal that it was written as."""
    return float(f"{number:.7g}")


def _vocabulary(header: GgufHeader, file: Path, key: str) -> int:
    place = header.tensors.get("token_embd.weight")
    if place is None or len(place.shape) != 2:
        raise ConfigError(f"{key}: {file} has no matrix token_embd.weight")
    return place.shape[0]


def _rope(header: GgufHeader, head: int, file: Path, key: str) -> dict[str, Any]:
    theta = _short(header.of_architecture("rope.freq_base", 10000.0))
    kind = header.of_architecture("rope.scaling.type", "none")
    if _ROPE_FACTORS in header.tensors:
        return {"rope_theta": theta, **_llama3(_floats(header, file), theta, head, file, key)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    found: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    for ours, theirs in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
        value = header.of_architecture(f"rope.scaling.{theirs}")
        if value is not None:
            found[ours] = value
    return found


def _floats(header: GgufHeader, file: Path) -> list[float]:
    place = header.tensors[_ROPE_FACTORS]
    with file.open("rb") as stream:
        stream.seek(place.start)
        return list(struct.unpack(f"<{place.size // 4}f", stream.read(place.size)))


def _llama3(divisors: Sequence[float], theta: float, head: int, file: Path, key: str) -> dict[str, Any]:
    """The parameters of Llama 3's scaling that give ``divisors`` of the frequencies, which is all a GGUF keeps."""
    factor = round(max(divisors), 3)
    frequencies = [theta ** (-2 * place / head) for place in range(head // 2)]
    for original in (2**power for power in range(5, 21)):
        rope = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
        wanted = [_divisor(2 * math.pi / frequency, original, factor) for frequency in frequencies]
        if len(wanted) == len(divisors) and all(abs(a - b) < 1e-3 for a, b in zip(wanted, divisors)):
            return {"rope_type": "llama3", **rope, "original_max_position_embeddings": original}
    raise ConfigError(f"{key}: {file} has {_ROPE_FACTORS} of another rule than Llama 3's, which is not supported")


def _divisor(wavelength: float, original: int, factor: float, low: float = 1.0, high: float = 4.0) -> float:
    """By what Llama 3's scaling divides the frequency of a wave of this length."""
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    share = (original / wavelength - low) / (high - low)
    return 1 / ((1 - share) / factor + share)


def _weights(header: GgufHeader, family: Family, fields: dict[str, Any]) -> Iterator[tuple[str, Origin]]:
    modules = family.modules
    yield f"{modules.embedding}.weight", Origin("token_embd.weight")
    for number in range(fields["num_hidden_layers"]):
        layer = modules.layer.format(number)
        for name, origin in _layer_weights(header, family, fields, f"blk.{number}."):
            yield layer + name, origin
    yield f"{modules.final_norm}.weight", Origin("output_norm.weight")
    if not fields["tie_word_embeddings"]:
        yield f"{modules.head}.weight", Origin("output.weight")


def _layer_weights(
    header: GgufHeader, family: Family, fields: dict[str, Any], block: str
) -> Iterator[tuple[str, Origin]]:
    modules = family.modules
    turned = header.architecture == _INTERLEAVED
    heads = (fields["num_attention_heads"], fields["num_key_value_heads"], None)
    yield f"{modules.attention_norm}.weight", Origin(f"{block}attn_norm.weight")
    names = ("attn_q", "attn_k", "attn_v") if len(modules.qkv) == 3 else ("attn_qkv",)
    biases = ("weight", "bias") if family.qkv_bias is True or fields["attention_bias"] else ("weight",)
    for module, name, count in zip(modules.qkv, names, heads):
        for part in biases:
            yield f"{module}.{part}", Origin(f"{block}{name}.{part}", heads=count if turned else None)
    if family.qk_norm:
        yield f"{modules.q_norm}.weight", Origin(f"{block}attn_q_norm.weight")
        yield f"{modules.k_norm}.weight", Origin(f"{block}attn_k_norm.weight")
    yield f"{modules.attention_output}.weight", Origin(f"{block}attn_output.weight")
    norm = "post_attention_norm" if family.model_type == "seed_oss" else "ffn_norm"
    yield f"{modules.mlp_norm}.weight", Origin(f"{block}{norm}.weight")
    if family.experts:
        yield from _expert_weights(family, fields, block)
        return
    halves = ("ffn_gate", "ffn_up") if len(modules.gate_up) == 2 else ("ffn_up",)
    for module, name in zip((*modules.gate_up, modules.down), (*halves, "ffn_down")):
        yield f"{module}.weight", Origin(f"{block}{name}.weight")


def _expert_weights(family: Family, fields: dict[str, Any], block: str) -> Iterator[tuple[str, Origin]]:
    experts = family.experts
    assert experts is not None
    yield f"{experts.router}.weight", Origin(f"{block}ffn_gate_inp.weight")
    for expert in range(fields[experts.count]):
        for module, name in ((experts.gate, "gate"), (experts.up, "up"), (experts.down, "down")):
            yield f"{module.format(expert)}.weight", Origin(f"{block}ffn_{name}_exps.weight", expert)


def _check_tensors(header: GgufHeader, weights: dict[str, Origin], file: Path, key: str) -> None:
    wanted = {origin.tensor for origin in weights.values()}
    missing = sorted(wanted - set(header.tensors))
    if missing:
        raise ConfigError(f"{key}: {file} lacks {len(missing)} tensors of the model, for instance {missing[0]}")
    more = sorted(set(header.tensors) - wanted - {_ROPE_FACTORS})
    if more:
        raise ConfigError(
            f"{key}: {file} has {len(more)} tensors that a model of architecture {header.architecture} has not here, "
            f"for instance {more[0]}"
        )


def _check_tokenizer(header: GgufHeader, file: Path, key: str) -> None:
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"{key}: {file} has a tokenizer of kind {kind!r}, which is not read; read: gpt2, llama")
    way = header.metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and way not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ConfigError(f"{key}: the tokenizer of {file} splits text by {way!r}, which is not known; known: {known}")
