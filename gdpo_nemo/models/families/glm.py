"""GLM-4 (0414, dense) and the mixtures GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

from gdpo_nemo.models.families.declaration import Experts, Family, Modules

EXPERTS = Experts(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    count="n_routed_experts",
    width="moe_intermediate_size",
    normalized="norm_topk_prob",
    sigmoid=True,
    bias="mlp.gate.e_score_correction_bias",
    groups=("n_group", "topk_group"),
    scaling="routed_scaling_factor",
    shared="n_shared_experts",
    first_dense="first_k_dense_replace",
)
"""DeepSeek-V3's experts (arXiv 2412.19437), which GLM-4.5 adopted."""

FAMILIES = (
    Family(
        "glm4",
        "Glm4ForCausalLM",
        r"(zai-org|THUDM)/GLM-(4|Z1|4-Z1)-(9|32)B(-Base|-Chat)?-0414",
        modules=Modules(gate_up=("mlp.gate_up_proj",)),
        qkv_bias="attention_bias",
        rope_types=("default",),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        post_norms=True,
        partial_rotary=True,
        rotary_pairs=True,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        r"zai-org/GLM-4\.[567](-Air)?(-Base)?",
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
)
