"""Corrections between sampler and trainer: values, exact zeros, and TRL's sequence mask."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings, TokenFields
from gdpo_nemo.algorithms.offpolicy import sequence_keep_mask
from gdpo_nemo.algorithms.policy_loss import importance_weights, policy_loss

IDS = torch.tensor([0, 0, 1, 1, 1])
RATIOS = torch.tensor([4.0, 0.5, 1.0, 0.1, 2.0])


def weights(mode, level, low=0.25, high=1.5, gap=None):
    settings = OffPolicySettings(mode=mode, level=level, ratio_min=low, ratio_max=high)
    gap = RATIOS.log() if gap is None else gap
    return importance_weights(fields_of(torch.zeros(5), -gap, old=torch.zeros(5)), settings)


def fields_of(advantages, sampler, ids=IDS, old=None):
    count = int(ids.max()) + 1
    return TokenFields(advantages, torch.ones(len(ids)), ids, count, old_logprobs=old, sampler_logprobs=sampler)


@pytest.mark.parametrize(
    ("mode", "level", "expected"),
    [
        ("none", "token", [1, 1, 1, 1, 1]),
        ("truncate", "token", [1.5, 0.5, 1, 0.1, 1.5]),
        ("mask", "token", [0, 0.5, 1, 0, 0]),
        ("icepop", "token", [0, 0.5, 1, 0, 0]),
        ("truncate", "sequence", [1.5, 1.5, 0.2, 0.2, 0.2]),
        ("mask", "sequence", [0, 0, 0, 0, 0]),
        ("truncate", "geometric", [2**0.5, 2**0.5] + [0.2 ** (1 / 3)] * 3),
        ("mask", "geometric", [2**0.5, 2**0.5] + [0.2 ** (1 / 3)] * 3),
        ("icepop", "geometric", [4, 0.5, 1, 0.1, 2]),
        ("icepop", "sequence", [0, 0, 0, 0, 0]),
    ],
)
def test_importance_weights(mode, level, expected):
    torch.testing.assert_close(weights(mode, level), torch.tensor(expected).float())


@pytest.mark.parametrize("mode", ["mask", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_tokens_have_weight_exactly_zero_and_no_gradient(mode, level):
    """A floor applied after the mask, as elsewhere, would bring the masked tokens back."""
    gap = torch.full((5,), 3.0)
    assert (weights(mode, level, low=0.5, high=1.2, gap=gap) == 0).all()
    logprobs = torch.zeros(5, requires_grad=True)
    fields = TokenFields(torch.ones(5), torch.ones(5), IDS, 2, old_logprobs=torch.zeros(5), sampler_logprobs=-gap)
    settings = LossSettings(off_policy=OffPolicySettings(mode=mode, level=level, ratio_max=1.2, ratio_min=0.5))
    loss, metrics = policy_loss(logprobs, None, fields, settings)
    assert (torch.autograd.grad(loss, logprobs)[0] == 0).all()
    assert metrics.sums["importance_masked"] == 5 and metrics.sums["importance_weight"] == 0


@pytest.mark.parametrize("mode", ["truncate", "mask", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_equal_log_probs_need_no_correction_and_unknown_ones_get_none(mode, level):
    assert (weights(mode, level, gap=torch.zeros(5)) == 1).all()
    assert (weights(mode, level, gap=torch.full((5,), float("nan"))) == 1).all()


def test_sequence_mask_needs_a_large_gap_and_a_negative_advantage():
    sampler = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0])
    logprobs = torch.tensor([-1.0, -0.2, -0.1, -0.1, -0.1])
    for advantages, expected in (([-1, -1], [0, 0, 1, 1, 1]), ([1, -1], [1] * 5), ([0, 0], [1] * 5)):
        advantage = torch.tensor(advantages).float()[IDS]
        assert sequence_keep_mask(logprobs, fields_of(advantage, sampler), 0.5).tolist() == expected


def test_sequence_exactly_at_the_threshold_is_retained():
    logprobs = torch.tensor([-0.75, -0.25, -1.0, -1.0, -1.0])
    advantage = -torch.ones(5)
    assert sequence_keep_mask(logprobs, fields_of(advantage, torch.zeros(5)), 0.5).tolist() == [1, 1, 0, 0, 0]


def test_sequence_mask_equals_trls():
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    tree = ast.parse((folder / "trainer" / "grpo_trainer.py").read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "get_off_policy_mask")
    node.decorator_list = []
    namespace = {"torch": torch}
    exec(compile(ast.Module([node], []), "grpo_trainer.py", "exec"), namespace)

    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(30, 8, generator=generator)
    sampler = -torch.rand(30, 8, generator=generator)
    mask = (torch.arange(8) < torch.randint(1, 9, (30, 1), generator=generator)).float()
    advantages = torch.randn(30, 1, generator=generator)
    theirs = namespace["get_off_policy_mask"](advantages, logprobs, sampler, mask, 0.05)
    kept = mask.bool()
    ids = torch.arange(30)[:, None].expand(30, 8)[kept]
    ours = sequence_keep_mask(logprobs[kept], fields_of(advantages.expand(30, 8)[kept], sampler[kept], ids), 0.05)
    assert torch.equal(ours, theirs.expand(30, 8)[kept])
    assert 0 < ours.mean() < 1
