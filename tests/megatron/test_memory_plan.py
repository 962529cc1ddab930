"""The plan's memory per rank against the tensors that real ranks hold."""

from __future__ import annotations

import memory_tracker
import pytest
import tiny_models
from layouts import parse

from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.schema import Config
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.planning.memory import policy_memory

pytestmark = pytest.mark.slow

SIZES = {
    "small": dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=176, vocab_size=512),
    "large": dict(hidden_size=192, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
    intermediate_size=512, vocab_size=2048),
}  # fmt: skip
PRECISION = {"small": "float32", "large": "bfloat16"}
BUDGET = 512


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The models by size, and their configurations."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    out = {}
    for name, sizes in SIZES.items():
        torch.manual_seed(1)
        hf = Qwen2Config(**sizes, max_position_embeddings=128, tie_word_embeddings=name == "small")
        folder = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(hf).save_pretrained(folder)
        out[name] = folder, hf.to_dict()
    return out


def predicted(content: dict, name: str, precision: str, tokens: int, rows: int) -> int:
    config = Config()
    config.policy.precision = precision
    config.policy.share_prompts = False  # as the batch, in which no two sequences begin alike
    config.policy.megatron_cfg = parse(name).config
    return policy_memory(resolve(config), describe(content), tokens, rows).total


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["DP1+FULL", "DP1+FULL+MUON", "DP1+MODULES", "TP2+SP", "TP2+SP+MUON", "PP2"])
def test_predicted_memory_is_within_15_percent_of_the_tensors_of_the_fullest_rank(on_ranks, folders, layout, size):
    folder, content = folders[size]
    batch = tiny_models.make_batch(28, longest=60)
    found = on_ranks(layout, memory_tracker.peak_of_update, folder, batch, BUDGET, PRECISION[size])
    fullest = max(found, key=lambda rank: rank["tensors"])
    guess = predicted(content, layout, PRECISION[size], max(r["tokens"] for r in found), max(r["rows"] for r in found))
    assert abs(guess / fullest["tensors"] - 1) < 0.15
