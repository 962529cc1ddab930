"""GGUF files: reading of the header, and conversion to config.json fields and Hugging Face weight names. No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.families import FAMILIES, Family
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.weights import weight_table
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import open_file

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_LENGTH = 1 << 32
"""Maximum length of a text in bytes, and of an array in items. A file with a larger value is considered damaged."""
_MAX_DEPTH = 8
"""Maximum depth of nested arrays. Real models have no nested arrays."""

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""Supported tensor types by GGML's type number: name, number of values in a block, and size of a block in bytes."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape, type and location of a tensor in a GGUF file."""

    shape: tuple[int, ...]
    """Dimensions in torch's order, which is the reverse of the order in the file."""
    kind: str
    """Name of the tensor type in ``BLOCKS``."""
    start: int
    """Offset of the first byte in the file."""
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file."""

    metadata: Mapping[str, Any]
    """Metadata values by key."""
    tensors: Mapping[str, TensorInfo]
    """Tensors by name."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.metadata.get("general.architecture"))

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """Return the metadata value with the key ``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf_header(file: Path, key: str) -> GgufHeader:
    """Read the header of a GGUF file, and check that the file is large enough for all its tensors.

    Args:
        key: config key or option that specifies the file, for error messages.

    Raises:
        ConfigError: if the file is damaged, truncated, one of several parts, or has tensors of an unsupported type.
    """
    try:
        with open_file(file) as stream:
            header = _read(stream, key, file)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{key}: {file} is not a complete GGUF file ({error})") from None
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(f"{key}: {file} is one of {parts} parts; join them with llama.cpp's `gguf-split --merge`")
    size = file.stat().st_size
    end = max((tensor.start + tensor.size for tensor in header.tensors.values()), default=0)
    if end > size:
        raise ConfigError(f"{key}: {file} is truncated: {size} of {end} bytes")
    return header


def _read(stream: BinaryIO, key: str, file: Path) -> GgufHeader:
    if stream.read(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    (version,) = _unpack(stream, "I")
    if version not in _VERSIONS:
        raise ConfigError(
            f"{key}: {file} has GGUF version {version}, which is not supported; "
            f"supported: {', '.join(map(str, _VERSIONS))}"
        )
    tensors, pairs = _unpack(stream, "QQ")
    metadata: dict[str, Any] = {}
    for _ in range(_checked(pairs)):
        name = _text(stream)
        metadata[name] = _value(stream, _unpack(stream, "I")[0])
    found = [(_text(stream), _dimensions(stream), _unpack(stream, "Q")[0]) for _ in range(_checked(tensors))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("general.alignment is not a valid size")
    begin = -(-stream.tell() // alignment) * alignment
    infos = {name: _tensor_info(key, file, name, *form, begin + offset) for name, form, offset in found}
    return GgufHeader(metadata, infos)


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack("<" + form, stream.read(struct.calcsize("<" + form)))


def _checked(count: int) -> int:
    if count > _MAX_LENGTH:
        raise ValueError(f"invalid count {count}")
    return count


def _text(stream: BinaryIO) -> str:
    length = _checked(_unpack(stream, "Q")[0])
    found = stream.read(length)
    if len(found) < length:
        raise ValueError("the file ends inside a text")
    return found.decode("utf-8", errors="replace")


def _value(stream: BinaryIO, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return _unpack(stream, _SCALARS[kind])[0]
    if kind == _STRING:
        return _text(stream)
    if kind != _ARRAY:
        raise ValueError(f"a value has the unknown type {kind}")
    if depth == _MAX_DEPTH:
        raise ValueError(f"arrays are nested more than {_MAX_DEPTH} deep")
    inner, count = _unpack(stream, "IQ")
    if inner in _SCALARS:
        return list(_unpack(stream, f"{_checked(count)}{_SCALARS[inner]}"))
    return [_value(stream, inner, depth + 1) for _ in range(_checked(count))]


def _dimensions(stream: BinaryIO) -> tuple[tuple[int, ...], int]:
    (count,) = _unpack(stream, "I")
    if count > 4:
        raise ValueError(f"a tensor has {count} dimensions")
    *dimensions, kind = _unpack(stream, f"{count}QI")
    return tuple(reversed(dimensions)), kind


def _tensor_info(key: str, file: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
    if kind not in BLOCKS:
        known = ", ".join(known for known, _, _ in BLOCKS.values())
        raise ConfigError(
            f"{key}: {name} of {file} is quantised as GGML type {kind}, which is not supported; supported: {known}"
        )
    label, values, size = BLOCKS[kind]
    if shape and shape[-1] % values:
        raise ValueError(f"{name} has rows of {shape[-1]} values, which is not a multiple of the block size {values}")
    return TensorInfo(shape, label, start, math.prod(shape) // values * size)


ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "phi3": "phi3",
    "seed_oss": "seed_oss",
}  # fmt: skip
"""``model_type`` by llama.cpp's architecture name.

