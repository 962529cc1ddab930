"""GLM-4 (0414, dense), and the mixtures GLM-4.5, 4.6, 4.7, GLM-4.7-Flash, GLM-5 and 5.1."""

from __future__ import annotations

from dataclasses import replace

from gdpo_nemo.models.families.declaration import Family, Modules
from gdpo_nemo.models.families.deepseek import EXPERTS, LATENT, LATENT_DEFAULTS

FAMILIES = (
    Family(
        "glm4",
        "Glm4ForCausalLM",
        r"(zai-org|THUDM)/GLM-(4|Z1|4-Z1)-(9|32)B(-Base|-Chat)?-0414",
        modules=Modules(
            gate_up=("mlp.gate_up_proj",),
            post_attention_norm="post_self_attn_layernorm",
            post_mlp_norm="post_mlp_layernorm",
        ),
        qkv_bias="attention_bias",
        rope_types=("default",),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
        partial_rotary=True,
        rotary_pairs=True,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        r"zai-org/GLM-4\.[567](-Air)?(-Base)?",
        engine_ties=False,
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        rope_types=("default",),
        experts=EXPERTS,
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        partial_rotary=True,
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        r"zai-org/GLM-4\.7-Flash",
        engine_ties=False,
        rope_types=("default",),
        modules=Modules(qkv=LATENT.by_heads),
        experts=replace(EXPERTS, kinds="mlp_layer_types"),
        defaults={
            **LATENT_DEFAULTS,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        rotary_pairs="rope_interleave",
        latent=LATENT,
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        r"zai-org/GLM-5(\.1)?",
        engine_ties=False,
        rope_types=("default",),
        layers={"indexed_attention": "*?"},
        modules=Modules(qkv=LATENT.by_heads),
        experts=replace(EXPERTS, kinds="mlp_layer_types"),
        defaults={
            **{key: value for key, value in LATENT_DEFAULTS.items() if key != "rope_interleave"},
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
        },
        rotary_pairs=True,
        latent=replace(LATENT, index="self_attn.indexer"),
        # Without these fields, vLLM's router uses softmax and no bias, and its index rotates other elements.
        engine_fields={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True},
    ),
)
