"""How a Hugging Face model maps onto Megatron's: its configuration, and the names of its weights.

Both follow from the declaration of its family in ``config.families``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gdpo_nemo.config import architectures
from gdpo_nemo.config.architectures import check_family
from gdpo_nemo.config.families import FAMILIES, Family

# How the rows or columns of a weight are split over tensor-parallel ranks, and what their order is in Megatron.
REPLICATED = "replicated"
ROWS = "rows"
COLUMNS = "columns"
QKV_ROWS = "rows by query group: its queries, its key, its value"
GATED_ROWS = "each rank's rows of the gate, then of the other half"

SCORE = "score.weight"
"""A reward model's head, by the name that Megatron's model and transformers' classifiers give it."""

ACTIVATIONS = {"silu": torch.nn.functional.silu}
"""By the name that ``hidden_act`` gives them."""


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter: its split, and the Hugging Face tensors it is made of."""

    split: str
    sources: tuple[str, ...]
    """For an expert's parameter with ``{}`` in place of the expert's number."""
    expert: int | None = None
    """Number of the expert among those of its rank; None: no expert's parameter."""
    stacked: str | None = None
    """The tensor that holds the sources where a folder keeps all experts of a layer together: [experts, ...] for an
    expert's parameter."""
    vocabulary: bool = False
    """Whether the rows are tokens, which Megatron pads."""


def _weights(split: str, *modules: str, **more: Any) -> Weight:
    return Weight(split, tuple(f"{module}.weight" for module in modules), **more)


@cache
def top_weights(model_type: str) -> dict[str, Weight]:
    """Megatron name -> weight, outside the layers."""
    modules = FAMILIES[model_type].modules
    return {
        "embedding.word_embeddings.weight": _weights(ROWS, modules.embedding, vocabulary=True),
        "output_layer.weight": _weights(ROWS, modules.head, vocabulary=True),
        "decoder.final_norm.weight": _weights(REPLICATED, modules.final_norm),
        SCORE: Weight(REPLICATED, (SCORE,)),
    }


@cache
def dense_weights(model_type: str) -> dict[str, Weight]:
    """Megatron name inside a Hybrid layer -> weight of a dense layer; sources are relative to the layer."""
    family = FAMILIES[model_type]
    modules = family.modules
    attention_norm = _weights(REPLICATED, modules.attention_norm)
    mlp_norm = _weights(REPLICATED, modules.mlp_norm)
    return {
        # Norms have a second name under TransformerEngine, which fuses them with the linear layer behind.
        "input_layernorm.weight": attention_norm,
        "self_attention.linear_qkv.layer_norm_weight": attention_norm,
        "self_attention.linear_qkv.weight": _weights(QKV_ROWS, *modules.qkv),
        "self_attention.linear_qkv.bias": Weight(QKV_ROWS, tuple(f"{module}.bias" for module in modules.qkv)),
        "self_attention.q_layernorm.weight": _weights(REPLICATED, modules.q_norm),
        "self_attention.k_layernorm.weight": _weights(REPLICATED, modules.k_norm),
        "self_attention.linear_proj.weight": _weights(COLUMNS, modules.attention_output),
        "pre_mlp_layernorm.weight": mlp_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "mlp.linear_fc1.weight": _weights(GATED_ROWS, *modules.gate_up),
        "mlp.linear_fc2.weight": _weights(COLUMNS, modules.down),
    }


# local_experts.3.linear_fc1.weight, or under TransformerEngine's grouped matrices linear_fc1.weight3
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight(\d*)")


def layer_weight(family: Family, name: str) -> Weight:
    """The weight behind the Megatron parameter ``name`` (inside a Hybrid layer); sources are relative to the layer."""
    experts = family.experts
    if experts is not None and name == "mlp.router.weight":
        return _weights(REPLICATED, experts.router, stacked=experts.stacked_router)
    match = _EXPERT.fullmatch(name)
    if match is None or experts is None:
        return dense_weights(family.model_type)[name]
    number = int(match[1] or match[3])
    if match[2] == "1":
        return _weights(GATED_ROWS, experts.gate, experts.up, expert=number, stacked=experts.stacked_gate_up)
    return _weights(COLUMNS, experts.down, expert=number, stacked=experts.stacked_down)


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a configuration as its config.json has them, those of transformers' defaults filled in."""
    return config.to_dict()


def family_of(config: PretrainedConfig) -> Family:
    """The family of a Hugging Face configuration.

    Raises:
        ConfigError: it is not supported; the message lists those that are.
    """
    return check_family(fields_of(config))


def head_size(config: PretrainedConfig) -> int:
    """Size of one attention head."""
    return architectures.head_size(fields_of(config))


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
    return architectures.num_experts(fields_of(config))


def layer_symbols(config: PretrainedConfig) -> list[str]:
    """Per Hugging Face layer its Hybrid layers: attention (``*``) and a dense (``-``) or mixture (``E``) MLP."""
    return ["*E" if mixture else "*-" for mixture in architectures.mixture_layers(fields_of(config))]


def _expert_fields(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    experts = family.experts
    if experts is None:
        return {}
    normalized = fields[experts.normalized] if experts.normalized else True
    return dict(
        num_moe_experts=architectures.num_experts(fields),
        moe_router_topk=fields["num_experts_per_tok"],
        moe_ffn_hidden_size=fields[experts.width],
        # Softmax over the chosen experts is softmax over all of them with the chosen ones' shares normalised.
        moe_router_pre_softmax=not normalized,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def transformer_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that the architecture decides.

    ``num_layers`` counts Hybrid layers: attention and MLP are one each.
    """
    fields = fields_of(config)
    family = check_family(fields)
    return dict(
        num_layers=2 * fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        num_attention_heads=fields["num_attention_heads"],
        num_query_groups=architectures.key_value_heads(fields),
        kv_channels=architectures.head_size(fields),
        ffn_hidden_size=fields["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=fields["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[family.activation],
        add_bias_linear=False,
        add_qkv_bias=architectures.has_qkv_bias(fields),
        qk_layernorm=family.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=fields["initializer_range"],
        **_expert_fields(fields, family),
    )
