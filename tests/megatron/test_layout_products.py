"""Products of layouts on four ranks, and bfloat16.

Every product with one of the families in turn; with ``--layout-table`` all with all.
"""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
import tiny_models
from layouts import in_turn

pytestmark = pytest.mark.slow

DENSE = [
    "TP2xPP2+SP+DIST",
    "TP2xCP2+SP+DIST",
    "TP2xDP2+SP+OVERLAP",
    "PP2xDP2+DIST",
    "PP2xCP2+DIST",
    "CP2xDP2+DIST",
    "PP4",
    "CP4+DIST",
    "PP2xVPP2",
]
MIXTURE = ["DP4xEP2+DIST", "DP4xEP4+DIST", "PP2xDP2xEP2+DIST", "TP2xDP2xEP2+SP+DIST", "TP2xDP2xEP4xETP1+SP+DIST"]


def pytest_generate_tests(metafunc):
    if metafunc.function is not test_updates_equal_transformers_and_torch:
        return
    whole = metafunc.config.getoption("layout_table")
    cases = in_turn(DENSE, tiny_models.DENSE, len(tiny_models.DENSE) if whole else 1)
    cases += in_turn([*MIXTURE, "PP2xVPP2"], tiny_models.MIXTURES, len(tiny_models.MIXTURES) if whole else 1)
    metafunc.parametrize("layout, model", cases)


def test_updates_equal_transformers_and_torch(packed_and_alone, layout, model):
    packed_and_alone(layout, model)


@pytest.mark.parametrize("layout", ["PP2xVPP2", "TP2xPP2+SP", "DP4xEP2"])
def test_round_trip_is_bit_exact(on_ranks, model_folder, layout):
    from safetensors.numpy import load_file

    model = "qwen3-moe" if "EP" in layout else "qwen2-tied"
    tensors = dict(on_ranks(layout, rank_cases.round_trips, {model: model_folder(model)})[0][model])
    stored = load_file(model_folder(model) / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert all(np.array_equal(tensors[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    "layout, model", [("TP1", "qwen3"), ("TP2+SP", "qwen3"), ("PP2", "qwen2"), ("DP2xEP2+DIST", "qwen3-moe")]
)
def test_bfloat16_stays_near_float32(on_ranks, model_folder, reference, layout, model):
    """2e-2 of loss and entropy, 5e-2 of the gradient norm: what transformers in bfloat16 is off by, too."""
    expected = reference(model).steps
    batch = tiny_models.make_batch()
    got = on_ranks(layout, rank_cases.updates, model_folder(model), batch, 2, 80, None, None, "bfloat16")[0].steps
    assert (np.abs(got - expected) <= np.array([2e-2, 5e-2, 2e-2]) * np.abs(expected).max(0)).all()
