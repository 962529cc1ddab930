"""Fields of Megatron's ``TransformerConfig`` and layer pattern, derived from a model's config.json."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import squared_relu
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdpo_nemo.models import architectures
from gdpo_nemo.models.architectures import check_family
from gdpo_nemo.models.families import Family

ACTIVATIONS = {"silu": torch.nn.functional.silu, "relu2": squared_relu}
"""Activation functions by their names in a Hugging Face config."""


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config.json. Missing fields have the values that transformers uses by default.

    Raises:
        ConfigError: if the family is not supported.
    """
    family_of(config)
    return architectures.with_defaults(config.to_dict())


def family_of(config: PretrainedConfig) -> Family:
    """Return the model family of a Hugging Face configuration.

    Raises:
        ConfigError: if the family is not supported. The message lists the supported families.
    """
    return check_family(config.to_dict())


def head_size(config: PretrainedConfig) -> int:
    """Return the size of one attention head."""
    return architectures.head_size(fields_of(config))


def rotary(config: PretrainedConfig) -> tuple[torch.Tensor, float] | None:
    """Return transformers' inverse rotary frequencies [head size / 2] and the scaling factor of cos and sin.

    Return None if the family has no rotary embedding.
    """
    if not family_of(config).rope_types:
        return None
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = head_size(config)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


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
    options: dict[str, Any] = {}
    if experts.score_function != "softmax":
        normalized = True  # Megatron always normalizes these weights
        options |= dict(moe_router_score_function=experts.score_function)
    if experts.bias:
        options |= dict(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0)
    if experts.scale:
        options |= dict(moe_router_topk_scaling_factor=fields[experts.scale])
    if experts.groups and fields[experts.groups[0]] > 1:
        groups, chosen = (fields[key] for key in experts.groups)
        options |= dict(moe_router_num_groups=groups, moe_router_group_topk=chosen)
    if experts.shared_width:
        options |= dict(moe_shared_expert_intermediate_size=fields[experts.shared_width])
    return dict(
        num_moe_experts=architectures.num_experts(fields),
        moe_router_topk=fields["num_experts_per_tok"],
        moe_ffn_hidden_size=fields[experts.width],
        # A softmax over the chosen experts equals a softmax over all experts that is renormalised over the chosen
        # experts.
        moe_router_pre_softmax=not normalized,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        **options,
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
        activation_func=ACTIVATIONS[family.activation],
        add_bias_linear=False,
        add_qkv_bias=architectures.has_qkv_bias(fields),
        qk_layernorm=family.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=fields["initializer_range"],
        **_expert_fields(fields, family),
        **_mamba_fields(fields, family),
    )
