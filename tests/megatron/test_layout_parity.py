"""Every layout computes what one process of transformers and torch computes, in float32.

Every family on one rank and on two, every other layout with some of the families in turn; with ``--layout-table`` all with all.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import rank_cases
import tiny_models
from hf_reference import relative_error
from layouts import in_turn

LAYOUTS = ["TP1", "TP2", "TP2+SP", "DP2", "DP2+DIST", "PP2", "CP2"]
MODELS = ["llama", "mistral", "qwen2", "qwen2-tied", "qwen3"]
MIXTURE_LAYOUTS = ["TP1", "TP2+SP", "TP2xEP2xETP1+SP", "DP2xEP2", "DP2xEP2+DIST", "PP2", "CP2xEP2+DIST"]
MIXTURES = ["mixtral", "qwen3-moe", "qwen3-moe-mixed"]


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("layout_table")
    if metafunc.function is test_updates_equal_transformers_and_torch:
        some = [(layout, model) for layout in ("TP1", "TP2+SP") for model in MODELS]
        some += in_turn([layout for layout in LAYOUTS if layout not in ("TP1", "TP2+SP")], MODELS, 2)
        metafunc.parametrize("layout, model", product(LAYOUTS, MODELS) if whole else some)
    if metafunc.function is test_mixtures_equal_transformers_and_torch:
        some = [("TP1", model) for model in MIXTURES] + in_turn(MIXTURE_LAYOUTS[1:], MIXTURES, 1)
        metafunc.parametrize("layout, model", product(MIXTURE_LAYOUTS, MIXTURES) if whole else some)


def test_updates_equal_transformers_and_torch(packed_and_alone, reference, layout, model):
    assert weight_error(packed_and_alone(layout, model), reference(model).weights) < 1e-6


def test_mixtures_equal_transformers_and_torch(packed_and_alone, layout, model):
    packed_and_alone(layout, model)


@pytest.mark.parametrize("layout", ["DP2+OVERLAP", "CP2+DIST", "TP2+SP+FULL", "TP2+SELECTIVE", "PP2xVPP2+FIRST"])
def test_overlap_and_recompute_change_nothing(on_ranks, model_folder, reference, layout):
    expected = reference("qwen3")
    results = on_ranks(layout, rank_cases.updates, model_folder("qwen3"), tiny_models.make_batch())
    assert max(relative_error(result.steps, expected.steps) for result in results) < 1e-5
    assert weight_error(results[0].weights, expected.weights) < 1e-6


@pytest.mark.parametrize("layout", ["TP2+SP", "CP2", "DP2"])
def test_logprobs_equal_log_softmax_of_transformers(on_ranks, model_folder, reference, layout):
    batch = tiny_models.make_batch()
    results = on_ranks(layout, rank_cases.updates, model_folder("qwen2"), batch)
    ours = rank_cases.by_sequence([result.before for result in results], batch)
    for got, expected in zip(ours, reference("qwen2").logprobs):
        np.testing.assert_allclose(got, expected, atol=2e-6, rtol=0)


def weight_error(ours, theirs) -> float:
    """Largest difference; the learning rate of 1e-2 is the size of what three updates moved."""
    assert set(ours) <= set(theirs)
    return max(float(np.abs(ours[name] - theirs[name].numpy()).max()) for name in ours)
