"""A reference that follows the policy has the weights that TRL would give it, at every layout and after a resume."""

from __future__ import annotations

import pytest
import rank_cases
import torch
from tiny_models import make_batch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout, model", [("TP2+SP", "qwen2"), ("PP2", "qwen2-tied"), ("DP2+OVERLAP", "qwen2")])
def test_a_reference_follows_as_in_trl_and_is_in_the_checkpoint(on_ranks, model_folder, tmp_path, layout, model):
    from trl.trainer.callbacks import SyncRefModelCallback

    found, *others = on_ranks(layout, rank_cases.following, model_folder(model), make_batch(), tmp_path)
    names = sorted(found.start)
    kept, policy = (
        torch.nn.ParameterList([torch.from_numpy(tensors[name].copy()) for name in names])
        for tensors in (found.start, found.policy)
    )
    SyncRefModelCallback._sync_target_model(policy, kept, 0.25)
    for name, expected in zip(names, kept):
        torch.testing.assert_close(torch.from_numpy(found.reference[name]), expected.detach(), rtol=0, atol=0)
    assert any((found.start[name] != found.reference[name]).any() for name in names)
    assert found.resumed and all(other.resumed for other in others)
