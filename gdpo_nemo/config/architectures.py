"""What a model's config.json says, read with its family's declaration; what that does not cover is refused by name.

Both sides of a run ask here: the checks before it, without torch, and ``megatron.hf_mapping``, which builds the model.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from gdpo_nemo.config.families import FAMILIES, Family, last_name, linear_layers
from gdpo_nemo.errors import ConfigError

ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
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

BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
"""Fields that give projections biases. Only that of ``Family.qkv_bias`` may be true."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""The names under which transformers has written the number of experts, for one family or the other."""


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
    fields = with_defaults(content)
    _check_window(fields)
    activation = fields.get("hidden_act", family.activation)
    if activation != family.activation:
        raise _refusal(f"activation {activation!r} is not supported; supported: {family.activation}")
    for key in BIASES:
        if fields.get(key) and key != family.qkv_bias:
            raise _refusal(f"{key} (biases of projections) is not supported for {family.model_type}")
    _check_not_quantised(fields)
    _check_rope(fields, family)
    return family


def _check_not_quantised(fields: Mapping[str, Any]) -> None:
    found = fields.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    key = "quantization_config" if found else "quantization"  # the latter is MLX's
    if found or fields.get("quantization"):
        by = method or ("MLX" if fields.get("quantization") else None)
        raise _refusal(
            f"quantised weights ({key}) are not supported{f', these are by {by}' if by else ''}; give the folder of "
            "the unquantised model"
        )


def _check_window(fields: Mapping[str, Any]) -> None:
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if window is not None:
        raise _refusal(f"sliding-window attention ({window} tokens) is not supported")
    layers = fields.get("layer_types") or []
    if not isinstance(layers, list):
        raise _refusal(f"layer_types must be a list of texts, not {str(layers)[:40]}")
    kinds = sorted({str(kind) for kind in layers} - {"full_attention"})
    if kinds:
        raise _refusal(f"layers of type {', '.join(kinds)} (layer_types) are not supported; supported: full_attention")


def _check_rope(fields: Mapping[str, Any], family: Family) -> None:
    rope = rope_of(fields)
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        supported = ", ".join(family.rope_types)
        raise _refusal(f"rope scaling {kind!r} is not supported for {family.model_type}; supported: {supported}")
    for key in ROPE_PARAMETERS[kind]:
        if not isinstance(rope.get(key), (int, float)):
            raise _refusal(f"rope scaling {kind!r} needs the number {key}")
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise _refusal("a rotary embedding of a part of each head (partial_rotary_factor) is not supported")


def with_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, and those that transformers fills in for its family where they are missing."""
    return {**FAMILIES[content["model_type"]].defaults, **content}


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
    experts = family.experts
    if experts:
        _check_size(experts.count, num_experts(content))
        for key in (experts.width, "num_experts_per_tok"):
            _check_size(key, content.get(key))
        if experts.period and content.get(experts.period) is not None:
            _check_size(experts.period, content[experts.period])
    return family


_LARGEST_SIZE = 2**31
"""Of a vocabulary, a width or a number of layers; what is counted up to must end."""


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise _refusal(f"{key} in the model's config.json must be a positive integer, got {repr(value)[:40]}")


def num_experts(content: Mapping[str, Any]) -> int:
    """Experts of one mixture layer; 0 for a dense family."""
    if not FAMILIES[content["model_type"]].experts:
        return 0
    return next((content[key] for key in EXPERT_COUNTS if content.get(key)), 0)


def mixture_layers(content: Mapping[str, Any]) -> list[bool]:
    """For each layer whether its MLP is a mixture."""
    layers = range(content["num_hidden_layers"])
    experts = FAMILIES[content["model_type"]].experts
    if experts is None:
        return [False for _ in layers]
    dense = (content.get(experts.dense_layers) if experts.dense_layers else None) or ()
    period = (content.get(experts.period) if experts.period else None) or 1
    return [layer not in dense and (layer + 1) % period == 0 for layer in layers]


def head_size(content: Mapping[str, Any]) -> int:
    """Size of one attention head."""
    return int(with_defaults(content).get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def key_value_heads(content: Mapping[str, Any]) -> int:
    """Heads of keys and values."""
    return int(with_defaults(content).get("num_key_value_heads") or content["num_attention_heads"])


def has_qkv_bias(content: Mapping[str, Any]) -> bool:
    """Whether the projections of queries, keys and values have biases."""
    bias = FAMILIES[content["model_type"]].qkv_bias
    return bool(with_defaults(content).get(bias)) if isinstance(bias, str) else bias


def rope_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters with their ``rope_type``, under either of the names transformers has had for
    them."""
    given = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise _refusal(f"the rotary parameters in the model's config.json must be an object, got {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    return {**given, "rope_type": "default" if kind is None else kind}


def check_adapted_layers(targets: Sequence[str], family: Family, tied: bool) -> None:
    """Refuse adapters on layers that a model of the ``family`` with a ``tied`` output layer lacks. Raises
    ConfigError."""
    key = "policy.lora.target_modules"
    known = linear_layers(family)
    missing = [name for name in targets if name not in known]
    if missing:
        raise ConfigError(
            f"{key}: a model of type {family.model_type} has no {', '.join(missing)}; its linear layers: "
            f"{', '.join(known)}"
        )
    dense = [last_name(module) for module in family.modules.mlp]
    if family.experts and set(dense) & set(targets):
        raise ConfigError(f"{key}: the model's experts cannot be adapted; leave out {', '.join(dense)}")
    head = last_name(family.modules.head)
    if tied and head in targets:
        raise ConfigError(
            f"{key}: the model's {head} is its embedding (tie_word_embeddings), which has no adapter; leave it out"
        )


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"policy.model_name: {what}")
