"""Architectures that are not supported are refused by name, with what is supported."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from gdpo_nemo.config.architectures import FAMILIES, attention_scaling
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.megatron.families import family_of, rotary


def test_an_unknown_family_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ConfigError) as refusal:
        family_of(GPT2Config())
    assert "gpt2" in str(refusal.value)
    assert all(name in str(refusal.value) for name in FAMILIES)


@pytest.mark.parametrize(
    "config",
    [MistralConfig(sliding_window=4096), Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0)],
)
def test_a_sliding_window_is_refused(config):
    with pytest.raises(ConfigError, match="sliding-window"):
        family_of(config)


def test_a_sliding_window_that_is_switched_off_is_no_obstacle():
    assert family_of(Qwen2Config(use_sliding_window=False, sliding_window=64)).qkv_bias


def test_another_activation_is_refused():
    with pytest.raises(ConfigError, match="gelu"):
        family_of(Qwen2Config(hidden_act="gelu"))


def test_rotary_frequencies_are_those_of_transformers():
    from transformers import AutoModelForCausalLM

    for name in ("llama", "qwen3"):
        config = tiny_models.hf_config(name)
        theirs = AutoModelForCausalLM.from_config(config).model.rotary_emb
        frequencies, scaling = rotary(config)
        assert torch.equal(frequencies, theirs.inv_freq)
        assert scaling == theirs.attention_scaling


YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_the_yarn_factor_of_queries_and_keys_is_known_before_the_build(more):
    config = Qwen2Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, rope_parameters={**YARN, **more})
    assert rotary(config)[1] == pytest.approx(attention_scaling(config.to_dict()))


@pytest.mark.parametrize(
    "trait", [{"attention_bias": True}, {"mlp_bias": True}, {"rope_parameters": {**YARN, "rope_type": "dynamic"}}]
)
def test_what_the_conversion_would_drop_is_refused(trait):
    with pytest.raises(ConfigError, match=next(iter(trait)).split("_")[0]):
        family_of(LlamaConfig(**trait))


def test_attention_by_transformer_engine_refuses_a_factor_that_it_would_not_apply():
    from gdpo_nemo.config.architectures import check_scaled_rope

    check_scaled_rope(1.0, transformer_engine=True)
    check_scaled_rope(1.14, transformer_engine=False)
    with pytest.raises(ConfigError, match="attention factor 1.14"):
        check_scaled_rope(1.14, transformer_engine=True)


def test_the_head_sizes_that_are_promised_are_those_of_the_installed_engine():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from gdpo_nemo.config.architectures import CPU_HEAD_SIZES

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
