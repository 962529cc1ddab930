"""Checks that a model's config.json is supported by its family, and properties read from its fields."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from gdpo_nemo.models.families import FAMILIES, Experts, Family
from gdpo_nemo.utils.errors import ConfigError


def last_name(module: str) -> str:
    """Return the last part of a module name, which selects modules for LoRA: ``q_proj`` for ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Return the last parts of the names of the linear modules that may have adapters. The output layer comes last."""
    modules = family.modules
    mlp: tuple[str, ...] = modules.mlp
    if experts := family.experts:  # dense layers of the families with experts have the same names
        mlp = () if experts.only_stacked else tuple(filter(None, (experts.gate, experts.up, experts.down)))
    names = (*modules.qkv, modules.attention_output, *mlp, *mamba_linear(family), modules.head)
    return tuple(dict.fromkeys(map(last_name, names)))


def mamba_linear(family: Family) -> tuple[str, ...]:
    """Return the linear modules of a Mamba-2 layer, relative to the layer."""
    return (f"{family.mamba.mixer}.in_proj", f"{family.mamba.mixer}.out_proj") if family.mamba else ()


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

BIASES = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
"""Fields that enable projection biases. Only the field named by ``Family.qkv_bias`` may be true."""

SWIGLU_ALPHA = 1.702
"""Supported factor in the sigmoid of a clamped SwiGLU (``Family.swiglu_limit``)."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
    _check_layers(fields, family)
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
    for layers in ((FULL, SLIDING) if family.layer_rope else ("",)) if family.rope_types else ():
        _check_rope(fields, family, rope_of(fields, layers))
    if family.mamba:
        _check_mamba(fields)
    return family


def _check_not_quantised(fields: Mapping[str, Any]) -> None:
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    key = "quantization_config" if quantization else "quantization"  # MLX writes the key quantization
    if quantization or fields.get("quantization"):
        by = method or ("MLX" if fields.get("quantization") else None)
        origin = f", these are by {by}" if by else ""
        raise _model_error(
            f"quantised weights ({key}) are not supported{origin}; specify the folder of the unquantised model"
        )


def _check_window(fields: Mapping[str, Any], family: Family) -> None:
    window = _window(fields)
    if window is not None and family.windows == "none":
        raise _model_error(f"sliding-window attention ({window} tokens) is not supported for {family.model_type}")
    if window is not None:
        _check_size("sliding_window", window)
    if fields.get("use_bidirectional_attention"):
        raise _model_error("bidirectional attention (use_bidirectional_attention) is not supported")


def _check_layers(fields: Mapping[str, Any], family: Family) -> None:
    key = family.layer_types
    layers = fields.get(key) or []
    if not isinstance(layers, list):
        raise _model_error(f"{key} must be a list of texts, got {str(layers)[:40]}")
    slides = family.windows in ("late", "periodic") and _window(fields) is not None
    supported = [*family.layers, *[SLIDING] * slides]
    kinds = sorted({str(kind) for kind in layers} - set(supported))
    if kinds:
        raise _model_error(
            f"layers of type {', '.join(kinds)} ({key}) are not supported; supported: {', '.join(supported)}"
        )


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


def _check_mamba(fields: Mapping[str, Any]) -> None:
    """Check that Megatron's Mamba-2 layer computes what the config describes. Raises ConfigError."""
    for key, supported in (("mamba_hidden_act", "silu"), ("conv_kernel", 4), ("use_conv_bias", True)):
        if fields[key] != supported:
            raise _model_error(f"{key} {fields[key]!r} is not supported; supported: {supported}")
    latent, predictions = "moe_latent_size", "num_nextn_predict_layers"
    for key, what in ((latent, "experts in a latent space"), (predictions, "multi-token prediction layers")):
        if fields.get(key):
            raise _model_error(f"{what} ({key} {fields[key]}) are not supported")


def _check_rope(fields: Mapping[str, Any], family: Family, rope: Mapping[str, Any]) -> None:
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        supported = ", ".join(family.rope_types)
        raise _model_error(f"rope scaling {kind!r} is not supported for {family.model_type}; supported: {supported}")
    for key in ROPE_PARAMETERS[kind]:
        if not isinstance(rope.get(key), (int, float)):
            raise _model_error(f"rope scaling {kind!r} requires the number {key}")
    factor = _rotated_share(fields)
    if factor != 1 and not family.partial_rotary:
        raise _model_error("a partial rotary embedding (partial_rotary_factor) is not supported")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise _model_error(f"partial_rotary_factor must be a number above 0 and at most 1, got {repr(factor)[:40]}")


