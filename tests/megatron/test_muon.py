"""Updates of Muon equal its definition in every layout. Its checkpoints are in ``test_checkpoint_resharding.py``."""

from __future__ import annotations

from dataclasses import replace

import adapter_cases
import hf_reference
import layouts
import numpy as np
import pytest
import rank_cases
import test_lora
import test_value_head
import tiny_models
import value_cases
from hf_reference import relative_error

pytestmark = pytest.mark.slow

MUON = replace(layouts.optimizer(), type="muon")
OTHERS = dict(
    muon_momentum=0.9,
    muon_nesterov=True,
    muon_scale_mode="shape_scaling",
    muon_extra_scale_factor=0.5,
    muon_coefficient_type="simple",
    muon_num_ns_steps=3,
)


def weight_error(ours, theirs) -> float:
    return max(float(np.abs(ours[name] - np.asarray(theirs[name])).max()) for name in ours)


@pytest.fixture(scope="module")
def definition(model_folder):
    """Two updates by transformers and the definition of Muon."""
    return hf_reference.run(model_folder("qwen3"), tiny_models.make_batch(), 2, MUON)


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP", "DP2", "PP2", "CP2"])
def test_updates_equal_the_definition_in_every_layout(on_ranks, model_folder, definition, layout):
    results = on_ranks(layout + "+MUON", rank_cases.updates, model_folder("qwen3"), tiny_models.make_batch())
    assert max(relative_error(result.steps, definition.steps) for result in results) < 1e-5
    assert set(results[0].weights) == set(definition.weights)
    assert weight_error(results[0].weights, definition.weights) < 1e-5


def test_queries_and_keys_of_layers_with_their_own_heads_are_split(on_ranks, model_folder):
    folder, batch = model_folder("gemma4"), tiny_models.make_batch()
    found = on_ranks("TP1+MUON", rank_cases.updates, folder, batch)[0].weights
    assert weight_error(found, hf_reference.run(folder, batch, 2, MUON).weights) < 1e-5


def trained(place, folder, batch, settings):
    """The weights after two updates with each of ``settings``."""
    found = []
    for fields in settings:
        policy = rank_cases.build_policy(place, folder, optimizer=fields)
        rank_cases.train(policy, batch, rank_cases.spread(place, batch), 2)
        found.append(rank_cases.exported(policy))
    return found


def test_settings_act_as_defined_and_blocks_differ(on_ranks, model_folder, definition):
    folder, batch = model_folder("qwen3"), tiny_models.make_batch()
    settings = [
        OTHERS,
        OTHERS | dict(muon_tp_mode="distributed"),
        dict(muon_tp_mode="blockwise"),
        dict(muon_split_qkv=False),
    ]
    gathered, distributed, blockwise, whole = on_ranks("TP2+MUON", trained, folder, batch, settings)[0]
    expected = hf_reference.run(folder, batch, 2, replace(MUON, **OTHERS)).weights
    assert weight_error(gathered, expected) < 1e-5 and weight_error(distributed, expected) < 1e-5
    assert weight_error(blockwise, definition.weights) > 1e-2 and weight_error(whole, definition.weights) > 1e-3


@pytest.mark.parametrize("layout, model", [("DP2xEP2", "qwen3-moe"), ("TP2xEP2xETP1+SP", "gpt-oss")])
def test_experts_are_updated_as_on_one_rank(on_ranks, model_folder, layout, model):
    arguments = (rank_cases.updates, model_folder(model), tiny_models.make_batch())
    one, many = (on_ranks(name + "+MUON", *arguments)[0] for name in ("TP1", layout))
    assert relative_error(many.steps, one.steps) < 1e-5 and weight_error(many.weights, one.weights) < 1e-5


def test_adapters_are_updated_as_on_one_rank(on_ranks, model_folder):
    arguments = (adapter_cases.lora_updates, model_folder("qwen2"), tiny_models.make_batch(), test_lora.HEAD_SHARED)
    one, many = (on_ranks(layout, *arguments)[0][0] for layout in ("TP1+MUON", "TP2+MUON"))
    assert relative_error(many, one) < 1e-5


def names_by_optimizer(place, folder):
    """(names of the matrices of Muon, names of other parameters) of a policy with a value head."""
    from gdpo_nemo.megatron.optimizer import chained, optimized

    policy = value_cases.build(place, folder)
    muon = set()
    for part in chained(policy.built.optimizer):
        if "momentum" in part.optimizer.defaults:
            muon |= {id(p) for p in optimized(part.optimizer)}
    found = [], []
    for name, p in policy.chunks[0].named_parameters():
        found[id(p) not in muon].append(name)
    return found


def test_critic_is_updated_as_on_one_rank_and_its_head_by_adamw(on_ranks, model_folder, tmp_path):
    arguments = (model_folder("qwen2"), test_value_head.make_values(), test_value_head.SETTINGS)
    one, many = (
        on_ranks(layout, value_cases.of_values, *arguments, tmp_path / layout)[0]
        for layout in ("TP1+MUON", "TP2+SP+MUON")
    )
    assert relative_error(many.steps, one.steps) < 1e-5 and (many.resumed == many.steps[1]).all()
    np.testing.assert_allclose(many.head, one.head, rtol=0, atol=1e-5)
    muon, adamw = on_ranks("TP1+MUON", names_by_optimizer, model_folder("qwen2"))[0]
    assert {name.rpartition(".linear_")[2] for name in muon} == {
        "qkv.weight", "proj.weight", "fc1.weight", "fc2.weight"
    }  # fmt: skip
    assert {"embedding.word_embeddings.weight", "output_layer.weight", "value_head.weight"} <= set(adamw)
