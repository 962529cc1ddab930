"""How old the weights were that sampled a token: from the spans of a trajectory to a correction that asks for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings, TokenFields
from gdpo_nemo.algorithms.loss_selection import loss_import_paths
from gdpo_nemo.algorithms.policy_loss import importance_weights, policy_loss
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.rollouts.credit import token_staleness, updates_of
from gdpo_nemo.utils.import_path import load_functions

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
BY_AGE = "examples/custom_correction.py:by_age"


def trajectory(spans=(), version: int = 5, tokens: int = 6, mask=None) -> Trajectory:
    prompt = Prompt("p", np.arange(2, dtype=np.int32), "p", "digit_sort")
    made = Trajectory(
        prompt, 0, np.arange(tokens, dtype=np.int32), np.full(tokens, -1, np.float32), version, "", "stop",
        loss_mask=mask,
    )  # fmt: skip
    made.spans = spans
    return made


@pytest.mark.parametrize(
    "spans, expected", [((), [2] * 6), (((7, 6),), [0] * 6), (((5, 1), (6, 3), (7, 2)), [2, 1, 1, 1, 0, 0])]
)
def test_every_token_has_the_age_of_the_weights_that_sampled_it(spans, expected):
    found = token_staleness(trajectory(spans), version=7)
    assert found.dtype == np.int32 and found.tolist() == expected


def test_tokens_of_the_environment_have_no_age_and_shift_nobodys():
    mask = np.array([True, True, False, False, True, False])
    assert token_staleness(trajectory(((5, 1), (7, 2)), mask=mask), version=7).tolist() == [2, 0, 0, 0, 0, 0]
    assert token_staleness(trajectory(((7, 2), (5, 1)), mask=mask), version=7).tolist() == [0, 0, 0, 0, 2, 0]


def test_ages_are_made_only_where_loss_or_correction_may_read_them():
    played = [trajectory(((5, 2), (6, 4))), trajectory(version=6)]
    ages = lambda *overrides: [  # noqa: E731
        s.staleness
        for update in updates_of(played, np.ones(2), load_config(DEMO, ["loss_fn.old_logprobs=trainer", *overrides]), 6)
        for s in update
    ]
    assert ages() == ages("loss_fn.off_policy.mode=truncate") == [None, None]
    for overrides in ([f"loss_fn.off_policy.mode={BY_AGE}"], ["loss_fn.type=examples/sapo.py:sapo"]):
        several = ["policy.train_global_batch_size=1"]
        for found in (ages(*overrides), ages(*overrides, *several)):
            assert [a.tolist() for a in found] == [[1, 1, 0, 0, 0, 0], [0] * 6]


def test_the_example_correction_halves_the_weight_of_old_tokens():
    settings = LossSettings(off_policy=OffPolicySettings(mode=BY_AGE, options={"half_life": 1}))
    functions = load_functions("loss_fn", loss_import_paths(settings))
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    fields = TokenFields(
        advantages=torch.ones(4),
        weights=torch.full((4,), 0.25),
        sequence_ids=torch.tensor([0, 0, 0, 1]),
        num_sequences=2,
        old_logprobs=logprobs.detach(),
        sampler_logprobs=torch.tensor([-1.0, -1.0, -1.0, -9.0]),
        staleness=torch.tensor([0, 1, 2, 0], dtype=torch.int32),
    )
    weights = importance_weights(fields, settings.off_policy, functions)
    assert weights.tolist() == [1.0, 0.5, 0.25, settings.off_policy.ratio_max]
    loss, _ = policy_loss(logprobs, None, fields, settings, functions=functions)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -0.25 * weights)


def test_custom_function_gets_ages_of_0_without_ages():
    settings = LossSettings(off_policy=OffPolicySettings(mode=BY_AGE))
    functions = load_functions("loss_fn", loss_import_paths(settings))
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    fields = TokenFields(
        advantages=torch.ones(3),
        weights=torch.tensor([0.5, 0.0, 0.5]),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        sampler_logprobs=torch.full((3,), -1.0),
    )
    loss, metrics = policy_loss(logprobs, None, fields, settings, functions=functions)
    assert float(loss.detach()) == -1 and float(metrics.sums["importance_weight"]) == 2
