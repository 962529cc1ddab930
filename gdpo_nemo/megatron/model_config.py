"""Fields of Megatron's ``TransformerConfig`` and layer pattern, derived from a model's config.json."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdpo_nemo.megatron.attention import LayerAttention
from gdpo_nemo.models import architectures
from gdpo_nemo.models.families import Family
from gdpo_nemo.models.family_checks import check_family

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": squared_relu,
}
"""Activation functions by their names in a Hugging Face config."""


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config.json. Missing fields have the values that transformers uses by default.

    Raises:
        ConfigError: if the family is not supported.
    """
    _, fields = _checked(config)
    return architectures.with_defaults(fields)


def family_of(config: PretrainedConfig) -> Family:
    """Return the model family of a Hugging Face configuration.

    Raises:
        ConfigError: if the family is not supported. The message lists the supported families.
    """
    family, _ = _checked(config)
    return family


def _checked(config: PretrainedConfig) -> tuple[Family, dict[str, Any]]:
    """Return the family and the fields of a configuration.

    Both are kept as long as the configuration exists, because a build asks for them hundreds of times, and each
    conversion to a dictionary copies all fields.
    """
    key = id(config)  # configurations are not hashable
    if key not in _known:
        fields = config.to_dict()
        _known[key] = check_family(fields), fields
        weakref.finalize(config, _known.pop, key)
    return _known[key]


_known: dict[int, tuple[Family, dict[str, Any]]] = {}


def head_size(config: PretrainedConfig) -> int:
    """Return the size of one attention head."""
    return architectures.head_size(fields_of(config))


def layer_heads(config: PretrainedConfig) -> list[architectures.Heads]:
    """Return the heads of each Hugging Face layer's attention, also for layers without attention."""
    return architectures.layer_heads(fields_of(config))


def _score_scale(fields: dict[str, Any], family: Family) -> float | None:
    """Return the factor of the attention scores, or None for the inverse square root of the head size."""
    scale = family.score_scale
    return fields[scale] ** -0.5 if isinstance(scale, str) else scale


def rotary(config: PretrainedConfig, layers: str = "") -> tuple[torch.Tensor, float] | None:
    """Return transformers' inverse rotary frequencies [rotated elements / 2] and the scaling factor of cos and sin.

    Return None if the family has no rotary embedding.

    Args:
        layers: value of ``layer_types`` whose embedding is returned, if the embedding depends on it.
    """
    if not family_of(config).rope_types:
        return None
    parameters = config.rope_parameters[layers] if layers else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = architectures.rotary_size(fields_of(config), layers)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **({"layer_type": layers} if layers else {}))


def layer_attentions(config: PretrainedConfig) -> list[LayerAttention]:
    """Return the properties of the attention by Hybrid layer, also for layers without attention."""
    fields = fields_of(config)
    family = check_family(fields)
    windows = architectures.layer_windows(fields)
    ropes = [""] * len(windows)
    if family.layer_rope:
        ropes = [architectures.FULL if window is None else architectures.SLIDING for window in windows]
    embeddings = {rope: rotary(config, rope) for rope in set(ropes)}
    cap = fields.get(family.score_cap) if family.score_cap else None
    options: dict[str, Any] = dict(
        score_cap=cap,
        sinks=family.sinks is not None,
        pairs=architectures.rotates_pairs(fields),
        query_scale=architectures.query_scale(fields),
    )
    size = architectures.index_size(fields)
    indices = [size if has_index else None for has_index in architectures.indexed_layers(fields)]
    layers = [
        LayerAttention(embeddings[rope], rope, window, index=index, heads=heads, **options)
        for rope, window, index, heads in zip(ropes, windows, indices, architectures.layer_heads(fields))
    ]
    return [layers[layer] for layer in hf_layers(config)]


