"""vLLM takes every family's weights under their declared names, and computes with them what transformers does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import engine_scores
import numpy as np
import pytest
import tiny_models
import torch

# vLLM on CPUs has no attention for the smaller heads of the other tests.
WIDE = dict(hidden_size=128, num_attention_heads=4, intermediate_size=64)


def fields(name: str) -> dict:
    """``WIDE``, with heads of 32 where the model says their size itself."""
    return WIDE | (dict(head_dim=32) if "head_dim" in tiny_models.MODELS[name] else {})


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> dict[str, np.ndarray]:
    """Per model and state float32 [tokens]: log-probs by vLLM and by transformers."""
    root = tmp_path_factory.mktemp("engines")
    folders = [
        tiny_models.write_model(name, root / f"{name}-{seed}", seed, **fields(name))
        for name in tiny_models.MODELS
        for seed in (7, 8)
    ]
    program = [sys.executable, str(Path(engine_scores.__file__)), str(root / "scores.npz"), *map(str, folders)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    scores = dict(np.load(root / "scores.npz"))
    found = {}
    for number, name in enumerate(tiny_models.MODELS):
        for state, folder in zip(("before", "after"), folders[2 * number :]):
            found[name, state] = scores[f"{number}.{state}"], by_transformers(folder)
    return found


def by_transformers(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in map(torch.from_numpy, engine_scores.sequences()):
        with torch.no_grad():
            scores = model(ids[None].long()).logits[0].log_softmax(-1)
        found.append(scores[:-1].gather(-1, ids[1:, None].long())[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("state", ["before", "after"])
@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_an_engine_scores_as_transformers_before_and_after_an_update(scored, name, state):
    engine, transformers = scored[name, state]
    np.testing.assert_allclose(engine, transformers, atol=2e-4, rtol=0)
    assert np.abs(scored[name, "before"][1] - scored[name, "after"][1]).max() > 0.1