llama.cpp uses the name llama also for Mistral, and for Mixtral, whose files have experts.
"""

PRE_TOKENIZERS = ("gpt-2", "llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "qwen2", "deepseek-r1-qwen",
                  "tekken", "smollm")  # fmt: skip
"""Supported pre-tokenizers of byte-level BPE, as values of ``tokenizer.ggml.pre``.

With a wrong pre-tokenizer, text would be split into different tokens than during the model's training.
"""

_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = "llama"
"""Architecture for which llama.cpp interleaves the rows of the two halves of each query and key head."""


@dataclass(frozen=True)
class WeightLocation:
    """Location of a Hugging Face weight in a GGUF file."""

    tensor: str
    """Name of the tensor in the file."""
    expert: int | None = None
    """Index in the tensor's first dimension (None for the whole tensor)."""
    heads: int | None = None
    """Number of heads whose rows must be reordered, because their two halves are interleaved; otherwise None."""


@dataclass(frozen=True)
class GgufModel:
    """A supported model in a GGUF file."""

    file: Path
    header: GgufHeader
    fields: dict[str, Any]
    """Equivalent fields of a Hugging Face config.json."""
    weights: dict[str, WeightLocation]
    """Locations of the weights by Hugging Face name, in the order of the layers."""


def read_gguf_model(file: Path, key: str) -> GgufModel:
    """Read the header of a GGUF file, and check that the model is supported.

    Args:
        key: config key or option that specifies the file, for error messages.

    Raises:
        ConfigError: if the architecture, the tokenizer or another feature of the model is not supported, or if a tensor
            is missing.
    """
    header = read_gguf_header(file, key)
    family = _family(header, file, key)
    fields = _fields(header, family, file, key)
    weights = dict(_weights(header, describe(fields)))
    _check_tensors(header, weights, file, key)
    _check_tokenizer(header, file, key)
    return GgufModel(file, header, fields, weights)


def _family(header: GgufHeader, file: Path, key: str) -> Family:
    name = header.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{key}: {file}: GGUF architecture {name!r} is not supported; supported: {known}")
    kind = ARCHITECTURES[name]
    return FAMILIES["mixtral" if kind == "llama" and header.architecture_value("expert_count") else kind]


