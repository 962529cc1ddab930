"""Llama and the families that differ from it in few details: Mistral, Mixtral, MiniMax-M2, Phi-3 and Seed-OSS."""

from __future__ import annotations

from dataclasses import replace

from gdpo_nemo.models.families.declaration import Experts, Family, Modules

_EXPERTS = Experts(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    count="num_local_experts",
    width="intermediate_size",
)

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        r"(meta-llama/(Meta-)?Llama-[23]|TinyLlama/|nvidia/OpenMath2-Llama|deepseek-ai/DeepSeek-R1-Distill-Llama-).*",
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        # image models, whose text model is trained
        r"mistralai/(Mistral-Medium-3\.5-128B|Ministral-3-\d+B-(Base|Instruct|Reasoning)-2512(-BF16)?)",
        rope_types=("yarn",),  # the others have no original_max_position_embeddings
        query_scale="llama_4_scaling_beta",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        r"mistralai/Mistral-(7B-(Instruct-)?v0\.[123]|Nemo-).*",
        windows="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        r"mistralai/Mixtral-.*",
        windows="all",
        rope_types=("default", "linear", "llama3"),  # yarn fails in transformers, because Mixtral's head_dim is null
        experts=_EXPERTS,
        defaults={"num_key_value_heads": 8},
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        r"MiniMaxAI/MiniMax-M2(\.[1-9])?",
        engine_ties=False,
        qk_norm=True,
        qk_norm_of_layer=True,
        rope_types=("default",),
        experts=replace(_EXPERTS, sigmoid=True, bias="block_sparse_moe.e_score_correction_bias"),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
        partial_rotary=True,
        rotary_size="rotary_dim",
        # Without these fields, vLLM's model has no router or no bias.
        engine_fields={"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        r"microsoft/([Pp]hi-4(-reasoning.*)?|Phi-3-(mini|medium)-4k-instruct)",
        modules=Modules(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        windows="all",
        rope_types=("default",),
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        r"ByteDance-Seed/Seed-OSS-.*",
        qkv_bias="attention_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
)
