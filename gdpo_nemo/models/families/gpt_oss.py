"""OpenAI's gpt-oss: attention sinks, alternating windows, biases, and experts with a clamped SwiGLU.

The published folders store the experts as MXFP4 weights, which ``models/mxfp4.py`` dequantises.
"""

from __future__ import annotations

from gdpo_nemo.models.families.declaration import Experts, Family

FAMILIES = (
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        r"openai/gpt-oss-.*",
        qkv_bias="attention_bias",
        rope_types=("default", "yarn"),
        experts=Experts(
            router="mlp.router",
            gate="mlp.experts.gate_up_proj",
            up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
            count="num_local_experts",
            width="intermediate_size",
            stacked_router="mlp.router.weight",
            only_stacked=True,
            interleaved=True,
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_limit": 7.0,
        },
        windows="periodic",
        sinks="self_attn.sinks",
        biases=True,
        swiglu_limit="swiglu_limit",
        engine_updates=False,  # experts and sinks stay 0 in vLLM 0.32's layer-wise reload
    ),
)
