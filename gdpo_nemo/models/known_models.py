"""Shapes of models on the Hub, for plans without a download."""

from __future__ import annotations

from typing import Any

_QWEN25 = dict(model_type="qwen2", vocab_size=151936, num_key_value_heads=2)
_QWEN25_1_5B = _QWEN25 | dict(
    hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, intermediate_size=8960, tie_word_embeddings=True
)
_QWEN25_3B = _QWEN25 | dict(
    hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, intermediate_size=11008, tie_word_embeddings=True
)
_QWEN25_7B = _QWEN25 | dict(
    vocab_size=152064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    intermediate_size=18944, tie_word_embeddings=False,
)  # fmt: skip
_QWEN25_TOWER = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16)
_QWEN3_TOWER = dict(
    depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, deepstack_visual_indexes=[5, 11, 17]
)
_QWEN3_VL = dict(
    model_type="qwen3_vl", vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    image_token_id=151655, video_token_id=151656, num_attention_heads=32, num_hidden_layers=36,
    rope_parameters=dict(
        rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True
    ),
)  # fmt: skip
_QWEN25_VL = dict(
    model_type="qwen2_5_vl", image_token_id=151655, video_token_id=151656,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]),
)  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25
    | dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864,
    tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B": _QWEN25_1_5B,
    "Qwen/Qwen2.5-3B": _QWEN25_3B,
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen2.5-VL-3B-Instruct": _QWEN25_3B | _QWEN25_VL | dict(
        vision_config=_QWEN25_TOWER | dict(out_hidden_size=2048)
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": _QWEN25_7B | _QWEN25_VL | dict(
        vision_config=_QWEN25_TOWER | dict(out_hidden_size=3584)
    ),
    "Qwen/Qwen3-VL-2B-Instruct": _QWEN3_VL | dict(
        hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144,
        vision_config=_QWEN3_TOWER | dict(out_hidden_size=2048),
    ),
    "Qwen/Qwen3-VL-4B-Instruct": _QWEN3_VL | dict(
        hidden_size=2560, intermediate_size=9728, vision_config=_QWEN3_TOWER | dict(out_hidden_size=2560)
    ),
    "Qwen/Qwen3-VL-8B-Instruct": _QWEN3_VL | dict(
        hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False,
        vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=4096),
    ),
    "Qwen/Qwen2.5-32B": _QWEN25
    | dict(
        vocab_size=152064, hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
        intermediate_size=27648, tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, tie_word_embeddings=False,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN25_1_5B | dict(tie_word_embeddings=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN25_7B,
    "microsoft/phi-4": dict(
        model_type="phi3", vocab_size=100352, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=10, intermediate_size=17920, tie_word_embeddings=False,
    ),
    "ByteDance-Seed/Seed-OSS-36B": dict(
        model_type="seed_oss", vocab_size=155136, hidden_size=5120, num_hidden_layers=64, num_attention_heads=80,
        num_key_value_heads=8, head_dim=128, intermediate_size=27648, tie_word_embeddings=False,
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": dict(
        model_type="nemotron_h", vocab_size=131072, hidden_size=4480, num_attention_heads=40, num_key_value_heads=8,
        intermediate_size=15680, mamba_head_dim=80, tie_word_embeddings=False,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": dict(
        model_type="nemotron_h", vocab_size=131072, hidden_size=2688, num_attention_heads=32, num_key_value_heads=2,
        intermediate_size=1856, mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6,
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, tie_word_embeddings=False,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": dict(
        model_type="nemotron_h", vocab_size=131072, hidden_size=4096, num_attention_heads=32, num_key_value_heads=2,
        intermediate_size=2688, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376, moe_latent_size=1024, tie_word_embeddings=False,
        hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "Qwen/Qwen3-Next-80B-A3B": dict(
        model_type="qwen3_next", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16,
        intermediate_size=5120, tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-8B": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-70B": dict(
        model_type="llama", vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, intermediate_size=28672, tie_word_embeddings=False,
    ),
    "google/gemma-4-31B-it": dict(
        model_type="gemma4_text", vocab_size=262144, hidden_size=5376, num_hidden_layers=60, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, intermediate_size=21504,
        sliding_window=1024, hidden_size_per_layer_input=0,
    ),
    "google/gemma-4-26B-A4B-it": dict(
        model_type="gemma4_text", vocab_size=262144, hidden_size=2816, num_hidden_layers=30, num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True, intermediate_size=2112,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704, sliding_window=1024,
        hidden_size_per_layer_input=0,
    ),
}  # fmt: skip
"""Shapes of the models in the recipes, from their published config.json files.

Instruction-tuned variants have equal shapes.
"""
