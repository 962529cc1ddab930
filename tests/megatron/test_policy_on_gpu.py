"""The policy's own step on a real GPU: who waits for it, and what off-loading changes."""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
import tiny_models
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_no_micro_batch_waits_for_the_gpu_and_offloading_changes_no_bit(on_ranks, model_folder):
    batch = tiny_models.make_batch()
    (here,), (away,) = (
        on_ranks("TP1", rank_cases.step_that_waits_for_nothing, model_folder("qwen2"), batch, offload)
        for offload in (False, True)
    )
    np.testing.assert_array_equal(here[0], away[0])
    for name, value in here[1].items():
        np.testing.assert_array_equal(value, away[1][name], err_msg=name)
    assert here[2] > 0 and away[2] > 0
