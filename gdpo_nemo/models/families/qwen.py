"""Qwen2, Qwen2.5 and Qwen3, dense and MoE."""

from __future__ import annotations

from gdpo_nemo.models.families.declaration import Experts, Family

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES = (
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        r"(Qwen/(Qwen2(\.5)?-(?!57B-A14B)|QwQ-)|deepseek-ai/DeepSeek-R1-Distill-Qwen-"
        r"|(agentica-org/DeepScaleR|nvidia/OpenMath-Nemotron|nvidia/AceReason-Nemotron)-).*",
        qkv_bias=True,
        windows="late",
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOW},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        r"Qwen/Qwen3-[\d.]+B(?!-A\d).*",
        qk_norm=True,
        windows="late",
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        r"Qwen/Qwen3-(Coder-)?\d+B-A\d+B.*",
        qk_norm=True,
        windows="all",
        experts=Experts(
            router="mlp.gate",
            gate="mlp.experts.{}.gate_proj",
            up="mlp.experts.{}.up_proj",
            down="mlp.experts.{}.down_proj",
            count="num_experts",
            width="moe_intermediate_size",
            normalized="norm_topk_prob",
            dense_layers="mlp_only_layers",
            period="decoder_sparse_step",
        ),
        defaults={"num_key_value_heads": 4, "norm_topk_prob": False, **_QWEN_WINDOW},
    ),
)
