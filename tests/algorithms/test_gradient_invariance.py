"""The gradient of an update is that of its batch: how the batch is cut into micro-batches and ranks does not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms import OffPolicySettings
from gdpo_nemo.algorithms.policy_loss import LossSettings, TokenFields, policy_loss

SEQUENCES = 6
TOKENS = 40
SETTINGS = {
    "clipped_pg": LossSettings(ratio_clip_c=3.0),
    "gspo": LossSettings(type="gspo"),
    "cispo": LossSettings(type="cispo"),
    "target_po": LossSettings(type="target_po"),
    "kl_and_entropy": LossSettings(reference_policy_kl_penalty=0.1, entropy_bonus=0.01),
    "truncated_importance": LossSettings(off_policy=OffPolicySettings(mode="truncate", level="sequence")),
    "masked_sequences": LossSettings(off_policy=OffPolicySettings(sequence_mask_threshold=0.05)),
}


def make_batch(seed: int):
    """Log-probs, entropies [tokens] and the fields of a batch; token t belongs to a random sequence."""
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    owner = torch.randint(SEQUENCES, (TOKENS,), generator=random).sort().values
    logprobs = -3 + normal(TOKENS)
    weights = torch.rand(SEQUENCES, generator=random, dtype=torch.float64) * (torch.arange(SEQUENCES) != 2)
    fields = TokenFields(
        advantages=normal(SEQUENCES)[owner],
        weights=weights[owner],
        sequence_ids=owner,
        num_sequences=SEQUENCES,
        old_logprobs=logprobs + 0.2 * normal(TOKENS),
        sampler_logprobs=logprobs + 0.2 * normal(TOKENS),
        reference_logprobs=logprobs + 0.2 * normal(TOKENS),
    )
    return logprobs, 2 + normal(TOKENS), fields


def gradient(logprobs, entropy, fields, options, micro_batch):
    """Sum of the losses, and its gradient in log-probs and entropies, when token t is in micro-batch micro_batch[t]."""
    leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for index in micro_batch.unique():
        mine = micro_batch == index
        loss, _ = policy_loss(leaves[0][mine], leaves[1][mine], fields.select(mine), options)
        loss.backward()
        total += loss.detach()
    grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    return total, *grads


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), places=st.lists(st.integers(0, 3), min_size=SEQUENCES, max_size=SEQUENCES))
def test_the_gradient_does_not_depend_on_the_micro_batches(name, seed, places):
    logprobs, entropy, fields = make_batch(seed)
    together = torch.zeros(TOKENS, dtype=torch.int64)
    apart = torch.tensor(places)[fields.sequence_ids]
    expected = gradient(logprobs, entropy, fields, SETTINGS[name], together)
    for got, value in zip(gradient(logprobs, entropy, fields, SETTINGS[name], apart), expected):
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(TOKENS)))
def test_the_gradient_does_not_depend_on_the_order_of_tokens(seed, order):
    logprobs, entropy, fields = make_batch(seed)
    together = torch.zeros(TOKENS, dtype=torch.int64)
    order = torch.tensor(order)
    expected = gradient(logprobs, entropy, fields, SETTINGS["gspo"], together)
    got = gradient(logprobs[order], entropy[order], fields.select(order), SETTINGS["gspo"], together)
    # Sequence sums are float32, so their order shows.
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    for mine, value in zip(got[1:], expected[1:]):
        torch.testing.assert_close(mine, value[order], rtol=1e-6, atol=1e-6)
