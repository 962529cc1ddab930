"""Llama and the families that differ from it in few details: Mistral, Mixtral, Phi-3 and Seed-OSS."""

from __future__ import annotations

from gdpo_nemo.models.families.declaration import Experts, Family, Modules

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        r"(meta-llama/(Meta-)?Llama-[23]|TinyLlama/|nvidia/OpenMath2-Llama|deepseek-ai/DeepSeek-R1-Distill-Llama-).*",
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
        experts=Experts(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
            count="num_local_experts",
            width="intermediate_size",
        ),
        defaults={"num_key_value_heads": 8},
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
