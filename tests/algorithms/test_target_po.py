"""TargetPO: the uncoupled gradient equals that of the literal loss over whole groups."""

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import LossSettings, TokenFields, target_po_coefficients, token_weights
from gdpo_nemo.algorithms.policy_loss import policy_loss

LENGTHS = np.array([3, 2, 4, 1, 0, 5])
GROUPS = np.array([7, 7, 7, 2, 2, 2])
SCORES = np.array([0.0, 1.0, 0.5, 3.0, 9.0, 1.0])


def literal_loss(logprobs, old, temperature, normalize):
    """- sum_i q_i log p_i, averaged over groups, on whole groups at once (paper eq. 1-4)."""
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    divisor = torch.tensor(LENGTHS).clamp(min=1) if normalize else torch.ones(6)
    current, before = (torch.zeros(6).double().index_add(0, ids, x) / divisor for x in (logprobs, old))
    losses = []
    for group in (7, 2):
        rows = torch.from_numpy((group == GROUPS) & (LENGTHS > 0))
        score = torch.from_numpy(SCORES)[rows]
        u = (score - score.mean()) / score.std(correction=0)
        target = torch.softmax(torch.log_softmax(before[rows], 0) + u / temperature, 0)
        losses.append(-(target * torch.log_softmax(current[rows], 0)).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradient_equals_the_literal_loss_even_when_groups_span_micro_batches(
    normalize, temperature, aggregation, micro_batches
):
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    logprobs = -torch.rand(len(ids), generator=generator).double().requires_grad_()
    old = logprobs.detach() + 0.3 * torch.randn(len(ids), generator=generator).double()
    logprobs = logprobs.detach().requires_grad_()
    expected = torch.autograd.grad(literal_loss(logprobs, old, temperature, normalize), logprobs)[0]

    sums = [torch.zeros(6).double().index_add(0, ids, x.detach()).numpy() for x in (logprobs, old)]
    weights = token_weights(LENGTHS, aggregation)
    advantages = target_po_coefficients(
        *sums, SCORES, GROUPS, lengths=LENGTHS, temperature=temperature, length_normalize=normalize, weights=weights
    )
    fields = TokenFields(advantages[ids], torch.from_numpy(weights)[ids], ids, 6)
    settings = LossSettings(type="target_po")
    total = 0
    for m in range(micro_batches):
        keep = ids % micro_batches == m
        total = total + policy_loss(logprobs[keep], None, fields.select(keep), settings)[0]
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], expected)


def coefficients(scores, groups, **options):
    zeros = np.zeros(len(scores))
    return target_po_coefficients(zeros, zeros, scores, groups, **{"length_normalize": False, **options})


def test_scores_are_whitened_by_population_std_and_flat_groups_pull_nowhere():
    pull = coefficients([0.0, 1, 0, 0], [0, 0, 1, 1]) * 2
    target = torch.softmax(torch.tensor([-1.0, 1.0]).double(), 0)
    torch.testing.assert_close(pull, torch.cat([target - 0.5, torch.zeros(2).double()]))


def test_invalid_members_leave_statistics_and_distribution():
    pull = coefficients([0.0, 100, 1], [0, 0, 0], valid=[True, False, True])
    target = torch.softmax(torch.tensor([-1.0, 1.0]).double(), 0) - 0.5
    torch.testing.assert_close(pull, torch.stack([target[0], torch.tensor(0.0).double(), target[1]]))
    assert (coefficients([0.0, 1], [0, 0], valid=[False, False]) == 0).all()
    half = coefficients([0.0, 1, 5, 7], [0, 0, 1, 1], valid=[True, True, False, False])
    torch.testing.assert_close(
        half, torch.tensor([-0.5, 0.5, 0, 0]).double() * (2 * torch.sigmoid(torch.tensor(2.0)) - 1) / 2
    )


def test_length_normalisation_keeps_a_long_sample_from_dominating():
    logprobs = np.array([-400.0, -2.0])
    lengths = np.array([400, 2])
    literal = target_po_coefficients(logprobs, logprobs, [1.0, 0.0], [0, 0], lengths=lengths, length_normalize=False)
    normalised = target_po_coefficients(logprobs, logprobs, [1.0, 0.0], [0, 0], lengths=lengths)
    assert literal.abs().max() < 1e-100
    assert normalised[0] * 400 > 0.3


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"length_normalize": True}, "requires lengths"),
])  # fmt: skip
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        coefficients([0.0, 1], [0, 0], **options)
