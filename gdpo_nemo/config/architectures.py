"""Which Hugging Face models can be trained: the families, and the traits of a config.json that neither trainer nor
sampler may ignore.

One declaration for both sides of a run: the checks before it read a ``config.json`` against it, without torch, and
``megatron.families`` builds the model from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from gdpo_nemo.errors import ConfigError


@dataclass(frozen=True)
class Experts:
    """A mixture layer: names of its tensors inside a layer as files hold them (``{}`` is an expert), and of its
    sizes."""

    router: str
    gate: str
    up: str
    down: str
    count: str
    """Field of the configuration with the number of experts."""
    width: str
    """Field of the configuration with an expert's intermediate size."""


@dataclass(frozen=True)
class Family:
    """What sets one Hugging Face architecture apart from a plain Llama."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    window: int | None = None
    """Sliding window of a config.json that does not mention one."""


_MIXTRAL_EXPERTS = Experts(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
    count="num_local_experts",
    width="intermediate_size",
)
_QWEN_EXPERTS = Experts(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
    count="num_experts",
    width="moe_intermediate_size",
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window=4096),
    "mixtral": Family("MixtralForCausalLM", experts=_MIXTRAL_EXPERTS),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=_QWEN_EXPERTS),
}
"""By ``model_type``."""

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Rotary embeddings whose frequencies are fixed, with the numbers each needs. Those of dynamic and longrope change with
the length of a sequence."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's attention on CPUs has kernels for."""

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Fields that every config.json of these families has; transformers would fill in sizes of its own for a missing
one."""

TRAITS = (
    "model_type", "architectures", "sliding_window", "use_sliding_window", "hidden_act", "attention_bias", "mlp_bias",
    "quantization_config", "rope_parameters", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
"""Fields that ``check_family`` reads."""


def check_family(content: Mapping[str, Any]) -> Family:
    """The family of a configuration, all of whose traits are supported.

    Args:
        content: fields of a Hugging Face configuration.

    Raises:
        ConfigError: the family, or a trait of this model, is not supported; the message lists what is.
    """
    family = _family(content)
    given = content.get("architectures")
    if given and not isinstance(given, list):
        raise _refusal(f"architectures in the model's config.json must be a list, got {given!r}")
    if given and family.architecture not in given:
        raise _refusal(f"architecture {', '.join(map(str, given))} is not supported; supported: {family.architecture}")
    window = content.get("sliding_window", family.window) if content.get("use_sliding_window", True) else None
    if window is not None:
        raise _refusal(f"sliding-window attention ({window} tokens) is not supported")
    if content.get("hidden_act", "silu") != "silu":
        raise _refusal(f"activation {content['hidden_act']!r} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        if content.get(key):
            raise _refusal(f"{key} (biases of projections) is not supported for {content['model_type']}")
    if content.get("quantization_config"):
        raise _refusal(
            "quantised weights (quantization_config) are not supported; give the folder of the unquantised model"
        )
    rope = rope_of(content)
    if rope["rope_type"] not in ROPE_TYPES:
        raise _refusal(f"rope scaling {rope['rope_type']!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for key in ROPE_TYPES[rope["rope_type"]]:
        if not isinstance(rope.get(key), (int, float)):
            raise _refusal(f"rope scaling {rope['rope_type']!r} needs the number {key}")
    if rope.get("partial_rotary_factor", content.get("partial_rotary_factor")) not in (None, 1):
        raise _refusal("a rotary embedding of a part of each head (partial_rotary_factor) is not supported")
    return family


def _family(content: Mapping[str, Any]) -> Family:
    kind = content.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(kind, str):
        raise _refusal(f"the model's config.json names no model_type; supported: {known}")
    if kind not in FAMILIES:
        nested = " (a text model inside another, text_config)" if "text_config" in content else ""
        raise _refusal(f"model type {kind!r}{nested} is not supported; supported: {known}")
    return FAMILIES[kind]


def check_model_content(content: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``, whose sizes are there as well. Raises ConfigError."""
    family = check_family(content)
    for key in SIZES:
        _check_size(key, content.get(key))
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        if content.get(key) is not None:
            _check_size(key, content[key])
    if family.experts:
        _check_size(family.experts.count, num_experts(content))
        for key in (family.experts.width, "num_experts_per_tok"):
            _check_size(key, content.get(key))
    return family


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(f"{key} in the model's config.json must be a positive integer, got {value!r}")


def num_experts(content: Mapping[str, Any]) -> int:
    """Experts of one mixture layer; 0 for a dense family. transformers has written the number under two names."""
    if not FAMILIES[content["model_type"]].experts:
        return 0
    return content.get("num_experts") or content.get("num_local_experts") or 0


def head_size(content: Mapping[str, Any]) -> int:
    """Size of one attention head of a ``config.json``."""
    return content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]


def rope_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters with their ``rope_type``, under either of the names transformers has had for
    them."""
    given = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise _refusal(f"the rotary parameters in the model's config.json must be an object, got {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    return {**given, "rope_type": "default" if kind is None else kind}


def attention_scaling(content: Mapping[str, Any]) -> float:
    """The factor that the rotary embedding puts on queries and keys; 1 but for YaRN (arXiv 2309.00071, section 3.4)."""
    rope = rope_of(content)
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(rope["factor"], rope["mscale"]) / _mscale(rope["factor"], rope["mscale_all_dim"])
    return _mscale(rope.get("factor") or 1.0)


def _mscale(factor: float, slope: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def check_scaled_rope(scaling: float, transformer_engine: bool) -> None:
    """Refuse TransformerEngine's layers, which take the rotary frequencies alone, where there is a factor, too. Raises
    ConfigError."""
    if transformer_engine and scaling != 1.0:
        raise ConfigError(
            f"policy.megatron_cfg.transformer_engine: its layers do not honour the attention factor {scaling:.4g} of "
            "the model's YaRN scaling; set it to false"
        )


def check_adapted_layers(targets: Sequence[str], experts: int, tied: bool) -> None:
    """Refuse adapters on layers that a model with so many ``experts`` and a ``tied`` output layer lacks. Raises
    ConfigError."""
    if experts and {"gate_proj", "up_proj", "down_proj"} & set(targets):
        raise ConfigError(
            "policy.lora.target_modules: the model's experts cannot be adapted; leave out gate_proj, up_proj, down_proj"
        )
    if tied and "lm_head" in targets:
        raise ConfigError(
            "policy.lora.target_modules: the model's lm_head is its embedding (tie_word_embeddings), which has no "
            "adapter; leave it out"
        )


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"policy.model_name: {what}")
