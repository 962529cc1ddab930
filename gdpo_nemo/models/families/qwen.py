"""Qwen1.5-MoE, Qwen2, Qwen2.5, Qwen3, Qwen3-Next and the text models of Qwen3.5, dense and MoE.

Also the image models Qwen2.5-VL and Qwen3-VL, dense.
"""

from __future__ import annotations

from dataclasses import replace

from gdpo_nemo.models.families.declaration import DeltaNet, Experts, Family, Modules, Tower

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_EXPERTS = Experts(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    count="num_experts",
    width="moe_intermediate_size",
    normalized="norm_topk_prob",
    dense_layers="mlp_only_layers",
    period="decoder_sparse_step",
)

_DELTA_FIELDS = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}

_SHARED_EXPERTS = replace(
    _EXPERTS,
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
    shared_width="shared_expert_intermediate_size",
    shared_scale="mlp.shared_expert_gate",
)

_QWEN_3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    r"Qwen/Qwen3-Next-\d+B-A\d+B(-Instruct|-Thinking)?",
    engine_ties=False,
    qk_norm=True,
    norm_offset=True,
    output_gate=True,
    partial_rotary=True,
    rope_types=("default", "yarn"),
    layers={"linear_attention": "G?", "full_attention": "*?"},
    layer_period="full_attention_interval",
    delta=DeltaNet(("in_proj_qkvz", "in_proj_ba"), by_key_head=True),
    untrained=("mtp.",),
    experts=_SHARED_EXPERTS,
    defaults={
        **_DELTA_FIELDS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
)

_QWEN_3_5 = replace(
    _QWEN_3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    hub_names=r"Qwen/Qwen3\.5-[\d.]+B(-Base)?",  # image models, whose text model is trained
    rope_types=("default",),
    delta=DeltaNet(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
    experts=None,
    defaults={**_DELTA_FIELDS, "num_key_value_heads": 4},
)

_QWEN_2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    r"(Qwen/(Qwen2(\.5)?-(?!57B-A14B|VL-)|QwQ-)|deepseek-ai/DeepSeek-R1-Distill-Qwen-"
    r"|(agentica-org/DeepScaleR|nvidia/OpenMath-Nemotron|nvidia/AceReason-Nemotron)-).*",
    qkv_bias=True,
    windows="late",
    defaults={"num_key_value_heads": 32, **_QWEN_WINDOW},
)

_QWEN_3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    r"Qwen/Qwen3-[\d.]+B(?!-A\d).*",
    qk_norm=True,
    windows="late",
    defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
)

_PATCHES = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}

_QWEN_2_5_VL = replace(
    _QWEN_2,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    hub_names=r"Qwen/Qwen2\.5-VL-\d+B-Instruct",
    rope_types=("default",),
    defaults={**_QWEN_WINDOW, "num_key_value_heads": 8, "max_window_layers": 80},
    tower=Tower(
        "visual.",
        in_memory={"model.": "model.language_model.", "visual.": "model.visual."},
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        merger=("ln_q", "mlp.0", "mlp.2"),
        biases=False,
        defaults={**_PATCHES, "patch_size": 14},
    ),
)

_QWEN_3_VL = replace(
    _QWEN_3,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    hub_names=r"Qwen/Qwen3-VL-\d+B-(Instruct|Thinking)",
    windows="none",
    rope_types=("default",),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    modules=Modules(
        layer="model.language_model.layers.{}.",
        embedding="model.language_model.embed_tokens",
        final_norm="model.language_model.norm",
    ),
    tower=Tower(
        "model.visual.",
        interleaved=True,
        positions="num_position_embeddings",
        deepstack="deepstack_visual_indexes",
        defaults={
            **_PATCHES,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": (8, 16, 24),
        },
    ),
)

FAMILIES = (
    _QWEN_3_NEXT,
    _QWEN_3_5,
    replace(
        _QWEN_3_5,
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        hub_names=r"Qwen/Qwen3\.5-\d+B-A\d+B(-Base)?",
        experts=replace(_SHARED_EXPERTS, normalized=None, dense_layers=None, period=None),
        defaults={
            **_DELTA_FIELDS,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 512,  # no layer has a dense MLP
        },
    ),
    _QWEN_2,
    _QWEN_2_5_VL,
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        r"Qwen/(Qwen1\.5-MoE-A2\.7B|Qwen2-57B-A14B)(-Chat|-Instruct)?",
        qkv_bias=True,
        experts=_SHARED_EXPERTS,
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            **_QWEN_WINDOW,
        },
    ),
    _QWEN_3,
    _QWEN_3_VL,
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        r"Qwen/Qwen3-(Coder-)?\d+B-A\d+B.*",
        qk_norm=True,
        windows="all",
        experts=_EXPERTS,
        defaults={"num_key_value_heads": 4, "norm_topk_prob": False, **_QWEN_WINDOW},
    ),
)
