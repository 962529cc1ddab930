"""The table of a model's weights has the names, shapes and totals of transformers' model."""

from __future__ import annotations

import pytest
import tiny_models
import torch

from gdpo_nemo.data.packing import attention_cost
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.weights import ROWS, WeightSpec, parameters, weight_table
from gdpo_nemo.utils.errors import ConfigError


def in_folder(row: WeightSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a row's tensors in the folder that transformers saves, by name."""
    if row.name.endswith(".{}"):
        return {str(row.stacked): (row.experts, *row.shape)}
    return {row.name.format(expert): row.shape for expert in range(max(1, row.experts))}


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_table_equals_tensors_that_transformers_saves(name):
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = tiny_models.hf_config(name)
    model = describe(config.to_dict())
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    saved = {
        name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(theirs, theirs.state_dict()).items()
    }
    if model.tied:
        del saved["lm_head.weight"]
    rows = list(weight_table(model))
    assert {tensor: shape for row in rows for tensor, shape in in_folder(row).items()} == saved
    assert parameters(model) == sum(parameter.numel() for parameter in theirs.parameters())
    buffers = {name for name, _ in theirs.named_buffers() if name in theirs.state_dict()}
    assert {row.name.rpartition(".")[2] for row in rows if row.buffer} == {name.rpartition(".")[2] for name in buffers}


@pytest.mark.parametrize("name", ["qwen2", "nemotron-3", "qwen3-next", "gemma4-moe", "glm5", "gpt-oss"])
def test_parameter_of_megatron_has_consecutive_rows_of_one_split(name):
    model = describe(tiny_models.hf_config(name).to_dict())
    seen: dict[tuple[int | None, str], str] = {}
    previous = None
    for row in weight_table(model):
        key = row.layer, row.megatron
        assert key == previous or key not in seen
        assert seen.setdefault(key, row.split) == row.split
        previous = key
    assert seen[None, "embedding.word_embeddings.weight"] == ROWS


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_table_of_model_with_an_invalid_field_is_refused_or_complete(name):
    """A check that misses a field would end a dry run with a traceback."""
    valid = {**tiny_models._SHAPE, **tiny_models.MODELS[name]}
    accepted = 0
    for key in {**describe(valid).fields, "layer_types": None, "per_layer_config": None}:
        for value in ("x", 1.5, None, [1]):
            try:
                model = describe({**valid, key: value})
            except ConfigError:
                continue
            accepted += 1
            assert all(type(size) is int and size > 0 for row in weight_table(model) for size in row.shape), key
            assert attention_cost(model) > 0
    assert accepted
