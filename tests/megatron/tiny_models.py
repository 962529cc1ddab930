"""Tiny Hugging Face models of every family, and batches for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.models.description import ModelDescription

# 99 tokens: the vocabulary has to be padded as soon as it is split.
VOCABULARY = 99
_SHAPE = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    initializer_range=0.1,
    pad_token_id=None,
)
_MIXTURE = dict(num_experts_per_tok=2, router_aux_loss_coef=0.0)
_LLAMA_3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


_TWO_ROPES = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e5, factor=4.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
_PROPORTIONAL = dict(
    full_attention=dict(rope_type="proportional", rope_theta=1e3, partial_rotary_factor=0.25),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
# Layers without a window have wider and fewer heads, whose values are the projections of the keys.
_GEMMA_4 = dict(
    model_type="gemma4_text",
    head_dim=16,
    global_head_dim=24,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    rope_parameters=_PROPORTIONAL,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=2.5,
    tie_word_embeddings=True,
)
_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, truncate=False, beta_fast=32.0,
    beta_slow=1.0,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, moe_intermediate_size=24)
_NEMOTRON = dict(
    model_type="nemotron_h", head_dim=16, mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=8,
    time_step_min=1e-9,  # transformers raises step sizes to this, and neither Megatron nor vLLM do
)  # fmt: skip

# The norm of a first token's output is almost the sign of q k, whose gradient is large without a larger epsilon.
_DELTA = dict(
    rms_norm_eps=1e-2,
    head_dim=16, partial_rotary_factor=0.5, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
)  # fmt: skip

_DEEPSEEK = dict(
    num_key_value_heads=4,
    num_experts_per_tok=2,
    n_routed_experts=4,
    moe_intermediate_size=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    num_nextn_predict_layers=0,
    first_k_dense_replace=1,
)

MODELS: dict[str, dict] = {
    # Windows of 8 keys: all sequences but the shortest are longer.
    "gemma2": dict(
        model_type="gemma2",
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
        tie_word_embeddings=True,
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_TWO_ROPES,
    ),
    # The first of a family is the one that engines load.
    "gemma4-moe": dict(**_GEMMA_4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24),
    "gemma4": _GEMMA_4,
    "glm4": dict(model_type="glm4", head_dim=16, attention_bias=True),
    "deepseek-v3": dict(
        model_type="deepseek_v3",
        **_DEEPSEEK,
        n_group=2,
        topk_group=1,
        q_lora_rank=12,
        rms_norm_eps=1e-3,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=1.0,
            mscale_all_dim=0.7,
            beta_fast=32,
            beta_slow=1,
        ),
    ),
    # As in Moonlight, q has no latent vector. The rotary embedding rotates elements of the two halves.
    "glm4-flash": dict(model_type="glm4_moe_lite", **_DEEPSEEK, q_lora_rank=None, rope_interleave=False),
    # Two groups of experts, of which a token uses one; a shared expert; norms of q and k.
    "glm4-moe": dict(
        model_type="glm4_moe",
        num_experts_per_tok=2,
        n_routed_experts=4,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
    ),
    "llama": dict(model_type="llama", rope_parameters=_LLAMA_3_ROPE),
    "mistral-window": dict(model_type="mistral", sliding_window=8),
    # Positions from 4 on scale the queries.
    "ministral3": dict(
        model_type="ministral3",
        head_dim=16,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=32.0,
            original_max_position_embeddings=4,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=4.0,
            beta_slow=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "phi3": dict(model_type="phi3"),
    "qwen2": dict(model_type="qwen2"),
    "qwen2-window": dict(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen2-tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "seed-oss": dict(model_type="seed_oss", head_dim=16),
    "nemotron-h": dict(
        **_NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]
    ),
    "qwen3.5": dict(model_type="qwen3_5_text", **_DELTA),
    "mixtral": dict(model_type="mixtral", **_MIXTURE, num_local_experts=4, sliding_window=None),
    "gpt-oss": dict(
        model_type="gpt_oss",
        **_MIXTURE,
        num_local_experts=4,
        intermediate_size=24,
        head_dim=16,
        sliding_window=8,
        swiglu_limit=0.7,
        rope_parameters=_YARN,
    ),
    "qwen3-moe": dict(model_type="qwen3_moe", **_MIXTURE, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    # Dense and mixture layers in turn, and shares of the chosen experts that do not add up to 1.
    "qwen3-moe-mixed": dict(
        model_type="qwen3_moe", **_MIXTURE, **_EXPERTS, norm_topk_prob=False, mlp_only_layers=[0, 2]
    ),
    "qwen2-moe": dict(model_type="qwen2_moe", **_MIXTURE, **_EXPERTS, shared_expert_intermediate_size=20),
    # A dense layer, and shares of the chosen experts that do not add up to 1.
    "qwen3-next": dict(
        model_type="qwen3_next",
        **_DELTA,
        **_MIXTURE,
        **_EXPERTS,
        shared_expert_intermediate_size=20,
        norm_topk_prob=False,
        mlp_only_layers=[2],
    ),
    "qwen3.5-moe": dict(
        model_type="qwen3_5_moe_text", **_DELTA, **_MIXTURE, **_EXPERTS, shared_expert_intermediate_size=20
    ),
    "nemotron-3": dict(
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        routed_scaling_factor=2.5,
    ),
    "nemotron-3-super": dict(
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=16,
    ),
    "minimax-m2": dict(
        model_type="minimax_m2", **_MIXTURE, num_local_experts=4, intermediate_size=24, head_dim=16, rotary_dim=8
    ),
    # Sequences of at most 64 tokens, for which the sparse indices select all keys. The third layer has no index.
    "glm5": dict(
        model_type="glm_moe_dsa",
        **_DEEPSEEK,
        q_lora_rank=12,
        index_topk=64,
        index_head_dim=16,
        index_n_heads=2,
        indexer_types=["full", "full", "shared", "full"],
    ),
}
"""The models by the names that tests use: what their config.json has beside ``_SHAPE``. At least one for each declared
family; tests of layouts, conversions and updates take all of them."""

MIXTURES = [name for name, fields in MODELS.items() if ModelDescription.of(_SHAPE | fields).experts]
DENSE = [name for name in MODELS if name not in MIXTURES]


def hf_config(name: str, **fields: object):
    """The configuration of a tiny model by the name the tests use; ``fields`` take the place of its own."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**_SHAPE, "tie_word_embeddings": False, **MODELS[name], **fields})


def write_model(tiny: str, folder: Path, seed: int = 7, **fields: object) -> Path:
    """Save the tiny model ``tiny`` into ``folder``, with norms and biases away from their neutral start."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(tiny, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("linear_attn.conv1d.weight"):
                parameter.mul_(5)  # float32 is not accurate enough for the norms of smaller queries and keys
            if MODELS[tiny]["model_type"] == "gemma4_text" and name.endswith("q_norm.weight"):
                parameter.mul_(0.25)  # the norms scale the attention scores, which the model does not scale
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def make_batch(count: int = 6, seed: int = 0, longest: int = 30) -> list[TrainSequence]:
    """``count`` sequences of varied lengths whose token weights form the mean over all completion tokens."""
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(count):
        prompt = int(rng.integers(1, 9))
        completion = int(rng.integers(1, longest))
        batch.append(
            TrainSequence(
                prompt_ids=rng.integers(0, VOCABULARY, prompt).astype(np.int32),
                completion_ids=rng.integers(0, VOCABULARY, completion).astype(np.int32),
                sampler_logprobs=rng.normal(-4.5, 0.3, completion).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    tokens = sum(len(s.completion_ids) for s in batch)
    for s in batch:
        s.weight = 1.0 / tokens
    return batch