def with_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add transformers' defaults for the family to the fields of a config.json. Return the result.

    If the family has different types of layers, their types and their number are also added.
    """
    family = FAMILIES[content["model_type"]]
    fields = {**family.defaults, **content}
    if family.pattern is None:
        return fields
    key, types = family.pattern
    if content.get(family.layer_types) is None and isinstance(pattern := content.get(key), str):
        fields[family.layer_types] = [types.get(letter, letter) for letter in pattern]
    found = fields[family.layer_types]
    return {**fields, "num_hidden_layers": len(found) if isinstance(found, list) else 0}


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
    content = with_defaults(content)
    for key in SIZES:
        _check_size(key, content.get(key))
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        if content.get(key) is not None:
            _check_size(key, content[key])
    if family.latent:
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"):
            if key != "q_lora_rank" or content.get(key) is not None:
                _check_size(key, content.get(key))
        if content["v_head_dim"] > head_size(content):
            raise _model_error("v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim")
        if key_value_heads(content) != content["num_attention_heads"]:
            raise _model_error("num_key_value_heads must be equal to num_attention_heads with latent attention")
    if family.mamba:
        for key in (family.mamba.heads, family.mamba.head_size, family.mamba.groups, family.mamba.state):
            _check_size(key, content[key])
    experts = family.experts
    if experts and (family.pattern is None or any(mixture_layers(content))):
        _check_size(experts.count, num_experts(content))
        for key in (experts.width, "num_experts_per_tok"):
            _check_size(key, content.get(key))
        _check_router(content, experts)
    return family


def _check_router(content: Mapping[str, Any], experts: Experts) -> None:
    """Check the fields of a router with sigmoid scores, groups and shared experts. Raises ConfigError."""
    fields = with_defaults(content)
    for key in (*(experts.groups or ()), experts.shared, experts.shared_width, experts.period):
        if key and fields.get(key) is not None:
            _check_size(key, fields[key])
    if experts.first_dense and fields.get(experts.first_dense):
        _check_size(experts.first_dense, fields[experts.first_dense])
    kinds = fields.get(experts.kinds) if experts.kinds else None
    if kinds is not None and (
        not isinstance(kinds, list)
        or len(kinds) != fields["num_hidden_layers"]
        or not {"dense", "sparse"}.issuperset(map(str, kinds))
    ):
        raise _model_error(f"{experts.kinds} must contain dense or sparse for each layer")
    scaling = fields.get(experts.scaling) if experts.scaling else None
    if scaling is not None and (isinstance(scaling, bool) or not isinstance(scaling, (int, float)) or scaling <= 0):
        raise _model_error(f"{experts.scaling} must be a positive number, got {repr(scaling)[:40]}")
    chosen = fields["num_experts_per_tok"]
    if experts.sigmoid and (chosen == 1 or not (experts.normalized and fields.get(experts.normalized, True))):
        raise _model_error(
            f"weights of experts that do not sum to 1 ({experts.normalized} false, or num_experts_per_tok 1) are not "
            f"supported for {fields['model_type']}"
        )
    groups, group_limit = expert_groups(fields)
    # A group's score is the sum of its two highest scores. Megatron sums num_experts_per_tok / topk_group scores.
    if groups > 1 and (num_experts(fields) % groups or group_limit > groups or chosen != 2 * group_limit):
        raise _model_error(
            f"{groups} groups of experts (n_group) with topk_group {group_limit} are not supported; n_group must "
            f"divide the {num_experts(fields)} experts, and topk_group must be half of num_experts_per_tok ({chosen})"
        )


_LARGEST_SIZE = 2**31
"""Maximum value of a size in config.json. This maximum limits loops over layers and experts."""


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise _model_error(f"{key} in the model's config.json must be a positive integer, got {repr(value)[:40]}")


def num_experts(content: Mapping[str, Any]) -> int:
    """Return the number of experts in an MoE layer, or 0 for a dense model."""
    family = FAMILIES[content["model_type"]]
    if not family.experts or (family.pattern and not any(mixture_layers(content))):
        return 0
    fields = with_defaults(content)
    return next((fields[key] for key in EXPERT_COUNTS if fields.get(key)), 0)


def layer_symbols(content: Mapping[str, Any]) -> list[str]:
    """Return Megatron's Hybrid layers of each layer: ``M``, ``*``, ``-`` and ``E`` (see ``Family.layers``)."""
    family = FAMILIES[content["model_type"]]
    fields = with_defaults(content)
    count = fields["num_hidden_layers"]
    types = fields[family.layer_types] if len(family.layers) > 1 else [*family.layers] * count
    mlps = ["E" if has_experts else "-" for has_experts in _layers_with_experts(fields, family.experts)]
    return [family.layers[kind].replace("?", mlp) for kind, mlp in zip(types, mlps)]


def _layers_with_experts(fields: Mapping[str, Any], experts: Experts | None) -> list[bool]:
    layers = range(fields["num_hidden_layers"])
    if experts is None:
        return [False for _ in layers]
    kinds = fields.get(experts.kinds) if experts.kinds else None
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    dense = (fields.get(experts.dense_layers) if experts.dense_layers else None) or ()
    if experts.first_dense:
        dense = range(fields.get(experts.first_dense) or 0)
    period = (fields.get(experts.period) if experts.period else None) or 1
    return [layer not in dense and (layer + 1) % period == 0 for layer in layers]