def _fields(header: GgufHeader, family: Family, file: Path, key: str) -> dict[str, Any]:
    read = header.architecture_value

    def size(name: str, default: int | None = None) -> int:
        value = read(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{key}: {file} has {header.architecture}.{name} {value!r}, which must be a positive integer"
            )
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
        rms_norm_eps=_round_float32(read("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_parameters=_rope(header, head, file, key),
        tie_word_embeddings="output.weight" not in header.tensors,
        sliding_window=read("attention.sliding_window") or None,
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=header.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    if family.windows == "late" and fields["sliding_window"]:
        raise ConfigError(f"{key}: {file} has a sliding window without its layers, which is not supported")
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = bool(fields["sliding_window"])
    if read("rope.dimension_count", head) != head:
        fields["partial_rotary_factor"] = read("rope.dimension_count") / head
    fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors and family.qkv_bias is not True
    experts = family.experts
    if experts:
        # Mixtral's config.json has the width of an expert in intermediate_size. llama.cpp stores this width in
        # feed_forward_length.
        fields[experts.width] = size("expert_feed_forward_length", fields["intermediate_size"])
        fields[experts.count] = size("expert_count")
        fields["num_experts_per_tok"] = size("expert_used_count")
        if experts.normalized:
            fields[experts.normalized] = True  # llama.cpp always normalizes these weights
    return fields


def _round_float32(number: float) -> float:
    """Round a float32 to 7 significant digits, which restores the decimal value before its conversion to float32."""
    return float(f"{number:.7g}")


def _vocabulary(header: GgufHeader, file: Path, key: str) -> int:
    tensor = header.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise ConfigError(f"{key}: {file} has no matrix token_embd.weight")
    return tensor.shape[0]


def _rope(header: GgufHeader, head: int, file: Path, key: str) -> dict[str, Any]:
    theta = _round_float32(header.architecture_value("rope.freq_base", 10000.0))
    kind = header.architecture_value("rope.scaling.type", "none")
    if _ROPE_FACTORS in header.tensors:
        return {"rope_theta": theta, **_llama3(_floats(header, file), theta, head, file, key)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    found: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    for name, gguf_name in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
        value = header.architecture_value(f"rope.scaling.{gguf_name}")
        if value is not None:
            found[name] = value
    return found


def _floats(header: GgufHeader, file: Path) -> list[float]:
    tensor = header.tensors[_ROPE_FACTORS]
    with file.open("rb") as stream:
        stream.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.size // 4}f", stream.read(tensor.size)))


def _llama3(divisors: Sequence[float], theta: float, head: int, file: Path, key: str) -> dict[str, Any]:
    """Find the parameters of Llama 3's RoPE scaling from its frequency divisors. GGUF stores only the divisors."""
    factor = round(max(divisors), 3)
    frequencies = [theta ** (-2 * index / head) for index in range(head // 2)]
    for original in (2**power for power in range(5, 21)):
        rope = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
        expected = [_divisor(2 * math.pi / frequency, original, factor) for frequency in frequencies]
        if len(expected) == len(divisors) and all(abs(a - b) < 1e-3 for a, b in zip(expected, divisors)):
            return {"rope_type": "llama3", **rope, "original_max_position_embeddings": original}
    raise ConfigError(
        f"{key}: {file} has {_ROPE_FACTORS} that differ from Llama 3's rule, which is the only supported rule"
    )


def _divisor(wavelength: float, original: int, factor: float, low: float = 1.0, high: float = 4.0) -> float:
    """Return the divisor that Llama 3's RoPE scaling applies to a frequency with this wavelength."""
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


_NAMES: Mapping[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("token_embd",),
    "input_layernorm": ("attn_norm",),
    "self_attention.linear_qkv": ("attn_q", "attn_k", "attn_v"),
    "self_attention.q_layernorm": ("attn_q_norm",),
    "self_attention.k_layernorm": ("attn_k_norm",),
    "self_attention.linear_proj": ("attn_output",),
    "pre_mlp_layernorm": ("ffn_norm",),
    "mlp.linear_fc1": ("ffn_gate", "ffn_up"),
    "mlp.linear_fc2": ("ffn_down",),
    "mlp.router": ("ffn_gate_inp",),
    "mlp.experts.linear_fc1": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.linear_fc2": ("ffn_down_exps",),
    "decoder.final_norm": ("output_norm",),
    "output_layer": ("output",),
}
"""llama.cpp's names of the tensors of Megatron's parameters (``WeightSpec.megatron``)."""
_FUSED_NAMES = {"self_attention.linear_qkv": ("attn_qkv",), "mlp.linear_fc1": ("ffn_up",)}
"""Names of parameters with a single tensor that usually have several."""


def _weights(header: GgufHeader, model: ModelDescription) -> Iterator[tuple[str, WeightLocation]]:
    names = dict(_NAMES)
    if model.family.model_type == "seed_oss":
        names["pre_mlp_layernorm"] = ("post_attention_norm",)
    heads: dict[str, int] = {}
    if header.architecture == _INTERLEAVED:
        heads = {"attn_q": model.heads, "attn_k": model.key_value_heads}
    for (layer, parameter), group in groupby(weight_table(model), key=lambda row: (row.layer, row.megatron)):
        rows = list(group)
        module, _, part = parameter.rpartition(".")
        tensors = names[module] if len(rows) == len(names[module]) else _FUSED_NAMES[module]
        block = "" if layer is None else f"blk.{layer}."
        for row, tensor in zip(rows, tensors, strict=True):
            location = WeightLocation(f"{block}{tensor}.{part}", heads=heads.get(tensor))
            for expert in range(row.experts):
                yield row.name.format(expert), replace(location, expert=expert)
            if not row.experts:
                yield row.name, location


def _check_tensors(header: GgufHeader, weights: dict[str, WeightLocation], file: Path, key: str) -> None:
    required = {location.tensor for location in weights.values()}
    missing = sorted(required - set(header.tensors))
    if missing:
        raise ConfigError(f"{key}: {file} lacks {len(missing)} tensors of the model, for example {missing[0]}")
    unexpected = sorted(set(header.tensors) - required - {_ROPE_FACTORS})
    if unexpected:
        raise ConfigError(
            f"{key}: {file} has {len(unexpected)} unsupported tensors for architecture {header.architecture}, for "
            f"example {unexpected[0]}"
        )


def _check_tokenizer(header: GgufHeader, file: Path, key: str) -> None:
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{key}: {file} has a tokenizer of type {kind!r}, which is not supported; supported: gpt2, llama"
        )
    pre_tokenizer = header.metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre_tokenizer not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ConfigError(
            f"{key}: the tokenizer of {file} has pre-tokenizer {pre_tokenizer!r}, which is not supported; "
            f"supported: {known}"
        )
