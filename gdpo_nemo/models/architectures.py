"""Checks that a model's config.json is supported by its family, and properties read from its fields."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from gdpo_nemo.models.families import FAMILIES, Family
from gdpo_nemo.utils.errors import ConfigError


def last_name(module: str) -> str:
    """Return the last part of a module name, which selects modules for LoRA: ``q_proj`` for ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Return the last parts of the names of a dense model's linear modules. The output layer comes last."""
    modules = family.modules
    return tuple(map(last_name, (*modules.linear, modules.head)))


ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported types of rotary embeddings, and the numeric parameters that each requires.

The types dynamic and longrope are not supported, because their frequencies depend on the sequence length.
"""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes supported by vLLM's CPU kernels."""

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Fields that config.json must contain. For a missing field, transformers would use a default size."""

BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
"""Fields that enable projection biases. Only the field named by ``Family.qkv_bias`` may be true."""

SWIGLU_ALPHA = 1.702
"""Supported factor in the sigmoid of a clamped SwiGLU (``Family.swiglu_limit``)."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Fields with the number of experts. The field's name depends on the family."""


def check_family(content: Mapping[str, Any]) -> Family:
    """Check that a model configuration is supported, and return its family.

    Args:
        content: fields of config.json.

    Raises:
        ConfigError: if the family or a feature of the model is not supported. The message lists the supported values.
    """
    family = _family(content)
    names = content.get("architectures")
    if names and not isinstance(names, list):
        raise _model_error(f"architectures in the model's config.json must be a list, got {names!r}")
    if names and family.architecture not in names:
        raise _model_error(
            f"architecture {', '.join(map(str, names))} is not supported; supported: {family.architecture}"
        )
    fields = with_defaults(content)
    _check_window(fields, family)
    activation = fields.get(family.activation_field, family.activation)
    if activation != family.activation:
        raise _model_error(f"activation {activation!r} is not supported; supported: {family.activation}")
    for key in BIASES:
        if fields.get(key) and key != family.qkv_bias:
            raise _model_error(f"{key} (projection biases) is not supported for {family.model_type}")
    if family.biases and not has_qkv_bias(fields):
        raise _model_error(f"attention_bias: false is not supported for {family.model_type}")
    if fields.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        raise _model_error(f"swiglu_alpha {fields['swiglu_alpha']} is not supported; supported: {SWIGLU_ALPHA}")
    _check_not_quantised(fields)
    _check_rope(fields, family)
    return family


def _check_not_quantised(fields: Mapping[str, Any]) -> None:
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    key = "quantization_config" if quantization else "quantization"  # MLX writes the key quantization
    if quantization or fields.get("quantization"):
        by = method or ("MLX" if fields.get("quantization") else None)
        origin = f", these are by {by}" if by else ""
        if method == "mxfp4":
            raise _model_error(
                "MXFP4 weights are only read from a local folder; specify the path of the downloaded model"
            )
        raise _model_error(
            f"quantised weights ({key}) are not supported{origin}; specify the folder of the unquantised model"
        )


def _check_window(fields: Mapping[str, Any], family: Family) -> None:
    window = _window(fields)
    if window is not None and family.windows == "none":
        raise _model_error(f"sliding-window attention ({window} tokens) is not supported for {family.model_type}")
    if window is not None:
        _check_size("sliding_window", window)
    layers = fields.get("layer_types") or []
    if not isinstance(layers, list):
        raise _model_error(f"layer_types must be a list of texts, got {str(layers)[:40]}")
    supported = [FULL, SLIDING] if family.windows in ("late", "periodic") and window is not None else [FULL]
    kinds = sorted({str(kind) for kind in layers} - set(supported))
    if kinds:
        raise _model_error(
            f"layers of type {', '.join(kinds)} (layer_types) are not supported; supported: {', '.join(supported)}"
        )
    if fields.get("use_bidirectional_attention"):
        raise _model_error("bidirectional attention (use_bidirectional_attention) is not supported")


FULL = "full_attention"
"""Value of ``layer_types`` for layers whose queries attend to all earlier keys."""
SLIDING = "sliding_attention"
"""Value of ``layer_types`` for layers with a sliding window."""


def _window(fields: Mapping[str, Any]) -> Any:
    return fields.get("sliding_window") if fields.get("use_sliding_window", True) else None


def is_windowed(content: Mapping[str, Any]) -> bool:
    """Return whether config.json enables a sliding window, even if no layer uses it."""
    return _window(with_defaults(content)) is not None


def layer_windows(content: Mapping[str, Any]) -> list[int | None]:
    """Return for each layer the number of keys that a query attends to, or None for all keys."""
    fields = with_defaults(content)
    windows = FAMILIES[fields["model_type"]].windows
    count = fields["num_hidden_layers"]
    window = _window(fields)
    if windows == "all":
        return [window] * count
    if windows == "none" or window is None:
        return [None] * count
    if kinds := fields.get("layer_types"):
        sliding = [kind == SLIDING for kind in kinds]
    elif windows == "late":
        sliding = [layer >= fields["max_window_layers"] for layer in range(count)]
    else:
        sliding = [(layer + 1) % fields["sliding_window_pattern"] != 0 for layer in range(count)]
    return [window if is_sliding else None for is_sliding in sliding]


def _check_rope(fields: Mapping[str, Any], family: Family) -> None:
    for layers in (FULL, SLIDING) if family.layer_rope else ("",):
        _check_rope_of(fields, family, rope_of(fields, layers))


