"""Gemma 2, and the text models of Gemma 3 and Gemma 4."""

from __future__ import annotations

from dataclasses import replace

from gdpo_nemo.models.families.declaration import Experts, Family, Modules

_GEMMA_2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    r"google/gemma-2-.*",
    modules=Modules(
        mlp_norm="pre_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
    ),
    activation="gelu_pytorch_tanh",
    activation_field="hidden_activation",
    norm_offset=True,
    embedding_scale=True,
    windows="periodic",
    score_scale="query_pre_attn_scalar",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
)

FAMILIES = (
    _GEMMA_2,
    replace(
        _GEMMA_2,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        hub_names=r"google/gemma-3-.*",
        qk_norm=True,
        layer_rope=True,
        defaults={
            **_GEMMA_2.defaults,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            # The configs of published image models lack these sizes of their text models.
            "num_attention_heads": 8,
            "vocab_size": 262208,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    replace(
        _GEMMA_2,
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        hub_names=r"google/gemma-4-\d+[Bb](-A\d+B)?(-it)?",
        experts=Experts(
            router="router.proj",
            gate="experts.gate_up_proj",
            up="experts.gate_up_proj",
            down="experts.down_proj",
            count="num_experts",
            width="moe_intermediate_size",
            stacked_router="router.proj.weight",
            stacked_gate_up="experts.gate_up_proj",
            stacked_down="experts.down_proj",
            only_stacked=True,
            chosen="top_k_experts",
            enabled="enable_moe_block",
            shared_gate="mlp.gate_proj",
            shared_up="mlp.up_proj",
            shared_down="mlp.down_proj",
            shared_width="intermediate_size",
            beside={
                "dense_norm.weight": "pre_feedforward_layernorm.weight",
                "dense_output_norm.weight": "post_feedforward_layernorm_1.weight",
                "expert_norm.weight": "pre_feedforward_layernorm_2.weight",
                "expert_output_norm.weight": "post_feedforward_layernorm_2.weight",
                "router.scale": "router.scale",
                "router.expert_scale": "router.per_expert_scale",
            },
        ),
        qk_norm=True,
        value_norm=True,
        norm_offset=False,
        layer_rope=True,
        rope_types=("default", "proportional"),
        last_layer_full=True,
        global_heads=("global_head_dim", "num_global_key_value_heads"),
        keys_as_values="attention_k_eq_v",
        layer_scale="layer_scalar",
        score_scale=1.0,
        score_cap=None,
        unsupported={
            "hidden_size_per_layer_input": "embeddings per layer",
            "num_kv_shared_layers": "layers that share keys and values",
        },
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
            "tie_word_embeddings": True,
        },
    ),
)
