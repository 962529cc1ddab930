"""Architectures that are not supported are refused by name, with what is supported."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from transformers import GPT2Config, MistralConfig, Qwen2Config

from gdpo_nemo.errors import ConfigError
from gdpo_nemo.megatron.families import FAMILIES, family_of, rotary


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