def _check_rope_of(fields: Mapping[str, Any], family: Family, rope: Mapping[str, Any]) -> None:
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        supported = ", ".join(family.rope_types)
        raise _model_error(f"rope scaling {kind!r} is not supported for {family.model_type}; supported: {supported}")
    for key in ROPE_PARAMETERS[kind]:
        if not isinstance(rope.get(key), (int, float)):
            raise _model_error(f"rope scaling {kind!r} requires the number {key}")
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise _model_error("a partial rotary embedding (partial_rotary_factor) is not supported")


def with_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add transformers' defaults for the family to the fields of a config.json. Return the result."""
    return {**FAMILIES[content["model_type"]].defaults, **content}


def _family(content: Mapping[str, Any]) -> Family:
    kind = content.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(kind, str):
        raise _model_error(f"the model's config.json has no model_type; supported: {known}")
    if kind not in FAMILIES:
        nested = " (a text model inside another model, text_config)" if "text_config" in content else ""
        raise _model_error(f"model type {kind!r}{nested} is not supported; supported: {known}")
    return FAMILIES[kind]


def check_model_content(content: Mapping[str, Any]) -> Family:
    """Check like ``check_family``, and also check that all sizes are positive integers. Return the family.

    Raises ConfigError.
    """
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
"""Maximum value of a size in config.json. This maximum limits loops over layers and experts."""


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise _model_error(f"{key} in the model's config.json must be a positive integer, got {repr(value)[:40]}")


def num_experts(content: Mapping[str, Any]) -> int:
    """Return the number of experts in an MoE layer, or 0 for a dense model."""
    if not FAMILIES[content["model_type"]].experts:
        return 0
    return next((content[key] for key in EXPERT_COUNTS if content.get(key)), 0)


def mixture_layers(content: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it is an MoE layer."""
    layers = range(content["num_hidden_layers"])
    experts = FAMILIES[content["model_type"]].experts
    if experts is None:
        return [False for _ in layers]
    dense = (content.get(experts.dense_layers) if experts.dense_layers else None) or ()
    period = (content.get(experts.period) if experts.period else None) or 1
    return [layer not in dense and (layer + 1) % period == 0 for layer in layers]


def head_size(content: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return int(with_defaults(content).get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def key_value_heads(content: Mapping[str, Any]) -> int:
    """Return the number of key and value heads."""
    return int(with_defaults(content).get("num_key_value_heads") or content["num_attention_heads"])


def has_qkv_bias(content: Mapping[str, Any]) -> bool:
    """Return whether the projections of queries, keys and values have biases."""
    bias = FAMILIES[content["model_type"]].qkv_bias
    return bool(with_defaults(content).get(bias)) if isinstance(bias, str) else bias


def special_attention(content: Mapping[str, Any]) -> str | None:
    """Return a property of the model for which FlexAttention replaces TransformerEngine's attention, or None."""
    fields = with_defaults(content)
    family = FAMILIES[fields["model_type"]]
    properties = {
        "sliding windows": any(layer_windows(fields)),
        "a soft cap of attention scores": family.score_cap and fields.get(family.score_cap) is not None,
        "attention sinks": family.sinks,
        "several rotary embeddings": family.layer_rope,
    }
    return next((name for name, is_present in properties.items() if is_present), None)


def has_logit_cap(content: Mapping[str, Any]) -> bool:
    """Return whether the model has a soft cap of its logits."""
    fields = with_defaults(content)
    field = FAMILIES[fields["model_type"]].logit_cap
    return field is not None and fields.get(field) is not None


def is_tied(content: Mapping[str, Any]) -> bool:
    """Return whether the output layer shares its weight with the embedding."""
    return bool(with_defaults(content).get("tie_word_embeddings"))


def rope_of(content: Mapping[str, Any], layers: str = "") -> dict[str, Any]:
    """Return the parameters of the rotary embedding, including ``rope_type``.

    They are read from ``rope_parameters``, or from the older field ``rope_scaling``.

    Args:
        layers: value of ``layer_types`` whose parameters are returned, if the parameters depend on it.
    """
    parameters = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if layers and isinstance(parameters, Mapping):
        # The older field applies only to layers without a window.
        is_nested = FULL in parameters or SLIDING in parameters
        parameters = parameters.get(layers) or {} if is_nested else parameters if layers == FULL else {}
    if not isinstance(parameters, Mapping):
        raise _model_error(f"the rotary parameters in the model's config.json must be an object, got {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {**parameters, "rope_type": "default" if kind is None else kind}


def check_adapted_layers(targets: Sequence[str], family: Family, tied: bool) -> None:
    """Check that LoRA adapters can be added to the target modules.

    Args:
        targets: last parts of module names, as in ``policy.lora.target_modules``.
        tied: True if the output layer shares its weight with the embedding.

    Raises:
        ConfigError: if the model has no such module, or adapters are not supported for it.
    """
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
        raise ConfigError(f"{key}: adapters on the model's experts are not supported; leave out {', '.join(dense)}")
    head = last_name(family.modules.head)
    if tied and head in targets:
        raise ConfigError(
            f"{key}: the model's {head} is tied to the embedding (tie_word_embeddings) and gets no adapter; omit it"
        )


def _model_error(problem: str) -> ConfigError:
    return ConfigError(f"policy.model_name: {problem}")
