"""Updates of Muon equal its definition in every layout, and its checkpoints continue in every layout."""

from __future__ import annotations

from dataclasses import replace

import checkpoint_cases
import hf_reference
import layouts
import numpy as np
import pytest
import rank_cases
import tiny_models
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


@pytest.fixture(scope="module")
def definition(model_folder):
    """Two updates by transformers and the definition of Muon."""
    return hf_reference.run(model_folder("qwen3"), tiny_models.make_batch(), 2, MUON)


def weight_error(ours, theirs) -> float:
    return max(float(np.abs(ours[name] - np.asarray(theirs[name])).max()) for name in ours)


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP", "DP2", "PP2", "CP2"])
def test_updates_equal_the_definition_in_every_layout(on_ranks, model_folder, definition, layout):
    results = on_ranks(layout + "+MUON", rank_cases.updates, model_folder("qwen3"), tiny_models.make_batch())
    print(
        layout, relative_error(results[0].steps, definition.steps), weight_error(results[0].weights, definition.weights)
    )
    assert max(relative_error(result.steps, definition.steps) for result in results) < 1e-5
    assert set(results[0].weights) == set(definition.weights)
    assert weight_error(results[0].weights, definition.weights) < 1e-5


def test_settings_act_as_defined(on_ranks, model_folder):
    """Of one update: the momentum starts at 0, so later updates are those of the test above."""
    folder, batch = model_folder("qwen2"), tiny_models.make_batch()
    expected = hf_reference.run(folder, batch, 2, replace(MUON, **OTHERS)).weights
    found = on_ranks("TP2+MUON", trained, folder, batch, [OTHERS, OTHERS | dict(muon_tp_mode="distributed"), {}])[0]
    exact, distributed, default = found
    print(weight_error(exact, expected), weight_error(distributed, expected), weight_error(default, expected))
    assert weight_error(exact, expected) < 1e-5 and weight_error(distributed, expected) < 1e-5
    assert weight_error(default, expected) > 1e-3


def trained(place, folder, batch, settings):
    """The weights after two updates with each of ``settings``."""
    found = []
    for fields in settings:
        policy = rank_cases.build_policy(place, folder, optimizer=fields)
        rank_cases.train(policy, batch, rank_cases.spread(place, batch), 2)
        found.append(rank_cases.exported(policy))
    return found