def is_recurrent(content: Mapping[str, Any]) -> bool:
    """Return whether a supported model has recurrent layers (Mamba-2)."""
    return content.get("model_type") in FAMILIES and any("M" in symbols for symbols in layer_symbols(content))


def mixture_layers(content: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it is an MoE layer."""
    return ["E" in symbols for symbols in layer_symbols(content)]


def mamba_sections(content: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Return the rows of a Mamba-2 layer's input projection: gate, input, B and C of each group, step sizes."""
    fields = with_defaults(content)
    mamba = FAMILIES[fields["model_type"]].mamba
    if mamba is None:
        raise ValueError(f"{fields['model_type']} has no Mamba-2 layers")
    inner = fields[mamba.heads] * fields[mamba.head_size]
    states = fields[mamba.groups] * fields[mamba.state]
    return inner, inner, states, states, fields[mamba.heads]


def head_size(content: Mapping[str, Any]) -> int:
    """Return the size of one head of queries and keys."""
    fields = with_defaults(content)
    if FAMILIES[content["model_type"]].latent:
        return int(fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"])
    return int(with_defaults(content).get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def key_value_heads(content: Mapping[str, Any]) -> int:
    """Return the number of key and value heads."""
    return int(with_defaults(content).get("num_key_value_heads") or content["num_attention_heads"])


def _rotated_share(fields: Mapping[str, Any]) -> Any:
    """Return the value of ``partial_rotary_factor``, of which transformers also reads the older place."""
    factor = rope_of(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return 1 if factor is None else factor


def rotary_size(content: Mapping[str, Any]) -> int:
    """Return the number of elements of a head that the rotary embedding rotates."""
    fields = with_defaults(content)
    if FAMILIES[content["model_type"]].latent:
        return int(fields["qk_rope_head_dim"])
    return int(head_size(content) * _rotated_share(fields))


def rotates_pairs(content: Mapping[str, Any]) -> bool:
    """Return whether the rotary embedding rotates neighbouring elements (``Family.rotary_pairs``)."""
    pairs = FAMILIES[content["model_type"]].rotary_pairs
    return bool(with_defaults(content).get(pairs)) if isinstance(pairs, str) else pairs


def latent_widths(content: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """Return the widths of the latent vectors of q (0: none) and of k and v, of the rotated part of a head, and of a
    head's values, or None if the model has no latent attention."""
    if FAMILIES[content["model_type"]].latent is None:
        return None
    fields = with_defaults(content)
    q, key_value, rotated, value = (
        int(fields[key] or 0) for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    )
    return q, key_value, rotated, value


def has_qk_norm(content: Mapping[str, Any]) -> bool:
    """Return whether the heads of queries and keys have norms."""
    norm = FAMILIES[content["model_type"]].qk_norm
    return bool(with_defaults(content).get(norm)) if isinstance(norm, str) else norm


def shared_width(content: Mapping[str, Any]) -> int:
    """Return the intermediate size of the shared experts of an MoE layer, or 0 if it has none."""
    experts = FAMILIES[content["model_type"]].experts
    if experts is None or not num_experts(content):
        return 0
    fields = with_defaults(content)
    if experts.shared_width:
        return int(fields[experts.shared_width])
    return int(fields.get(experts.shared) or 0) * int(fields[experts.width]) if experts.shared else 0


def expert_groups(content: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of groups of experts, and of groups from which a token's experts are chosen: (1, 1) if the
    experts are not grouped."""
    experts = FAMILIES[content["model_type"]].experts
    if experts is None or experts.groups is None:
        return 1, 1
    groups, chosen = (with_defaults(content).get(field) or 1 for field in experts.groups)
    return int(groups), int(chosen)


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


def check_adapted_layers(targets: Sequence[str], content: Mapping[str, Any]) -> None:
    """Check that LoRA adapters can be added to the target modules.

    Args:
        targets: last parts of module names, as in ``policy.lora.target_modules``.
        content: fields of config.json.

    Raises:
        ConfigError: if the model has no such module, or adapters are not supported for it.
    """
    key = "policy.lora.target_modules"
    family = FAMILIES[content["model_type"]]
    known = linear_layers(family)
    if family.latent:
        factored = with_defaults(content).get("q_lora_rank") is not None
        absent = last_name(family.latent.query if factored else family.latent.query_up)
        known = tuple(name for name in known if name != absent)
    missing = [name for name in targets if name not in known]
    if missing:
        raise ConfigError(
            f"{key}: a model of type {family.model_type} has no {', '.join(missing)}; its linear layers: "
            f"{', '.join(known)}"
        )
    head = last_name(family.modules.head)
    if is_tied(content) and head in targets:
        raise ConfigError(
            f"{key}: the model's {head} is tied to the embedding (tie_word_embeddings) and gets no adapter; omit it"
        )


def _model_error(problem: str) -> ConfigError:
    return ConfigError(f"policy.model_name: {problem}")
