"""Every layout computes what one process of transformers and torch computes."""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
import tiny_models

LAYOUTS = ["TP1", "TP2", "TP2+SP", "DP2", "DP2+DIST", "DP2+OVERLAP", "PP2", "CP2", "CP2+DIST"]
MODELS = ["llama", "mistral", "qwen2", "qwen2-tied", "qwen3"]


def relative(ours, theirs) -> float:
    return float(np.max(np.abs(np.asarray(ours) - theirs) / np.abs(theirs)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_equal_transformers_and_torch(on_ranks, model_folder, reference, layout, model):
    expected = reference(model)
    results = on_ranks(layout, rank_cases.updates, model_folder(model), tiny_models.make_batch())
    errors = [relative(steps, expected.steps) for _, steps, _ in results]
    weights = results[0][2]
    w = max(np.abs(weights[n] - expected.weights[n].numpy()).max() for n in weights)
    print(f"\n{layout} {model} step1 {relative(results[0][1][:1], expected.steps[:1]):.1e} all {max(errors):.1e} w {w:.1e}")
    assert max(errors) < 1e-5
