"""Checks that a model's config.json is supported by its family, and properties read from its fields."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from gdpo_nemo.models.families import FAMILIES, Experts, Family
from gdpo_nemo.utils.errors import ConfigError


def last_name(module: str) -> str:
    """Return the last part of a module name, which selects modules for LoRA: ``q_proj`` for ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Return the last parts of the names of a dense model's linear modules. The output layer comes last."""
    modules = family.modules
    mamba = mamba_linear(family)
    return tuple(dict.fromkeys(map(last_name, (*modules.linear, *mamba, modules.head))))


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
    _check_window(fields)
    _check_layers(fields, family)
    activation = fields.get(family.activation_field, family.activation)
    if activation != family.activation:
        raise _model_error(f"activation {activation!r} is not supported; supported: {family.activation}")
    for key in BIASES:
        if fields.get(key) and key != family.qkv_bias:
            raise _model_error(f"{key} (projection biases) is not supported for {family.model_type}")
    _check_not_quantised(fields)
    if family.rope_types:
        _check_rope(fields, family)
    if family.mamba:
        _check_mamba(fields)
    if family.experts and family.experts.score_function == "sigmoid":
        _check_sigmoid_router(fields, family.experts)
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


def _check_window(fields: Mapping[str, Any]) -> None:
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if window is not None:
        raise _model_error(f"sliding-window attention ({window} tokens) is not supported")


def _check_layers(fields: Mapping[str, Any], family: Family) -> None:
    key = family.layer_types
    layers = fields.get(key) or []
    if not isinstance(layers, list):
        raise _model_error(f"{key} must be a list of texts, got {str(layers)[:40]}")
    kinds = sorted({str(kind) for kind in layers} - family.layers.keys())
    if kinds:
        raise _model_error(
            f"layers of type {', '.join(kinds)} ({key}) are not supported; supported: {', '.join(family.layers)}"
        )


def _check_mamba(fields: Mapping[str, Any]) -> None:
    """Check that Megatron's Mamba-2 layer computes what the config describes. Raises ConfigError."""
    for key, supported in (("mamba_hidden_act", "silu"), ("conv_kernel", 4), ("use_conv_bias", True)):
        if fields[key] != supported:
            raise _model_error(f"{key} {fields[key]!r} is not supported; supported: {supported}")
    for key, what in (
        ("moe_latent_size", "experts in a latent space"),
        ("num_nextn_predict_layers", "multi-token prediction layers"),
    ):
        if fields.get(key):
            raise _model_error(f"{what} ({key} {fields[key]}) are not supported")


def _check_sigmoid_router(fields: Mapping[str, Any], experts: Experts) -> None:
    """Check that Megatron's router selects and weighs experts as transformers does. Raises ConfigError."""
    for key in ("num_experts_per_tok", *(experts.groups or ())):
        _check_size(key, fields.get(key))
    selected = fields["num_experts_per_tok"]
    if selected == 1 or (experts.normalized and not fields[experts.normalized]):
        raise _model_error("a sigmoid router without normalized weights is not supported")
    if experts.groups:
        groups, chosen = (fields[key] for key in experts.groups)
        # transformers ranks groups by their two best experts, and Megatron by their selected / chosen best experts.
        if groups > 1 and selected != 2 * chosen:
            raise _model_error(
                f"{experts.groups[1]} {chosen} with {selected} experts per token is not supported; supported: half of "
                "num_experts_per_tok"
            )


def _check_rope(fields: Mapping[str, Any], family: Family) -> None:
    rope = rope_of(fields)
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
    if family.mamba:
        for key in (family.mamba.heads, family.mamba.head_size, family.mamba.groups, family.mamba.state):
            _check_size(key, content[key])
    experts = family.experts
    if experts and experts.period and content.get(experts.period) is not None:
        _check_size(experts.period, content[experts.period])
    if experts and (family.pattern is None or any(mixture_layers(content))):
        _check_size(experts.count, num_experts(content))
        for key in (experts.width, "num_experts_per_tok"):
            _check_size(key, content.get(key))
    return family


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
    dense: Sequence[int] = range(count)
    period = 1
    if experts := family.experts:
        dense = (fields.get(experts.dense_layers) if experts.dense_layers else None) or ()
        period = (fields.get(experts.period) if experts.period else None) or 1
    mlps = ["-" if layer in dense or (layer + 1) % period else "E" for layer in range(count)]
    return [family.layers[kind].replace("?", mlp) for kind, mlp in zip(types, mlps)]


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
    """Return the size of one attention head."""
    return int(with_defaults(content).get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def key_value_heads(content: Mapping[str, Any]) -> int:
    """Return the number of key and value heads."""
    return int(with_defaults(content).get("num_key_value_heads") or content["num_attention_heads"])


def has_qkv_bias(content: Mapping[str, Any]) -> bool:
    """Return whether the projections of queries, keys and values have biases."""
    bias = FAMILIES[content["model_type"]].qkv_bias
    return bool(with_defaults(content).get(bias)) if isinstance(bias, str) else bias


def rope_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, including ``rope_type``.

    They are read from ``rope_parameters``, or from the older field ``rope_scaling``.
    """
    parameters = content.get("rope_parameters") or content.get("rope_scaling") or {}
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
    tied = bool(content.get("tie_word_embeddings"))
    known = linear_layers(family)
    missing = [name for name in targets if name not in known]
    if missing:
        raise ConfigError(
            f"{key}: a model of type {family.model_type} has no {', '.join(missing)}; its linear layers: "
            f"{', '.join(known)}"
        )
    dense = [last_name(module) for module in family.modules.mlp]
    if num_experts(content) and set(dense) & set(targets):
        raise ConfigError(f"{key}: adapters on the model's experts are not supported; leave out {', '.join(dense)}")
    head = last_name(family.modules.head)
    if tied and head in targets:
        raise ConfigError(
            f"{key}: the model's {head} is tied to the embedding (tie_word_embeddings) and gets no adapter; omit it"
        )


def _model_error(problem: str) -> ConfigError:
    return ConfigError(f"policy.model_name: {problem}")
