"""DeepSeek-V3 and models with its architecture: DeepSeek-R1 and Moonlight."""

from __future__ import annotations

from gdpo_nemo.models.families.declaration import Experts, Family, Latent, Modules

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

LATENT = Latent()

LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
"""Values that transformers uses for missing fields of models with latent attention."""

FAMILIES = (
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        r"moonshotai/Moonlight-.*|deepseek-ai/DeepSeek-(V3|R1)(-Base|-Zero|-0324|-0528)?",
        engine_ties=False,
        rope_types=("default", "yarn"),
        modules=Modules(qkv=LATENT.by_heads),
        experts=EXPERTS,
        defaults={
            **LATENT_DEFAULTS,
            "num_key_value_heads": 128,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
        },
        rotary_pairs="rope_interleave",
        latent=LATENT,
        # Without these fields, vLLM's router uses softmax and no bias.
        engine_fields={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
)