def embedding_scale(config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Return the factor of the embeddings, rounded to ``dtype`` as in transformers."""
    scaled = family_of(config).embedding_scale
    return torch.tensor(config.hidden_size**0.5).to(dtype).item() if scaled else 1.0


def logit_cap(config: PretrainedConfig) -> float | None:
    """Return the soft cap c of the logits x, c * tanh(x / c), or None if the model has none."""
    field = family_of(config).logit_cap
    return getattr(config, field) if field else None


def num_experts(config: PretrainedConfig) -> int:
    """Return the number of experts in an MoE layer, or 0 for a dense model family."""
    return architectures.num_experts(fields_of(config))


def layer_symbols(config: PretrainedConfig) -> list[str]:
    """Return the Hybrid layers of each Hugging Face layer (``architectures.layer_symbols``)."""
    return architectures.layer_symbols(fields_of(config))


def hf_layers(config: PretrainedConfig) -> list[int]:
    """Return the index of the Hugging Face layer of each Hybrid layer."""
    return [layer for layer, symbols in enumerate(layer_symbols(config)) for _ in symbols]


def _expert_fields(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    experts = family.experts
    if experts is None or not architectures.num_experts(fields):
        return {}
    normalized = fields[experts.normalized] if experts.normalized else True
    groups, chosen = architectures.expert_groups(fields)
    return dict(
        num_moe_experts=architectures.num_experts(fields),
        moe_router_topk=fields["num_experts_per_tok"],
        moe_ffn_hidden_size=fields[experts.width],
        # A softmax over the chosen experts equals a softmax over all experts that is renormalised over the chosen
        # experts.
        moe_router_pre_softmax=not normalized and not experts.sigmoid,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_score_function="sigmoid" if experts.sigmoid else "softmax",
        moe_router_enable_expert_bias=experts.bias is not None,
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=chosen if groups > 1 else None,
        moe_router_topk_scaling_factor=fields[experts.scaling] if experts.scaling else None,
        moe_shared_expert_intermediate_size=architectures.shared_width(fields) or None,
        moe_shared_expert_gate=experts.shared_scale is not None,
        moe_latent_size=architectures.expert_latent(fields) or None,
    )


def _latent_fields(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    if family.latent is None:
        return {}
    rope = architectures.rope_of(fields)
    return dict(
        q_lora_rank=fields["q_lora_rank"],
        kv_lora_rank=fields["kv_lora_rank"],
        qk_head_dim=fields["qk_nope_head_dim"],
        qk_pos_emb_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rope_type="rope",  # PackedAttention applies the rotary embedding, so Megatron's is not used
        # Megatron multiplies the attention scores by the square of 0.1 * mscale_all_dim * ln(factor) + 1.
        rotary_scaling_factor=rope.get("factor", 1.0),
        mscale_all_dim=rope.get("mscale_all_dim", 0.0) if rope["rope_type"] != "default" else 0.0,
    )


def _activation_fields(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    if family.swiglu_limit is None:
        return dict(activation_func=ACTIVATIONS[family.activation])
    return dict(
        activation_func=quick_gelu,  # x * sigmoid(1.702 x)
        glu_linear_offset=1.0,
        activation_func_clamp_value=fields[family.swiglu_limit],
    )


def _mamba_fields(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    mamba = family.mamba
    if mamba is None:
        return {}
    return dict(
        is_hybrid_model=True,
        mamba_num_heads=fields[mamba.heads],
        mamba_head_dim=fields[mamba.head_size],
        mamba_num_groups=fields[mamba.groups],
        mamba_state_dim=fields[mamba.state],
    )


def _delta_fields(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    delta = family.delta
    if delta is None:
        return {}
    return dict(
        linear_num_key_heads=fields[delta.key_heads],
        linear_num_value_heads=fields[delta.value_heads],
        linear_key_head_dim=fields[delta.key_size],
        linear_value_head_dim=fields[delta.value_size],
        linear_conv_kernel_dim=fields[delta.kernel],
    )


def transformer_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that depend only on the model's architecture.

    ``num_layers`` counts Hybrid layers.
    """
    fields = fields_of(config)
    family = check_family(fields)
    return dict(
        num_layers=len(hf_layers(config)),
        hidden_size=fields["hidden_size"],
        num_attention_heads=fields["num_attention_heads"],
        num_query_groups=architectures.key_value_heads(fields),
        kv_channels=architectures.head_size(fields),
        ffn_hidden_size=fields["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=fields[family.norm_epsilon],
        gated_linear_unit=family.gated_mlp,
        **_activation_fields(fields, family),
        layernorm_zero_centered_gamma=family.norm_offset,
        softmax_scale=_score_scale(fields, family),
        add_bias_linear=family.biases,
        add_qkv_bias=architectures.has_qkv_bias(fields),
        # With qk_layernorm, Megatron sums the gradients of the norms over the tensor-parallel ranks, which hold the
        # weights of different heads if a norm has all heads. qk_l2_norm only enables the norms of the layer spec.
        qk_layernorm=architectures.has_qk_norm(fields) and not family.qk_norm_of_layer,
        qk_l2_norm=family.qk_norm_of_layer,
        attention_output_gate=family.output_gate,
        # Megatron refuses this field for latent attention, whose rotary embedding PackedAttention applies.
        rotary_interleaved=architectures.rotates_pairs(fields) and not family.latent,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=fields["initializer_range"],
        **_latent_fields(fields, family),
        **_expert_fields(fields, family),
        **_mamba_fields(fields, family),
        **_delta_fields(fields, family),
    )
