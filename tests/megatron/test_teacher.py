"""A frozen teacher of another family and size beside the policy: its log-probs at every layout, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
import tiny_models

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP", "PP2", "CP2", "DP2+OVERLAP"])
def test_teacher_scores_as_transformers_does_and_does_not_change_the_policy(on_ranks, model_folder, reference, layout):
    batch = tiny_models.make_batch()
    results = on_ranks(layout, rank_cases.teacher_logprobs, model_folder("qwen2"), model_folder("llama"), batch)
    before, taught, again = (rank_cases.by_sequence([r[i] for r in results], batch) for i in range(3))
    for one, teacher, two, expected in zip(before, taught, again, reference("llama").logprobs, strict=True):
        np.testing.assert_allclose(teacher, expected, atol=2e-5)
        np.testing.assert_array_equal(one, two)
        assert np.abs(one - teacher).max() > 0.1
    alone = on_ranks(layout, rank_cases.updates, model_folder("qwen2"), batch, 2)
    for (*_, steps), untaught in zip(results, alone):
        np.testing.assert_array_equal(steps, untaught.steps)
