"""A model that cannot be trained is refused from its config.json alone, by every command, before any process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import EMBEDDING_ONLY

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.models.architectures import CPU_HEAD_SIZES
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.family_checks import check_adapted_layers, describe
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

GPUS = ["cluster.gpus_per_node=4", "policy.precision=bfloat16"]


def shape(
    kind: str, hidden: int, layers: int, heads: int, groups: int, ffn: int, vocabulary: int, positions: int, **more
) -> dict:
    """The fields that every published config.json has."""
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups)
    return {
        "model_type": kind,
        **sizes,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **more,
    }


LLAMA_3_ROPE = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
)  # fmt: skip
QWEN_YARN = dict(factor=4.0, original_max_position_embeddings=32768, type="yarn")
GEMMA_4_TEXT = shape(
    "gemma4_text", 5376, 60, 32, 16, 21504, 262144, 262144, head_dim=256, global_head_dim=512,
    num_global_key_value_heads=4, attention_k_eq_v=True, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    sliding_window=1024, use_bidirectional_attention="vision", final_logit_softcapping=30.0,
)  # fmt: skip
GEMMA_3_TEXT = shape("gemma3_text", 2560, 34, 8, 4, 10240, 262208, 131072, head_dim=256, sliding_window=1024)

MOONLIGHT = dict(
    architectures=["DeepseekV3ForCausalLM"], q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
    moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.446,
    norm_topk_prob=True, num_nextn_predict_layers=0, attention_bias=False,
)  # fmt: skip

# As published; what a check has no business with is left out.
REFUSED = {
    "FP8 weights without the size of a block": (
        shape("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128,
        quantization_config=dict(quant_method="fp8", weight_block_size=[128])),
        "quantised weights (quantization_config) are not supported, these are by fp8",
    ),
    "a GLM-5 with indices of another kind": (
        shape("glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880, 202752, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, index_topk_pattern="F" * 77 + "X"),
        "index_topk_pattern must contain F or S for each layer",
    ),
    "a GLM-5 with a number for its layers with indices": (
        shape("glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880, 202752, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, indexer_types=3),
        "indexer_types must contain full or shared for each layer",
    ),
    "a Ministral 3 without a scaled rotary embedding": (
        shape("ministral3", 4096, 34, 32, 8, 14336, 131072, 262144),
        "rope scaling 'default' is not supported for ministral3; supported: yarn",
    ),
    "large_groups": (
        shape("deepseek_v3", 2048, 27, 16, 16, 11264, 163840, 8192, **MOONLIGHT | dict(n_group=8, topk_group=2)),
        "8 groups of experts (n_group) with topk_group 2 are not supported; n_group must divide the 64 experts, and "
        "topk_group must be half of num_experts_per_tok (6)",
    ),
    "a Nemotron-H with a layer of another kind": (
        shape("nemotron_h", 4096, 52, 32, 8, 21504, 131072, 8192, hybrid_override_pattern="M-G*-"),
        "layers of type G (layers_block_type) are not supported; supported: linear_attention, full_attention, mlp, "
        "moe, mamba, attention",
    ),
    "a latent space without a size": (
        shape("nemotron_h", 4096, 88, 32, 2, 2688, 131072, 262144, hybrid_override_pattern="M*E", moe_latent_size=0),
        "moe_latent_size in the model's config.json must be a positive integer, got 0",
    ),
    "a Nemotron-H with a longer convolution": (
        shape("nemotron_h", 4096, 52, 32, 8, 21504, 131072, 8192, hybrid_override_pattern="M-*-", conv_kernel=8),
        "conv_kernel 8 is not supported; supported: 4",
    ),
    "a sigmoid router that does not normalize": (
        shape("nemotron_h", 2688, 52, 32, 2, 1856, 131072, 262144, hybrid_override_pattern="M*E", norm_topk_prob=False),
        "weights of experts that do not sum to 1 (norm_topk_prob false, or num_experts_per_tok 1) are not supported",
    ),
    "groups of experts that Megatron ranks differently": (
        shape("nemotron_h", 2688, 52, 32, 2, 1856, 131072, 262144, hybrid_override_pattern="ME*E", n_group=4,
        topk_group=2, num_experts_per_tok=6),
        "4 groups of experts (n_group) with topk_group 2 are not supported",
    ),
    "a Qwen3-Next without a type for each layer": (
        shape("qwen3_next", 2048, 48, 16, 2, 5120, 151936, 262144, layer_types=["linear_attention"]),
        "layer_types must have a value for each of the model's layers (num_hidden_layers)",
    ),
    "a Qwen3-Next with a longer convolution": (
        shape("qwen3_next", 2048, 48, 16, 2, 5120, 151936, 262144, linear_conv_kernel_dim=8),
        "linear_conv_kernel_dim 8 is not supported; supported: 4",
    ),
    "value heads that key heads do not divide": (
        shape("qwen3_next", 2048, 48, 16, 2, 5120, 151936, 262144, linear_num_value_heads=24),
        "linear_num_value_heads 24 must be a multiple of linear_num_key_heads 16",
    ),
    "a list as the size of a head, of which a part is rotated": (
        shape("minimax_m2", 3072, 62, 48, 8, 1536, 200064, 196608, rotary_dim=64, head_dim=[128]),
        "head_dim in the model's config.json must be a positive integer, got [128]",
    ),
    "a Qwen2-MoE without biases": (
        shape("qwen2_moe", 2048, 24, 16, 16, 5632, 151936, 8192, qkv_bias=False),
        "qkv_bias: false is not supported for qwen2_moe",
    ),
    "Phi-3 with 128k": (
        shape("phi3", 3072, 32, 32, 32, 8192, 32064, 131072, rope_scaling=dict(type="longrope", short_factor=[1.0])),
        "rope scaling 'longrope' is not supported for phi3; supported: default",
    ),
    "Qwen2-VL": (
        {"model_type": "qwen2_vl", "text_config": shape("qwen2_vl_text", 1536, 28, 12, 2, 8960, 151936, 32768)},
        "model type 'qwen2_vl' (a text model inside another model, text_config) is not supported",
    ),
    "layers of two kinds": (
        shape("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, layer_types=["full_attention", "sliding_attention"]),
        "layers of type sliding_attention (layer_types) are not supported; supported: full_attention",
    ),
    "a Llama with a window": (
        shape("llama", 4096, 32, 32, 8, 14336, 32000, 4096, sliding_window=4096),
        "sliding-window attention (4096 tokens) is not supported for llama",
    ),
    "gpt-oss without biases": (
        shape("gpt_oss", 2880, 24, 64, 8, 2880, 201088, 131072, num_local_experts=32, num_experts_per_tok=4,
        attention_bias=False),
        "attention_bias: false is not supported for gpt_oss",
    ),
    "a part of each head rotated": (
        shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096, partial_rotary_factor=0.5),
        "a partial rotary embedding (partial_rotary_factor) is not supported",
    ),
    "a mixture in every half layer": (
        shape("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, 40960, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step="2"),
        "decoder_sparse_step in the model's config.json must be a positive integer, got '2'",
    ),
    "Gemma 4 E4B": (
        GEMMA_4_TEXT | dict(hidden_size_per_layer_input=256),
        "embeddings per layer (hidden_size_per_layer_input 256) are not supported for gemma4_text",
    ),
    "a Gemma 4 without a number of experts per token": (
        GEMMA_4_TEXT | dict(enable_moe_block=True, num_experts=128, moe_intermediate_size=704),
        "top_k_experts in the model's config.json must be a positive integer, got None",
    ),
    "a reward model": (
        shape("llama", 4096, 32, 32, 8, 14336, 128256, 8192, architectures=["LlamaForSequenceClassification"]),
        "architecture LlamaForSequenceClassification is not supported; supported: LlamaForCausalLM",
    ),
    "dynamic rope": (
        shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096, rope_scaling=dict(type="dynamic", factor=2.0)),
        "rope scaling 'dynamic' is not supported for llama; supported: default, linear, llama3, yarn",
    ),
    "longrope": (
        shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096, rope_scaling=dict(rope_type="longrope",
        short_factor=[1.0])),
        "rope scaling 'longrope' is not supported",
    ),
    "rope without its factor": (
        shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096, rope_scaling=dict(type="linear")),
        "rope scaling 'linear' requires the number factor",
    ),
    "Qwen2.5 AWQ": (
        shape("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768, quantization_config=dict(quant_method="awq", bits=4)),
        "quantised weights (quantization_config) are not supported",
    ),
    "InternLM as a Llama": (
        shape("llama", 4096, 32, 32, 32, 11008, 103168, 2048, attention_bias=True),
        "attention_bias (projection biases) is not supported for llama",
    ),
    "heads of 16": (
        shape("qwen2", 64, 2, 4, 4, 128, 99, 2048),
        "vLLM on CPUs does not support attention heads of size 16",
    ),
    "no model type": ({"hidden_size": 64}, "has no model_type; supported: deepseek_v3, gemma2"),
    "no sizes": ({"model_type": "llama"}, "num_hidden_layers in the model's config.json must be a positive integer, "
                                          "got None"),
}  # fmt: skip
SUPPORTED = {
    "Qwen2.5": shape(
        "qwen2", 3584, 28, 28, 4, 18944, 152064, 32768, architectures=["Qwen2ForCausalLM"], hidden_act="silu",
        sliding_window=131072, use_sliding_window=False, max_window_layers=28,
    ),
    "Qwen3": shape("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, attention_bias=False,
    rope_scaling=None),
    "Qwen1.5-MoE": shape(
        "qwen2_moe", 2048, 24, 16, 16, 5632, 151936, 8192, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1, norm_topk_prob=False,
        use_sliding_window=False, sliding_window=32768, max_window_layers=21,
    ),
    "Qwen2-57B-A14B": shape(
        "qwen2_moe", 3584, 28, 28, 4, 18944, 151936, 131072, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=2560, shared_expert_intermediate_size=20480, decoder_sparse_step=1, norm_topk_prob=False,
        use_sliding_window=False, sliding_window=65536, max_window_layers=28,
    ),
    "Qwen3-MoE": shape(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, 40960, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, sliding_window=None, use_sliding_window=False,
    ),
    "Llama 3.1": shape("llama", 4096, 32, 32, 8, 14336, 128256, 131072, rope_scaling=LLAMA_3_ROPE, mlp_bias=False),
    "Mistral 7B v0.3": shape("mistral", 4096, 32, 32, 8, 14336, 32768, 32768, sliding_window=None),
    "Mixtral": shape("mixtral", 4096, 32, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2,
    sliding_window=None),
    "Phi-4": shape("phi3", 5120, 40, 40, 10, 17920, 100352, 16384, architectures=["Phi3ForCausalLM"], rope_scaling=None,
    sliding_window=None),
    "Mistral 7B v0.1": shape("mistral", 4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=4096),
    "Phi-3": shape("phi3", 3072, 32, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "Qwen2 with its window on": shape(
        "qwen2", 3584, 28, 28, 4, 18944, 152064, 32768, sliding_window=131072, use_sliding_window=True,
        max_window_layers=0,
    ),
    "Gemma 2": shape("gemma2", 2304, 26, 8, 4, 9216, 256000, 8192, head_dim=256, sliding_window=4096,
    hidden_act="gelu_pytorch_tanh"),
    "Gemma 3": GEMMA_3_TEXT,
    "Gemma 4": GEMMA_4_TEXT
    | dict(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704),
    "gpt-oss": shape(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, 131072, architectures=["GptOssForCausalLM"], attention_bias=True,
        sliding_window=128, num_local_experts=32, num_experts_per_tok=4, head_dim=64, hidden_act="silu",
        rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    ),
    "Moonlight": shape("deepseek_v3", 2048, 27, 16, 16, 11264, 163840, 8192, **MOONLIGHT),
    "GLM-4": shape("glm4", 4096, 40, 32, 2, 13696, 151552, 32768, head_dim=128, attention_bias=False,
    partial_rotary_factor=0.5),
    "GLM-4.5-Air": shape(
        "glm4_moe", 4096, 46, 96, 8, 10944, 151552, 131072, head_dim=128, attention_bias=True, use_qk_norm=False,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408, n_group=1,
        topk_group=1, first_k_dense_replace=1, partial_rotary_factor=0.5, num_nextn_predict_layers=1,
    ),
    "Nemotron Nano 2": shape(
        "nemotron_h", 4480, 56, 40, 8, 15680, 131072, 131072, architectures=["NemotronHForCausalLM"], head_dim=128,
        mamba_head_dim=80, hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    ),
    "Nemotron 3 Nano": shape(
        "nemotron_h", 2688, 52, 32, 2, 1856, 131072, 262144, mamba_num_heads=64, n_routed_experts=128,
        num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "Nemotron 3 Super": shape(
        "nemotron_h", 4096, 88, 32, 2, 2688, 131072, 262144, n_routed_experts=512, num_experts_per_tok=22,
        moe_intermediate_size=2688, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
        layers_block_type=["mamba", "moe", "attention", "moe"] * 22, num_nextn_predict_layers=1,
    ),
    "Qwen3-Next": shape(
        "qwen3_next", 2048, 48, 16, 2, 5120, 151936, 262144, architectures=["Qwen3NextForCausalLM"], head_dim=256,
        full_attention_interval=4, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
        mlp_only_layers=[], partial_rotary_factor=0.25, rope_scaling=None, attention_bias=False,
    ),
    "Qwen3.5": shape("qwen3_5_text", 4096, 32, 16, 4, 12288, 248320, 262144, head_dim=256),
    "MiniMax-M2": shape(
        "minimax_m2", 3072, 62, 48, 8, 1536, 200064, 196608, architectures=["MiniMaxM2ForCausalLM"], head_dim=128,
        rotary_dim=64, num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid", qk_norm_type="per_layer",
    ),
    "Mistral Medium 3.5": shape(
        "ministral3", 12288, 88, 96, 8, 28672, 131072, 262144, head_dim=128, rope_parameters=dict(rope_type="yarn",
        rope_theta=1e6, factor=64.0, original_max_position_embeddings=4096, beta_fast=4.0, llama_4_scaling_beta=0),
    ),
    "GLM-5": shape(
        "glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880, 202752, architectures=["GlmMoeDsaForCausalLM"],
        q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, index_topk=2048,
        index_n_heads=32, index_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=2048, first_k_dense_replace=3, n_group=1, topk_group=1, num_nextn_predict_layers=1,
    ),
    "Qwen2.5 with YaRN": shape("qwen2", 3584, 28, 28, 4, 18944, 152064, 131072, rope_scaling=QWEN_YARN),
}  # fmt: skip


def model_folder(folder: Path, content: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(EMBEDDING_ONLY)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path):
    return lambda content: model_folder(tmp_path / "model", content)


COMMANDS = ["--dry-run", "plan", "convert", "parity", "eval"]
CASES = [(command, name) for name in REFUSED for command in COMMANDS if command != "convert" or name != "heads of 16"]


@pytest.mark.parametrize("command, name", CASES)
def test_a_model_that_cannot_be_trained_is_refused_by_name(command, name, folder, minimal, tmp_path, capsys):
    content, expected = REFUSED[name]
    model = str(folder(content))
    arguments = {
        "--dry-run": ["train", "--dry-run", "--config", str(minimal), f"policy.model_name={model}"],
        "plan": ["plan", "--config", str(minimal), f"policy.model_name={model}"],
        "convert": ["convert", "--to", "checkpoint", model, str(tmp_path / "out")],
        "parity": ["parity", "--model", model, "--engine"],
        "eval": [
            "eval",
            model,
            "--config",
            str(minimal),
            "data.validation={environment: toy}",
            "gdpo.val_at_start=true",
        ],
    }[command]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    if "model type" in expected:
        assert all(family in said for family in FAMILIES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_families_pass(name, folder, minimal):
    describe(SUPPORTED[name])
    family = FAMILIES[SUPPORTED[name]["model_type"]]
    # vLLM on CPUs computes gated delta nets only in bfloat16, no experts without a gate, and no sparse attention.
    indexed = family.latent and family.latent.index
    gpus = GPUS if family.delta or indexed or (family.mamba and describe(SUPPORTED[name]).experts) else []
    if family.engine_updates:
        validate(load_config(minimal, [f"policy.model_name={folder(SUPPORTED[name])}", *gpus]))


@pytest.mark.parametrize("layers", ["null", "true", "false"])
def test_yarn_and_adapters_go_with_the_layers_of_transformer_engine(folder, minimal, layers):
    model = f"policy.model_name={folder(SUPPORTED['Qwen2.5 with YaRN'])}"
    chosen = [model, *GPUS, f"policy.megatron_cfg.transformer_engine={layers}"]
    validate(load_config(minimal, chosen))
    validate(load_config(minimal, [*chosen, "policy.lora.rank=8"]))


@pytest.mark.parametrize(
    "model, targets, expected",
    [
        (
            "Qwen3",
            ["qkv_proj", "down_proj"],
            "type qwen3 has no qkv_proj; its linear layers: q_proj, k_proj",
        ),
        ("Moonlight", ["q_b_proj", "o_proj"], "deepseek_v3 has no q_b_proj; its linear layers: q_proj, kv_b_proj"),
        ("Gemma 4", ["gate_up_proj"], "gemma4_text has no gate_up_proj; its linear layers: q_proj, k_proj, v_proj"),
        ("gpt-oss", ["q_proj", "up_proj"], "gpt_oss has no up_proj; its linear layers: q_proj, k_proj, v_proj, o_proj"),
        (
            "Nemotron 3 Super",
            ["fc1_latent_proj"],
            "nemotron_h has no fc1_latent_proj; its linear layers: q_proj, k_proj",
        ),
        ("Mixtral", ["up_proj"], "mixtral has no up_proj; its linear layers: q_proj, k_proj, v_proj, o_proj, w1, w3"),
    ],
)
def test_adapters_on_layers_that_the_family_lacks_are_refused(model, targets, expected):
    with pytest.raises(ConfigError, match=expected):
        check_adapted_layers(targets, describe(SUPPORTED[model]))


def test_the_layers_to_adapt_are_named_where_the_usual_names_do_not_fit(folder, minimal):
    with pytest.raises(ConfigError, match="its linear layers: qkv_proj, o_proj, gate_up_proj, down_proj, lm_head"):
        validate(load_config(minimal, [f"policy.model_name={folder(SUPPORTED['Phi-4'])}", "policy.lora.rank=8"]))


@pytest.mark.parametrize(
    "setting, message",
    [
        ("attention_backend=flash", "flash is not supported for a model with sliding windows; use auto or flex"),
        ("fused_logprobs=true", "fused_logprobs: true is not supported for a model with a soft cap of its logits"),
    ],
)
def test_kernels_that_cannot_compute_the_model_are_refused(folder, minimal, setting, message):
    model = f"policy.model_name={folder(SUPPORTED['Gemma 2'])}"
    with pytest.raises(ConfigError, match=message):
        validate(load_config(minimal, [model, *GPUS, f"policy.megatron_cfg.{setting}"]))


def test_a_family_whose_new_weights_engines_lose_is_refused_for_sampling(folder, minimal):
    with pytest.raises(ConfigError, match="vLLM loses new weights of gpt_oss models; train them without engines"):
        validate(load_config(minimal, [f"policy.model_name={folder(SUPPORTED['gpt-oss'])}", *GPUS]))


def test_latent_attention_that_rotates_halves_is_refused_for_sampling(folder, minimal):
    content = {**SUPPORTED["Moonlight"], "rope_interleave": False}
    with pytest.raises(ConfigError, match="vLLM ignores rope_interleave: false"):
        validate(load_config(minimal, [f"policy.model_name={folder(content)}", *GPUS]))


def test_experts_without_a_gate_are_refused_for_sampling_on_cpus(folder, minimal):
    model = f"policy.model_name={folder(SUPPORTED['Nemotron 3 Super'])}"
    with pytest.raises(ConfigError, match="vLLM on CPUs does not support experts without a gate"):
        validate(load_config(minimal, [model]))
    validate(load_config(minimal, [model, *GPUS]))


def test_sequences_beyond_the_keys_of_a_sparse_index_are_refused(folder, minimal):
    model = [f"policy.model_name={folder({**SUPPORTED['GLM-5'], 'index_topk': 64})}", *GPUS]
    model += ["policy.generation.max_new_tokens=32"]
    validate(load_config(minimal, [*model, "policy.max_total_sequence_length=64"]))
    with pytest.raises(ConfigError, match="65 exceeds the 64 keys of the model's sparse attention .index_topk."):
        validate(load_config(minimal, [*model, "policy.max_total_sequence_length=65"]))


def test_sparse_attention_is_refused_for_sampling_on_cpus(folder, minimal):
    with pytest.raises(ConfigError, match="vLLM on CPUs does not support sparse attention"):
        validate(load_config(minimal, [f"policy.model_name={folder(SUPPORTED['GLM-5'])}"]))


@pytest.mark.parametrize("name", ["Moonlight", "GLM-4.5-Air", "MiniMax-M2", "GLM-5"])
def test_tied_embeddings_that_vllm_ignores_are_refused_for_sampling(name, folder, minimal):
    content = {**SUPPORTED[name], "tie_word_embeddings": True}
    with pytest.raises(ConfigError, match="vLLM ignores tie_word_embeddings of"):
        validate(load_config(minimal, [f"policy.model_name={folder(content)}", *GPUS]))


def test_gated_delta_nets_in_float32_are_refused_for_engines_on_cpus(folder, minimal):
    model = f"policy.model_name={folder(SUPPORTED['Qwen3.5'])}"
    with pytest.raises(ConfigError, match="vLLM on CPUs computes gated delta net layers only in bfloat16"):
        validate(load_config(minimal, [model]))
    validate(load_config(minimal, [model, "policy.precision=bfloat16"]))


@pytest.mark.parametrize("max_window_layers", [14, 28])
def test_windows_that_engines_would_give_to_all_layers_are_refused_for_sampling(folder, minimal, max_window_layers):
    content = {**SUPPORTED["Qwen2 with its window on"], "max_window_layers": max_window_layers}
    with pytest.raises(ConfigError, match="vLLM does not support a sliding window in only some layers"):
        validate(load_config(minimal, [f"policy.model_name={folder(content)}", *GPUS]))


def test_window_that_is_off_by_default_is_accepted():
    describe({**SUPPORTED["Qwen3"], "sliding_window": 4096})


def test_head_sizes_are_limited_only_for_engines_on_cpus(folder, minimal):
    model = f"policy.model_name={folder(REFUSED['heads of 16'][0])}"
    validate(load_config(minimal, [model, *GPUS]))
    assert 16 not in CPU_HEAD_SIZES


def test_recipe_of_nemo_rl_with_a_local_model_is_also_compared_with_the_families(folder, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"policy: {{model_name: {folder(REFUSED['Qwen2-VL'][0])}}}\ngrpo: {{num_prompts_per_step: 4}}\n")
    assert cli.main(["config", "from-nemo-rl", str(recipe)]) != 0
    assert "model type 'qwen2_vl' (a text model" in capsys.readouterr().err


def test_the_check_needs_no_torch():
    code = (
        "import sys; from gdpo_nemo.models.family_checks import describe; "
        f"describe({SUPPORTED['Llama 3.1']!r}); sys.exit('torch' in sys.modules or 'transformers' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2]).returncode == 0


@pytest.mark.parametrize(
    "damage, expected",
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            "model.safetensors is not a valid safetensors file",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "is not a valid safetensors file",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "has weights only as *.bin",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "model-2.safetensors"}}'
            ),
            "lacks model-2.safetensors, which is listed in model.safetensors.index.json",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is not a valid index of weights"),
        (lambda folder: cut_off(folder / "model.safetensors"), "model.safetensors is truncated"),
        (
            lambda folder: tensors(folder / "model.safetensors", "model.layers.0.mlp.switch_mlp.up_proj.weight"),
            "has experts stacked by MLX (switch_mlp), which is not supported",
        ),
    ],
)
def test_weight_files_that_are_missing_or_cut_off_are_refused(damage, expected, folder, minimal):
    model = folder(SUPPORTED["Qwen3"])
    damage(model)
    with pytest.raises(ConfigError) as refusal:
        validate(load_config(minimal, [f"policy.model_name={model}"]))
    assert expected in str(refusal.value)


def cut_off(file: Path) -> None:
    """A file whose header promises more than there is, as an interrupted download leaves it."""
    tensors(file, "x")
    file.write_bytes(file.read_bytes()[:-8])


def tensors(file: Path, name: str) -> None:
    """A file with one tensor of four numbers."""
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
