"""How a Hugging Face configuration and its weight names map onto Megatron's.

Which families there are, and what sets each apart, is declared in ``config.architectures``; building, conversion and
checkpoints follow from that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdpo_nemo.config.architectures import TRAITS, Family, check_family

# How a weight is split over tensor-parallel ranks.
REPLICATED = "replicated"
ROWS = "rows"
COLUMNS = "columns"
GATED_ROWS = "gated rows"


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter: its split, and the Hugging Face tensors it is made of."""

    split: str
    sources: tuple[str, ...]
    """For an expert's parameter with ``{}`` in place of the expert's number."""
    expert: int | None = None
    """Number of the expert among those of its rank; None: no expert's parameter."""


_ATTENTION_NORM = Weight(REPLICATED, ("input_layernorm.weight",))
_MLP_NORM = Weight(REPLICATED, ("post_attention_layernorm.weight",))

# Megatron name inside a Hybrid layer -> Hugging Face names inside a layer. Norms have a second name under
# TransformerEngine.
LAYER_WEIGHTS: dict[str, Weight] = {
    "input_layernorm.weight": _ATTENTION_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _ATTENTION_NORM,
    "self_attention.linear_qkv.weight": Weight(ROWS, tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": Weight(ROWS, tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": Weight(REPLICATED, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Weight(REPLICATED, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Weight(COLUMNS, ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": Weight(GATED_ROWS, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Weight(COLUMNS, ("mlp.down_proj.weight",)),
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOP_WEIGHTS: dict[str, Weight] = {
    "embedding.word_embeddings.weight": Weight(ROWS, (EMBEDDING,)),
    "output_layer.weight": Weight(ROWS, (HEAD,)),
    "decoder.final_norm.weight": Weight(REPLICATED, ("model.norm.weight",)),
}

# local_experts.3.linear_fc1.weight, or under TransformerEngine's grouped matrices linear_fc1.weight3
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight(\d*)")


def layer_weight(family: Family, name: str) -> Weight:
    """The weight behind the Megatron parameter ``name`` (inside a Hybrid layer); sources are relative to the layer."""
    experts = family.experts
    if experts is not None and name == "mlp.router.weight":
        return Weight(REPLICATED, (experts.router,))
    match = _EXPERT.fullmatch(name)
    if match is None:
        return LAYER_WEIGHTS[name]
    number = int(match[1] or match[3])
    if match[2] == "1":
        return Weight(GATED_ROWS, (experts.gate, experts.up), number)
    return Weight(COLUMNS, (experts.down,), number)


def family_of(config: PretrainedConfig) -> Family:
    """The family of a Hugging Face configuration.

    Raises:
        ConfigError: it is not supported; the message lists those that are.
    """
    return check_family({name: getattr(config, name) for name in TRAITS if hasattr(config, name)})


def head_size(config: PretrainedConfig) -> int:
    """Size of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Inverse rotary frequencies [head size / 2] and the factor on cos and sin, by transformers' own rules."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = head_size(config)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def num_experts(config: PretrainedConfig) -> int:
    """Experts of one mixture layer; 0 for a dense family."""
    experts = family_of(config).experts
    return getattr(config, experts.count) if experts is not None else 0


def layer_symbols(config: PretrainedConfig) -> list[str]:
    """Per Hugging Face layer its Hybrid layers: attention (``*``) and a dense (``-``) or mixture (``E``) MLP."""
    if family_of(config).experts is None:
        return ["*-"] * config.num_hidden_layers
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    every = getattr(config, "decoder_sparse_step", 1)
    return ["*-" if layer in dense or (layer + 1) % every else "*E" for layer in range(config.num_hidden_layers)]


def _expert_fields(config: PretrainedConfig) -> dict[str, Any]:
    experts = family_of(config).experts
    if experts is None:
        return {}
    return dict(
        num_moe_experts=num_experts(config),
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=getattr(config, experts.width),
        # Softmax over the chosen experts is softmax over all of them with the chosen ones' shares normalised.
        moe_router_pre_softmax=not getattr(config, "norm_topk_prob", True),
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_permute_fusion=False,
    )


def transformer_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that the architecture decides.

    ``num_layers`` counts Hybrid layers: attention and MLP are one each.
    """
    family = family_of(config)
    return dict(
        num_layers=2 * config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=config.initializer_range,
        **_expert_fields(config),
    )
