"""The table of a model's weights has the names, shapes and totals of transformers' model."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
from tiny_vision import KINDS, write_tiny_vision

from gdpo_nemo.data.packing import attention_cost
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.known_models import KNOWN
from gdpo_nemo.models.weight_files import tensor_shapes
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


@pytest.fixture(scope="module", params=KINDS)
def vision(request, tmp_path_factory):
    """Folder of a tiny image model."""
    return write_tiny_vision(tmp_path_factory.mktemp("vision"), request.param)


def test_table_of_an_image_model_equals_the_folder_that_transformers_saves(vision):
    """Also if config.json has the older form, without a separate object for the text model."""
    content = json.loads((vision / "config.json").read_text())
    saved = tensor_shapes(vision, "policy.model_name")
    text = content.pop("text_config")
    rope = {**text.pop("rope_parameters"), "type": "mrope"}
    older = {**text, **content, "rope_scaling": {key: rope[key] for key in rope if key != "rope_type"}}
    for form in ({**content, "text_config": {**text, "rope_parameters": rope}}, older):
        model = describe(form)
        assert {row.name: row.shape for row in weight_table(model)} == saved
        assert model.tower is not None and not any(row.adapted for row in weight_table(model) if "visual" in row.name)


def test_table_of_an_image_model_with_an_invalid_field_is_refused_or_complete(vision):
    valid = json.loads((vision / "config.json").read_text())
    places = [valid, valid["text_config"], valid["vision_config"], valid["text_config"]["rope_parameters"]]
    accepted = 0
    for place in places:
        for key in [*place]:
            before = place[key]
            for value in ("x", 1.5, None, [1], {}, 10**9):
                place[key] = value
                try:
                    model = describe(valid)
                except ConfigError:
                    continue
                accepted += 1
                assert len(model.rotary_axes) == 16
                assert all(type(size) is int and size > 0 for row in weight_table(model) for size in row.shape), key
            place[key] = before
    assert accepted


@pytest.mark.parametrize("name", [name for name, fields in KNOWN.items() if "vision_config" in fields])
def test_published_image_models_have_the_sizes_and_rotary_axes_of_transformers(name):
    from transformers import AutoConfig, AutoModelForImageTextToText

    fields = dict(KNOWN[name])
    model = describe(fields)
    kind, vision, tied = (fields.pop(key) for key in ("model_type", "vision_config", "tie_word_embeddings"))
    config = AutoConfig.for_model(kind, text_config=fields, vision_config=vision, tie_word_embeddings=tied)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == parameters(model)
    assert model.rotary_axes is not None
    by_axis = torch.arange(3).view(3, 1).expand(3, len(model.rotary_axes)).clone()
    axes = theirs.model.language_model.rotary_emb.recomposition_frequencies(by_axis)
    assert axes.tolist() == [*model.rotary_axes, *model.rotary_axes]


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
