"""Fields of Megatron's ``TransformerConfig`` and layer pattern, derived from a model's config.json."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdpo_nemo.megatron.attention import LayerAttention
from gdpo_nemo.models.description import FULL, KERNEL, SLIDING, ModelDescription
from gdpo_nemo.models.family_checks import describe

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": squared_relu,
}
"""Activation functions by their names in a Hugging Face config."""


def description_of(config: PretrainedConfig) -> ModelDescription:
    """Return the description of a Hugging Face configuration.

    Raises:
        ConfigError: if the model is not supported (see ``describe``).
    """
    return describe(config.to_dict())


def _score_scale(model: ModelDescription) -> float | None:
    """Return the factor of the attention scores, or None for the inverse square root of the head size."""
    scale = model.family.score_scale
    return model.fields[scale] ** -0.5 if isinstance(scale, str) else scale


def rotary(config: PretrainedConfig, model: ModelDescription, layers: str = "") -> tuple[torch.Tensor, float] | None:
    """Return transformers' inverse rotary frequencies [rotated elements / 2] and the scaling factor of cos and sin.

    Return None if the family has no rotary embedding.

    Args:
        layers: value of ``layer_types`` whose embedding is returned, if the embedding depends on it.
    """
    if not model.family.rope_types:
        return None
    config = config.get_text_config()
    parameters = config.rope_parameters[layers] if layers else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = model.rotary_size(layers)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **({"layer_type": layers} if layers else {}))


def layer_attentions(config: PretrainedConfig, model: ModelDescription) -> list[LayerAttention]:
    """Return the properties of the attention by Hybrid layer, also for layers without attention."""
    ropes = [""] * model.layers
    if model.family.layer_rope:
        ropes = [FULL if window is None else SLIDING for window in model.windows]
    embeddings = {rope: rotary(config, model, rope) for rope in set(ropes)}
    options: dict[str, Any] = dict(
        score_cap=model.score_cap,
        sinks=model.family.sinks is not None,
        pairs=model.rotates_pairs,
        axes=model.rotary_axes,
        query_scale=model.query_scale,
    )
    layers = []
    for rope, window, has_index, heads in zip(ropes, model.windows, model.indexed_layers, model.layer_heads):
        index = model.index if has_index else None
        layers.append(LayerAttention(embeddings[rope], rope, window, index=index, heads=heads, **options))
    return [layers[layer] for layer in model.hf_layers]


def embedding_scale(model: ModelDescription, dtype: torch.dtype) -> float:
    """Return the factor of the embeddings, rounded to ``dtype`` as in transformers."""
    return torch.tensor(model.hidden**0.5).to(dtype).item() if model.family.embedding_scale else 1.0


def _expert_fields(model: ModelDescription) -> dict[str, Any]:
    experts, fields = model.family.experts, model.fields
    if experts is None or not model.experts:
        return {}
    normalized = fields[experts.normalized] if experts.normalized else True
    groups, chosen = model.expert_groups
    return dict(
        num_moe_experts=model.experts,
        moe_router_topk=model.active_experts,
        moe_ffn_hidden_size=model.expert_ffn,
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
        moe_shared_expert_intermediate_size=model.shared_ffn or None,
        moe_shared_expert_gate=experts.shared_scale is not None,
        moe_latent_size=model.expert_latent or None,
    )


def _latent_fields(model: ModelDescription) -> dict[str, Any]:
    if model.family.latent is None:
        return {}
    fields, rope = model.fields, model.rope()
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


def _activation_fields(model: ModelDescription) -> dict[str, Any]:
    family = model.family
    if family.swiglu_limit is None:
        return dict(activation_func=ACTIVATIONS[family.activation])
    return dict(
        activation_func=quick_gelu,  # x * sigmoid(1.702 x)
        glu_linear_offset=1.0,
        activation_func_clamp_value=model.fields[family.swiglu_limit],
    )


def _mamba_fields(model: ModelDescription) -> dict[str, Any]:
    mamba, fields = model.family.mamba, model.fields
    if mamba is None:
        return {}
    return dict(
        is_hybrid_model=True,
        mamba_num_heads=fields[mamba.heads],
        mamba_head_dim=fields[mamba.head_size],
        mamba_num_groups=fields[mamba.groups],
        mamba_state_dim=fields[mamba.state],
    )


def _delta_fields(model: ModelDescription) -> dict[str, Any]:
    if model.family.delta is None:
        return {}
    return dict(
        linear_num_key_heads=model.delta.key_heads,
        linear_num_value_heads=model.delta.value_heads,
        linear_key_head_dim=model.delta.key,
        linear_value_head_dim=model.delta.value,
        linear_conv_kernel_dim=KERNEL,
    )


def transformer_fields(model: ModelDescription) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that depend only on the model's architecture.

    ``num_layers`` counts Hybrid layers.
    """
    family = model.family
    return dict(
        num_layers=len(model.hf_layers),
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.fields[family.norm_epsilon],
        gated_linear_unit=family.gated_mlp,
        **_activation_fields(model),
        layernorm_zero_centered_gamma=family.norm_offset,
        softmax_scale=_score_scale(model),
        add_bias_linear=family.biases,
        add_qkv_bias=model.qkv_bias,
        # With qk_layernorm, Megatron sums the gradients of the norms over the tensor-parallel ranks, which hold the
        # weights of different heads if a norm has all heads. qk_l2_norm only enables the norms of the layer spec.
        qk_layernorm=model.qk_norm and not family.qk_norm_of_layer,
        qk_l2_norm=family.qk_norm_of_layer,
        attention_output_gate=family.output_gate,
        # Megatron refuses this field for latent attention, whose rotary embedding PackedAttention applies.
        rotary_interleaved=model.rotates_pairs and not family.latent,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=model.fields["initializer_range"],
        **_latent_fields(model),
        **_expert_fields(model),
        **_mamba_fields(model),
        **_delta_fields(model),
    )
